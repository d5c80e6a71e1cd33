"""What is decided for a trajectory as a whole."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl_tpu.ops.rows import per_token, trajectory_sum
from rl_tpu.ops.sums import divide_or_zero
from rl_tpu.types import Batch, Estimate


def action_sum(x: Float[Array, "R T"], batch: Batch) -> Float[Array, " N"]:
  """Sum of `x` over each trajectory's action tokens."""
  x = jnp.where(batch.action_mask, x, 0.0)
  return trajectory_sum(x, batch.trajectory_ids, batch.group_ids.shape[0])


def action_count(batch: Batch) -> Float[Array, " N"]:
  """Action tokens of each trajectory; 0 for those of other rows."""
  return action_sum(jnp.ones(batch.tokens.shape), batch)


def action_mean(x: Float[Array, "R T"], batch: Batch) -> Float[Array, "R T"]:
  """Mean of `x` over its trajectory's action tokens, at each token.

  Of log ratios: the log of their geometric mean, finite at any length.
  """
  mean = divide_or_zero(action_sum(x, batch), action_count(batch))
  return per_token(mean, batch.trajectory_ids)


def masked_trajectories(kept: Bool[Array, "R T"], batch: Batch) -> Estimate:
  """Share of trajectories none of whose action tokens is kept.

  Above one half, most of what was sampled teaches nothing.
  """
  there = action_count(batch) > 0
  masked = there & (action_sum(kept.astype(jnp.float32), batch) == 0)
  return Estimate(
    total=jnp.sum(masked, dtype=jnp.float32),
    count=jnp.sum(there, dtype=jnp.float32),
  )


def drop_truncated(
  advantages: Float[Array, "R T"], batch: Batch
) -> Float[Array, "R T"]:
  """Advantages, 0 for every token of a trajectory that the budget ended."""
  cut = per_token(batch.truncated.astype(jnp.float32), batch.trajectory_ids)
  return jnp.where(cut > 0, 0.0, advantages)
