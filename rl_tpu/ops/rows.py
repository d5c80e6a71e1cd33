"""How a row is laid out: shifts, borders of trajectories, sums inside them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def shift_to_logits(x: Array, fill: float) -> Array:
  """From the tokens predicted to the positions that predict: x[t + 1] at t."""
  return jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=fill)


def shift_to_tokens(predicted: Float[Array, "R T"]) -> Float[Array, "R T"]:
  """From the positions that predict to the tokens predicted; entry 0 is 0."""
  return jnp.pad(predicted[:, :-1], ((0, 0), (1, 0)))


def continues(trajectory_ids: Int[Array, "R T"]) -> Bool[Array, "R T"]:
  """Whether the next position of the row is of the same trajectory."""
  same = shift_to_logits(trajectory_ids, -1) == trajectory_ids
  return same & (trajectory_ids >= 0)


def segment(
  reduction, x: Float[Array, " M"], ids: Int[Array, " M"], num: int
) -> Float[Array, " N"]:
  """Reduces `x` by id; entries with id -1 are left out."""
  return reduction(x, jnp.where(ids >= 0, ids, num), num + 1)[:num]


def segment_total(
  x: Float[Array, " N"], group_ids: Int[Array, " N"]
) -> Float[Array, " N"]:
  """Each entry's group total."""
  totals = segment(jax.ops.segment_sum, x, group_ids, x.shape[0])
  return totals[jnp.where(group_ids >= 0, group_ids, 0)]


def trajectory_sum(
  x: Float[Array, "R T"], trajectory_ids: Int[Array, "R T"], num: int
) -> Float[Array, " N"]:
  """Sum of `x` over each of the `num` trajectories; padding is left out."""
  return segment(jax.ops.segment_sum, x.ravel(), trajectory_ids.ravel(), num)


def per_token(
  x: Float[Array, " N"], trajectory_ids: Int[Array, "R T"]
) -> Float[Array, "R T"]:
  """Each trajectory's value at each of its tokens, 0 on padding."""
  inside = trajectory_ids >= 0
  return jnp.where(inside, x[jnp.where(inside, trajectory_ids, 0)], 0.0)


def reverse_accumulate(
  x: Float[Array, "R T"], decay: Float[Array, "R T"]
) -> Float[Array, "R T"]:
  """y[t] = x[t] + decay[t] * y[t + 1], from the right.

  A loop over T: the associative form takes ten seconds to compile at 32k
  tokens, and this runs once a batch.
  """

  def step(later, now):
    y = now[0] + now[1] * later
    return y, y

  start = jnp.zeros_like(x[:, 0])
  return jax.lax.scan(step, start, (x.T, decay.T), reverse=True)[1].T
