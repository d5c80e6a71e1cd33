"""Decoupled PPO: equation 5 by hand, by loop, and where it becomes PPO."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from rl_tpu import algorithms
from rl_tpu.algorithms import decoupled_ppo, ppo

Config = decoupled_ppo.Config
LOG2 = math.log(2.0)


def means(metrics):
  return {name: float(m.mean(empty=0.0)) for name, m in metrics.items()}


def slow_loss(target, proximal, behavior, advantages, config):
  total, cap = 0.0, config.behavior_weight_cap
  rows = zip(target, proximal, behavior, advantages, strict=True)
  for logp, centre, sampled, advantage in rows:
    ratio, weight = math.exp(logp - centre), math.exp(centre - sampled)
    held = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    loss = max(-ratio * advantage, -held * advantage)
    if config.dual_clip and advantage < 0:
      loss = min(loss, -config.dual_clip * advantage)
    if cap and weight > cap:
      weight = cap if config.behavior_weight_mode == "clamp" else 0.0
    total += weight * loss
  return total


@pytest.fixture
def numbers():
  generator = np.random.default_rng(0)
  behavior = -generator.uniform(0.1, 3.0, 60)
  proximal = behavior + generator.normal(0, 0.8, 60)
  target = proximal + generator.normal(0, 0.4, 60)
  arrays = target, proximal, behavior, generator.normal(size=60)
  return [x.tolist() for x in arrays]


@pytest.mark.parametrize(
  "config",
  [
    Config(),
    Config(clip_low=0.1, clip_high=0.5, dual_clip=1.3),
    Config(behavior_weight_cap=1.5),
    Config(behavior_weight_cap=1.5, behavior_weight_mode="clamp"),
    Config(behavior_weight_cap=None),
  ],
  ids=str,
)
def test_the_loss_equals_the_slow_loop(build, numbers, config):
  target, proximal, behavior, advantages = numbers
  outputs, batch = build(target, behavior, advantages, proximal)
  loss, _ = decoupled_ppo.loss(outputs, batch, config)
  assert loss.total == pytest.approx(slow_loss(*numbers, config), rel=1e-4)
  assert loss.count == 60


def test_at_the_first_minibatch_it_is_a_weighted_policy_gradient(
  build, gradient
):
  """The clip is centred where the update starts; the weight always applies."""
  outputs, batch = build([-1.0], [-1.0 - LOG2], [3.0], proximal=[-1.0])
  loss, metrics = decoupled_ppo.loss(outputs, batch, Config())
  assert loss.total == pytest.approx(-6.0, rel=1e-6)
  slopes = gradient(decoupled_ppo, outputs, batch, Config())
  np.testing.assert_allclose(slopes, [-6.0], rtol=1e-6)
  assert means(metrics)["clip_fraction"] == 0.0
  assert means(metrics)["behavior_weight"] == pytest.approx(2.0, rel=1e-6)
  assert means(metrics)["behavior_proximal_kl"] == pytest.approx(-LOG2)


def test_a_capped_token_still_counts_in_the_denominator(build):
  outputs, batch = build([-1.0] * 2, [-1.0, -4.0], [1.0, 1.0], [-1.0] * 2)
  masked, metrics = decoupled_ppo.loss(outputs, batch, Config())
  assert (masked.total, masked.count) == (-1.0, 2.0)
  assert means(metrics)["behavior_weight_masked"] == 0.5
  clamped, metrics = decoupled_ppo.loss(
    outputs, batch, Config(behavior_weight_mode="clamp")
  )
  assert (clamped.total, clamped.count) == (-6.0, 2.0)
  assert means(metrics)["behavior_weight_masked"] == 0.0


def test_X01_an_unbounded_weight_is_capped_and_counted(build, gradient):
  outputs, batch = build([-1.0], [-100.0], [1.0], [-1.0])
  loss, metrics = decoupled_ppo.loss(outputs, batch, Config())
  assert loss.total == 0.0
  assert means(metrics)["behavior_weight_masked"] == 1.0
  assert gradient(decoupled_ppo, outputs, batch, Config()).tolist() == [0.0]


@pytest.mark.parametrize("dual_clip", [None, 1.3])
def test_with_the_behavior_policy_as_proximal_it_is_ppo(
  build, gradient, numbers, dual_clip
):
  target, _, behavior, advantages = numbers
  outputs, batch = build(target, [math.nan, *behavior[1:]], advantages)
  decoupled = Config(proximal="behavior", dual_clip=dual_clip)
  plain = ppo.Config(dual_clip=dual_clip)
  loss, metrics = decoupled_ppo.loss(outputs, batch, decoupled)
  expected, expected_metrics = ppo.loss(outputs, batch, plain)
  assert loss == expected
  for name, metric in expected_metrics.items():
    assert metrics[name] == metric
  np.testing.assert_array_equal(
    gradient(decoupled_ppo, outputs, batch, decoupled),
    gradient(ppo, outputs, batch, plain),
  )


@pytest.mark.parametrize(
  ("token_version", "alpha"), [(8, 1.0), (7, 1.0), (6, 0.5), (4, 0.25)]
)
def test_loglinear_leans_to_the_target_with_staleness(
  build, gradient, token_version, alpha
):
  """u = r^alpha, w = r^(1 - alpha), their product always r = e^0.1."""
  outputs, batch = build(
    [-1.0], [-1.1], [2.0], token_version=[token_version], version=8
  )
  config = Config(proximal="loglinear")
  loss, metrics = decoupled_ppo.loss(outputs, batch, config)
  assert loss.total == pytest.approx(-2.0 * math.exp(0.1), rel=1e-5)
  assert means(metrics)["ratio"] == pytest.approx(math.exp(0.1 * alpha))
  weight = means(metrics)["behavior_weight"]
  assert weight == pytest.approx(math.exp(0.1 * (1 - alpha)))
  slopes = gradient(decoupled_ppo, outputs, batch, config)
  np.testing.assert_allclose(slopes, [-2.0 * math.exp(0.1)], rtol=1e-5)


def test_loglinear_gives_older_tokens_a_looser_clip(build):
  outputs, batch = build(
    [-1.0] * 2, [-1.3] * 2, [1.0] * 2, token_version=[7, 4], version=8
  )
  _, metrics = decoupled_ppo.loss(outputs, batch, Config(proximal="loglinear"))
  assert means(metrics)["clip_fraction"] == 0.5


def test_where_the_clip_binds_loglinear_leaves_no_gradient(build, gradient):
  """The weight holds the target too, as a constant."""
  outputs, batch = build([-1.0], [-2.0], [1.0], token_version=[6], version=8)
  config = Config(proximal="loglinear")
  loss, _ = decoupled_ppo.loss(outputs, batch, config)
  assert loss.total == pytest.approx(-1.2 * math.exp(0.5), rel=1e-6)
  assert gradient(decoupled_ppo, outputs, batch, config).tolist() == [0.0]


@pytest.mark.parametrize("proximal", ["recompute", "loglinear", "behavior"])
def test_X02_a_missing_behavior_logp_has_weight_one(build, gradient, proximal):
  outputs, batch = build(
    [-1.0, -2.0], [math.nan, -2.5], [3.0, 1.0], [-1.0, -2.0], [0, 0], version=4
  )
  config = Config(proximal=proximal)
  loss, metrics = decoupled_ppo.loss(outputs, batch, config)
  assert np.isfinite(loss.total)
  slopes = gradient(decoupled_ppo, outputs, batch, config)
  assert slopes[0] == pytest.approx(-3.0, rel=1e-6)
  assert means(metrics)["nonfinite_logp"] == 0.5


def test_only_recomputing_asks_the_learner_for_a_forward_pass(build):
  for proximal in ("loglinear", "behavior"):
    config = Config(proximal=proximal)
    assert algorithms.requires(decoupled_ppo, config) == frozenset()
  assert algorithms.requires(decoupled_ppo, Config()) == {"proximal_logp"}
  outputs, batch = build([-1.0], [-1.0], [1.0])
  with pytest.raises(ValueError, match=r"outputs\.proximal_logp is None"):
    decoupled_ppo.loss(outputs, batch, Config())


def test_under_jit_nothing_changes(build, numbers):
  target, proximal, behavior, advantages = numbers
  outputs, batch = build(target, behavior, advantages, proximal)
  batch = dataclasses.replace(batch, version=batch.version + 3)
  for mode in ("recompute", "loglinear"):
    config = Config(proximal=mode)
    eager, _ = decoupled_ppo.loss(outputs, batch, config)
    compiled = jax.jit(lambda o, b, c=config: decoupled_ppo.loss(o, b, c)[0])
    assert compiled(outputs, batch).total == pytest.approx(
      float(eager.total), rel=1e-5
    )


@pytest.mark.parametrize(
  ("field", "value", "allowed"),
  [
    ("clip_low", 0.0, r"in \(0, 1\]"),
    ("clip_high", 0.0, "> 0"),
    ("dual_clip", 0.5, "> 1 or None"),
    ("behavior_weight_cap", 0.9, ">= 1 or None"),
    ("behavior_weight_mode", "drop", "clamp"),
    ("proximal", "old", "loglinear"),
    ("baseline", "critic", "leave_one_out"),
  ],
)
def test_the_config_names_field_value_and_what_is_allowed(
  field, value, allowed
):
  message = f"decoupled_ppo.Config.{field} is {value!r}; it must be .*{allowed}"
  with pytest.raises(ValueError, match=message):
    Config(**{field: value})
