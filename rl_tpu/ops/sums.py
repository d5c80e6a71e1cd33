"""Sums over a mask that travel with their count."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl_tpu.types import Estimate


def masked_mean_std(
  x: Float[Array, "*S"], mask: Bool[Array, "*S"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Mean and biased standard deviation over the mask; 0, 0 if it is empty.

  Equal values have their own value as mean and a deviation of 0, exactly.
  """
  count = jnp.sum(mask, dtype=x.dtype)
  largest = jnp.max(jnp.where(mask, x, -jnp.inf))
  largest = jnp.where(count > 0, largest, 0.0)
  excess = jnp.where(mask, x - largest, 0.0)
  mean = divide_or_zero(jnp.sum(excess), count)
  square = jnp.where(mask, (excess - mean) ** 2, 0.0)
  return largest + mean, jnp.sqrt(divide_or_zero(jnp.sum(square), count))


def divide_or_zero(
  x: Float[Array, "*S"], by: Float[Array, "*#S"]
) -> Float[Array, "*S"]:
  """X / by where by > 0, else 0: nothing to divide by is nothing."""
  some = by > 0
  return jnp.where(some, x / jnp.where(some, by, 1.0), 0.0)


def estimate(
  x: Float[Array, "R T"] | Bool[Array, "R T"], mask: Bool[Array, "R T"]
) -> Estimate:
  """The sum of `x` over the mask, and the size of the mask."""
  total = jnp.sum(jnp.where(mask, x, 0.0))
  return Estimate(total=total, count=jnp.sum(mask, dtype=total.dtype))
