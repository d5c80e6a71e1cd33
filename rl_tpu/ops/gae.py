r"""A critic's use: advantages, the targets it learns, and its error.

Generalised advantage estimation runs over the subsequence of a trajectory's
action tokens. With n(t) the next action token after t, however many observation
tokens lie between, and V = A = 0 after the last one

    delta_t = r_t + gamma V_n(t) - V_t
    A_t     = delta_t + gamma lambda_t A_n(t)

so a gap of observations costs one factor gamma lambda, as a step inside a turn
does (SAO, arXiv:2607.07508, equations 4 and 5; GAE: arXiv:1506.02438). In terms
of the lambda-return G = A + V, which is what a critic is to predict,

    G_t = r_t + gamma [(1 - lambda_t) V_n(t) + lambda_t G_n(t)]

and no value is read where lambda = 1: then G is the discounted return and
A = G - V exactly. Off the action mask nothing is read and everything is 0.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rl_tpu.ops.checks import check_shapes, required
from rl_tpu.ops.credit import return_to_go
from rl_tpu.ops.rows import continues, reverse_accumulate, shift_to_logits
from rl_tpu.ops.sums import divide_or_zero, estimate, masked_mean_std
from rl_tpu.types import Batch, Estimate, PolicyOutputs


def lambda_returns(
  rewards: Float[Array, "R T"],
  values: Float[Array, "R T"],
  action_mask: Bool[Array, "R T"],
  trajectory_ids: Int[Array, "R T"],
  gamma: float,
  lam: Float[Array, "R T"] | float,
) -> Float[Array, "R T"]:
  """The return to expect after each action token, by TD(lambda); in f32."""
  dtype = jnp.promote_types(rewards.dtype, jnp.float32)
  rewards = jnp.where(action_mask, rewards, 0.0).astype(dtype)
  values = jnp.where(action_mask, values, 0.0).astype(dtype)
  lam = jnp.where(action_mask, lam, 0.0).astype(dtype)
  inside = continues(trajectory_ids)
  # The value of the first action token at or after t, then of that after t.
  value_from = reverse_accumulate(values, (inside & ~action_mask).astype(dtype))
  value_next = jnp.where(inside, shift_to_logits(value_from, 0.0), 0.0)
  here = rewards + gamma * (1.0 - lam) * value_next
  carried = jnp.where(action_mask, gamma * lam, 1.0) * inside
  returns = reverse_accumulate(jnp.where(action_mask, here, 0.0), carried)
  return jnp.where(action_mask, returns, 0.0)


def gae(
  rewards: Float[Array, "R T"],
  values: Float[Array, "R T"],
  action_mask: Bool[Array, "R T"],
  trajectory_ids: Int[Array, "R T"],
  gamma: float,
  lam: Float[Array, "R T"] | float,
) -> Float[Array, "R T"]:
  """Advantages of action tokens; observations between them cost nothing.

  The end of a trajectory has value 0, also where the budget ended it. Rewards
  on observation tokens are not read.
  """
  returns = lambda_returns(
    rewards, values, action_mask, trajectory_ids, gamma, lam
  )
  return jnp.where(action_mask, returns - values, 0.0)


def length_adaptive_lambda(
  action_mask: Bool[Array, "R T"],
  trajectory_ids: Int[Array, "R T"],
  alpha: float,
) -> Float[Array, "R T"]:
  """1 - 1 / (alpha l), l the trajectory's action tokens; at least 0.

  The credit that reaches the first token is then exp(-1 / alpha) at any length.
  VAPO, arXiv:2504.05118.
  """
  count = span_total(action_mask.astype(jnp.float32), trajectory_ids)
  return jnp.maximum(1.0 - 1.0 / (alpha * jnp.maximum(count, 1.0)), 0.0)


def turn_ids(
  action_mask: Bool[Array, "R T"], trajectory_ids: Int[Array, "R T"]
) -> Int[Array, "R T"]:
  """Numbers a row's turns, its unbroken runs of action tokens; -1 elsewhere."""
  acts = jnp.where(action_mask, trajectory_ids, -1)
  before = jnp.pad(acts[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  starts = action_mask & (before != acts)
  return jnp.where(action_mask, jnp.cumsum(starts, axis=1) - 1, -1)


def turn_ends(turns: Int[Array, "R T"]) -> Bool[Array, "R T"]:
  """The last token of each turn."""
  return (turns >= 0) & ~continues(turns)


def so_far(
  x: Float[Array, "R T"], ids: Int[Array, "R T"]
) -> Float[Array, "R T"]:
  """Sum of `x` from the start of a trajectory, or turn, to t."""
  return return_to_go(x[:, ::-1], ids[:, ::-1])[:, ::-1]


def span_total(
  x: Float[Array, "R T"], ids: Int[Array, "R T"]
) -> Float[Array, "R T"]:
  """Sum of `x` over the whole trajectory, or turn, at each of its tokens."""
  return so_far(x, ids) + return_to_go(x, ids) - x


def whiten(
  advantages: Float[Array, "R T"], mask: Bool[Array, "R T"]
) -> Float[Array, "R T"]:
  """Mean 0 and deviation 1 over the mask; 0 without spread and off it."""
  mean, std = masked_mean_std(advantages, mask)
  return jnp.where(mask, divide_or_zero(advantages - mean, std), 0.0)


def value_error(
  values: Float[Array, "R T"],
  returns: Float[Array, "R T"],
  before: Float[Array, "R T"] | None = None,
  clip: float | None = None,
) -> tuple[Float[Array, "R T"], Bool[Array, "R T"]]:
  """Squared error, and where a value moved further than `clip` from `before`.

  With a clip the error is the larger one of the value and of the value held
  within `clip` of what it was before the update: pessimistic, as PPO's ratio.

  Raises:
    ValueError: if there is a clip and no `before`.
  """
  error = (values - returns) ** 2
  if clip is None:
    return error, jnp.zeros(values.shape, bool)
  if before is None:
    raise ValueError(
      "batch.values is None; a value clip needs the values before the update"
    )
  held = before + jnp.clip(values - before, -clip, clip)
  error = jnp.maximum(error, (held - returns) ** 2)
  return error, jnp.abs(values - before) > clip


def value_loss(
  outputs: PolicyOutputs,
  batch: Batch,
  mask: Bool[Array, "R T"],
  clip: float | None = None,
) -> tuple[Estimate, dict[str, Estimate]]:
  """Mean squared error of the live values to `batch.returns`, over `mask`.

  `value_clip_fraction`: share further than `clip` from `batch.values`.

  Raises:
    ValueError: if values, returns or, for a clip, earlier values are missing.
  """
  check_shapes(batch, outputs)
  values = required(outputs.values, "outputs.values")
  returns = required(batch.returns, "batch.returns")
  values, returns = (jnp.where(mask, x, 0.0) for x in (values, returns))
  before = batch.values
  if before is not None:
    before = jnp.where(mask, before, 0.0)
  error, clipped = value_error(values, returns, before, clip)
  metrics = {
    "value": estimate(values, mask),
    "return": estimate(returns, mask),
    "value_clip_fraction": estimate(clipped, mask),
  }
  return estimate(error, mask), metrics
