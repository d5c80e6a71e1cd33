"""AReaL's loss on Qwen3 8B: 64 chips of v6e train, slices of 8 generate.

  python -m rl_tpu compile --config=experiments/pods/qwen3_8b_v6e64.py

shows what it takes, on a CPU; the report lies beside this file. AReaL's sizes
(arXiv:2505.24298) but for the context, which is 16k tokens: batches of 512
prompts of 16 trajectories in 4 minibatches, staleness up to 8.
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
      name="qwen3_8b_v6e64",
      batches=250,
      groups_per_batch=512,
      group_size=16,
      max_staleness=8,
      task=Choice(
        name="reasoning_gym", config=envs.get("reasoning_gym").Config()
      ),
      algorithm=Choice(name="decoupled_ppo", config=loss),
      model=transformer.sized(MODEL, compute_dtype="bfloat16", remat="dots"),
      sampling=Sampling(max_tokens=15360),
      learner=learner.Config(
        minibatches=4, microbatch_rows=16, row_length=16384, logit_chunk=1024
      ),
      engine=engine.Config(
        slots=16,
        context_length=16384,
        prefill_buckets=(1024, 4096, 16384),
        prefill_batches=(2,),
        steps_per_dispatch=16,
      ),
      devices=parts.Devices(
        trainer=sharding.MeshShape(fsdp=16, tensor=4),
        generator=sharding.MeshShape(data=2, tensor=4),
      ),
      warm_start=sft.Config(batches=0, wrong_batches=0),
      compile=topology.Config(topology="v6e:8x8", generator_topology="v6e:2x4"),
    )
  )
