r"""GSPO, a one-policy loss: ratio s = target/behavior of a whole trajectory.

    s_n  = exp( mean over its action tokens of log target - log behavior )
    s_nt = sg(s_n) r_t / sg(r_t),          r_t = target/behavior of the token
    loss = - sum_t min(s_nt A_t, clip(s_nt, 1 - low, 1 + high) A_t)
             / number of action tokens

Zheng et al. 2025, arXiv:2507.18071, in its token form: s_nt has the value of
the geometric mean and the gradient of the token, which for an advantage that is
constant in a trajectory is the paper's sequence form. Everything is in log
space, so the ratio is finite at any length and needs no shorter one. A clip
takes or leaves whole trajectories; the band is two orders of magnitude
narrower than a token's.

Choices that public implementations make differently: the gradient of the token
form also where A varies in a trajectory; a mean over tokens, so that a long
trajectory weighs by its tokens, where the paper's is a mean of trajectories;
advantages as in `grpo`; no KL term. `ratio` in the metrics is s.
"""

import dataclasses
from typing import Literal

import jax
from jaxtyping import Array, Float

from rl_tpu import ops
from rl_tpu.types import Batch, Estimate, PolicyOutputs

REQUIRES = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What GSPO may be varied in."""

  clip_low: float = 3e-4
  """Below 1 - clip_low the trajectory's ratio earns nothing more, in
  (0, 1]."""
  clip_high: float = 4e-4
  """Above 1 + clip_high the trajectory's ratio earns nothing more, > 0."""
  baseline: Literal["group", "group_mean"] = "group"
  """`group` divides by the group's standard deviation, as in the paper;
  `group_mean` only subtracts its mean."""

  def __post_init__(self):
    ops.check_choices(self)
    ops.check_fields(
      self,
      ("clip_low", 0 < self.clip_low <= 1, "in (0, 1]"),
      ("clip_high", self.clip_high > 0, "> 0"),
    )


def advantages(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """The outcome, compared with the group's."""
  return ops.outcome_advantages(batch, config.baseline)


def loss(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> tuple[Estimate, dict[str, Estimate]]:
  """The clipped surrogate of each trajectory's geometric mean ratio."""
  ops.check_shapes(batch, outputs)
  mask = batch.action_mask
  behavior_logp = ops.known_logp(batch.behavior_logp, outputs.target_logp)
  log_ratio = ops.log_ratio(outputs.target_logp, behavior_logp, mask)
  mean = ops.action_mean(log_ratio, batch)
  ratio = ops.ratio(log_ratio + jax.lax.stop_gradient(mean - log_ratio))
  surrogate, clipped = ops.clipped_surrogate(
    ratio, ops.action_advantages(batch), config.clip_low, config.clip_high
  )
  metrics = {
    "ratio": ops.estimate(ratio, mask),
    "clip_fraction": ops.estimate(clipped, mask),
    "masked_trajectories": ops.masked_trajectories(~clipped, batch),
    **ops.behavior_metrics(outputs, batch),
  }
  return ops.estimate(surrogate, mask), metrics
