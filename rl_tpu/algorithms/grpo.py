r"""GRPO, a one-policy loss: ratio r_t = target/behavior.

    A_n  = (R_n - mean of the group) / std of the group
    loss = - sum_t min(r_t A, clip(r_t, 1 - low, 1 + high) A)
             / number of action tokens
           + kl_coefficient KL(target || reference)

Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300. Choices that public
implementations make differently: the standard deviation is unbiased (n - 1);
a group without spread, or with a single member, has advantage 0 and there is
no epsilon; the loss is a mean over tokens, not a mean of trajectory means
(the paper's, which favours short answers: arXiv:2503.20783); the KL term,
estimated at the tokens taken, is off unless asked for (paper: k3, 0.04).
"""

import dataclasses
from typing import Literal

from jaxtyping import Array, Float

from rl_tpu import ops
from rl_tpu.types import Batch, Estimate, PolicyOutputs

REQUIRES = frozenset({"reference_logp"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What GRPO may be varied in."""

  clip_low: float = 0.2
  """Below 1 - clip_low a ratio earns nothing more, in (0, 1]."""
  clip_high: float = 0.2
  """Above 1 + clip_high a ratio earns nothing more, > 0."""
  baseline: Literal["group", "group_mean"] = "group"
  """`group` divides by the group's standard deviation; `group_mean` only
  subtracts its mean (Dr. GRPO, arXiv:2503.20783)."""

  kl_coefficient: float = 0.0
  """Weight of the KL term, >= 0; 0: no reference policy."""
  kl_estimator: Literal["k1", "k2", "k3"] = "k3"
  """How that KL is estimated at a token; see `ops.target_reference_kl`."""

  def __post_init__(self):
    ops.check_choices(self)
    ops.check_fields(
      self,
      ("clip_low", 0 < self.clip_low <= 1, "in (0, 1]"),
      ("clip_high", self.clip_high > 0, "> 0"),
      ("kl_coefficient", self.kl_coefficient >= 0, ">= 0"),
    )


def requires(config: Config) -> frozenset[str]:
  """The reference logp, only where there is a KL term."""
  return REQUIRES if config.kl_coefficient else frozenset()


def advantages(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """The outcome, compared with the group's."""
  return ops.outcome_advantages(batch, config.baseline)


def loss(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> tuple[Estimate, dict[str, Estimate]]:
  """The clipped surrogate around the behavior policy, a token mean."""
  ops.check_shapes(batch, outputs)
  mask = batch.action_mask
  behavior_logp = ops.known_logp(batch.behavior_logp, outputs.target_logp)
  ratio = ops.ratio(ops.log_ratio(outputs.target_logp, behavior_logp, mask))
  surrogate, clipped = ops.clipped_surrogate(
    ratio, ops.action_advantages(batch), config.clip_low, config.clip_high
  )
  metrics = {
    "ratio": ops.estimate(ratio, mask),
    "clip_fraction": ops.estimate(clipped, mask),
    **ops.behavior_metrics(outputs, batch),
  }
  total = surrogate
  if config.kl_coefficient:
    kl = ops.target_reference_kl(
      outputs.target_logp,
      ops.required(outputs.reference_logp, "outputs.reference_logp"),
      mask,
      config.kl_estimator,
    )
    total = total + config.kl_coefficient * kl
    metrics["target_reference_kl"] = ops.estimate(kl, mask)
  return ops.estimate(total, mask), metrics
