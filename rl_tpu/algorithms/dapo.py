r"""DAPO, a one-policy loss: ratio r_t = target/behavior.

    A_n  = (R_n - mean of the group) / std of the group
    loss = - sum_t min(r_t A, clip(r_t, 1 - low, 1 + high) A)
             / number of action tokens,                high > low

Yu et al. 2025, arXiv:2503.14476. Its four parts:

* Clip-higher: a wider upper clip lets unlikely tokens grow.
* Token mean: long answers weigh by their tokens.
* Length: with L the action tokens of a trajectory, R_n gains

      0                                where L <= limit - margin
      (limit - margin - L) / margin    between
      -1                               where L > limit

  if `length_limit` is set. `truncated="mask"` is the paper's filter in its
  place: what the budget cut short teaches nothing.
* Dynamic sampling: `keep` refuses groups whose members all earned the same,
  whose advantages are 0; the actor drops them before the buffer and samples
  other prompts. The penalty plays no part in it: it is judged on rewards.

Choices as in `grpo`: the deviation is unbiased, no epsilon, no KL term.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_tpu import ops
from rl_tpu.types import Batch, Estimate, Group, PolicyOutputs

REQUIRES = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What DAPO may be varied in."""

  clip_low: float = 0.2
  """Below 1 - clip_low a ratio earns nothing more, in (0, 1]."""
  clip_high: float = 0.28
  """Above 1 + clip_high a ratio earns nothing more, > 0."""
  length_limit: int | None = None
  """Action tokens from which the penalty is 1, >= length_margin (paper: 20480);
  None: no penalty."""
  length_margin: int = 4096
  """Action tokens before the limit over which the penalty grows, >= 1."""
  truncated: Literal["keep", "mask"] = "keep"
  """Whether trajectories that the budget ended are part of the loss."""

  def __post_init__(self):
    limit, margin = self.length_limit, self.length_margin
    ops.check_choices(self)
    ops.check_fields(
      self,
      ("clip_low", 0 < self.clip_low <= 1, "in (0, 1]"),
      ("clip_high", self.clip_high > 0, "> 0"),
      ("length_margin", margin >= 1, ">= 1"),
      (
        "length_limit",
        limit is None or limit >= margin,
        f">= length_margin = {margin} or None",
      ),
    )


def keep(group: Group) -> bool:
  """Whether a group has anything to teach: its outcomes differ."""
  return len({trajectory.outcome for trajectory in group.trajectories}) > 1


def advantages(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """The penalised outcome, compared with the group's."""
  ops.check_shapes(batch, outputs)
  limit, margin = config.length_limit, config.length_margin
  if limit is not None:
    batch = dataclasses.replace(batch, rewards=_penalised(batch, limit, margin))
  result = ops.outcome_advantages(batch, "group")
  if config.truncated == "mask":
    result = ops.drop_truncated(result, batch)
  return result


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
  return ops.estimate(surrogate, mask), metrics


def _penalised(batch: Batch, limit: int, margin: int) -> Float[Array, "R T"]:
  """Rewards with the penalty on length on each last action token."""
  mask, ids = batch.action_mask, batch.trajectory_ids
  acts = jnp.where(mask, 1.0, 0.0)
  last = mask & (ops.return_to_go(acts, ids) == 1)
  length = ops.span_total(acts, ids)
  penalty = jnp.clip((limit - margin - length) / margin, -1.0, 0.0)
  return jnp.where(mask, batch.rewards + jnp.where(last, penalty, 0.0), 0.0)
