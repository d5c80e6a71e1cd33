"""Plays an environment with given texts."""

import asyncio
import itertools

import numpy as np

from rl_tpu.models.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def ids(text):
  return np.append(TOKENIZER.encode(text), TOKENIZER.eos_id)


def attempt(task, row, *texts, stop_reason="stop", index=0):
  """Returns the observations as text, the last step, and sums of metrics."""
  environment = task.environment(task.prompt(row, index))
  said, counted = [], {}

  async def main():
    await environment.reset()
    for text in texts:
      action = ids(text) if stop_reason == "stop" else ids(text)[:-1]
      step = await environment.step(action, stop_reason)
      for name, value in step.metrics.items():
        counted[name] = counted.get(name, 0) + value
      if step.end:
        assert not len(step.observation)
      else:
        said.append(TOKENIZER.decode(step.observation))
    return step

  return said, asyncio.run(main()), counted


def rows(task, split="train", count=50):
  return list(itertools.islice(task.records(split), count))


def demonstrated(task, row, seed=0, wrong=0.0):
  """Returns a demonstration's two parts as text, BOS and stop left out."""
  prompt, answer = task.demonstration(row, np.random.default_rng(seed), wrong)
  assert prompt.dtype == answer.dtype == np.int32
  assert answer[-1] == TOKENIZER.eos_id
  return TOKENIZER.decode(prompt), TOKENIZER.decode(answer)
