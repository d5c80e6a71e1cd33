r"""TOPR, a one-policy loss: ratio target/behavior of a whole trajectory.

    w_n  = 1                                              where A_n >= 0
           min(1, prod_t target(a_t | s_t) / behavior)    where A_n < 0
    loss = - sum_t sg(w_n) A_n log target(a_t | s_t)  /  number of action tokens

Le Roux et al. 2025, arXiv:2503.14286: what was rewarded is imitated as it is;
what was not is pushed down only as far as the target policy would still do it,
so that log target of bad answers does not run to minus infinity. The product
is taken in log space: it cannot overflow, but a drift of 0.005 a token already
halves it at 140 tokens, and a long trajectory can lose all its weight:
`masked_trajectories` counts weights below 1%. `weight="geometric_mean"` does
not shrink with length. Choices: A is the outcome less the group's mean (the
paper's rewards are +-1, with a constant baseline); a mean over tokens.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_tpu import ops
from rl_tpu.types import Batch, Estimate, PolicyOutputs

REQUIRES = frozenset()
_LOST = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What TOPR may be varied in."""

  weight: Literal["product", "geometric_mean"] = "product"
  """The trajectory's ratio: the product over its action tokens (the paper) or
  its root of their number."""
  baseline: Literal["none", "group_mean", "leave_one_out"] = "group_mean"
  """What the outcome is compared with; see `ops.outcome_advantages`. With
  `none` rewards must be negative for anything to be tapered."""

  def __post_init__(self):
    ops.check_choices(self)


def advantages(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """The outcome, less the group's mean if asked for."""
  return ops.outcome_advantages(batch, config.baseline)


def loss(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> tuple[Estimate, dict[str, Estimate]]:
  """The policy gradient with tapered weights where A is negative."""
  ops.check_shapes(batch, outputs)
  mask = batch.action_mask
  signed = ops.action_advantages(batch)
  behavior_logp = ops.known_logp(batch.behavior_logp, outputs.target_logp)
  log_ratio = ops.log_ratio(outputs.target_logp, behavior_logp, mask)
  if config.weight == "product":
    total = ops.action_sum(log_ratio, batch)
    log_weight = ops.per_token(total, batch.trajectory_ids)
  else:
    log_weight = ops.action_mean(log_ratio, batch)
  tapered = ops.ratio(jnp.minimum(log_weight, 0.0))
  weight = jax.lax.stop_gradient(jnp.where(signed < 0, tapered, 1.0))
  metrics = {
    "ratio": ops.estimate(ops.ratio(log_ratio), mask),
    "weight": ops.estimate(weight, mask),
    "masked_trajectories": ops.masked_trajectories(weight >= _LOST, batch),
    **ops.behavior_metrics(outputs, batch),
  }
  return ops.estimate(-weight * signed * outputs.target_logp, mask), metrics
