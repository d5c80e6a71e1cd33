"""AReaL's math run on Qwen3 8B: 64 chips of v5p train, slices of 4 generate.

  python -m rl_tpu compile --config=experiments/pods/qwen3_8b_v5p64.py

shows what it takes, on a CPU; the report lies beside this file. AReaL's sizes
(arXiv:2505.24298): contexts of 32k tokens, batches of 512 prompts of 16
trajectories in 4 minibatches, staleness up to 8. Weights are split 16 ways over
fsdp: over all 64 chips the compiler would gather them by sums, twice the bytes.
"""

import ml_collections

from rl_tpu import algorithms, envs, learner, parts, sft, sharding, topology
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.generation import engine
from rl_tpu.models import transformer
from rl_tpu.types import Sampling

MODEL = "qwen3-8b"


def get_config() -> ml_collections.ConfigDict:
  """The run's config; give `--config.pretrained` to start from weights."""
  loss = algorithms.get("decoupled_ppo").Config(baseline="group")
  return to_config_dict(
    parts.Config(
      name="qwen3_8b_v5p64",
      batches=250,
      groups_per_batch=512,
      group_size=16,
      max_staleness=8,
      task=Choice(
        name="reasoning_gym", config=envs.get("reasoning_gym").Config()
      ),
      algorithm=Choice(name="decoupled_ppo", config=loss),
      model=transformer.sized(MODEL, compute_dtype="bfloat16", remat="dots"),
      sampling=Sampling(max_tokens=31744),
      learner=learner.Config(
        minibatches=4, microbatch_rows=16, row_length=32768, logit_chunk=8192
      ),
      engine=engine.Config(
        slots=16,
        context_length=32768,
        prefill_buckets=(1024, 4096, 32768),
        prefill_batches=(1,),
        prompts_per_row=8,
        steps_per_dispatch=16,
      ),
      devices=parts.Devices(
        trainer=sharding.MeshShape(fsdp=16, tensor=4),
        generator=sharding.MeshShape(tensor=4),
      ),
      warm_start=sft.Config(batches=0, wrong_batches=0),
      compile=topology.Config(
        topology="v5p:4x4x4", generator_topology="v5p:2x2x1"
      ),
    )
  )
