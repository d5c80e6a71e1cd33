r"""Score centering: the score's mean under the behavior policy, taken out.

With p the target, q the behavior policy and s_v = grad log p_v at one prefix,
a constant reward c moves a policy gradient by

    E_q[c w_y s_y] = c sum_v q_v w_v s_v    (the drift; 0 where p = q, w = 1)

which says nothing about which token is good and, step after step, pulls the
policy to a collapse. Centering subtracts that mean token by token

    loss_t = -A_t [ sg(w_y) log p_y - sum_v sg(q_v w_v) log p_v ]

and leaves the covariance of reward and score. The weights w_v = f(p_v / q_v)
are constants, and one f weighs the token taken and every other: otherwise the
two terms have not the same mean. Score centering: arXiv:2609.20807.

**The tail.** Samplers keep a head H, their K most likely tokens. The rest is
modelled in proportion to the target, q_v = rho p_v, so that w_v is one number
there, the tail is one more slot, and sum_v p_v s_v = 0 folds it into the head:

    rho  = (1 - sum_H q) / (1 - sum_H p)
    c_v  = q_v f(p_v / q_v) - alpha p_v,    alpha = rho f(1 / rho)
    term = sum_H sg(c_v) log p_v

Both tails are floored at 1e-6, below which 1 - sum is rounding: two exhausted
tails have rho = 1. A floor moves the gradient with respect to the logits by no
more than 2e-6 f. Where the sampler's tail is real and the target's is not, rho
reaches 1e6 times the former: the gradient stays bounded, in f32 with a loss of
digits, and the two policies have parted. An f that depends on more than a
ratio, such as a mask on |p - q|, varies inside the tail and cannot be folded.

**Exact.** Where the head is the whole support there is no tail: K = V, or a
filtered sampler (top-k, top-p) whose support is recorded whole and on which p
is normalised as well. Such heads also work as if they had a tail, for alpha
multiplies sum_v p_v s_v = 0; `exact` says that they have none, which cannot be
read off masses that are 1 up to rounding, and gives the loss its true value.

Axes: R rows, T tokens, K slots of the head; S = K + 1, the tail last.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl_tpu.ops.checks import required
from rl_tpu.ops.ratios import (
  WEIGHT_MODES,
  clipped_surrogate,
  importance_weight,
  ratio,
)
from rl_tpu.ops.sums import estimate
from rl_tpu.types import Batch, Estimate

TAIL_FLOOR = 1e-6
"""Least mass of a tail."""
CORRECTIONS = (*WEIGHT_MODES, "ppo")


class Centering(NamedTuple):
  """The term and what it was made of; all but `term` are for diagnosis."""

  term: Float[Array, "R T"]
  """sum_H sg(c_v) log p_v; a loss adds advantage * term."""
  head_mass: Float[Array, "R T"]
  """sum_H q_v: what the behavior policy gives its head."""
  target_head_mass: Float[Array, "R T"]
  """sum_H p_v."""
  tail_ratio: Float[Array, "R T"]
  """rho, behavior over target; 1 where there is no tail."""
  coefficients: Float[Array, "R T"]
  """sum_H |c_v|: 0 where the policies agree, above 0.05 suspect."""
  head_kl: Float[Array, "R T"]
  """KL(behavior || target) with the tail as one token."""
  gradient: Float[Array, "R T"]
  """L1 norm of the term's gradient with respect to logits / temperature."""


def centering_term(
  target_topk_logp: Float[Array, "R T K"],
  behavior_topk_logp: Float[Array, "R T K"],
  valid: Bool[Array, "R T K"],
  mode: str,
  low: float = 0.0,
  high: float = math.inf,
  *,
  advantages: Float[Array, "R T"] | None = None,
  dual_clip: float | None = None,
  exact: bool = False,
) -> Float[Array, "R T"]:
  """The centering term of `correction_weight`; see `center`."""

  def weigh(target_logp, behavior_logp):
    spread = None if advantages is None else advantages[..., None]
    return correction_weight(
      target_logp, behavior_logp, mode, low, high, spread, dual_clip
    )

  return center(
    target_topk_logp, behavior_topk_logp, valid, weigh, exact=exact
  ).term


def center(
  target_topk_logp: Float[Array, "R T K"],
  behavior_topk_logp: Float[Array, "R T K"],
  valid: Bool[Array, "R T K"],
  weigh: Callable[[Array, Array], Array],
  *,
  exact: bool = False,
) -> Centering:
  """Centers the score whose token has the weight `weigh` gives it.

  `weigh(target, behavior)` maps logps [R,T,S] to weights; it is the function
  that weighs the token taken, and may close over what does not depend on that
  token, such as the advantage (one centering per sign) or `with_tail` of a
  third policy. Slots that are not `valid` contribute nothing and are not read.

  Raises:
    ValueError: if the three arrays differ in shape.
  """
  _check_shapes(target_topk_logp, behavior_topk_logp, valid)
  live = jnp.where(valid, target_topk_logp, 0.0)
  target = with_tail(target_topk_logp, valid)
  behavior = with_tail(behavior_topk_logp, valid)
  has_tail = jnp.full_like(valid[..., :1], not exact)
  used = jnp.concatenate([valid, has_tail], axis=-1)
  p, q = (jnp.where(used, jnp.exp(x), 0.0) for x in (target, behavior))
  mass = q * weigh(target, behavior)
  alpha = mass[..., -1:] / jnp.where(has_tail, p[..., -1:], 1.0)
  coefficients = jax.lax.stop_gradient(
    jnp.where(valid, (mass - alpha * p)[..., :-1], 0.0)
  )
  total = coefficients.sum(-1, keepdims=True)
  head_slopes = coefficients - total * p[..., :-1]
  tail_slope = total * p[..., -1:]
  return Centering(
    term=(coefficients * live).sum(-1),
    head_mass=q[..., :-1].sum(-1),
    target_head_mass=p[..., :-1].sum(-1),
    tail_ratio=jnp.exp((behavior - target)[..., -1] * (not exact)),
    coefficients=jnp.abs(coefficients).sum(-1),
    head_kl=(q * (behavior - target)).sum(-1),
    gradient=jnp.abs(head_slopes).sum(-1) + jnp.abs(tail_slope)[..., 0],
  )


def correction_weight(
  target_logp: Float[Array, "*S"],
  behavior_logp: Float[Array, "*S"],
  mode: str,
  low: float = 0.0,
  high: float = math.inf,
  advantages: Float[Array, "*#S"] | None = None,
  dual_clip: float | None = None,
) -> Float[Array, "*S"]:
  r"""The weight f(r), r = target / behavior, of a token or a slot.

  As `importance_weight`, and `ppo`: r where PPO's clip to [low, high] leaves a
  gradient, else 0. That is r <= high where A >= 0, and low <= r <= dual_clip
  where A < 0. Logps are finite; the weight is not detached.

  Raises:
    ValueError: for another mode, or `ppo` without advantages.
  """
  log_ratio = target_logp - behavior_logp
  if mode != "ppo":
    everywhere = jnp.ones(log_ratio.shape, bool)
    return importance_weight(log_ratio, everywhere, mode, low, high)
  r = ratio(log_ratio)
  signs = required(advantages, "advantages of a ppo correction")
  _, binds = clipped_surrogate(r, signs, 1.0 - low, high - 1.0, dual_clip)
  return jnp.where(binds, 0.0, r)


def head_slots(batch: Batch) -> Bool[Array, "R T K"]:
  """The slots of the sampler's head that hold a number, on action tokens.

  Raises:
    ValueError: if the batch carries no head.
  """
  ids = required(batch.behavior_topk_ids, "batch.behavior_topk_ids")
  logp = required(batch.behavior_topk_logp, "batch.behavior_topk_logp")
  return batch.action_mask[..., None] & (ids >= 0) & jnp.isfinite(logp)


def with_tail(
  topk_logp: Float[Array, "R T K"], valid: Bool[Array, "R T K"]
) -> Float[Array, "R T S"]:
  """The head and, last, the log of what it leaves; 0 where not valid."""
  topk_logp = jnp.where(valid, topk_logp, 0.0)
  mass = jnp.where(valid, jnp.exp(topk_logp), 0.0).sum(-1, keepdims=True)
  tail = jnp.log(jnp.maximum(1.0 - mass, TAIL_FLOOR))
  return jnp.concatenate([topk_logp, tail], axis=-1)


def centering_metrics(
  centering: Centering,
  weight: Float[Array, "R T"],
  target_logp: Float[Array, "R T"],
  batch: Batch,
) -> dict[str, Estimate]:
  """Means over action tokens that every centered loss reports.

  `centering_gradient` and `score_gradient` are L1 norms, per token and times
  |A|, of what the term and the weighted score send to the logits: their ratio
  says how much of the step centering takes back.
  """
  mask = batch.action_mask
  size = jnp.abs(required(batch.advantages, "batch.advantages"))
  missed = -jnp.expm1(jnp.where(mask, target_logp, 0.0))
  return {
    "head_mass": estimate(centering.head_mass, mask),
    "target_head_mass": estimate(centering.target_head_mass, mask),
    "tail_ratio": estimate(centering.tail_ratio, mask),
    "centering_coefficients": estimate(centering.coefficients, mask),
    "head_kl": estimate(centering.head_kl, mask),
    "centering_gradient": estimate(size * centering.gradient, mask),
    "score_gradient": estimate(size * 2.0 * weight * missed, mask),
  }


def _check_shapes(target, behavior, valid) -> None:
  shapes = target.shape, behavior.shape, valid.shape
  if len(set(shapes)) > 1:
    raise ValueError(
      f"target_topk_logp, behavior_topk_logp and valid have shapes {shapes}; "
      "they must be alike, [R,T,K]"
    )
