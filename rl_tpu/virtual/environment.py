"""An environment that takes time instead of judging."""

import asyncio

import numpy as np

from rl_tpu.envs import Step
from rl_tpu.types import Prompt, StopReason
from rl_tpu.virtual.config import Draw


class VirtualEnvironment:
  """Answers after a while, and knows nothing."""

  def __init__(
    self,
    prompt: Prompt,
    turns: int,
    observation: int,
    latency: Draw,
    rng: np.random.Generator,
  ):
    self._prompt, self._turns = prompt, turns
    self._observation = np.zeros(observation, np.int32)
    self._latency, self._rng = latency, rng

  async def reset(self) -> np.ndarray:
    """The prompt."""
    return self._prompt.tokens

  async def step(self, action: np.ndarray, stop_reason: StopReason) -> Step:
    """Waits on the loop's clock; the last of the turns ends the episode."""
    del action, stop_reason
    if seconds := self._latency(self._rng):
      await asyncio.sleep(seconds)
    self._turns -= 1
    observation = self._observation if self._turns else self._observation[:0]
    return Step(observation=observation, reward=0.0, end=not self._turns)
