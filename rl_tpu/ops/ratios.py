"""Ratios of policies, weights made of them, and the clipped surrogate."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl_tpu.ops.credit import action_advantages
from rl_tpu.ops.logp import known_logp
from rl_tpu.ops.sums import estimate
from rl_tpu.types import Batch, Estimate, PolicyOutputs

MAX_LOG_RATIO = 20.0
"""Log ratios are clipped to +-20 nats before `exp`, which bounds a ratio by
4.9e8; beyond it the gradient through the ratio is 0."""
WEIGHT_MODES = ("none", "is", "truncate", "mask", "mask_unit")


def log_ratio(
  numerator: Float[Array, "R T"],
  denominator: Float[Array, "R T"],
  mask: Bool[Array, "R T"],
) -> Float[Array, "R T"]:
  """Difference of two logps on the mask, 0 off it."""
  return jnp.where(mask, numerator - denominator, 0.0)


def ratio(log_ratio: Float[Array, "R T"]) -> Float[Array, "R T"]:
  """`exp` of a log ratio, within exp(+-MAX_LOG_RATIO)."""
  return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def importance_weight(
  log_ratio: Float[Array, "R T"],
  mask: Bool[Array, "R T"],
  mode: str,
  low: float = 0.0,
  high: float = math.inf,
) -> Float[Array, "R T"]:
  r"""Per-token weight f(r) of the ratio r = exp(log_ratio); 0 off the mask.

  | mode | f(r) |
  |---|---|
  | none | 1 |
  | is | r |
  | truncate | r clamped to [low, high] |
  | mask | r where low <= r <= high, else 0 |
  | mask_unit | 1 where low <= r <= high, else 0 |

  A ratio that is NaN or infinite counts as 1. The weight is not detached.

  Raises:
    ValueError: for another mode.
  """
  known = mask & jnp.isfinite(log_ratio)
  r = ratio(jnp.where(known, log_ratio, 0.0))
  inside = (r >= low) & (r <= high)
  match mode:
    case "none":
      weight = jnp.ones_like(r)
    case "is":
      weight = r
    case "truncate":
      weight = jnp.clip(r, low, high)
    case "mask":
      weight = jnp.where(inside, r, 0.0)
    case "mask_unit":
      weight = jnp.where(inside, 1.0, 0.0)
    case _:
      raise ValueError(
        f"importance_weight mode is {mode!r}; it must be one of {WEIGHT_MODES}"
      )
  return jnp.where(mask, weight, 0.0)


def clipped_surrogate(
  ratio: Float[Array, "R T"],
  advantages: Float[Array, "R T"],
  clip_low: float,
  clip_high: float,
  dual_clip: float | None = None,
) -> tuple[Float[Array, "R T"], Bool[Array, "R T"]]:
  r"""PPO's pessimistic loss per token, and where a clip binds.

  loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), from above bounded
  by dual_clip * |A| if given, which acts where A < 0 only. Where a clip binds
  the gradient is 0; at a tie it does not bind. PPO: Schulman et al. 2017,
  arXiv:1707.06347; dual clip: Ye et al. 2020, arXiv:1912.09729.
  """
  unclipped = -ratio * advantages
  clipped = -jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
  binds = clipped > unclipped
  loss = jnp.where(binds, clipped, unclipped)
  if dual_clip is not None:
    ceiling = dual_clip * jnp.abs(advantages)
    binds |= loss > ceiling
    loss = jnp.where(loss > ceiling, ceiling, loss)
  return loss, binds


def behavior_metrics(
  outputs: PolicyOutputs, batch: Batch
) -> dict[str, Estimate]:
  """What every loss reports of its action tokens, under the same names.

  `engine_mismatch`: mean |log target - log behavior| over the tokens that this
  version sampled, NaN where there are none; from the second minibatch on it
  holds the updates of those before. `behavior_target_kl`: log behavior - log
  target, an unbiased estimate of KL(behavior || target). `nonfinite_logp`:
  share of tokens for which the engine reported no number. `extreme_ratio`:
  share with a log ratio beyond +-MAX_LOG_RATIO. `zero_advantage`: share that
  teaches nothing.
  """
  mask = batch.action_mask
  behavior = known_logp(batch.behavior_logp, outputs.target_logp)
  difference = log_ratio(behavior, outputs.target_logp, mask)
  present = mask & (batch.token_version == batch.version)
  return {
    "engine_mismatch": estimate(jnp.abs(difference), present),
    "behavior_target_kl": estimate(difference, mask),
    "nonfinite_logp": estimate(~jnp.isfinite(batch.behavior_logp), mask),
    "extreme_ratio": estimate(jnp.abs(difference) > MAX_LOG_RATIO, mask),
    "zero_advantage": estimate(action_advantages(batch) == 0, mask),
  }
