"""SAO on Qwen3 30B-A3B, with its critic: 128 chips of v5p train, 16 generate.

  python -m rl_tpu compile --config=experiments/pods/qwen3_30b_a3b_v5p128.py

shows what it takes, on a CPU; the report lies beside this file. SAO's sizes
(arXiv:2607.07508): contexts of 128k tokens, batches of 128 prompts of one
trajectory, policy and critic of the same size, two updates of the critic for
each of the policy. A row is one trajectory, and each chip has one: 16 ways of
fsdp by 8 of experts.
"""

import ml_collections

from rl_tpu import algorithms, envs, learner, parts, sft, sharding, topology
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.generation import engine
from rl_tpu.models import transformer
from rl_tpu.types import Sampling

MODEL = "qwen3-30b-a3b"
CONTEXT = 131_072


def get_config() -> ml_collections.ConfigDict:
  """The run's config; give `--config.pretrained` to start from weights."""
  return to_config_dict(
    parts.Config(
      name="qwen3_30b_a3b_v5p128",
      batches=1000,
      groups_per_batch=128,
      group_size=1,
      max_staleness=4,
      task=Choice(
        name="reasoning_gym", config=envs.get("reasoning_gym").Config()
      ),
      algorithm=Choice(
        name="sao", config=algorithms.get("sao").Config(band="math")
      ),
      model=transformer.sized(MODEL, compute_dtype="bfloat16", remat="full"),
      sampling=Sampling(max_tokens=CONTEXT - 1024),
      learner=learner.Config(
        learning_rate=1e-6,
        microbatch_rows=128,
        row_length=CONTEXT,
        logit_chunk=1024,
      ),
      engine=engine.Config(
        slots=32,
        context_length=CONTEXT,
        prefill_buckets=(1024, 8192, CONTEXT),
        prefill_batches=(16,),
        steps_per_dispatch=16,
      ),
      devices=parts.Devices(
        trainer=sharding.MeshShape(fsdp=16, expert=8),
        generator=sharding.MeshShape(expert=16),
      ),
      warm_start=sft.Config(batches=0, wrong_batches=0),
      compile=topology.Config(
        topology="v5p:4x4x8", generator_topology="v5p:2x2x4"
      ),
    )
  )
