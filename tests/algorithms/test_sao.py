"""SAO: its unit tests (a) to (k), its fields, and centering composed with it.

(d) to (g) are tests of `ops.gae`, (h) and (i) of the critic.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu import algorithms
from rl_tpu.algorithms import reinforce, sao
from rl_tpu.types import PolicyOutputs

Config = sao.Config


def means(metrics):
  return {name: float(m.mean(empty=0.0)) for name, m in metrics.items()}


def test_SAO_a_on_policy_the_gradient_is_the_plain_policy_gradient(
  build, gradient
):
  outputs, batch = build([-1.0, -3.0], [-1.0, -3.0], [2.0, -0.5])
  slopes = gradient(sao, outputs, batch, Config())
  plain = gradient(reinforce, outputs, batch, reinforce.Config())
  np.testing.assert_allclose(slopes, plain, rtol=1e-6)
  assert slopes.tolist() == [-2.0, 0.5]


@pytest.mark.parametrize(
  ("band", "ratios", "weights"),
  [
    (None, [0.69, 0.71, 5.9, 6.1], [0.0, 0.71, 5.9, 0.0]),
    ("math", [0.69, 0.71, 5.9, 6.1], [0.0, 0.71, 5.9, 0.0]),
    ("coding", [0.19, 0.21, 3.9, 4.1], [0.0, 0.21, 3.9, 0.0]),
  ],
)
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_SAO_b_outside_its_band_a_token_has_no_gradient_whatever_the_sign(
  build, gradient, band, ratios, weights, advantage
):
  behavior = [-1.0 - math.log(r) for r in ratios]
  outputs, batch = build([-1.0] * 4, behavior, [advantage] * 4)
  slopes = gradient(sao, outputs, batch, Config(band=band))
  expected = [-advantage * weight for weight in weights]
  np.testing.assert_allclose(slopes, expected, rtol=1e-5)
  loss, metrics = sao.loss(outputs, batch, Config(band=band))
  assert loss.count == 4
  assert means(metrics)["clip_fraction"] == 0.5


def test_SAO_c_the_gradient_is_that_of_the_masked_ratio(build, gradient):
  """And not that of differentiating f(r) log p, which can turn its sign."""
  generator = np.random.default_rng(0)
  behavior = -generator.uniform(0.1, 3.0, 40)
  target = behavior + generator.normal(0.0, 0.7, 40)
  numbers = [x.tolist() for x in (target, behavior, generator.normal(size=40))]
  outputs, batch = build(*numbers)

  def masked_ratio(target_logp):
    ratio = jnp.exp(target_logp - batch.behavior_logp)
    inside = (ratio > 0.7) & (ratio < 6.0)
    return -jnp.sum(jnp.where(inside, ratio, 0.0) * batch.advantages)

  expected = jax.grad(masked_ratio)(outputs.target_logp)[0, 1:]
  slopes = gradient(sao, outputs, batch, Config())
  np.testing.assert_allclose(slopes, expected, rtol=1e-5)
  assert 0 < np.count_nonzero(slopes) < 40


def test_SAO_j_rows_of_padding_do_not_touch_a_rows_loss(build):
  outputs, batch = build([-1.0, -2.0], [-1.1, -1.8], [1.0, -2.0])
  pad = lambda x: jnp.pad(x, ((0, 3), (0, 4)))  # noqa: E731
  padded = dataclasses.replace(
    batch.map_rows(pad),
    trajectory_ids=jnp.pad(
      batch.trajectory_ids, ((0, 3), (0, 4)), constant_values=-1
    ),
  )
  expected = sao.loss(outputs, batch, Config())
  actual = sao.loss(jax.tree.map(pad, outputs), padded, Config())
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_SAO_k_replayed_at_its_own_version_the_ratio_is_one_within_noise(build):
  """An engine's rounding, 0.01 nats: nothing is masked, the mean is 1."""
  generator = np.random.default_rng(0)
  target = -generator.uniform(0.1, 3.0, 200)
  behavior = target + generator.normal(0.0, 0.01, 200)
  numbers = [x.tolist() for x in (target, behavior, np.ones(200))]
  _, metrics = sao.loss(*build(*numbers), Config())
  assert means(metrics)["ratio"] == pytest.approx(1.0, abs=0.005)
  assert means(metrics)["clip_fraction"] == 0.0


@pytest.mark.parametrize(("closed", "slope"), [(False, 0.0), (True, -0.5)])
def test_the_ends_of_the_band_are_out_unless_it_is_closed(
  build, gradient, closed, slope
):
  """1 - epsilon_low = 0.5 and log 0.5 are met exactly."""
  outputs, batch = build([math.log(0.5)], [0.0], [1.0])
  config = Config(epsilon_low=0.5, closed_band=closed)
  slopes = gradient(sao, outputs, batch, config)
  np.testing.assert_allclose(slopes, [slope], rtol=1e-6)


def test_each_denominator_counts_what_it_is_named_after(build):
  outputs, batch = build([-1.0] * 4, [-1.0, -1.0, -1.0, -9.0], [1.0] * 4)
  ids = jnp.array([[0, 0, 1, 1, 1]])
  batch = dataclasses.replace(
    batch,
    trajectory_ids=ids,
    group_ids=jnp.zeros(3, jnp.int32),
    truncated=jnp.zeros(3, bool),
  )
  # Trajectory 0 has one action, 1 has three, the last one masked.
  for denominator, total, count in (
    ("action_tokens", 3.0, 4.0),
    ("kept_tokens", 3.0, 3.0),
    ("trajectories", 1.0 + 2.0 / 3.0, 2.0),
  ):
    loss, _ = sao.loss(outputs, batch, Config(denominator=denominator))
    assert loss.total == pytest.approx(total, rel=1e-6), denominator
    assert loss.count == count


@pytest.fixture
def turns(build):
  """One trajectory of two turns, prompt o a a o a o, values and a reward."""
  values = [0.3, 0.1, 9.0, 0.6, 9.0]
  outputs, batch = build([-1.0] * 5, [-1.0] * 5, [0.0] * 5)
  mask = jnp.array([[False, True, True, False, True, False]])
  batch = dataclasses.replace(
    batch, action_mask=mask, rewards=jnp.array([[0.0] * 4 + [1.0, 5.0]])
  )
  values = jnp.array([[9.0, *values]])
  return dataclasses.replace(outputs, values=values), batch


def test_at_token_level_lambda_follows_the_number_of_action_tokens(turns):
  outputs, batch = turns
  advantages = sao.advantages(batch, outputs, Config())
  lam = 1 - 1 / (1.5 * 3)
  third = 1.0 - 0.6
  second = 0.6 - 0.1 + lam * third
  first = 0.1 - 0.3 + lam * second
  expected = [[0.0, first, second, 0.0, third, 0.0]]
  np.testing.assert_allclose(advantages, expected, rtol=1e-5)


def test_lambda_may_count_the_observations_of_the_response(turns):
  outputs, batch = turns
  config = Config(lambda_length="response")
  advantages = sao.advantages(batch, outputs, config)
  # Positions 1 to 5: the prompt is no part of the response.
  second = 0.6 - 0.1 + (1 - 1 / (1.5 * 5)) * 0.4
  assert advantages[0, 2] == pytest.approx(second, rel=1e-5)


@pytest.mark.parametrize(
  ("level", "value"), [("step_average", 0.2), ("step_last", 0.1)]
)
def test_a_turn_is_one_decision_with_one_advantage(turns, level, value):
  outputs, batch = turns
  advantages = sao.advantages(batch, outputs, Config(level=level))
  lam = 1 - 1 / (1.5 * 2)
  second = 1.0 - 0.6
  first = 0.6 - value + lam * second
  expected = [[0.0, first, first, 0.0, second, 0.0]]
  np.testing.assert_allclose(advantages, expected, rtol=1e-5)


def test_a_turn_earns_what_any_of_its_tokens_earned(turns):
  outputs, batch = turns
  rewards = batch.rewards.at[0, 1].set(0.5)
  batch = dataclasses.replace(batch, rewards=rewards)
  advantages = sao.advantages(batch, outputs, Config(level="step_last"))
  first = 0.5 + 0.6 - 0.1 + (1 - 1 / (1.5 * 2)) * 0.4
  expected = [[0.0, first, first, 0.0, 0.4, 0.0]]
  np.testing.assert_allclose(advantages, expected, rtol=1e-5)


@pytest.mark.parametrize(
  ("level", "count"), [("token", 3), ("step_average", 3), ("step_last", 2)]
)
def test_the_critic_learns_where_its_value_is_used(turns, level, count):
  outputs, batch = turns
  returns = sao.returns(batch, outputs, Config())
  assert returns.tolist() == [[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]]
  batch = dataclasses.replace(batch, returns=returns)
  loss, metrics = sao.value_loss(outputs, batch, Config(level=level))
  errors = {1: 0.7**2, 2: 0.9**2, 4: 0.4**2}
  if level == "step_last":
    del errors[1]
  assert loss.count == count
  assert loss.total == pytest.approx(sum(errors.values()), rel=1e-5)
  assert means(metrics)["return"] == 1.0


def test_targets_of_a_smaller_lambda_lean_on_the_critic(turns):
  outputs, batch = turns
  returns = sao.returns(batch, outputs, Config(lambda_critic=0.0))
  np.testing.assert_allclose(returns, [[0.0, 0.1, 0.6, 0.0, 1.0, 0.0]])


def test_what_the_budget_cut_is_kept_or_masked(turns):
  outputs, batch = turns
  batch = dataclasses.replace(batch, truncated=jnp.array([True]))
  kept = sao.advantages(batch, outputs, Config())
  assert np.count_nonzero(kept) == 3
  config = Config(truncated="mask")
  assert not sao.advantages(batch, outputs, config).any()


def test_whitening_is_over_the_batchs_action_tokens(turns):
  outputs, batch = turns
  plain = np.asarray(sao.advantages(batch, outputs, Config()))
  white = np.asarray(sao.advantages(batch, outputs, Config(whiten=True)))
  used = plain[np.asarray(batch.action_mask)]
  expected = (used - used.mean()) / used.std()
  actual = white[np.asarray(batch.action_mask)]
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


# Golden policies of papers/golden: log ratios out of the math band on both
# sides of it, so that the mask makes the score drift.
TARGET = jnp.array([2.0, 0.8, -0.5, 0.2, -1.0])
SHIFT = jnp.array([0.6, 1.0, -0.2, -0.9, 0.0])


def expected_gradient(build, config, vocabulary, head, advantage):
  """E over behavior's tokens of d loss / d logits, exactly."""
  logits = TARGET[:vocabulary]
  behavior = jax.nn.log_softmax(logits - SHIFT[:vocabulary])
  ids = jnp.argsort(-behavior)[:head]

  def loss(logits, token):
    logp = jax.nn.log_softmax(logits)
    outputs, batch = build([0.0], [0.0], [advantage])
    spread = lambda x: jnp.broadcast_to(x, (1, 2, head))  # noqa: E731
    batch = dataclasses.replace(
      batch,
      behavior_logp=batch.behavior_logp.at[0, 1].set(behavior[token]),
      behavior_topk_ids=spread(ids),
      behavior_topk_logp=spread(behavior[ids]),
    )
    outputs = PolicyOutputs(
      target_logp=outputs.target_logp.at[0, 1].set(logp[token]),
      target_topk_logp=spread(logp[ids]),
    )
    return sao.loss(outputs, batch, config)[0].total

  slopes = jax.vmap(jax.grad(loss), in_axes=(None, 0))
  gradients = jax.jit(slopes)(logits, jnp.arange(vocabulary))
  return jnp.exp(behavior) @ gradients


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize(
  ("vocabulary", "head", "top_k"), [(5, 5, 0), (5, 4, 4), (3, 2, 2)]
)
@pytest.mark.parametrize("band", ["math", "coding"])
def test_with_centering_a_constant_advantage_moves_nothing(
  build, advantage, vocabulary, head, top_k, band
):
  """Exactly over the vocabulary, and with a tail of a single token."""
  centered = Config(band=band, centering=True, top_k=top_k)
  case = vocabulary, head, advantage
  drift = expected_gradient(build, centered, *case)
  assert jnp.max(jnp.abs(drift)) < 1e-6
  if band == "math":
    drift = expected_gradient(build, Config(band=band), *case)
    assert jnp.max(jnp.abs(drift)) > 1e-3


def test_centering_asks_for_the_head_and_nothing_off_the_mask_reaches_it(build):
  assert algorithms.requires(sao, Config()) == {"values"}
  config = Config(centering=True, top_k=3)
  assert algorithms.requires(sao, config) == {"values", "target_topk_logp"}
  outputs, batch = build([-1.0, -2.0], [-1.2, -1.5], [1.0, -1.0])
  head = jnp.log(jnp.broadcast_to(jnp.array([0.4, 0.3, 0.1]), (1, 3, 3)))
  batch = dataclasses.replace(
    batch,
    behavior_topk_ids=jnp.zeros((1, 3, 3), jnp.int32),
    behavior_topk_logp=head,
  )
  outputs = dataclasses.replace(outputs, target_topk_logp=head[..., ::-1])
  loss, metrics = sao.loss(outputs, batch, config)
  spoilt = sao.loss(
    dataclasses.replace(
      outputs, target_topk_logp=outputs.target_topk_logp.at[:, 0].set(jnp.nan)
    ),
    dataclasses.replace(batch, behavior_topk_logp=head.at[:, 0].set(-jnp.inf)),
    config,
  )
  jax.tree.map(np.testing.assert_array_equal, spoilt, (loss, metrics))
  assert means(metrics)["head_mass"] == pytest.approx(0.8, rel=1e-5)
  with pytest.raises(ValueError, match=r"behavior_topk_ids is None"):
    sao.loss(
      outputs, dataclasses.replace(batch, behavior_topk_ids=None), config
    )


def test_the_paper_names_its_bands():
  assert Config().bounds == pytest.approx((0.7, 6.0))
  assert Config(band="math").bounds == pytest.approx((0.7, 6.0))
  assert Config(band="coding").bounds == pytest.approx((0.2, 4.0))


def test_a_band_may_reach_down_to_zero(build, gradient):
  outputs, batch = build([-9.0], [-1.0], [1.0])
  slopes = gradient(sao, outputs, batch, Config(epsilon_low=1.0))
  np.testing.assert_allclose(slopes, [-math.exp(-8.0)], rtol=1e-5)


@pytest.mark.parametrize(
  ("fields", "allowed"),
  [
    ({"epsilon_low": 1.5}, r"in \(0, 1\]"),
    ({"epsilon_high": 0.0}, "> 0"),
    ({"band": "science"}, "coding"),
    ({"band": "coding", "epsilon_low": 0.5}, "None where epsilon_low"),
    ({"denominator": "kept"}, "kept_tokens"),
    ({"gamma": 0.0}, r"in \(0, 1\]"),
    ({"lambda_alpha": 0.0}, "> 0"),
    ({"lambda_length": "all"}, "response"),
    ({"lambda_critic": 1.1}, r"in \[0, 1\]"),
    ({"level": "turn"}, "step_last"),
    ({"truncated": "drop"}, "terminal"),
    ({"critic_updates": 0}, ">= 1"),
    ({"freeze": "all"}, "attention"),
    ({"values": "mid"}, "post"),
    ({"value_clip": 0.0}, "> 0 or None"),
    ({"top_k": -1}, ">= 0"),
  ],
)
def test_the_config_names_field_value_and_what_is_allowed(fields, allowed):
  field, value = next(iter(fields.items()))
  message = f"sao.Config.{field} is {value!r}; it must be .*{allowed}"
  with pytest.raises(ValueError, match=message):
    Config(**fields)
