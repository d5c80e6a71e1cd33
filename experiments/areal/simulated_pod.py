"""AReaL's pods in simulated time, and every assumption about them.

  python -m rl_tpu simulate --config=experiments/areal/simulated_pod.py:ARG

ARG is `staleness` (Fig. 5c: throughput by staleness limit, 1.5B, answers up to
8k tokens), or `async-MODEL` and `sync-MODEL` (a row of Table 1: answers up to
27k; MODEL is 1.5b, 7b, 14b or 32b). It is an eighth of the paper's nodes of 8
GPUs, with an eighth of its batch of 512 prompts, so that a batch takes as long
and tokens/s are an eighth. The study `simulated` has all pods, beside what the
paper measured.

Assumed (arXiv:2505.24298 states none of these): a GPU of 80 GB, 3.35 TB/s and
990 TFLOP/s; 16-bit weights and caches; sizes as in MODELS; 75% of the GPUs
generate (stated), as many of them to a generator as MODELS says.

- A decode step: 5 ms of host and launches, reading the weights once at full
  speed, and 20 us for each of two sums a layer where GPUs share them.
- Per sequence: 2 FLOP a parameter at 400 TFLOP/s a GPU. Per cached token: its
  keys and values at 60% of the memory's speed. At 128 sequences of 4k tokens
  1.5B makes 9k tokens/s a GPU; the paper's Fig. 6b has 231k for 32, 7.2k each.
- Prefill: 2 FLOP a parameter and token at half the peak.
- Training: 4 passes (proximal, forward, backward twice) at 400 TFLOP/s (Fig. 6a
  has 427, 455 and 388 for 1B, 7B and 32B), half as much again for attention and
  padding.
- Weights go through a disk at 1 GB/s, after 5 s, while the learner waits;
  generators load them in half of that; resharding one set of GPUs takes as
  long as the disk, each way.
- Lengths: log-normal, sigma 1, for all models; their mean is MEANS'.

These are one set of constants for all models, and were not fitted: simulated
synchronous pods are 1.5 to 3 times as fast as the paper's, most of all the
large ones, which generate as well as all of their memory allows.
"""

import dataclasses

import ml_collections

from rl_tpu import algorithms, envs, learner, parts, sft
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.generation import engine
from rl_tpu.models import transformer
from rl_tpu.types import Sampling
from rl_tpu.virtual.config import Config, Distribution, Service

GROUPS = 64
"""Prompts of a batch: an eighth of the paper's."""
MEANS = {8192: 5000, 15_360: 7000, 27_648: 9000, 31_744: 9000}
"""Mean tokens of an answer, by the most that it may have: before they are
cut."""
FLOPS = 400e12
"""Of a GPU that is kept busy, a second."""
MEMORY = 3.35e12
"""Bytes of a GPU's memory, a second."""


@dataclasses.dataclass(frozen=True)
class Model:
  """One of the paper's, and where it runs."""

  parameters: float
  layers: int
  heads: int
  """Of keys and values, 128 wide."""
  gpus: int
  """An eighth of the paper's."""
  together: int
  """GPUs of one generator."""
  slots: int
  """Of one generator; what its memory holds of answers of 9k tokens, 128 at
  most a GPU."""
  staleness: int
  """The paper's limit, for math and for code."""


MODELS = {
  "1.5b": Model(1.54e9, 28, 2, 16, 1, 128, 8),
  "7b": Model(7.6e9, 28, 4, 24, 1, 96, 8),
  "14b": Model(14.8e9, 48, 8, 32, 4, 128, 4),
  "32b": Model(32.8e9, 64, 8, 48, 4, 96, 4),
}


def service(model: Model, trainers: int) -> Service:
  """The times assumed above."""
  pass_over = 2 * model.parameters
  weights = 2 * model.parameters
  cached = model.layers * model.heads * 128 * 2 * 2
  disk = 5 + weights / 1e9
  sums = 2 * model.layers * 20e-6 if model.together > 1 else 0.0
  return Service(
    decode_step=5e-3 + weights / MEMORY / model.together + sums,
    decode_per_sequence=pass_over / FLOPS / model.together,
    decode_per_cached_token=cached / (0.6 * MEMORY) / model.together,
    prefill_per_token=pass_over / (0.5 * 990e12) / model.together,
    update_per_token=1.5 * 4 * pass_over / FLOPS / trainers,
    publish=disk,
    swap=disk / 2,
    reshard=disk,
  )


def pod(
  name: str,
  schedule: str,
  *,
  gpus: int,
  longest: int,
  limit: int | None,
  groups: int = GROUPS,
) -> parts.Config:
  """One model of the paper on so many GPUs.

  Args:
    name: of MODELS.
    schedule: `async`, three quarters of the GPUs generating, or `sync`, all of
      them generating and training by turns.
    gpus: simulated.
    longest: tokens of an answer at most, of MEANS.
    limit: of staleness, under async; None: none.
    groups: prompts of a batch.
  """
  model, serial = MODELS[name], schedule == "sync"
  generating = gpus if serial else gpus * 3 // 4
  loss = algorithms.get("decoupled_ppo").Config()
  return parts.Config(
    name=f"areal_simulated_{schedule}_{name}",
    schedule=schedule,
    groups_per_batch=groups,
    group_size=16,
    max_staleness=limit,
    max_running_groups=4 * groups,
    task=Choice(
      name="reasoning_gym", config=envs.get("reasoning_gym").Config()
    ),
    algorithm=Choice(name="decoupled_ppo", config=loss),
    model=transformer.sized("qwen3-1.7b"),
    sampling=Sampling(max_tokens=longest),
    learner=learner.Config(minibatches=4, row_length=1024 + longest),
    engine=engine.Config(
      slots=model.slots,
      context_length=1024 + longest,
      prefill_buckets=(1024 + longest,),
      prefill_batches=(1,),
    ),
    warm_start=sft.Config(batches=0, wrong_batches=0),
    simulate=Config(
      service=service(model, gpus if serial else gpus - generating),
      generators=generating // model.together,
      prompt_tokens=256,
      lengths=Distribution(
        kind="lognormal", mean=MEANS[longest], sigma=1.0, least=64
      ),
      batches=24,
      warm_up=12,
      grain=64,
    ),
  )


def get_config(arg: str = "staleness") -> ml_collections.ConfigDict:
  """The pod of one of the paper's experiments."""
  schedule, _, name = arg.partition("-")
  model = MODELS[name or "1.5b"]
  if schedule != "staleness":
    return to_config_dict(
      pod(
        *(name, schedule),
        gpus=model.gpus,
        longest=27_648,
        limit=model.staleness,
      )
    )
  config = pod(
    "1.5b", "async", gpus=model.gpus, longest=8192, limit=model.staleness
  )
  sweep = dataclasses.replace(
    config.simulate, sweep_staleness=(0, 1, 2, 4, 8, 16, None)
  )
  return to_config_dict(dataclasses.replace(config, simulate=sweep))
