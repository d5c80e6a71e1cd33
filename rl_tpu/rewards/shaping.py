"""From what the rules say to what is trained on, one formula for every task.

    shaped = clip(scale * (reward + bias), low, high) - penalty of length

for each turn's reward, then, for a turn of an episode with n turns in all,

    turn i has    sum over j >= i of turn_discount^(j - i) shaped_j

when `turn_discount` is set: a turn is worth what came after it, less the
further away. The penalty is DAPO's soft overlong punishment (Yu et al. 2025,
arXiv:2503.14476, equation 13) on the action tokens L of the whole episode,

    0 up to overlong_from;  (L - overlong_from) / (overlong_to - overlong_from)
    from there to overlong_to;  1 beyond;    times overlong_penalty,

and lies on the last action token. Shaping is for training alone: evaluations
report what the rules say.
"""

import dataclasses
import math

import numpy as np

from rl_tpu.types import Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What is done to rewards; as it stands, nothing."""

  bias: float = 0.0
  """Added to the reward of every turn."""
  scale: float = 1.0
  """Times that, != 0."""
  low: float = -math.inf
  """Least reward of a turn after that."""
  high: float = math.inf
  """Largest reward of a turn after that, >= low."""
  overlong_penalty: float = 0.0
  """Taken off in full at `overlong_to` action tokens, >= 0 (DAPO: 1)."""
  overlong_from: int = 0
  """Action tokens of an episode up to which nothing is taken off, >= 0."""
  overlong_to: int = 0
  """Action tokens from which on all of it is, > overlong_from where there is a
  penalty (DAPO: 4096 more)."""
  turn_discount: float | None = None
  """Share of a later turn's worth that a turn gets per turn between them, in
  [0, 1]; None leaves rewards where they were earned. With it the algorithm's
  own returns count a reward more than once: leave its discount to it instead
  unless its advantages are those of turns."""

  def __post_init__(self):
    discount = self.turn_discount
    for name, good, allowed in (
      ("bias", math.isfinite(self.bias), "finite"),
      ("scale", math.isfinite(self.scale) and self.scale != 0, "finite, not 0"),
      ("high", self.high >= self.low, f">= low = {self.low}"),
      ("overlong_penalty", 0 <= self.overlong_penalty < math.inf, ">= 0"),
      ("overlong_from", self.overlong_from >= 0, ">= 0"),
      (
        "overlong_to",
        not self.overlong_penalty or self.overlong_to > self.overlong_from,
        f"> overlong_from = {self.overlong_from}",
      ),
      ("turn_discount", discount is None or 0 <= discount <= 1, "in [0, 1]"),
    ):
      if not good:
        raise ValueError(
          f"shaping.{name} is {getattr(self, name)!r}; it must be {allowed}"
        )


def shape(trajectory: Trajectory, config: Config) -> Trajectory:
  """Returns the trajectory with shaped rewards, on the same tokens.

  Where the config does something, the outcome as it was is among its metrics.
  """
  if config == Config():
    return trajectory
  ends = turn_ends(trajectory.action_mask)
  worth = config.scale * (trajectory.rewards[ends] + config.bias)
  worth = np.clip(worth, config.low, config.high)
  worth[-1] -= _overlong(int(trajectory.action_mask.sum()), config)
  if config.turn_discount is not None:
    for turn in reversed(range(len(worth) - 1)):
      worth[turn] += config.turn_discount * worth[turn + 1]
  rewards = np.zeros_like(trajectory.rewards)
  rewards[ends] = worth
  metrics = {**trajectory.metrics, "unshaped_reward": trajectory.outcome}
  return dataclasses.replace(trajectory, rewards=rewards, metrics=metrics)


def turn_ends(action_mask: np.ndarray) -> np.ndarray:
  """Returns the places of the turns' last action tokens, in order.

  Turns with no observation between them would count as one.
  """
  after = np.append(action_mask[1:], False)
  return np.flatnonzero(action_mask & ~after)


def _overlong(tokens: int, config: Config) -> float:
  if not config.overlong_penalty:
    return 0.0
  width = config.overlong_to - config.overlong_from
  share = (tokens - config.overlong_from) / width
  return config.overlong_penalty * min(max(share, 0.0), 1.0)
