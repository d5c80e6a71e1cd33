r"""Decoupled PPO: clip around the proximal policy, weight by the behavior one.

    u_t  = target / proximal                 (the ratio; carries the gradient)
    w_t  = proximal / behavior               (the behavior weight; a constant)
    loss = - sum_t w_t min(u_t A_t, clip(u_t, 1 - low, 1 + high) A_t)
             / number of action tokens

AReaL, arXiv:2505.24298, equations 4 and 5; decoupling: Hilton et al. 2021,
arXiv:2110.00641. The proximal policy is that of the weights before this
batch's first minibatch, where u = 1: data may be stale without pulling the
target back towards the weights that sampled it. With one minibatch a batch the
clip never binds and the step is an importance-weighted policy gradient.

Choices that public implementations make differently: w_t is always applied;
a token whose weight the cap removes still counts in the denominator, so the
cap does not scale up the rest; the dual clip comes before the weight.

`proximal="loglinear"` saves the forward pass that `recompute` costs. With
staleness d = batch.version - token_version and alpha = 1 / max(d, 1)

    log proximal = alpha log behavior + (1 - alpha) log target   (a constant)

so u = (target/behavior)^alpha and w = (target/behavior)^(1 - alpha): the older
a token, the looser its clip (A-3PO, arXiv:2512.06547). Fresh tokens and those
of staleness 1 have proximal = behavior. The alternative reading, alpha =
1 / (d + 1), counts the target as one version ahead; it is not offered.
`proximal="behavior"` is `ppo`: w = 1, u = target/behavior.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_tpu import ops
from rl_tpu.types import Batch, Estimate, PolicyOutputs

REQUIRES = frozenset({"proximal_logp"})
_PROXIMAL = ("recompute", "loglinear", "behavior")
_WEIGHT_MODES = {"mask": "mask", "clamp": "truncate"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What decoupled PPO may be varied in."""

  clip_low: float = 0.2
  """Below 1 - clip_low the ratio target/proximal earns nothing more, in
  (0, 1]."""
  clip_high: float = 0.2
  """Above 1 + clip_high the ratio earns nothing more, > 0."""
  dual_clip: float | None = None
  """Loss of a token with A < 0, before its weight, is at most this times |A|,
  > 1; None: unbounded."""
  behavior_weight_cap: float | None = 5.0
  """Largest weight proximal/behavior, >= 1; None: no cap. 5 is that of AReaL's
  released recipes, the paper has none."""
  behavior_weight_mode: Literal["mask", "clamp"] = "mask"
  """Above the cap a weight becomes 0 (mask) or the cap (clamp)."""
  proximal: Literal["recompute", "loglinear", "behavior"] = "recompute"
  """Where the proximal logp comes from: a forward pass of the learner, the
  mixture above, or the behavior logp."""
  baseline: Literal["batch", "group", "group_mean", "leave_one_out", "none"] = (
    "batch"
  )
  """How rewards become advantages; see `ops.outcome_advantages`. `batch` is
  AReaL's: normalised over the action tokens of the batch."""

  def __post_init__(self):
    cap, dual = self.behavior_weight_cap, self.dual_clip
    modes = tuple(_WEIGHT_MODES)
    ops.check_fields(
      self,
      ("clip_low", 0 < self.clip_low <= 1, "in (0, 1]"),
      ("clip_high", self.clip_high > 0, "> 0"),
      ("dual_clip", dual is None or dual > 1, "> 1 or None"),
      ("behavior_weight_cap", cap is None or cap >= 1, ">= 1 or None"),
      (
        "behavior_weight_mode",
        self.behavior_weight_mode in modes,
        f"one of {modes}",
      ),
      ("proximal", self.proximal in _PROXIMAL, f"one of {_PROXIMAL}"),
      ("baseline", self.baseline in ops.BASELINES, f"one of {ops.BASELINES}"),
    )


def requires(config: Config) -> frozenset[str]:
  """The proximal logp, only where it is recomputed."""
  return REQUIRES if config.proximal == "recompute" else frozenset()


def advantages(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """Rewards made into advantages by the recipe named in the config."""
  return ops.outcome_advantages(batch, config.baseline)


def loss(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> tuple[Estimate, dict[str, Estimate]]:
  """The weighted clipped surrogate around the proximal policy."""
  ops.check_shapes(batch, outputs)
  mask = batch.action_mask
  proximal_logp = _proximal_logp(outputs, batch, config)
  behavior_logp = ops.known_logp(batch.behavior_logp, proximal_logp)
  log_weight = ops.log_ratio(proximal_logp, behavior_logp, mask)
  weight = ops.importance_weight(
    log_weight,
    mask,
    _WEIGHT_MODES[config.behavior_weight_mode],
    high=config.behavior_weight_cap or math.inf,
  )
  ratio = ops.ratio(ops.log_ratio(outputs.target_logp, proximal_logp, mask))
  surrogate, clipped = ops.clipped_surrogate(
    ratio,
    ops.action_advantages(batch),
    config.clip_low,
    config.clip_high,
    config.dual_clip,
  )
  metrics = {
    "ratio": ops.estimate(ratio, mask),
    "clip_fraction": ops.estimate(clipped, mask),
    "behavior_weight": ops.estimate(weight, mask),
    "behavior_weight_masked": ops.estimate(weight == 0, mask),
    "behavior_proximal_kl": ops.estimate(-log_weight, mask),
    **ops.behavior_metrics(outputs, batch),
  }
  return ops.estimate(weight * surrogate, mask), metrics


def _proximal_logp(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> Float[Array, "R T"]:
  """Log-probabilities under the centre of the trust region, constants."""
  if config.proximal == "recompute":
    return ops.required(outputs.proximal_logp, "outputs.proximal_logp")
  target_logp = jax.lax.stop_gradient(outputs.target_logp)
  behavior_logp = ops.known_logp(batch.behavior_logp, target_logp)
  if config.proximal == "behavior":
    return behavior_logp
  staleness = batch.version - batch.token_version
  alpha = 1.0 / jnp.maximum(staleness, 1).astype(target_logp.dtype)
  return alpha * behavior_logp + (1.0 - alpha) * target_logp
