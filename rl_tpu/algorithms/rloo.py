r"""RLOO: REINFORCE with the other members of the group as baseline.

    A_n  = R_n - mean of the other members' R      (a constant)
    loss = - sum_t A_n log target(a_t | s_t)  /  number of action tokens

Ahmadian et al. 2024, arXiv:2402.14740; Kool et al. 2019. Unbiased where the
target policy sampled: there is no ratio, so staleness is not corrected for.
The KL penalty is part of the reward, as in the paper:

    R_n  = sum_t [ r_t - kl_coefficient KL_t(behavior || reference) ]

estimated at the tokens taken, under the policy that took them. Choices that
public implementations make differently: a member without siblings has
advantage 0, not its raw reward; the loss is a mean over tokens, where the
paper's is a mean of trajectories' sums. Metrics: `ratio` is target/behavior.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_tpu import ops
from rl_tpu.types import Batch, Estimate, PolicyOutputs

REQUIRES = frozenset({"reference_logp"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What RLOO may be varied in."""

  kl_coefficient: float = 0.0
  """Weight of the KL penalty in the reward, >= 0; 0: no reference policy."""
  kl_estimator: Literal["k1", "k2", "k3"] = "k1"
  """How that KL is estimated at a token; see `ops.behavior_reference_kl`."""

  def __post_init__(self):
    ops.check_choices(self)
    good = self.kl_coefficient >= 0
    ops.check_fields(self, ("kl_coefficient", good, ">= 0"))


def requires(config: Config) -> frozenset[str]:
  """The reference logp, only where there is a penalty."""
  return REQUIRES if config.kl_coefficient else frozenset()


def advantages(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """The penalised outcome, compared with that of the others of the group."""
  ops.check_shapes(batch, outputs)
  if config.kl_coefficient:
    kl = ops.behavior_reference_kl(
      batch.behavior_logp,
      ops.required(outputs.reference_logp, "outputs.reference_logp"),
      batch.action_mask,
      config.kl_estimator,
    )
    rewards = jnp.where(batch.action_mask, batch.rewards, 0.0)
    batch = dataclasses.replace(
      batch, rewards=rewards - config.kl_coefficient * kl
    )
  return ops.outcome_advantages(batch, "leave_one_out")


def loss(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> tuple[Estimate, dict[str, Estimate]]:
  """Minus advantage times target logp, a token mean."""
  ops.check_shapes(batch, outputs)
  mask = batch.action_mask
  target_logp = outputs.target_logp
  behavior_logp = ops.known_logp(batch.behavior_logp, target_logp)
  ratio = ops.ratio(ops.log_ratio(target_logp, behavior_logp, mask))
  negative = -ops.action_advantages(batch) * target_logp
  metrics = {
    "ratio": ops.estimate(ratio, mask),
    **ops.behavior_metrics(outputs, batch),
  }
  return ops.estimate(negative, mask), metrics
