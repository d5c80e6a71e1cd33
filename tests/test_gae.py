"""GAE over action tokens: slow loops, hand cases and identities."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu import ops
from rl_tpu.types import Batch, PolicyOutputs

# Two trajectories in a row of nine, padding last; `o` is an observation.
#          prompt a  a  o  a | prompt a  o | padding
IDS = np.array([[0, 0, 0, 0, 0, 1, 1, 1, -1]])
MASK = np.array([[0, 1, 1, 0, 1, 0, 1, 0, 0]], bool)


def numbers(shape, seed=0):
  generator = np.random.default_rng(seed)
  return generator.normal(size=shape).astype(np.float32)


def random_layout(rows=4, length=17, seed=0):
  """Rows of several trajectories with observations anywhere, padding last."""
  generator = np.random.default_rng(seed)
  ids = np.full((rows, length), -1)
  mask, n = np.zeros((rows, length), bool), 0
  for row in range(rows):
    start = 0
    while start < length - 1:
      end = min(start + int(generator.integers(2, 8)), length - 1)
      ids[row, start:end] = n
      mask[row, start + 1 : end] = generator.random(end - start - 1) < 0.6
      start, n = end, n + 1
  return ids, mask


def textbook_gae(rewards, values, gamma, lam):
  """One list of transitions, no masks."""
  advantages, later, value = np.zeros(len(rewards)), 0.0, 0.0
  for t in reversed(range(len(rewards))):
    delta = rewards[t] + gamma * value - values[t]
    advantages[t] = later = delta + gamma * lam[t] * later
    value = values[t]
  return advantages


def slow_gae(rewards, values, mask, ids, gamma, lam):
  """Cuts out each trajectory's action tokens and forgets the rest."""
  out = np.zeros(mask.shape)
  for n in range(ids.max() + 1):
    where = (ids == n) & mask
    parts = rewards[where], values[where], gamma, lam[where]
    out[where] = textbook_gae(*parts)
  return out


def test_SAO_d_without_observations_it_is_textbook_gae():
  rewards, values = numbers((1, 8)), numbers((1, 8), 1)
  ones = np.ones((1, 8), bool)
  advantages = ops.gae(rewards, values, ones, np.zeros((1, 8), int), 0.9, 0.8)
  expected = textbook_gae(rewards[0], values[0], 0.9, np.full(8, 0.8))
  np.testing.assert_allclose(advantages[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", [0, 1])
def test_in_packed_rows_it_equals_a_loop_over_each_trajectory(gamma, seed):
  ids, mask = random_layout(seed=seed)
  rewards, values = numbers(ids.shape), numbers(ids.shape, 1)
  lam = np.random.default_rng(2).uniform(0.0, 1.0, ids.shape)
  advantages = ops.gae(rewards, values, mask, ids, gamma, lam)
  expected = slow_gae(rewards, values, mask, ids, gamma, lam)
  np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-5)
  assert np.count_nonzero(expected) > 10


@pytest.mark.parametrize("gap", [1, 2, 7])
def test_SAO_e_observations_and_their_values_change_nothing(gap):
  """One action to the next costs one factor gamma lambda, at any distance."""
  rewards, values = numbers((1, 4)), numbers((1, 4), 1)
  plain = ops.gae(
    rewards, values, np.ones((1, 4), bool), np.zeros((1, 4), int), 0.9, 0.7
  )

  def insert(x, garbage):
    return np.insert(x, [2] * gap, garbage, axis=1)

  mask = insert(np.ones((1, 4), bool), False)
  advantages = ops.gae(
    insert(rewards, 55.0),
    insert(values, 999.0),
    mask,
    np.zeros(mask.shape, int),
    0.9,
    0.7,
  )
  np.testing.assert_allclose(advantages[mask], plain[0], rtol=1e-6)
  assert not advantages[~mask].any()


def test_SAO_f_with_lambda_one_it_is_the_return_less_the_value():
  """The bridge over observations then does nothing."""
  ids, mask = random_layout()
  rewards, values = numbers(ids.shape), numbers(ids.shape, 1)
  actions = jnp.where(mask, rewards, 0.0)
  returns = ops.return_to_go(actions, ids)
  advantages = ops.gae(rewards, values, mask, ids, 1.0, 1.0)
  expected = np.where(mask, returns - values, 0.0)
  np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)


def test_SAO_g_the_hand_case_with_an_observation_in_the_middle():
  rewards, values = [[0.0, 0.0, 1.0]], [[0.2, 999.0, 0.4]]
  arguments = [jnp.array(x) for x in (rewards, values)]
  mask, ids = jnp.array([[True, False, True]]), jnp.zeros((1, 3), int)
  advantages = ops.gae(*arguments, mask, ids, 1.0, 1.0)
  np.testing.assert_allclose(advantages, [[0.8, 0.0, 0.6]], rtol=1e-6)
  returns = ops.lambda_returns(*arguments, mask, ids, 1.0, 1.0)
  np.testing.assert_array_equal(returns, [[1.0, 0.0, 1.0]])


def test_the_hand_case_with_lambda_one_half():
  """delta = .2 - 0 at the first action: .4 - .2, then .5 * .6."""
  mask, ids = jnp.array([[True, False, True]]), jnp.zeros((1, 3), int)
  advantages = ops.gae(
    jnp.array([[0.0, 0.0, 1.0]]),
    jnp.array([[0.2, 999.0, 0.4]]),
    mask,
    ids,
    1.0,
    0.5,
  )
  np.testing.assert_allclose(advantages, [[0.5, 0.0, 0.6]], rtol=1e-6)


@pytest.mark.parametrize("trailing", [1, 3])
def test_trailing_observations_are_no_state_to_bootstrap_from(trailing):
  """What follows the last action has value 0, whatever the critic says."""
  mask = jnp.array([[True, True] + [False] * trailing])
  ids = jnp.zeros(mask.shape, int)
  rewards = jnp.zeros(mask.shape).at[0, 1].set(1.0).at[0, -1].set(7.0)
  values = jnp.full(mask.shape, 0.25)
  advantages = ops.gae(rewards, values, mask, ids, 1.0, 0.5)
  expected = [0.0 + 0.5 * 0.75, 0.75] + [0.0] * trailing
  np.testing.assert_allclose(advantages, [expected], rtol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_numbers_off_the_mask_are_not_read(poison):
  rewards, values = numbers(IDS.shape), numbers(IDS.shape, 1)
  lam = np.full(IDS.shape, 0.9)
  expected = ops.gae(rewards, values, MASK, IDS, 1.0, lam)
  spoilt = [np.where(MASK, x, poison) for x in (rewards, values, lam)]
  advantages = ops.gae(*spoilt[:2], MASK, IDS, 1.0, spoilt[2])
  np.testing.assert_array_equal(advantages, expected)
  assert np.isfinite(expected).all()


def test_X20_a_trajectory_without_an_action_has_no_reward_to_earn():
  ids = np.array([[0, 0, -1, -1]])
  rewards = np.array([[0.0, 0.0, 0.0, 1.0]], np.float32)
  mask = np.zeros(ids.shape, bool)
  advantages = ops.gae(rewards, rewards, mask, ids, 1.0, 1.0)
  assert not advantages.any()


def test_half_precision_rewards_are_summed_in_f32():
  ones = jnp.ones((1, 300), jnp.bfloat16)
  ids = jnp.zeros((1, 300), int)
  returns = ops.lambda_returns(ones, 0 * ones, ones > 0, ids, 1.0, 1.0)
  assert returns.dtype == jnp.float32
  assert returns[0, 0] == 300.0


def test_lambda_grows_with_the_trajectorys_own_action_tokens():
  lam = ops.length_adaptive_lambda(MASK, IDS, 1.5)
  long, short = 1 - 1 / (1.5 * 3), 1 - 1 / 1.5
  expected = [long] * 5 + [short] * 3
  np.testing.assert_allclose(lam[0, :8], expected, rtol=1e-6)


@pytest.mark.parametrize(
  ("alpha", "expected"), [(math.inf, 1.0), (0.05, 0.0), (1.5, 1 / 3)]
)
def test_lambda_of_a_single_token_is_never_negative(alpha, expected):
  mask, ids = jnp.array([[False, True]]), jnp.zeros((1, 2), int)
  lam = ops.length_adaptive_lambda(mask, ids, alpha)
  np.testing.assert_allclose(lam, [[expected] * 2], rtol=1e-6)


def test_the_first_token_keeps_the_same_credit_at_any_length():
  for length in (10, 1000):
    mask, ids = jnp.ones((1, length), bool), jnp.zeros((1, length), int)
    lam = ops.length_adaptive_lambda(mask, ids, 1.5)
    credit = float(lam[0, 0]) ** length
    assert credit == pytest.approx(math.exp(-1 / 1.5), rel=0.05)


def test_turns_are_runs_of_actions_of_one_trajectory():
  ids = np.array([[0, 0, 0, 0, 0, 1, 1, 1, -1]])
  mask = np.array([[0, 1, 1, 0, 1, 1, 1, 0, 0]], bool)
  turns = ops.turn_ids(mask, ids)
  assert turns.tolist() == [[-1, 0, 0, -1, 1, 2, 2, -1, -1]]
  ends = [[False, False, True, False, True, False, True, False, False]]
  assert ops.turn_ends(turns).tolist() == ends


def test_totals_and_running_sums_stay_inside_a_trajectory():
  x = jnp.arange(1.0, 10.0)[None]
  assert ops.so_far(x, IDS)[0, :8].tolist() == [1, 3, 6, 10, 15, 6, 13, 21]
  total = ops.span_total(x, IDS)
  assert total[0, :8].tolist() == [15] * 5 + [21] * 3


def test_whitened_advantages_have_mean_0_and_deviation_1_or_are_0():
  x = numbers((3, 5))
  mask = np.random.default_rng(1).random((3, 5)) < 0.7
  white = ops.whiten(x, mask)
  np.testing.assert_allclose(white[mask].mean(), 0.0, atol=1e-6)
  np.testing.assert_allclose(white[mask].std(), 1.0, rtol=1e-5)
  assert not white[~mask].any()
  assert not ops.whiten(jnp.full((3, 5), 2.5), mask).any()


def one_row(values, returns, before):
  """(outputs, batch) of action tokens after a prompt token."""
  length = len(values) + 1
  row = lambda x: jnp.array([[0.0, *x]])  # noqa: E731
  zeros = jnp.zeros((1, length), jnp.int32)
  batch = Batch(
    tokens=zeros,
    trajectory_ids=zeros,
    positions=zeros,
    action_mask=jnp.array([[False] + [True] * len(values)]),
    behavior_logp=row(values),
    token_version=zeros,
    rewards=row(values),
    temperature=row(values),
    truncated=jnp.zeros(1, bool),
    group_ids=jnp.zeros(1, jnp.int32),
    version=jnp.zeros((), jnp.int32),
    returns=None if returns is None else row(returns),
    values=None if before is None else row(before),
  )
  return PolicyOutputs(target_logp=row(values), values=row(values)), batch


def test_H26a_two_of_three_values_moved_further_than_the_clip():
  outputs, batch = one_row([0.1, 0.5, -1.0], [0.0] * 3, [0.0] * 3)
  loss, metrics = ops.value_loss(outputs, batch, batch.action_mask, 0.2)
  fraction = metrics["value_clip_fraction"].mean(empty=0.0)
  assert fraction == pytest.approx(2 / 3)
  assert loss.total == pytest.approx(0.01 + 0.25 + 1.0)


def test_a_clip_makes_the_value_error_pessimistic():
  outputs, batch = one_row([1.0], [1.0], [0.0])
  loss, _ = ops.value_loss(outputs, batch, batch.action_mask, 0.2)
  assert loss.total == pytest.approx(0.64)
  plain, metrics = ops.value_loss(outputs, batch, batch.action_mask)
  assert (plain.total, plain.count) == (0.0, 1.0)
  assert metrics["value_clip_fraction"].total == 0.0


@pytest.mark.parametrize("missing", ["values", "returns", "outputs"])
def test_a_value_loss_says_what_it_lacks(missing):
  outputs, batch = one_row(
    [1.0],
    None if missing == "returns" else [1.0],
    None if missing == "values" else [1.0],
  )
  name = "batch." + missing
  if missing == "outputs":
    outputs = PolicyOutputs(target_logp=outputs.target_logp)
    name = "outputs.values"
  with pytest.raises(ValueError, match=f"{name} is None"):
    ops.value_loss(outputs, batch, batch.action_mask, 0.2)
