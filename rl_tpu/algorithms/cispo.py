r"""CISPO, a one-policy loss: ratio r_t = target/behavior, clipped as a weight.

    loss = - sum_t sg(clip(r_t, 1 - low, 1 + high)) A_t log target(a_t | s_t)
             / number of action tokens

MiniMax 2025, arXiv:2506.13585. PPO's clip removes a token's gradient where it
binds; here it bounds the weight and every token keeps teaching. Choices that
public implementations make differently: both bounds are offsets from 1, not an
absolute cap; the paper sets no lower bound and does not state the upper one,
and [0, 5] is that of Khatri et al. 2025, arXiv:2510.13786. Advantages as in
`grpo`; no KL term.
"""

import dataclasses
from typing import Literal

import jax
from jaxtyping import Array, Float

from rl_tpu import ops
from rl_tpu.types import Batch, Estimate, PolicyOutputs

REQUIRES = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What CISPO may be varied in."""

  clip_low: float = 1.0
  """The weight is at least 1 - clip_low, in (0, 1]; 1: no lower bound."""
  clip_high: float = 4.0
  """The weight is at most 1 + clip_high, > 0."""
  baseline: Literal["group", "group_mean"] = "group"
  """`group` divides by the group's standard deviation, as in the paper;
  `group_mean` only subtracts its mean."""

  def __post_init__(self):
    ops.check_choices(self)
    ops.check_fields(
      self,
      ("clip_low", 0 < self.clip_low <= 1, "in (0, 1]"),
      ("clip_high", self.clip_high > 0, "> 0"),
    )


def advantages(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """The outcome, compared with the group's."""
  return ops.outcome_advantages(batch, config.baseline)


def loss(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> tuple[Estimate, dict[str, Estimate]]:
  """The policy gradient with a clipped importance weight, a token mean."""
  ops.check_shapes(batch, outputs)
  mask = batch.action_mask
  behavior_logp = ops.known_logp(batch.behavior_logp, outputs.target_logp)
  log_ratio = ops.log_ratio(outputs.target_logp, behavior_logp, mask)
  low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
  weight = jax.lax.stop_gradient(
    ops.importance_weight(log_ratio, mask, "truncate", low, high)
  )
  ratio = ops.ratio(log_ratio)
  negative = -weight * ops.action_advantages(batch) * outputs.target_logp
  metrics = {
    "ratio": ops.estimate(ratio, mask),
    "weight": ops.estimate(weight, mask),
    "clip_fraction": ops.estimate((ratio < low) | (ratio > high), mask),
    **ops.behavior_metrics(outputs, batch),
  }
  return ops.estimate(negative, mask), metrics
