r"""Pure sequence maths: the only place that shifts, masks and exponentiates.

Everything here is a function of arrays. Losses are written with it, so that
each of the following is decided once:

* Alignment. Entry t of a per-token array speaks of `tokens[t]`; the logits at
  t - 1 predict it. Only `shift_to_logits` and `shift_to_tokens` move anything.
* Packing. A row holds several trajectories; nothing crosses the border of
  `trajectory_ids`.
* Masks. `where` comes before `exp` and before any product, so that NaN or
  infinity off the action mask reaches neither a value nor a gradient.
* Ratios. `exp` of a log ratio is bounded by `MAX_LOG_RATIO`.
* Denominators. A sum travels with its count; no epsilon anywhere: what has no
  spread or no members is 0 by name.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rl_tpu.types import Batch, Estimate, PolicyOutputs

MAX_LOG_RATIO = 20.0
"""Log ratios are clipped to +-20 nats before `exp`, which bounds a ratio by
4.9e8; beyond it the gradient through the ratio is 0."""

WEIGHT_MODES = ("none", "is", "truncate", "mask", "mask_unit")
BASELINES = ("none", "group_mean", "leave_one_out", "group", "batch")


def next_tokens(
  tokens: Int[Array, "R T"], trajectory_ids: Int[Array, "R T"] | None = None
) -> Int[Array, "R T"]:
  """The token that the logits at each position predict, -1 for none.

  The last position of a trajectory, and padding, predict nothing. Without
  `trajectory_ids` each row is one trajectory.
  """
  if trajectory_ids is None:
    trajectory_ids = jnp.zeros_like(tokens)
  return jnp.where(_continues(trajectory_ids), shift_to_logits(tokens, -1), -1)


def label_logp(
  logits: Float[Array, "R T V"],
  labels: Int[Array, "R T"],
  temperature: Float[Array, "R T"] | float,
) -> Float[Array, "R T"]:
  """Log softmax(logits / temperature)[label] in f32; 0 where label is -1.

  Unshifted, so that a learner may call it a chunk of positions at a time; it
  keeps two reductions over V, never the [R,T,V] log-probabilities. Logits
  without a label are not read: NaN there stays there.
  """
  used = labels >= 0
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  logits = jnp.where(used[..., None], logits, 0.0)
  logits = logits / jnp.broadcast_to(temperature, labels.shape)[..., None]
  index = jnp.where(used, labels, 0)[..., None]
  picked = jnp.take_along_axis(logits, index, axis=-1)[..., 0]
  return jnp.where(used, picked - jax.nn.logsumexp(logits, axis=-1), 0.0)


def shift_to_logits(x: Array, fill: float) -> Array:
  """From the tokens predicted to the positions that predict: x[t + 1] at t."""
  return jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=fill)


def shift_to_tokens(predicted: Float[Array, "R T"]) -> Float[Array, "R T"]:
  """From the positions that predict to the tokens predicted; entry 0 is 0."""
  return jnp.pad(predicted[:, :-1], ((0, 0), (1, 0)))


def token_logp(
  logits: Float[Array, "R T V"],
  tokens: Int[Array, "R T"],
  temperature: Float[Array, "R T"] | float,
  trajectory_ids: Int[Array, "R T"] | None = None,
) -> Float[Array, "R T"]:
  """Log-probability of each token given those before it, aligned to `tokens`.

  Entry t comes from `logits[t - 1] / temperature[t]`. The first token of each
  trajectory, and padding, has 0. Temperatures are > 0.
  """
  labels = next_tokens(tokens, trajectory_ids)
  temperature = jnp.broadcast_to(jnp.asarray(temperature), tokens.shape)
  temperature = shift_to_logits(temperature, 1.0)
  return shift_to_tokens(label_logp(logits, labels, temperature))


def known_logp(
  logp: Float[Array, "R T"], otherwise: Float[Array, "R T"]
) -> Float[Array, "R T"]:
  """`logp`, or the constant `otherwise` where it is NaN or infinite.

  An engine may have no log-probability to report for a token of which it is
  nearly sure. With the numerator of a ratio as `otherwise` the token counts
  as on-policy: ratio 1, gradient kept.
  """
  return jnp.where(jnp.isfinite(logp), logp, jax.lax.stop_gradient(otherwise))


def log_ratio(
  numerator: Float[Array, "R T"],
  denominator: Float[Array, "R T"],
  mask: Bool[Array, "R T"],
) -> Float[Array, "R T"]:
  """Difference of two logps on the mask, 0 off it."""
  return jnp.where(mask, numerator - denominator, 0.0)


def ratio(log_ratio: Float[Array, "R T"]) -> Float[Array, "R T"]:
  """`exp` of a log ratio, within exp(+-MAX_LOG_RATIO)."""
  return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def importance_weight(
  log_ratio: Float[Array, "R T"],
  mask: Bool[Array, "R T"],
  mode: str,
  low: float = 0.0,
  high: float = math.inf,
) -> Float[Array, "R T"]:
  r"""Per-token weight f(r) of the ratio r = exp(log_ratio); 0 off the mask.

  | mode | f(r) |
  |---|---|
  | none | 1 |
  | is | r |
  | truncate | r clamped to [low, high] |
  | mask | r where low <= r <= high, else 0 |
  | mask_unit | 1 where low <= r <= high, else 0 |

  A ratio that is NaN or infinite counts as 1. The weight is not detached.

  Raises:
    ValueError: for another mode.
  """
  known = mask & jnp.isfinite(log_ratio)
  r = ratio(jnp.where(known, log_ratio, 0.0))
  inside = (r >= low) & (r <= high)
  match mode:
    case "none":
      weight = jnp.ones_like(r)
    case "is":
      weight = r
    case "truncate":
      weight = jnp.clip(r, low, high)
    case "mask":
      weight = jnp.where(inside, r, 0.0)
    case "mask_unit":
      weight = jnp.where(inside, 1.0, 0.0)
    case _:
      raise ValueError(
        f"importance_weight mode is {mode!r}; it must be one of {WEIGHT_MODES}"
      )
  return jnp.where(mask, weight, 0.0)


def clipped_surrogate(
  ratio: Float[Array, "R T"],
  advantages: Float[Array, "R T"],
  clip_low: float,
  clip_high: float,
  dual_clip: float | None = None,
) -> tuple[Float[Array, "R T"], Bool[Array, "R T"]]:
  r"""PPO's pessimistic loss per token, and where a clip binds.

  loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), from above bounded
  by dual_clip * |A| if given, which acts where A < 0 only. Where a clip binds
  the gradient is 0; at a tie it does not bind. PPO: Schulman et al. 2017,
  arXiv:1707.06347; dual clip: Ye et al. 2020, arXiv:1912.09729.
  """
  unclipped = -ratio * advantages
  clipped = -jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantages
  binds = clipped > unclipped
  loss = jnp.where(binds, clipped, unclipped)
  if dual_clip is not None:
    ceiling = dual_clip * jnp.abs(advantages)
    binds |= loss > ceiling
    loss = jnp.where(loss > ceiling, ceiling, loss)
  return loss, binds


def trajectory_sum(
  x: Float[Array, "R T"], trajectory_ids: Int[Array, "R T"], num: int
) -> Float[Array, " N"]:
  """Sum of `x` over each of the `num` trajectories; padding is left out."""
  return _segment(jax.ops.segment_sum, x.ravel(), trajectory_ids.ravel(), num)


def per_token(
  x: Float[Array, " N"], trajectory_ids: Int[Array, "R T"]
) -> Float[Array, "R T"]:
  """Each trajectory's value at each of its tokens, 0 on padding."""
  inside = trajectory_ids >= 0
  return jnp.where(inside, x[jnp.where(inside, trajectory_ids, 0)], 0.0)


def reverse_accumulate(
  x: Float[Array, "R T"], decay: Float[Array, "R T"]
) -> Float[Array, "R T"]:
  """y[t] = x[t] + decay[t] * y[t + 1], from the right.

  A loop over T: the associative form takes ten seconds to compile at 32k
  tokens, and this runs once a batch.
  """

  def step(later, now):
    y = now[0] + now[1] * later
    return y, y

  start = jnp.zeros_like(x[:, 0])
  return jax.lax.scan(step, start, (x.T, decay.T), reverse=True)[1].T


def return_to_go(
  rewards: Float[Array, "R T"], trajectory_ids: Int[Array, "R T"]
) -> Float[Array, "R T"]:
  """Rewards from t to the end of the trajectory, undiscounted (gamma = 1)."""
  decay = _continues(trajectory_ids).astype(rewards.dtype)
  return reverse_accumulate(rewards, decay)


def group_baseline(
  returns: Float[Array, " N"], group_ids: Int[Array, " N"], mode: str
) -> Float[Array, " N"]:
  """What each return is compared with: `mean` or `leave_one_out` of its group.

  Groups are numbered below N; -1 has none. A member without siblings, or
  without a group, is compared with itself, so its advantage is 0; so is that
  of equal returns, exactly. Leave-one-out: Kool et al. 2019 (RLOO).

  Raises:
    ValueError: for another mode.
  """
  if mode not in ("mean", "leave_one_out"):
    raise ValueError(
      f"group_baseline mode is {mode!r}; it must be mean or leave_one_out"
    )
  largest, excess, total, count = _group_excess(returns, group_ids)
  if mode == "leave_one_out":
    total, count = total - excess, count - 1
  baseline = largest + divide_or_zero(total, count)
  return jnp.where((group_ids >= 0) & (count > 0), baseline, returns)


def group_std(
  returns: Float[Array, " N"], group_ids: Int[Array, " N"]
) -> Float[Array, " N"]:
  """Unbiased standard deviation (n - 1) of each return's group.

  0 for equal returns, exactly, and where there are no siblings.
  """
  _, excess, total, count = _group_excess(returns, group_ids)
  square = (excess - divide_or_zero(total, count)) ** 2
  spread = divide_or_zero(_segment_total(square, group_ids), count - 1)
  return jnp.where(group_ids >= 0, jnp.sqrt(spread), 0.0)


def masked_mean_std(
  x: Float[Array, "*S"], mask: Bool[Array, "*S"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Mean and biased standard deviation over the mask; 0, 0 if it is empty.

  Equal values have their own value as mean and a deviation of 0, exactly.
  """
  count = jnp.sum(mask, dtype=x.dtype)
  largest = jnp.max(jnp.where(mask, x, -jnp.inf))
  largest = jnp.where(count > 0, largest, 0.0)
  excess = jnp.where(mask, x - largest, 0.0)
  mean = divide_or_zero(jnp.sum(excess), count)
  square = jnp.where(mask, (excess - mean) ** 2, 0.0)
  return largest + mean, jnp.sqrt(divide_or_zero(jnp.sum(square), count))


def divide_or_zero(
  x: Float[Array, "*S"], by: Float[Array, "*#S"]
) -> Float[Array, "*S"]:
  """X / by where by > 0, else 0: nothing to divide by is nothing."""
  some = by > 0
  return jnp.where(some, x / jnp.where(some, by, 1.0), 0.0)


def estimate(
  x: Float[Array, "R T"] | Bool[Array, "R T"], mask: Bool[Array, "R T"]
) -> Estimate:
  """The sum of `x` over the mask, and the size of the mask."""
  total = jnp.sum(jnp.where(mask, x, 0.0))
  return Estimate(total=total, count=jnp.sum(mask, dtype=total.dtype))


def outcome_advantages(batch: Batch, baseline: str) -> Float[Array, "R T"]:
  r"""Advantages from rewards alone (gamma = lambda = 1, no critic).

  With G_t the return to go, N the trajectory's whole outcome:

  | baseline | advantage of an action token |
  |---|---|
  | none | G_t |
  | batch | (G_t - mean) / std over the batch's action tokens (AReaL) |
  | group_mean | N - mean of the group |
  | leave_one_out | N - mean of the group's other members |
  | group | (N - mean) / std of the group |

  The group recipes credit the whole outcome to every action token: equal
  members get exactly 0, and so does a member without siblings. Where the
  spread is 0 the advantage is 0. The batch's deviation is biased, a group's
  unbiased. 0 off the action mask, where rewards are not read.

  Raises:
    ValueError: for another baseline, or arrays that do not fit each other.
  """
  if baseline not in BASELINES:
    raise ValueError(f"baseline is {baseline!r}; it must be one of {BASELINES}")
  check_shapes(batch)
  mask, ids, groups = batch.action_mask, batch.trajectory_ids, batch.group_ids
  rewards = jnp.where(mask, batch.rewards, 0.0)
  if baseline in ("none", "batch"):
    advantages = return_to_go(rewards, ids)
    if baseline == "batch":
      mean, std = masked_mean_std(advantages, mask)
      advantages = divide_or_zero(advantages - mean, std)
  else:
    outcomes = trajectory_sum(rewards, ids, groups.shape[0])
    mode = "leave_one_out" if baseline == "leave_one_out" else "mean"
    centred = outcomes - group_baseline(outcomes, groups, mode)
    if baseline == "group":
      centred = divide_or_zero(centred, group_std(outcomes, groups))
    advantages = per_token(centred, ids)
  return jnp.where(mask, advantages, 0.0)


def action_advantages(batch: Batch) -> Float[Array, "R T"]:
  """The batch's advantages, 0 off the action mask.

  Raises:
    ValueError: if they were not set.
  """
  advantages = required(batch.advantages, "batch.advantages")
  return jnp.where(batch.action_mask, advantages, 0.0)


def behavior_metrics(
  outputs: PolicyOutputs, batch: Batch
) -> dict[str, Estimate]:
  """What every loss reports of its action tokens, under the same names.

  `behavior_target_kl`: log behavior - log target, an unbiased estimate of
  KL(behavior || target). `nonfinite_logp`: share of tokens for which the
  engine reported no number. `extreme_ratio`: share with a log ratio beyond
  +-MAX_LOG_RATIO. `zero_advantage`: share that teaches nothing.
  """
  mask = batch.action_mask
  behavior = known_logp(batch.behavior_logp, outputs.target_logp)
  difference = log_ratio(behavior, outputs.target_logp, mask)
  return {
    "behavior_target_kl": estimate(difference, mask),
    "nonfinite_logp": estimate(~jnp.isfinite(batch.behavior_logp), mask),
    "extreme_ratio": estimate(jnp.abs(difference) > MAX_LOG_RATIO, mask),
    "zero_advantage": estimate(action_advantages(batch) == 0, mask),
  }


def required(value: Array | None, name: str) -> Array:
  """`value`, which must not be None.

  Raises:
    ValueError: if it is None.
  """
  if value is None:
    raise ValueError(f"{name} is None; it must be set before it is used")
  return value


def check_shapes(batch: Batch, outputs: PolicyOutputs | None = None) -> None:
  """Raises ValueError unless per-token arrays are [R,T] and per-trajectory [N].

  JAX would broadcast [R,1] or [T] in silence.
  """
  rows, row = batch.tokens.shape, batch.group_ids.shape
  expected = [(f"batch.{name}", batch, name, rows) for name in Batch.ROW_FIELDS]
  expected += [("batch.truncated", batch, "truncated", row)]
  if outputs is not None:
    expected += [
      (f"outputs.{field.name}", outputs, field.name, rows)
      for field in dataclasses.fields(outputs)
    ]
  for label, owner, name, shape in expected:
    array = getattr(owner, name)
    if array is not None and array.shape[: len(shape)] != shape:
      raise ValueError(
        f"{label} has shape {array.shape}; it must start with {shape}, "
        "like batch.tokens [R,T] or batch.group_ids [N]"
      )


def check_fields(config: Any, *checks: tuple[str, bool, str]) -> None:
  """Raises ValueError for the first (field, is it good, what is allowed)."""
  for name, good, allowed in checks:
    if not good:
      algorithm = type(config).__module__.rsplit(".", 1)[-1]
      raise ValueError(
        f"{algorithm}.Config.{name} is {getattr(config, name)!r}; "
        f"it must be {allowed}"
      )


def _continues(trajectory_ids: Int[Array, "R T"]) -> Bool[Array, "R T"]:
  """Whether the next position of the row is of the same trajectory."""
  same = shift_to_logits(trajectory_ids, -1) == trajectory_ids
  return same & (trajectory_ids >= 0)


def _segment(
  reduction, x: Float[Array, " M"], ids: Int[Array, " M"], num: int
) -> Float[Array, " N"]:
  """Reduces `x` by id; entries with id -1 are left out."""
  return reduction(x, jnp.where(ids >= 0, ids, num), num + 1)[:num]


def _segment_total(
  x: Float[Array, " N"], group_ids: Int[Array, " N"]
) -> Float[Array, " N"]:
  """Each entry's group total."""
  totals = _segment(jax.ops.segment_sum, x, group_ids, x.shape[0])
  return totals[jnp.where(group_ids >= 0, group_ids, 0)]


def _group_excess(
  returns: Float[Array, " N"], group_ids: Int[Array, " N"]
) -> tuple[Array, Array, Array, Array]:
  """Largest return of the group, own less largest, sum of those, group size.

  Equal returns have excess 0 exactly, so that no rounding error of a mean is
  ever divided by a standard deviation of its own size.
  """
  index = jnp.where(group_ids >= 0, group_ids, 0)
  num = returns.shape[0]
  largest = _segment(jax.ops.segment_max, returns, group_ids, num)[index]
  excess = jnp.where(group_ids >= 0, returns - largest, 0.0)
  total = _segment_total(excess, group_ids)
  count = _segment_total(jnp.ones_like(returns), group_ids)
  return largest, excess, total, count
