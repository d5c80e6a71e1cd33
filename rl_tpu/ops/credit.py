"""From rewards to advantages."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rl_tpu.ops.checks import check_shapes, required
from rl_tpu.ops.rows import (
  continues,
  per_token,
  reverse_accumulate,
  segment,
  segment_total,
  trajectory_sum,
)
from rl_tpu.ops.sums import divide_or_zero, masked_mean_std
from rl_tpu.types import Batch

BASELINES = ("none", "group_mean", "leave_one_out", "group", "batch")


def return_to_go(
  rewards: Float[Array, "R T"], trajectory_ids: Int[Array, "R T"]
) -> Float[Array, "R T"]:
  """Rewards from t to the end of the trajectory, undiscounted (gamma = 1)."""
  decay = continues(trajectory_ids).astype(rewards.dtype)
  return reverse_accumulate(rewards, decay)


def group_baseline(
  returns: Float[Array, " N"], group_ids: Int[Array, " N"], mode: str
) -> Float[Array, " N"]:
  """What each return is compared with: `mean` or `leave_one_out` of its group.

  Groups are numbered below N; -1 has none. A member without siblings, or
  without a group, is compared with itself, so its advantage is 0; so is that
  of equal returns, exactly. Leave-one-out: Kool et al. 2019 (RLOO).

  Raises:
    ValueError: for another mode.
  """
  if mode not in ("mean", "leave_one_out"):
    raise ValueError(
      f"group_baseline mode is {mode!r}; it must be mean or leave_one_out"
    )
  largest, excess, total, count = _group_excess(returns, group_ids)
  if mode == "leave_one_out":
    total, count = total - excess, count - 1
  baseline = largest + divide_or_zero(total, count)
  return jnp.where((group_ids >= 0) & (count > 0), baseline, returns)


def group_std(
  returns: Float[Array, " N"], group_ids: Int[Array, " N"]
) -> Float[Array, " N"]:
  """Unbiased standard deviation (n - 1) of each return's group.

  0 for equal returns, exactly, and where there are no siblings.
  """
  _, excess, total, count = _group_excess(returns, group_ids)
  square = (excess - divide_or_zero(total, count)) ** 2
  spread = divide_or_zero(segment_total(square, group_ids), count - 1)
  return jnp.where(group_ids >= 0, jnp.sqrt(spread), 0.0)


def outcome_advantages(batch: Batch, baseline: str) -> Float[Array, "R T"]:
  r"""Advantages from rewards alone (gamma = lambda = 1, no critic).

  With G_t the return to go, N the trajectory's whole outcome:

  | baseline | advantage of an action token |
  |---|---|
  | none | G_t |
  | batch | (G_t - mean) / std over the batch's action tokens (AReaL) |
  | group_mean | N - mean of the group |
  | leave_one_out | N - mean of the group's other members |
  | group | (N - mean) / std of the group |

  The group recipes credit the whole outcome to every action token: equal
  members get exactly 0, and so does a member without siblings. Where the
  spread is 0 the advantage is 0. The batch's deviation is biased, a group's
  unbiased. 0 off the action mask, where rewards are not read.

  Raises:
    ValueError: for another baseline, or arrays that do not fit each other.
  """
  if baseline not in BASELINES:
    raise ValueError(f"baseline is {baseline!r}; it must be one of {BASELINES}")
  check_shapes(batch)
  mask, ids, groups = batch.action_mask, batch.trajectory_ids, batch.group_ids
  rewards = jnp.where(mask, batch.rewards, 0.0)
  if baseline in ("none", "batch"):
    advantages = return_to_go(rewards, ids)
    if baseline == "batch":
      mean, std = masked_mean_std(advantages, mask)
      advantages = divide_or_zero(advantages - mean, std)
  else:
    outcomes = trajectory_sum(rewards, ids, groups.shape[0])
    mode = "leave_one_out" if baseline == "leave_one_out" else "mean"
    centred = outcomes - group_baseline(outcomes, groups, mode)
    if baseline == "group":
      centred = divide_or_zero(centred, group_std(outcomes, groups))
    advantages = per_token(centred, ids)
  return jnp.where(mask, advantages, 0.0)


def action_advantages(batch: Batch) -> Float[Array, "R T"]:
  """The batch's advantages, 0 off the action mask.

  Raises:
    ValueError: if they were not set.
  """
  advantages = required(batch.advantages, "batch.advantages")
  return jnp.where(batch.action_mask, advantages, 0.0)


def _group_excess(
  returns: Float[Array, " N"], group_ids: Int[Array, " N"]
) -> tuple[Array, Array, Array, Array]:
  """Largest return of the group, own less largest, sum of those, group size.

  Equal returns have excess 0 exactly, so that no rounding error of a mean is
  ever divided by a standard deviation of its own size.
  """
  index = jnp.where(group_ids >= 0, group_ids, 0)
  num = returns.shape[0]
  largest = segment(jax.ops.segment_max, returns, group_ids, num)[index]
  excess = jnp.where(group_ids >= 0, returns - largest, 0.0)
  total = segment_total(excess, group_ids)
  count = segment_total(jnp.ones_like(returns), group_ids)
  return largest, excess, total, count
