r"""Running mean, a one-policy loss: ratio r = target/behavior, and no critic.

    A_n  = R_n - b_n,  b_n = mean of the last outcomes before n's batch
    loss = - sum_t sg(f(r_t)) A_n log target(a_t | s_t)
             / number of action tokens
    f(r) = r  where  1 - epsilon_low <= r <= 1 + epsilon_high,  else 0

The baselines that SAO, arXiv:2607.07508, is compared with. Its table 4 keeps
the double-sided token mask and one trajectory a prompt, but has the mean of the
prompt's 8 most recent rewards in place of the critic (`scope` prompt). Figure
5, where the reward changes under way, has that of the last 128 rewards of any
prompt (`scope` global). Every action token gets the whole advantage.

The paper leaves open what is in the window when. Here: outcomes of batches
consumed before this one, so that no trajectory, nor another of its batch, is
in its own baseline, which would shrink the gradient; `history.py` keeps them,
in checkpoints too. A prompt not consumed yet has no baseline, and it comes back
an epoch later at the earliest: till then it is compared with its own batch, or
left out (`unseen`). The metric `known_baseline` is the share of action tokens
with a running mean; at 0 in scope `prompt` the method is another one. Appendix
A.2 names this need to know a prompt's difficulty beforehand as the weakness of
running means; SPO, arXiv:2509.13232, samples all prompts before it trains.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_tpu import ops
from rl_tpu.types import Batch, Estimate, PolicyOutputs

REQUIRES = frozenset({"baselines"})
_WINDOWS = {"prompt": 8, "global": 128}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What the running mean may be varied in."""

  scope: Literal["prompt", "global"] = "prompt"
  """Whose outcomes are averaged: the prompt's, or those of all prompts."""
  window: int | None = None
  """Most recent outcomes in the mean, >= 1; None: the paper's, 8 of a prompt
  or 128 of all."""
  unseen: Literal["batch_mean", "skip"] = "batch_mean"
  """What a trajectory without earlier outcomes is compared with: the mean
  outcome of its batch, or itself, which teaches nothing. Not in the paper."""
  epsilon_low: float = 0.3
  """Ratios below 1 - epsilon_low are masked; an offset from 1, in (0, 1].
  Paper: 0.3 for math, 0.8 for coding."""
  epsilon_high: float = 5.0
  """Ratios above 1 + epsilon_high are masked; an offset from 1, > 0. Paper: 5
  for math, 3 for coding."""
  whiten: bool = False
  """Advantages to mean 0 and deviation 1 over the batch's action tokens, as in
  SPO. Not in the paper."""

  def __post_init__(self):
    window = self.window
    ops.check_choices(self)
    ops.check_fields(
      self,
      ("window", window is None or window >= 1, ">= 1 or None"),
      ("epsilon_low", 0 < self.epsilon_low <= 1, "in (0, 1]"),
      ("epsilon_high", self.epsilon_high > 0, "> 0"),
    )

  @property
  def history_window(self) -> int:
    """Outcomes that the run's history keeps, in each scope."""
    return self.window or _WINDOWS[self.scope]


def advantages(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """The outcome less its running mean, at every action token."""
  ops.check_shapes(batch, outputs)
  mask, ids = batch.action_mask, batch.trajectory_ids
  baselines = ops.required(batch.baselines, "batch.baselines")
  known = jnp.isfinite(baselines)
  outcomes = ops.action_sum(batch.rewards, batch)
  instead = outcomes
  if config.unseen == "batch_mean":
    instead, _ = ops.masked_mean_std(outcomes, batch.group_ids >= 0)
  baselines = jnp.where(known, baselines, instead)
  result = jnp.where(mask, ops.per_token(outcomes - baselines, ids), 0.0)
  if config.whiten:
    judged = mask
    if config.unseen == "skip":
      judged &= ops.per_token(known.astype(result.dtype), ids) > 0
    result = ops.whiten(result, judged)
  return result


def loss(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> tuple[Estimate, dict[str, Estimate]]:
  """Minus advantage times the masked score."""
  ops.check_shapes(batch, outputs)
  mask = batch.action_mask
  target_logp = jnp.where(mask, outputs.target_logp, 0.0)
  behavior_logp = ops.known_logp(batch.behavior_logp, target_logp)
  log_ratio = ops.log_ratio(target_logp, behavior_logp, mask)
  low, high = 1.0 - config.epsilon_low, 1.0 + config.epsilon_high
  weight = jax.lax.stop_gradient(
    ops.importance_weight(log_ratio, mask, "mask", low, high)
  )
  negative = -ops.action_advantages(batch) * weight * target_logp
  baselines = ops.required(batch.baselines, "batch.baselines")
  known = jnp.isfinite(baselines).astype(jnp.float32)
  metrics = {
    "ratio": ops.estimate(ops.ratio(log_ratio), mask),
    "clip_fraction": ops.estimate(weight == 0, mask),
    "known_baseline": ops.estimate(
      ops.per_token(known, batch.trajectory_ids), mask
    ),
    **ops.behavior_metrics(outputs, batch),
  }
  return ops.estimate(negative, mask), metrics
