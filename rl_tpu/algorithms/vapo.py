r"""VAPO, a one-policy loss: ratio r_t = target/behavior, with a critic.

    loss = [ - sum_t min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)
             - nll_coefficient sum_{t: R_n > 0} log target(a_t | s_t) ]
             / number of action tokens

Yue et al. 2025, arXiv:2504.05118. A_t is GAE over action tokens (`ops.gae`)
with lambda = 1 - 1 / (lambda_alpha l), l the trajectory's action tokens, while
the critic learns with lambda_critic = 1 (decoupled GAE); a wider upper clip; a
token mean; and imitation of what was rewarded. lambda_alpha = 0.05 leaves
exp(-20) of the outcome's credit to the first token: `sao` keeps half of it.

Choices: the imitation term has the denominator of the rest, where the paper
divides by the tokens of rewarded trajectories. The critic may also learn by
classification (`ops.hl_gauss`). Below 20 action tokens lambda would be negative
and is 0. No whitening. VAPO samples groups, but no baseline comes from them.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl_tpu import ops
from rl_tpu.types import Batch, Estimate, PolicyOutputs

REQUIRES = frozenset({"values"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ops.ValueLossConfig):
  """What VAPO may be varied in."""

  clip_low: float = 0.2
  """Below 1 - clip_low a ratio earns nothing more, in (0, 1]."""
  clip_high: float = 0.28
  """Above 1 + clip_high a ratio earns nothing more, > 0."""
  nll_coefficient: float = 0.1
  """Weight of the imitation of rewarded trajectories, >= 0 (paper: 0.1)."""
  gamma: float = 1.0
  """Discount per action token, in (0, 1]."""
  lambda_alpha: float = 0.05
  """lambda = 1 - 1 / (lambda_alpha l), > 0."""
  lambda_critic: float = 1.0
  """Lambda of the critic's targets, in [0, 1]; 1: the return itself."""
  critic_updates: int = 1
  """Optimizer steps of the critic per batch, >= 1."""
  freeze: Literal["attention", "none"] = "none"
  """Which weights of the critic are not trained after its pretraining."""
  values: Literal["pre", "post"] = "pre"
  """Whether advantages use the critic as it was before the last of this
  batch's updates or after it."""

  def __post_init__(self):
    ops.check_choices(self)
    super().__post_init__()
    ops.check_fields(
      self,
      ("clip_low", 0 < self.clip_low <= 1, "in (0, 1]"),
      ("clip_high", self.clip_high > 0, "> 0"),
      ("nll_coefficient", self.nll_coefficient >= 0, ">= 0"),
      ("gamma", 0 < self.gamma <= 1, "in (0, 1]"),
      ("lambda_alpha", self.lambda_alpha > 0, "> 0"),
      ("lambda_critic", 0 <= self.lambda_critic <= 1, "in [0, 1]"),
      ("critic_updates", self.critic_updates >= 1, ">= 1"),
    )


def advantages(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """GAE over action tokens with the length-adaptive lambda."""
  ops.check_shapes(batch, outputs)
  mask, ids = batch.action_mask, batch.trajectory_ids
  values = ops.required(outputs.values, "outputs.values")
  lam = ops.length_adaptive_lambda(mask, ids, config.lambda_alpha)
  return ops.gae(batch.rewards, values, mask, ids, config.gamma, lam)


def returns(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """What the critic is to predict at each action token; 0 elsewhere."""
  ops.check_shapes(batch, outputs)
  return ops.lambda_returns(
    batch.rewards,
    ops.required(outputs.values, "outputs.values"),
    batch.action_mask,
    batch.trajectory_ids,
    config.gamma,
    config.lambda_critic,
  )


def loss(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> tuple[Estimate, dict[str, Estimate]]:
  """The clipped surrogate and the imitation of rewarded trajectories."""
  ops.check_shapes(batch, outputs)
  mask = batch.action_mask
  target_logp = jnp.where(mask, outputs.target_logp, 0.0)
  behavior_logp = ops.known_logp(batch.behavior_logp, target_logp)
  ratio = ops.ratio(ops.log_ratio(target_logp, behavior_logp, mask))
  surrogate, clipped = ops.clipped_surrogate(
    ratio, ops.action_advantages(batch), config.clip_low, config.clip_high
  )
  rewarded = _rewarded(batch)
  imitation = jnp.where(rewarded, -target_logp, 0.0)
  metrics = {
    "ratio": ops.estimate(ratio, mask),
    "clip_fraction": ops.estimate(clipped, mask),
    "rewarded_nll": ops.estimate(imitation, rewarded),
    **ops.behavior_metrics(outputs, batch),
  }
  total = surrogate + config.nll_coefficient * imitation
  return ops.estimate(total, mask), metrics


def value_loss(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> tuple[Estimate, dict[str, Estimate]]:
  """Error of the critic at the action tokens."""
  mask = batch.action_mask
  support = config.value_support
  if support is not None:
    return ops.hl_gauss_loss(outputs, batch, mask, support)
  return ops.value_loss(outputs, batch, mask, config.value_clip)


def _rewarded(batch: Batch) -> Bool[Array, "R T"]:
  """Action tokens of trajectories with a positive outcome."""
  rewards = jnp.where(batch.action_mask, batch.rewards, 0.0)
  outcome = ops.span_total(rewards, batch.trajectory_ids)
  return batch.action_mask & (outcome > 0)
