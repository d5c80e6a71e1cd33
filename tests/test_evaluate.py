import asyncio
import dataclasses

import numpy as np
import pytest

from rl_tpu import attempts, evaluate
from rl_tpu.envs import Step
from rl_tpu.types import Completion, Prompt, Sampling


class Scripted:
  """Answers 1 when sampled and 2 when greedy; remembers what it was asked."""

  def __init__(self):
    self.requests = []

  async def generate(self, request, progress):
    self.requests.append(request)
    if request.prompt_index == 3:
      raise OSError("gone")
    token = 2 if request.sampling.temperature == 0 else 1
    return Completion(
      tokens=np.array([token], np.int32),
      logp=np.zeros(1, np.float32),
      version=np.zeros(1, np.int32),
      stop_reason="stop",
    )


class Judge:
  def __init__(self, prompt):
    self.prompt = prompt

  async def reset(self):
    return self.prompt.tokens

  async def step(self, action, stop_reason):
    right = self.prompt.metadata["right"]
    nothing = np.zeros(0, np.int32)
    return Step(observation=nothing, reward=float(action[0] in right), end=True)


def run(generator, judge=Judge):
  right = [{1, 2}, {1}, {2}, {1, 2}]
  prompts = [
    Prompt(index=i, tokens=np.array([5], np.int32), metadata={"right": answers})
    for i, answers in enumerate(right)
  ]
  return asyncio.run(
    evaluate.evaluate(
      generator,
      judge,
      prompts,
      sampling=Sampling(temperature=0.8),
      seed=7,
      max_turns=1,
      max_trajectory_tokens=4,
    )
  )


def test_H25_an_episode_that_crashed_counts_as_wrong_and_is_reported():
  assert run(Scripted()) == {
    "heldout_accuracy": 0.5,
    "heldout_greedy": 0.5,
    "heldout_failed": 2.0,
  }


def test_what_environments_counted_is_reported_of_the_sampled_episodes():
  class Counting(Judge):
    async def step(self, action, stop_reason):
      step = await super().step(action, stop_reason)
      return dataclasses.replace(step, metrics={"calls": float(action[0])})

  row = run(Scripted(), Counting)
  assert row["heldout_env_calls"] == 1.0


def test_evaluation_shares_no_sampling_key_with_training():
  generator = Scripted()
  run(generator)
  assert {r.seed for r in generator.requests} == {7 + attempts.SEED}
  temperatures = sorted(r.sampling.temperature for r in generator.requests)
  assert temperatures == [0] * 4 + [0.8] * 4


def test_an_impossible_setting_is_refused():
  with pytest.raises(ValueError, match="evaluation.problems is 0"):
    evaluate.Config(problems=0)
