"""Sequence maths against slow loops, hand-worked tokens and fault reports."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu import ops
from rl_tpu.packing import pack
from rl_tpu.types import Estimate, PolicyOutputs, Trajectory

# A = [10, 11, 12], B = [20, 21], one padding token.
TOKENS = jnp.array([[10, 11, 12, 20, 21, 0]])
IDS = jnp.array([[0, 0, 0, 1, 1, -1]])


def random(shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_ids(rows=3, length=11, seed=0):
  """Rows of trajectories of random lengths, padding last."""
  generator, n = np.random.default_rng(seed), 0
  ids = np.full((rows, length), -1)
  for row in range(rows):
    start = 0
    while start < length - 1:
      end = min(start + generator.integers(1, 5), length - 1)
      ids[row, start:end] = n
      start, n = end, n + 1
  return ids, n


def slow_token_logp(logits, tokens, temperature, ids):
  out = np.zeros(tokens.shape)
  for row, column in np.ndindex(tokens.shape):
    inside = column > 0 and ids[row, column] >= 0
    if inside and ids[row, column - 1] == ids[row, column]:
      scores = logits[row, column - 1].astype(np.float64)
      scores = scores / temperature[row, column]
      log_total = np.log(np.exp(scores - scores.max()).sum()) + scores.max()
      out[row, column] = scores[tokens[row, column]] - log_total
  return out


def test_token_logp_equals_the_slow_loop_at_each_tokens_own_temperature():
  ids, _ = random_ids()
  logits = 5 * random((*ids.shape, 7))
  tokens = np.random.default_rng(1).integers(0, 7, ids.shape)
  temperature = np.random.default_rng(2).uniform(0.3, 2.0, ids.shape)
  logp = ops.token_logp(logits, tokens, temperature, ids)
  expected = slow_token_logp(logits, tokens, temperature, ids)
  np.testing.assert_allclose(logp, expected, rtol=1e-5, atol=1e-5)
  assert np.count_nonzero(expected) > 10


def test_without_ids_each_row_is_one_trajectory_and_a_scalar_serves_all():
  logits, tokens = random((2, 4, 5)), jnp.array([[1, 2, 3, 4], [0, 0, 1, 1]])
  ones = np.full((2, 4), 0.7)
  expected = slow_token_logp(logits, np.asarray(tokens), ones, np.zeros((2, 4)))
  logp = ops.token_logp(logits, tokens, 0.7)
  np.testing.assert_allclose(logp, expected, rtol=1e-5)


def test_half_precision_logits_are_normalised_in_f32():
  logits = jnp.asarray(random((1, 6, 30)), jnp.bfloat16)
  logp = ops.token_logp(logits, TOKENS, 1.0, IDS)
  exact = ops.token_logp(logits.astype(jnp.float32), TOKENS, 1.0, IDS)
  assert logp.dtype == jnp.float32
  np.testing.assert_array_equal(logp, exact)


def test_H02_labels_stay_inside_their_trajectory():
  labels = ops.next_tokens(TOKENS[:, :5], IDS[:, :5])
  assert labels.tolist() == [[11, 12, -1, 21, -1]]


def test_H02_changing_the_neighbours_token_changes_nothing_here():
  logits = jnp.asarray(random((1, 6, 30)))

  def total(logits, tokens):
    logp = ops.token_logp(logits, tokens, 1.0, IDS)
    return jnp.sum(jnp.where(IDS == 0, logp, 0.0))

  one = jax.value_and_grad(total)(logits, TOKENS)
  two = jax.value_and_grad(total)(logits, TOKENS.at[0, 3].set(25))
  assert one[0] == two[0]
  np.testing.assert_array_equal(one[1], two[1])


def test_H02_the_logits_of_a_last_position_are_never_used():
  logits = jnp.asarray(random((1, 6, 30)))
  spoilt = logits.at[0, jnp.array([2, 4, 5])].set(jnp.nan)

  def total(logits):
    return jnp.sum(ops.token_logp(logits, TOKENS, 1.0, IDS))

  expected = jax.value_and_grad(total)(logits)
  value, gradient = jax.value_and_grad(total)(spoilt)
  assert value == expected[0]
  np.testing.assert_array_equal(gradient, expected[1])


@pytest.mark.parametrize(
  ("mode", "weights"),
  [
    ("none", [1.0, 1.0, 1.0, 1.0]),
    ("is", [0.25, 0.5, 2.0, 4.0]),
    ("truncate", [0.5, 0.5, 2.0, 2.0]),
    ("mask", [0.0, 0.5, 2.0, 0.0]),
    ("mask_unit", [0.0, 1.0, 1.0, 0.0]),
  ],
)
def test_each_weight_mode_by_hand_the_band_is_closed(mode, weights):
  log_ratio = jnp.log(jnp.array([[0.25, 0.5, 2.0, 4.0, 1.0]]))
  mask = jnp.array([[True] * 4 + [False]])
  weight = ops.importance_weight(log_ratio, mask, mode, 0.5, 2.0)
  np.testing.assert_allclose(weight, [[*weights, 0.0]], rtol=1e-6)


@pytest.mark.parametrize(
  ("mode", "low", "high", "weights"),
  [
    ("is", 0.0, math.inf, [2.3230582938, 0.4690173806, 0.2107430938]),
    ("truncate", 0.0, 2.0, [2.0, 0.4690173806, 0.2107430938]),
    ("truncate", 0.5, 2.0, [2.0, 0.5, 0.5]),
    ("mask", 0.5, 5.0, [2.3230582938, 0.0, 0.0]),
    ("mask_unit", 0.4, 2.0, [0.0, 1.0, 0.0]),
  ],
)
def test_weights_are_those_of_the_score_centering_code(
  mode, low, high, weights
):
  target = jnp.array([[-0.4689813363, -1.6689813363, -3.4689813363]])
  behavior = jnp.array([[-1.311865884, -0.911865884, -1.911865884]])
  mask = jnp.ones((1, 3), bool)
  log_ratio = ops.log_ratio(target, behavior, mask)
  weight = ops.importance_weight(log_ratio, mask, mode, low, high)
  np.testing.assert_allclose(weight, [weights], rtol=1e-5)


def test_an_unknown_weight_mode_is_told_the_known_ones():
  with pytest.raises(ValueError, match=r"'icepop'.*mask_unit"):
    ops.importance_weight(jnp.zeros((1, 1)), jnp.ones((1, 1), bool), "icepop")


@pytest.mark.parametrize("mode", ops.WEIGHT_MODES)
@pytest.mark.parametrize("extreme", [99.0, -99.0])
def test_X01_a_log_ratio_of_99_is_bounded_with_a_finite_gradient(mode, extreme):
  mask = jnp.array([[True, True, False]])

  def total(log_ratio):
    weight = ops.importance_weight(log_ratio, mask, mode, 0.5, 5.0)
    return jnp.sum(weight), weight

  log_ratio = jnp.array([[extreme, 0.3, extreme]])
  gradient, weight = jax.grad(total, has_aux=True)(log_ratio)
  assert np.all(np.isfinite(gradient)) and np.all(np.isfinite(weight))
  assert weight[0, 0] <= (5.0 if mode != "is" else math.exp(20.001))
  assert weight[0, 2] == gradient[0, 2] == 0


def test_X01_off_the_mask_neither_logp_reaches_the_ratio():
  mask = jnp.array([[True, False]])
  behavior = jnp.array([[-1.0, -jnp.inf]])

  def total(target):
    log_ratio = ops.log_ratio(target, behavior, mask)
    return jnp.sum(ops.ratio(log_ratio) * mask)

  value, gradient = jax.value_and_grad(total)(jnp.array([[-1.0, jnp.nan]]))
  assert value == 1.0
  assert gradient.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("mode", ops.WEIGHT_MODES)
@pytest.mark.parametrize("missing", [np.nan, np.inf, -np.inf])
def test_X02_a_ratio_that_is_no_number_counts_as_one(mode, missing):
  log_ratio = jnp.array([[missing, 0.1, missing]])
  mask = jnp.array([[True, True, False]])
  weight = ops.importance_weight(log_ratio, mask, mode, 0.5, 5.0)
  assert weight[0, 0] == 1.0 and weight[0, 2] == 0.0


def test_X02_a_missing_logp_takes_the_others_place_without_its_gradient():
  def filled(otherwise):
    return jnp.sum(ops.known_logp(jnp.array([[-1.0, jnp.nan]]), otherwise))

  value, gradient = jax.value_and_grad(filled)(jnp.array([[-5.0, -7.0]]))
  assert value == -8.0
  assert not gradient.any()


@pytest.mark.parametrize(
  ("ratio", "advantage", "dual_clip", "loss", "binds"),
  [
    (1.5, 2.0, None, -2.6, True),  # earned enough
    (0.5, 2.0, None, -1.0, False),  # may come back
    (0.5, -2.0, None, 1.6, True),  # avoided enough
    (1.5, -2.0, None, 3.0, False),  # must come back
    (1.1, 2.0, None, -2.2, False),
    (1.0, 2.0, None, -2.0, False),
    (4.0, -2.0, None, 8.0, False),
    (4.0, -2.0, 3.0, 6.0, True),  # but not at any price
    (2.0, -2.0, 3.0, 4.0, False),
    (4.0, 2.0, 3.0, -2.6, True),
    (9.0, 0.0, 3.0, 0.0, False),
  ],
)
def test_the_clipped_surrogate_by_hand(
  ratio, advantage, dual_clip, loss, binds
):
  def surrogate(ratio):
    value, bound = ops.clipped_surrogate(
      ratio, jnp.array([[advantage]]), 0.2, 0.3, dual_clip
    )
    return value[0, 0], bound[0, 0]

  (value, bound), gradient = jax.value_and_grad(surrogate, has_aux=True)(
    jnp.array([[ratio]])
  )
  assert value == pytest.approx(loss, rel=1e-6)
  assert bound == binds
  assert gradient[0, 0] == (0.0 if binds else -advantage)


def test_returns_and_sums_equal_the_slow_loop():
  ids, num = random_ids()
  x = random(ids.shape)
  to_go, sums = np.zeros(ids.shape), np.zeros(num)
  for row, column in np.ndindex(ids.shape):
    if ids[row, column] >= 0:
      sums[ids[row, column]] += x[row, column]
      to_go[row, column] = sum(
        x[row, later]
        for later in range(column, ids.shape[1])
        if ids[row, later] == ids[row, column]
      )
  padding = ids < 0
  result = np.where(
    padding, 0.0, jax.jit(ops.return_to_go)(jnp.asarray(x), ids)
  )
  np.testing.assert_allclose(result, to_go, rtol=1e-5, atol=1e-6)
  result = ops.trajectory_sum(jnp.asarray(x), jnp.asarray(ids), num + 2)
  np.testing.assert_allclose(result, [*sums, 0, 0], rtol=1e-5, atol=1e-6)
  result = ops.per_token(jnp.asarray(sums), jnp.asarray(ids))
  np.testing.assert_allclose(result, np.where(padding, 0, sums[ids]), rtol=1e-6)


def test_reverse_accumulate_equals_the_recursion():
  x, decay = random((2, 9)), np.abs(random((2, 9), 1))
  y = np.zeros((2, 10))
  for t in range(8, -1, -1):
    y[:, t] = x[:, t] + decay[:, t] * y[:, t + 1]
  result = jax.jit(ops.reverse_accumulate)(jnp.asarray(x), jnp.asarray(decay))
  np.testing.assert_allclose(result, y[:, :9], rtol=1e-5, atol=1e-6)


GROUPS = jnp.array([0, 2, 0, 1, 2, 0, -1, -1])
RETURNS = jnp.array([1.0, 4.0, 3.0, 9.0, 6.0, 8.0, 5.0, 5.0])


@pytest.mark.parametrize(
  ("mode", "baseline"),
  [
    ("mean", [4.0, 5.0, 4.0, 9.0, 5.0, 4.0, 5.0, 5.0]),
    ("leave_one_out", [5.5, 6.0, 4.5, 9.0, 4.0, 2.0, 5.0, 5.0]),
  ],
)
def test_a_group_baseline_leaves_singletons_without_advantage(mode, baseline):
  result = ops.group_baseline(RETURNS, GROUPS, mode)
  np.testing.assert_allclose(result, baseline, rtol=1e-6)


def test_a_groups_deviation_is_unbiased_and_zero_without_siblings():
  std = ops.group_std(RETURNS, GROUPS)
  three, two = math.sqrt(13.0), math.sqrt(2.0)
  expected = [three, two, three, 0, two, three, 0, 0]
  np.testing.assert_allclose(std, expected, rtol=1e-6)


def test_an_unknown_group_mode_is_refused():
  with pytest.raises(ValueError, match=r"'median'.*leave_one_out"):
    ops.group_baseline(RETURNS, GROUPS, "median")


@pytest.mark.parametrize("value", [0.1, -0.7, 1e6 + 0.1])
def test_equal_values_have_exactly_their_mean_and_no_deviation(value):
  """A mean rounds; its error over a deviation as small would be +-1."""
  same = jnp.full(7, value, jnp.float32)
  groups = jnp.zeros(7, jnp.int32)
  mean, std = ops.masked_mean_std(same, jnp.ones(7, bool))
  assert mean == same[0] and std == 0
  assert not ops.group_std(same, groups).any()
  for mode in ("mean", "leave_one_out"):
    assert jnp.all(ops.group_baseline(same, groups, mode) == same)


def test_masked_mean_and_deviation_are_biased_numpys():
  x, mask = random((4, 5)), random((4, 5), 1) > 0
  spoilt = jnp.where(mask, x, jnp.nan)
  mean, std = ops.masked_mean_std(spoilt, jnp.asarray(mask))
  np.testing.assert_allclose(mean, x[mask].mean(), rtol=1e-5)
  np.testing.assert_allclose(std, x[mask].std(), rtol=1e-5)
  assert ops.masked_mean_std(spoilt, jnp.zeros((4, 5), bool)) == (0.0, 0.0)


def test_H04_the_token_mean_pools_totals_and_counts():
  losses = jnp.array(
    [[1.0, 1.0, jnp.nan, jnp.nan], [4.0] * 4, [4.0, 4.0, 0, 0]]
  )
  mask = jnp.array([[1, 1, 0, 0], [1] * 4, [1, 1, 0, 0]], bool)
  pooled = ops.estimate(losses[:1], mask[:1]) + ops.estimate(
    losses[1:], mask[1:]
  )
  assert pooled.mean(empty=0.0) == 3.25
  nothing = ops.estimate(losses, jnp.zeros_like(mask))
  assert (pooled + nothing).mean(empty=0.0) == 3.25
  assert (nothing.total, nothing.count) == (0.0, 0.0)


advantages_of = jax.jit(ops.outcome_advantages, static_argnums=1)


def make_batch(outcomes, groups, lengths):
  """Trajectories of one prompt token and actions; outcome on the last."""
  trajectories = []
  for outcome, group, length in zip(outcomes, groups, lengths, strict=True):
    actions = np.arange(length) > 0
    rewards = np.zeros(length, np.float32)
    rewards[-1] = outcome
    trajectories.append(
      Trajectory(
        prompt_id=group,
        group_id=group,
        member=0,
        tokens=np.arange(length, dtype=np.int32),
        action_mask=actions,
        behavior_logp=-actions.astype(np.float32),
        token_version=actions.astype(np.int32) - 1,
        rewards=rewards,
      )
    )
  batch = pack(trajectories, row_length=8, version=0)
  return jax.tree.map(jnp.asarray, batch)


@pytest.mark.parametrize(
  ("baseline", "expected"),
  [
    ("none", [1.0, 0.0, 4.0]),
    ("group_mean", [0.5, -0.5, 0.0]),
    ("leave_one_out", [1.0, -1.0, 0.0]),
    ("group", [math.sqrt(0.5), -math.sqrt(0.5), 0.0]),
    # Token-weighted: 1, 0, 0, 4, 4, 4 has mean 13/6 and variance 125/36.
    ("batch", np.array([-7.0, -13.0, 11.0]) / math.sqrt(125)),
  ],
)
def test_every_action_token_has_its_trajectorys_advantage(baseline, expected):
  batch = make_batch([1.0, 0.0, 4.0], [0, 0, 1], [2, 3, 4])
  advantages = advantages_of(batch, baseline)
  for n, value in enumerate(expected):
    here = (batch.trajectory_ids == n) & batch.action_mask
    np.testing.assert_allclose(advantages[here], value, rtol=1e-5, atol=1e-7)
  assert not advantages[~batch.action_mask].any()


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "group"])
def test_a_lone_member_rewarded_twice_still_has_no_advantage(baseline):
  batch = make_batch([1.0], [0], [5])
  batch = dataclasses.replace(batch, rewards=batch.rewards.at[0, 2].set(0.3))
  assert not advantages_of(batch, baseline).any()


def test_the_return_to_go_of_a_token_leaves_out_what_it_did_not_earn():
  batch = make_batch([1.0], [0], [4])
  batch = dataclasses.replace(batch, rewards=batch.rewards.at[0, 1].set(0.5))
  advantages = advantages_of(batch, "none")
  assert advantages[0, :4].tolist() == [0.0, 1.5, 1.0, 1.0]


@pytest.mark.parametrize("baseline", ["batch", "group"])
def test_where_all_are_rewarded_alike_there_is_nothing_to_learn(baseline):
  batch = make_batch([0.1] * 7, [0] * 7, [2, 3, 4, 5, 6, 7, 8])
  assert not advantages_of(batch, baseline).any()


def test_an_unknown_baseline_is_told_the_known_ones():
  with pytest.raises(ValueError, match=r"'mean'.*leave_one_out"):
    advantages_of(make_batch([1.0], [0], [2]), "mean")


def test_the_kl_is_positive_where_behavior_was_surer_than_target():
  batch = make_batch([1.0, 1.0], [0, 0], [3, 3])
  batch = dataclasses.replace(batch, advantages=batch.rewards)
  target = jnp.full(batch.tokens.shape, -1.25)
  metrics = ops.behavior_metrics(PolicyOutputs(target_logp=target), batch)
  means = {name: float(m.mean(empty=0.0)) for name, m in metrics.items()}
  assert means == {
    "engine_mismatch": 0.25,
    "behavior_target_kl": 0.25,
    "nonfinite_logp": 0.0,
    "extreme_ratio": 0.0,
    "zero_advantage": 0.5,
  }
  assert isinstance(metrics["zero_advantage"], Estimate)


def test_per_trajectory_arrays_of_unequal_length_are_refused():
  batch = make_batch([1.0], [0], [2])
  batch = dataclasses.replace(batch, truncated=jnp.zeros(9, bool))
  with pytest.raises(ValueError, match=r"batch.truncated has shape \(9,\)"):
    ops.check_shapes(batch)
