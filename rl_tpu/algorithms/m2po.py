r"""M2PO, a one-policy loss: ratio r_t = target/behavior, outliers left out.

    M2   = mean of (log proximal - log behavior)^2 over the tokens kept
    loss = - sum_{t kept} r_t A_t  /  number of action tokens

Zheng et al. 2025, arXiv:2510.01161. Tokens leave in the order of their squared
log ratio, the largest first, until M2 <= threshold; nothing is clipped. A
second moment cannot cancel as a mean of log ratios does, and a batch decides
for itself how many tokens are outliers: far fewer than a fixed band takes.

Which tokens leave depends on all of the batch, so it is decided once, in
`advantages`, by the weights before the batch's first minibatch: a token left
out has advantage 0 and is counted by `zero_advantage`. With several minibatches
the paper decides again for each, by the target policy. Choices that public
implementations make differently: the denominator keeps the tokens left out;
equal log ratios leave together; advantages as in `grpo`.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl_tpu import ops
from rl_tpu.types import Batch, Estimate, PolicyOutputs

REQUIRES = frozenset({"proximal_logp"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What M2PO may be varied in."""

  threshold: float = 0.04
  """Largest mean squared log ratio of the tokens kept, > 0 (paper: 0.04)."""
  candidates: Literal["outward", "all"] = "outward"
  """Over which tokens M2 is taken and which may leave: those that the update
  would move further from the behavior policy (A > 0 with a ratio above 1, A < 0
  with one below; the paper), or all (AReaL)."""
  baseline: Literal["group", "group_mean"] = "group"
  """`group` divides by the group's standard deviation, as in the paper;
  `group_mean` only subtracts its mean."""

  def __post_init__(self):
    ops.check_choices(self)
    ops.check_fields(self, ("threshold", self.threshold > 0, "> 0"))


def advantages(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """The outcome compared with the group's; 0 for tokens left out."""
  ops.check_shapes(batch, outputs)
  result = ops.outcome_advantages(batch, config.baseline)
  proximal_logp = ops.required(outputs.proximal_logp, "outputs.proximal_logp")
  behavior_logp = ops.known_logp(batch.behavior_logp, proximal_logp)
  log_ratio = ops.log_ratio(proximal_logp, behavior_logp, batch.action_mask)
  candidate = batch.action_mask
  if config.candidates == "outward":
    candidate = result * log_ratio > 0
  return jnp.where(
    _outliers(log_ratio**2, candidate, config.threshold), 0.0, result
  )


def loss(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> tuple[Estimate, dict[str, Estimate]]:
  """Minus ratio times advantage, a token mean."""
  ops.check_shapes(batch, outputs)
  mask = batch.action_mask
  behavior_logp = ops.known_logp(batch.behavior_logp, outputs.target_logp)
  log_ratio = ops.log_ratio(outputs.target_logp, behavior_logp, mask)
  ratio = ops.ratio(log_ratio)
  signed = ops.action_advantages(batch)
  metrics = {
    "ratio": ops.estimate(ratio, mask),
    "second_moment": ops.estimate(log_ratio**2, mask),
    "second_moment_kept": ops.estimate(log_ratio**2, mask & (signed != 0)),
    **ops.behavior_metrics(outputs, batch),
  }
  return ops.estimate(-ratio * signed, mask), metrics


def _outliers(
  square: Float[Array, "R T"], candidate: Bool[Array, "R T"], threshold: float
) -> Bool[Array, "R T"]:
  """The largest candidates, without which the mean is within the threshold."""
  ordered = jnp.sort(jnp.where(candidate, square, jnp.inf), axis=None)
  places = 1.0 + jnp.arange(ordered.size, dtype=ordered.dtype)
  # The mean of the smallest ones grows with their number.
  kept = jnp.sum(jnp.cumsum(ordered) / places <= threshold)
  first_out = jnp.append(ordered, jnp.inf)[kept]
  return candidate & (square >= first_out)
