"""Decoupled PPO: equation 5 by hand, by loop, and where it becomes PPO."""

import dataclasses
import json
import math
import pathlib

import jax
import jax.numpy as jnp
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


def two_trajectories(outputs, batch, length):
  """The row's first `length` tokens are one trajectory, the rest another."""
  ids = (jnp.arange(batch.tokens.shape[1]) >= length).astype(int)[None]
  batch = dataclasses.replace(
    batch,
    trajectory_ids=ids,
    group_ids=jnp.zeros(2, int),
    truncated=jnp.zeros(2, bool),
  )
  return outputs, batch


@pytest.mark.parametrize("ratio", [0.7, 1 / 0.7])
def test_X07_a_sequence_weight_is_a_geometric_mean(build, gradient, ratio):
  """300 ratios, whose product is 0 or infinite, weigh as one of them."""
  behavior = [-2.0 - math.log(ratio)] * 300
  outputs, batch = build([-2.0] * 300, behavior, [1.0] * 300, [-2.0] * 300)
  config = Config(behavior_weight_level="sequence")
  loss, metrics = decoupled_ppo.loss(outputs, batch, config)
  assert loss.total == pytest.approx(-300 * ratio, rel=1e-4)
  assert means(metrics)["behavior_weight"] == pytest.approx(ratio, rel=1e-4)
  assert means(metrics)["trajectories_masked"] == 0.0
  slopes = gradient(decoupled_ppo, outputs, batch, config)
  np.testing.assert_allclose(slopes, -ratio, rtol=1e-4)


def test_X07_mild_drift_masks_no_batch_and_the_masked_share_is_a_metric(build):
  """0.005 a token, however long; one of two trajectories is far off."""
  behavior = [-2.005] * 400 + [-4.0] * 100
  outputs, batch = build([-2.0] * 500, behavior, [1.0] * 500, [-2.0] * 500)
  outputs, batch = two_trajectories(outputs, batch, 401)
  config = Config(behavior_weight_level="sequence")
  loss, metrics = decoupled_ppo.loss(outputs, batch, config)
  assert means(metrics)["trajectories_masked"] == 0.5
  assert metrics["trajectories_masked"].count == 2
  assert means(metrics)["behavior_weight_masked"] == pytest.approx(0.2)
  assert loss.total == pytest.approx(-400 * math.exp(0.005), rel=1e-4)
  assert loss.count == 500


def test_a_trajectory_shares_one_weight_and_one_fate(build):
  """Log weights 1 and 3, mean 2 > log 5; the other's are 0 and log 2."""
  behavior = [-2.0, -4.0, -1.0, -1.0 - LOG2]
  outputs, batch = build([-1.0] * 4, behavior, [1.0] * 4, [-1.0] * 4)
  outputs, batch = two_trajectories(outputs, batch, 3)
  for mode, first in (("mask", 0.0), ("clamp", 5.0)):
    config = Config(behavior_weight_level="sequence", behavior_weight_mode=mode)
    loss, _ = decoupled_ppo.loss(outputs, batch, config)
    expected = -2 * first - 2 * math.sqrt(2.0)
    assert loss.total == pytest.approx(expected, rel=1e-5)
  tokens, _ = decoupled_ppo.loss(outputs, batch, Config())
  assert tokens.total == pytest.approx(-math.e - 1 - 2, rel=1e-5)


GOLDEN = json.loads(
  pathlib.Path(__file__)
  .parents[1]
  .joinpath("golden/score_centering.json")
  .read_text()
)
CAPPED = {"behavior_weight_cap": 1.5, "behavior_weight_mode": "clamp"}


@pytest.mark.parametrize("sign", ["+1.5", "-1.5"])
def test_centering_three_policies_reproduces_the_golden_numbers(
  sign, logit_gradient
):
  with jax.enable_x64(True):
    inputs, golden = GOLDEN["inputs"], GOLDEN["ppo3_old_policy"][f"A={sign}"]
    target, behavior, proximal = (
      jnp.array(inputs[f"{name}_logits"])
      for name in ("policy", "sampler", "old")
    )
    p, q = jax.nn.softmax(target), jax.nn.softmax(behavior)

    def slopes(advantages, **kwargs):
      config = Config(**CAPPED, top_k=0, **kwargs)
      rest = target, behavior, float(sign) * advantages, range(5), proximal
      return logit_gradient(decoupled_ppo, config, *rest)[1]

    def close(found, expected):
      np.testing.assert_allclose(found, expected, atol=1e-8)

    weight = np.array(golden["w"])
    for token in range(5):
      one = jax.nn.one_hot(token, 5, dtype=float)
      close(slopes(one), -float(sign) * weight[token] * (one - p))
    mass = np.array(golden["centring_mass"])
    close(mass, q * weight)
    term = slopes(q, centering=True) - slopes(q)
    close(term, float(sign) * (mass - mass.sum() * p))
    close(slopes(q), golden["expected_grad_uncentred"])
    one = jax.nn.one_hot(1, 5, dtype=float)
    close(slopes(one, centering=True), golden["grad_y1_sc"])


# Probabilities of another implementation's case; a tail of one token.
PROXIMAL, BEHAVIOR = [0.2, 0.25, 0.3, 0.25], [0.45, 0.08, 0.07, 0.40]
TARGET = [-0.9, 0.8, -0.2, 0.1]


@pytest.mark.parametrize("advantage", [-1.7, 2.3])
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize(
  "kwargs",
  [
    CAPPED,
    {"behavior_weight_cap": 1.5},
    {**CAPPED, "dual_clip": 1.3},
    {**CAPPED, "proximal": "loglinear"},
    {"behavior_weight_cap": 2.0, "proximal": "loglinear"},
    {"proximal": "behavior"},
  ],
  ids=str,
)
def test_a_centered_constant_advantage_moves_nothing_in_expectation(
  kwargs, top_k, advantage, logit_gradient
):
  """Whatever cap and clip take away; without centering they drift."""
  behavior, proximal = jnp.log(jnp.array([BEHAVIOR, PROXIMAL]))
  advantages = advantage * jnp.array(BEHAVIOR)
  head = [0, 3, 1] if top_k else range(4)
  arguments = jnp.array(TARGET), behavior, advantages, head, proximal
  versions = {"token_version": [2, 2, 2, 2], "version": 4}

  def slopes(centering):
    config = Config(**kwargs, centering=centering, top_k=top_k)
    return logit_gradient(decoupled_ppo, config, *arguments, **versions)[1]

  assert np.abs(slopes(True)).max() < 1e-6
  assert np.abs(slopes(False)).max() > 1e-3


def test_a_clipped_token_sends_no_score_to_the_logits(one_prefix):
  """target/proximal is 1.5, clipped, and 0.5; the weight is 1."""
  target, proximal = jnp.log(jnp.array([[0.75, 0.25], [0.5, 0.5]]))
  outputs, batch = one_prefix(target, proximal, jnp.ones(2), [0, 1], proximal)
  _, metrics = decoupled_ppo.loss(outputs, batch, Config(centering=True))
  # 2 A w u (1 - p) of the second token alone.
  expected = 2 * 0.5 * 0.75 / 2
  assert means(metrics)["score_gradient"] == pytest.approx(expected, rel=1e-5)


def test_where_no_cap_and_no_clip_binds_centering_adds_nothing(logit_gradient):
  """The first minibatch with mild staleness: p = o, an exact weight."""
  behavior = jnp.log(jnp.array(BEHAVIOR))
  advantages = jnp.array([1.0, -2.0, 0.5, 3.0])
  slopes = [
    logit_gradient(
      decoupled_ppo,
      Config(behavior_weight_cap=10.0, centering=centering, top_k=2),
      *(TARGET, behavior, advantages, [0, 3], TARGET),
    )[1]
    for centering in (True, False)
  ]
  np.testing.assert_allclose(*slopes, atol=1e-6)


def test_centering_asks_for_the_heads_that_its_proximal_needs(one_prefix):
  def needs(**kwargs):
    return algorithms.requires(decoupled_ppo, Config(centering=True, **kwargs))

  assert needs() == {"proximal_logp", "target_topk_logp", "proximal_topk_logp"}
  assert needs(proximal="loglinear") == {"target_topk_logp"}
  assert needs(proximal="behavior") == {"target_topk_logp"}
  outputs, batch = one_prefix(TARGET, TARGET, jnp.ones(4), [0, 1], TARGET)
  without = dataclasses.replace(outputs, proximal_topk_logp=None)
  with pytest.raises(ValueError, match="outputs.proximal_topk_logp is None"):
    decoupled_ppo.loss(without, batch, Config(centering=True))


def test_a_sequences_weight_cannot_be_centered():
  with pytest.raises(ValueError, match="and token where centering is on"):
    Config(centering=True, behavior_weight_level="sequence")


@pytest.mark.parametrize(
  ("field", "value", "allowed"),
  [
    ("behavior_weight_level", "turn", "sequence"),
    ("top_k", -1, ">= 0"),
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
