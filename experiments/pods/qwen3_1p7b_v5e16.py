"""AReaL's loss on Qwen3 1.7B: 16 chips of v5e train, 8 generate.

  python -m rl_tpu compile --config=experiments/pods/qwen3_1p7b_v5e16.py

shows what it takes, on a CPU; the report lies beside this file. Contexts of
4096 tokens, batches of 128 prompts of 8 trajectories in 4 minibatches.
"""

from collections.abc import Callable

import ml_collections

from rl_tpu import algorithms, envs, learner, parts, sft, sharding, topology
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.generation import engine
from rl_tpu.models import transformer
from rl_tpu.types import Sampling

MODEL = "qwen3-1.7b"


def get_config() -> ml_collections.ConfigDict:
  """The run's config; give `--config.pretrained` to start from weights."""
  loss = algorithms.get("decoupled_ppo").Config(baseline="group")
  return to_config_dict(
    parts.Config(
      name="qwen3_1p7b_v5e16",
      batches=250,
      groups_per_batch=128,
      group_size=8,
      max_staleness=4,
      task=Choice(
        name="reasoning_gym", config=envs.get("reasoning_gym").Config()
      ),
      algorithm=Choice(name="decoupled_ppo", config=loss),
      model=transformer.sized(MODEL, compute_dtype="bfloat16", remat="dots"),
      sampling=Sampling(max_tokens=3072),
      learner=learner.Config(
        minibatches=4, microbatch_rows=16, row_length=4096, logit_chunk=2048
      ),
      engine=engine.Config(
        slots=64,
        context_length=4096,
        prefill_buckets=(512, 1024, 4096),
        prefill_batches=(2, 8),
        prompts_per_row=8,
        steps_per_dispatch=16,
      ),
      devices=parts.Devices(
        trainer=sharding.MeshShape(fsdp=16),
        generator=sharding.MeshShape(data=2, tensor=4),
      ),
      warm_start=sft.Config(batches=0, wrong_batches=0),
      compile=topology.Config(topology="v5e:4x4", generator_topology="v5e:2x4"),
    )
  )


def sweep(add: Callable[..., None]) -> None:
  """What does the staleness limit cost in reward?"""
  for limit in (1, 2, 4, 8):
    add(max_staleness=limit)
