r"""DPPO, a one-policy loss: ratio r_t = target/behavior, masked by divergence.

    loss = - sum_t M_t r_t A_t  /  number of action tokens
    M_t  = 0  where D_t > threshold and the step would lead further away:
              A_t > 0 with r_t > 1, or A_t < 0 with r_t < 1;   else 1

Qi et al. 2026, arXiv:2602.04879. A clip on the ratio holds unlikely tokens,
which move no mass, and lets go of likely ones, which move much: 1e-5 to 1e-3
is a ratio of 100, 0.99 to 0.8 one of 0.81. D measures the mass, between the two
policies told apart only by whether they take the token, with p = target and
q = behavior probability of it:

    tv: |p - q|          kl: KL(q || p) of the two Bernoullis

both lower bounds of the divergence over the vocabulary. Advantages as in
`grpo`, with the group's deviation. A masked token still counts in the
denominator.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_tpu import ops
from rl_tpu.types import Batch, Estimate, PolicyOutputs

REQUIRES = frozenset()
_THRESHOLDS = {"tv": 0.15, "kl": 0.05}
_LEAST = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What DPPO may be varied in."""

  divergence: Literal["tv", "kl"] = "tv"
  """How far target and behavior policy are apart at a token."""
  threshold: float | None = None
  """Largest divergence of a token that moves further, > 0; None: the
  authors', 0.15 for tv and 0.05 nats for kl."""
  baseline: Literal["group", "group_mean"] = "group"
  """`group` divides by the group's standard deviation; `group_mean` only
  subtracts its mean."""

  def __post_init__(self):
    good = self.threshold is None or self.threshold > 0
    ops.check_choices(self)
    ops.check_fields(self, ("threshold", good, "> 0 or None"))


def advantages(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """The outcome, compared with the group's."""
  return ops.outcome_advantages(batch, config.baseline)


def loss(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> tuple[Estimate, dict[str, Estimate]]:
  """The masked, unclipped surrogate, a token mean."""
  ops.check_shapes(batch, outputs)
  mask = batch.action_mask
  signed = ops.action_advantages(batch)
  target_logp = jnp.where(mask, outputs.target_logp, 0.0)
  behavior_logp = ops.known_logp(batch.behavior_logp, target_logp)
  log_ratio = ops.log_ratio(target_logp, behavior_logp, mask)
  divergence = _divergence(target_logp, target_logp - log_ratio, config)
  threshold = config.threshold or _THRESHOLDS[config.divergence]
  masked = (signed * log_ratio > 0) & (divergence > threshold)
  ratio = ops.ratio(log_ratio)
  surrogate = jnp.where(masked, 0.0, -ratio * signed)
  metrics = {
    "ratio": ops.estimate(ratio, mask),
    "clip_fraction": ops.estimate(masked, mask),
    "divergence": ops.estimate(divergence, mask),
    **ops.behavior_metrics(outputs, batch),
  }
  return ops.estimate(surrogate, mask), metrics


def _divergence(
  target_logp: Float[Array, "R T"],
  behavior_logp: Float[Array, "R T"],
  config: Config,
) -> Float[Array, "R T"]:
  """Between the policies as Bernoullis: this token or another."""
  p, q = jnp.exp(target_logp), jnp.exp(behavior_logp)
  if config.divergence == "tv":
    return jnp.abs(p - q)
  p, q = (jnp.clip(x, _LEAST, 1.0 - _LEAST) for x in (p, q))
  other = (1.0 - q) * (jnp.log1p(-q) - jnp.log1p(-p))
  return q * (jnp.log(q) - jnp.log(p)) + other
