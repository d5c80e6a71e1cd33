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

`behavior_weight_level="sequence"` replaces log w_t by its mean over the action
tokens of the trajectory, which then shares one weight and one fate.

`centering` adds A_t times the term of `ops.centering`, whose gradient is the
mean under the behavior policy of the score as it is weighted here,

    sum_v behavior_v w_v u_v [no clip binds at u_v, A_t] grad log target_v

(arXiv:2609.20807, with three policies): a constant advantage then moves
nothing in expectation, whatever cap and clip take away. The tail is in
proportion to the target for the behavior and the proximal policy alike.

Signs of health: `ratio` and `behavior_weight` average near 1, `ratio` exactly 1
with one minibatch a batch; `trajectories_masked` well below one half.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl_tpu import ops
from rl_tpu.types import Batch, Estimate, PolicyOutputs

REQUIRES = frozenset(
  {"proximal_logp", "proximal_topk_logp", "target_topk_logp"}
)
_PROXIMAL = ("recompute", "loglinear", "behavior")
_WEIGHT_MODES = {"mask": "mask", "clamp": "truncate"}
_LEVELS = ("token", "sequence")


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
  behavior_weight_level: Literal["token", "sequence"] = "token"
  """Whose weight it is: each token's own, or the geometric mean over the
  trajectory's action tokens, both to decide and to weigh (AReaL's second
  kind; a product over tokens, as elsewhere, needs other caps)."""
  proximal: Literal["recompute", "loglinear", "behavior"] = "recompute"
  """Where the proximal logp comes from: a forward pass of the learner, the
  mixture above, or the behavior logp."""
  baseline: Literal["batch", "group", "group_mean", "leave_one_out", "none"] = (
    "batch"
  )
  """How rewards become advantages; see `ops.outcome_advantages`. `batch` is
  AReaL's: normalised over the action tokens of the batch."""
  centering: bool = False
  """Subtract the score's mean under the behavior policy; only with weights of
  level `token`: a trajectory's weight depends on the tokens taken."""
  top_k: int = 128
  """Size of the sampler's head for centering, >= 0; 0: the head is the whole
  support and centering exact."""

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
      (
        "behavior_weight_level",
        self.behavior_weight_level in _LEVELS
        and not (self.centering and self.behavior_weight_level == "sequence"),
        f"one of {_LEVELS}, and token where centering is on",
      ),
      ("top_k", self.top_k >= 0, ">= 0"),
      ("proximal", self.proximal in _PROXIMAL, f"one of {_PROXIMAL}"),
      ("baseline", self.baseline in ops.BASELINES, f"one of {ops.BASELINES}"),
    )


def requires(config: Config) -> frozenset[str]:
  """The proximal logps only where recomputed, heads only where centered."""
  recomputed = config.proximal == "recompute"
  wanted = {
    "proximal_logp": recomputed,
    "proximal_topk_logp": recomputed and config.centering,
    "target_topk_logp": config.centering,
  }
  return frozenset(name for name in REQUIRES if wanted[name])


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
  advantage = ops.action_advantages(batch)
  proximal_logp = _proximal_logp(outputs, batch, config)
  behavior_logp = ops.known_logp(batch.behavior_logp, proximal_logp)
  log_weight = ops.log_ratio(proximal_logp, behavior_logp, mask)
  kl = ops.estimate(-log_weight, mask)
  if config.behavior_weight_level == "sequence":
    log_weight = ops.action_mean(log_weight, batch)
  weight = _behavior_weight(log_weight, mask, config)
  ratio = ops.ratio(ops.log_ratio(outputs.target_logp, proximal_logp, mask))
  surrogate, clipped = _surrogate(ratio, advantage, config)
  total = weight * surrogate
  metrics = {
    "ratio": ops.estimate(ratio, mask),
    "clip_fraction": ops.estimate(clipped, mask),
    "behavior_weight": ops.estimate(weight, mask),
    "behavior_weight_masked": ops.estimate(weight == 0, mask),
    "trajectories_masked": ops.masked_trajectories(weight > 0, batch),
    "behavior_proximal_kl": kl,
    **ops.behavior_metrics(outputs, batch),
  }
  if config.centering:
    centered = _center(outputs, batch, advantage, config)
    total += advantage * centered.term
    score_weight = jnp.where(clipped, 0.0, weight * ratio)
    metrics |= ops.centering_metrics(
      centered, score_weight, outputs.target_logp, batch
    )
  return ops.estimate(total, mask), metrics


def _center(
  outputs: PolicyOutputs,
  batch: Batch,
  advantage: Float[Array, "R T"],
  config: Config,
) -> ops.Centering:
  """The mean of the score as `loss` weighs it, over the sampler's head."""
  valid = ops.head_slots(batch)

  def weigh(target_logp, behavior_logp):
    if config.proximal == "recompute":
      topk_logp = ops.required(
        outputs.proximal_topk_logp, "outputs.proximal_topk_logp"
      )
      proximal_logp = ops.with_tail(topk_logp, valid)
    else:
      proximal_logp = _between(target_logp, behavior_logp, batch, config)
    log_weight = proximal_logp - behavior_logp
    everywhere = jnp.ones(log_weight.shape, bool)
    weight = _behavior_weight(log_weight, everywhere, config)
    ratio = ops.ratio(target_logp - proximal_logp)
    _, clipped = _surrogate(ratio, advantage[..., None], config)
    return jnp.where(clipped, 0.0, weight * ratio)

  return ops.center(
    ops.required(outputs.target_topk_logp, "outputs.target_topk_logp"),
    ops.required(batch.behavior_topk_logp, "batch.behavior_topk_logp"),
    valid,
    weigh,
    exact=config.top_k == 0,
  )


def _behavior_weight(
  log_weight: Float[Array, "*S"], mask: Bool[Array, "*S"], config: Config
) -> Float[Array, "*S"]:
  """Proximal over behavior, capped; 0 off the mask."""
  mode = _WEIGHT_MODES[config.behavior_weight_mode]
  cap = config.behavior_weight_cap or math.inf
  return ops.importance_weight(log_weight, mask, mode, high=cap)


def _surrogate(
  ratio: Float[Array, "*S"], advantage: Float[Array, "*#S"], config: Config
) -> tuple[Float[Array, "*S"], Bool[Array, "*S"]]:
  """The clipped surrogate of target over proximal, and where it is clipped."""
  return ops.clipped_surrogate(
    ratio, advantage, config.clip_low, config.clip_high, config.dual_clip
  )


def _proximal_logp(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> Float[Array, "R T"]:
  """Log-probabilities under the centre of the trust region, constants."""
  if config.proximal == "recompute":
    return ops.required(outputs.proximal_logp, "outputs.proximal_logp")
  target_logp = jax.lax.stop_gradient(outputs.target_logp)
  behavior_logp = ops.known_logp(batch.behavior_logp, target_logp)
  return _between(target_logp, behavior_logp, batch, config)


def _between(
  target_logp: Float[Array, "R T *S"],
  behavior_logp: Float[Array, "R T *S"],
  batch: Batch,
  config: Config,
) -> Float[Array, "R T *S"]:
  """The proximal logp that no forward pass is spent on."""
  if config.proximal == "behavior":
    return behavior_logp
  staleness = batch.version - batch.token_version
  alpha = 1.0 / jnp.maximum(staleness, 1).astype(target_logp.dtype)
  alpha = alpha.reshape(*alpha.shape, *[1] * (target_logp.ndim - alpha.ndim))
  return alpha * behavior_logp + (1.0 - alpha) * target_logp
