r"""REINFORCE: the policy gradient, without any ratio.

    loss = - sum_t A_t log target(a_t | s_t)  /  number of action tokens

A_t is a constant. The gradient is that of the expected return only where the
target policy itself sampled the tokens (staleness 0): nothing corrects for
the behavior policy, which makes this the baseline that shows what staleness
costs. Williams 1992, "Simple statistical gradient-following algorithms for
connectionist reinforcement learning".

One-policy loss: `ratio` in the metrics is target/behavior.
"""

import dataclasses
from typing import Literal

from jaxtyping import Array, Float

from rl_tpu import ops
from rl_tpu.types import Batch, Estimate, PolicyOutputs

REQUIRES = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What REINFORCE may be varied in."""

  baseline: Literal["none", "group_mean", "leave_one_out"] = "none"
  """What is subtracted: `none` leaves the return to go; see
  `ops.outcome_advantages`. leave_one_out makes it RLOO (arXiv:2402.14740)."""

  def __post_init__(self):
    allowed = ("none", "group_mean", "leave_one_out")
    good = self.baseline in allowed
    ops.check_fields(self, ("baseline", good, f"one of {allowed}"))


def advantages(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """Return to go, or the outcome less its group's baseline."""
  return ops.outcome_advantages(batch, config.baseline)


def loss(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> tuple[Estimate, dict[str, Estimate]]:
  """Minus advantage times target logp, a token mean."""
  ops.check_shapes(batch, outputs)
  mask = batch.action_mask
  target_logp = outputs.target_logp
  behavior_logp = ops.known_logp(batch.behavior_logp, target_logp)
  ratio = ops.ratio(ops.log_ratio(target_logp, behavior_logp, mask))
  negative = -ops.action_advantages(batch) * target_logp
  metrics = {
    "ratio": ops.estimate(ratio, mask),
    **ops.behavior_metrics(outputs, batch),
  }
  return ops.estimate(negative, mask), metrics
