r"""PPO clipped around the behavior policy: ratio r_t = target/behavior.

    loss = - sum_t min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)
             / number of action tokens
           - entropy_coefficient * mean entropy of the target policy

The baseline of AReaL's Figure 5a ("naive PPO", arXiv:2505.24298): with stale
data the trust region is centred on the policy that sampled, which pulls the
target back towards old weights; `decoupled_ppo` centres it on the proximal
policy. No critic (lambda = gamma = 1, V = 0), no KL term; the entropy bonus,
over action tokens, is off unless asked for. PPO: Schulman et al. 2017,
arXiv:1707.06347.
"""

import dataclasses
from typing import Literal

from jaxtyping import Array, Float

from rl_tpu import ops
from rl_tpu.types import Batch, Estimate, PolicyOutputs

REQUIRES = frozenset({"entropy"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What PPO may be varied in."""

  clip_low: float = 0.2
  """Below 1 - clip_low a ratio earns nothing more, in (0, 1]."""
  clip_high: float = 0.2
  """Above 1 + clip_high a ratio earns nothing more, > 0."""
  dual_clip: float | None = None
  """Loss of a token with A < 0 is at most this times |A|, > 1; None: unbounded
  (arXiv:1912.09729 uses 3)."""
  baseline: Literal["batch", "group", "group_mean", "leave_one_out", "none"] = (
    "batch"
  )
  """How rewards become advantages; see `ops.outcome_advantages`. `batch` is
  AReaL's: normalised over the action tokens of the batch."""

  entropy_coefficient: float = 0.0
  """Weight of the entropy bonus, >= 0; 0: no entropy is computed."""

  def __post_init__(self):
    dual = self.dual_clip
    ops.check_fields(
      self,
      ("clip_low", 0 < self.clip_low <= 1, "in (0, 1]"),
      ("clip_high", self.clip_high > 0, "> 0"),
      ("dual_clip", dual is None or dual > 1, "> 1 or None"),
      ("baseline", self.baseline in ops.BASELINES, f"one of {ops.BASELINES}"),
      ("entropy_coefficient", self.entropy_coefficient >= 0, ">= 0"),
    )


def requires(config: Config) -> frozenset[str]:
  """The entropy, only where there is a bonus."""
  return REQUIRES if config.entropy_coefficient else frozenset()


def advantages(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """Rewards made into advantages by the recipe named in the config."""
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
    ratio,
    ops.action_advantages(batch),
    config.clip_low,
    config.clip_high,
    config.dual_clip,
  )
  metrics = {
    "ratio": ops.estimate(ratio, mask),
    "clip_fraction": ops.estimate(clipped, mask),
    **ops.behavior_metrics(outputs, batch),
  }
  total = surrogate
  if config.entropy_coefficient:
    entropy = ops.required(outputs.entropy, "outputs.entropy")
    total = total - config.entropy_coefficient * entropy
    metrics["entropy"] = ops.estimate(entropy, mask)
  return ops.estimate(total, mask), metrics
