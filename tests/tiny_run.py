"""A run small enough for a test: a few hundred tokens a batch."""

import dataclasses
import pathlib

import numpy as np

from rl_tpu import algorithms, envs, evaluate, learner, parts, sft
from rl_tpu.config import Choice
from rl_tpu.envs import Step
from rl_tpu.generation import engine
from rl_tpu.models import transformer
from rl_tpu.types import Prompt, Sampling, StopReason

GROUPS = 4
SIZE = 4


class OddFirst:
  """An environment whose reward a random policy earns half of the time."""

  def __init__(self, prompt: Prompt):
    self.prompt = prompt

  async def reset(self) -> np.ndarray:
    return self.prompt.tokens

  async def step(self, action: np.ndarray, stop_reason: StopReason) -> Step:
    nothing = np.zeros(0, np.int32)
    return Step(observation=nothing, reward=float(action[0] % 2), end=True)


def get_config(below: pathlib.Path, **changes) -> parts.Config:
  """Four groups of four; runs live in `below` and share a cache."""
  task = envs.get("reasoning_gym").Config(
    generator="spell_backward",
    generator_config={"min_word_len": 3, "max_word_len": 4},
    template="{word}=",
    size=400,
  )
  loss = algorithms.get("decoupled_ppo").Config(baseline="group_mean")
  config = parts.Config(
    name="tiny",
    directory=str(below / "{schedule}-{seed}"),
    cache=str(below.parent / "cache"),
    schedule="sync",
    batches=4,
    groups_per_batch=GROUPS,
    group_size=SIZE,
    task=Choice(name="reasoning_gym", config=task),
    algorithm=Choice(name="decoupled_ppo", config=loss),
    model=transformer.Config(
      vocab_size=384,
      d_model=16,
      num_layers=1,
      num_heads=2,
      num_kv_heads=1,
      head_dim=8,
      d_ff=32,
    ),
    sampling=Sampling(max_tokens=6),
    learner=learner.Config(
      row_length=32, microbatch_rows=8, learning_rate=1e-3, minibatches=2
    ),
    engine=engine.Config(
      slots=8,
      context_length=12,
      prefill_buckets=(12,),
      prefill_batches=(8,),
      steps_per_dispatch=1,
    ),
    warm_start=sft.Config(batches=0, wrong_batches=0),
    evaluation=evaluate.Config(every=0, problems=4),
    checkpoint_every=1,
  )
  return dataclasses.replace(config, **changes)
