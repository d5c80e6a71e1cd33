"""Where the sampler differs from the learner, and the runs that try it.

`small` is the quickstart's task in lockstep with half of its batch, 16 prompts
by 8 answers. `paper` is the paper's run (arXiv:2609.20807, appendix B) with any
mismatch: SGD with a constant rate of 0.01 and no clipping, rewards of 1 and -1,
contexts of 512 (0.6B) or 1024 tokens; the questions of the 30B runs are a file
of your own. Learner and generator have meshes for a pod.

The paper rounds activations as well (W8A8) and has a 4-bit float; here weights
and cache are rounded, and int4 stands in for fp4.
"""

import math

import ml_collections

from experiments import quickstart
from rl_tpu import (
  algorithms,
  envs,
  evaluate,
  learner,
  parts,
  sft,
  sharding,
)
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.generation import engine
from rl_tpu.models import transformer
from rl_tpu.rewards import shaping
from rl_tpu.types import Sampling

ONE_OR_MINUS_ONE = {"bias": -0.5, "scale": 2.0}
"""Of `shaping`: rewards of 0 and 1 become -1 and 1."""
CONTEXT = {"qwen3-0.6b": 512, "qwen3-1.7b": 1024, "qwen3-30b-a3b": 1024}
"""Tokens of prompt and completion, by the paper's model."""


def small(seed: int, scale: str) -> ml_collections.ConfigDict:
  """The quickstart's task, not stale; 60 batches, or 2 small ones at smoke."""
  config = quickstart.get_config("lockstep(0)")
  config.seed, config.batches, config.groups_per_batch = seed, 60, 16
  config.learner.microbatch_rows = 8
  config.evaluation.every, config.evaluation.problems = 0, 64
  if scale == "smoke":
    config.batches, config.groups_per_batch = 2, 4
    config.evaluation.problems = 8
    config.warm_start.batches, config.warm_start.wrong_batches = 20, 2
  return config


def paper(model: str, batches: int, seed: int) -> ml_collections.ConfigDict:
  """The paper's run of a model, on policy until a mismatch is set."""
  context = CONTEXT[model]
  large = model == "qwen3-30b-a3b"
  if large:
    task = Choice(
      name="math", config=envs.get("math").Config(path="questions.jsonl")
    )
  else:
    task = Choice(name="countdown", config=envs.get("countdown").Config())
  loss = algorithms.get("score_centering").Config()
  return to_config_dict(
    parts.Config(
      name=f"score_centering_{model}",
      schedule="lockstep(0)",
      seed=seed,
      batches=batches,
      groups_per_batch=16 if large else 64,
      group_size=8,
      shaping=shaping.Config(**ONE_OR_MINUS_ONE),
      task=task,
      algorithm=Choice(name="score_centering", config=loss),
      model=transformer.sized(model, compute_dtype="bfloat16", remat="dots"),
      sampling=Sampling(max_tokens=context),
      learner=learner.Config(
        kind="sgd",
        learning_rate=1e-2,
        weight_decay=0.0,
        max_grad_norm=math.inf,
        row_length=context,
        microbatch_rows=16,
        logit_chunk=128,
      ),
      engine=engine.Config(
        slots=128,
        context_length=context,
        prefill_buckets=(128, context),
        prefill_batches=(16,),
        steps_per_dispatch=16,
        behavior_top_k=128,
      ),
      devices=parts.Devices(
        trainer=sharding.MeshShape(fsdp=16),
        generator=sharding.MeshShape(data=4, tensor=4),
      ),
      warm_start=sft.Config(batches=0, wrong_batches=0),
      evaluation=evaluate.Config(problems=64),
    )
  )


def differ(config: ml_collections.ConfigDict, mismatch: dict) -> None:
  """Sets fields of `engine.mismatch`, the noise drawn by the run's seed."""
  config.engine.mismatch.update(mismatch)
  config.engine.mismatch.noise_seed = config.seed
