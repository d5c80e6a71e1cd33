"""Score centering: the golden cells, the drift it removes, its baselines."""

import dataclasses
import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu import algorithms
from rl_tpu.algorithms import reinforce, score_centering

Config = score_centering.Config
GOLDEN = json.loads(
  pathlib.Path(__file__)
  .parents[1]
  .joinpath("golden/score_centering.json")
  .read_text()
)
CORRECTIONS = {
  "none": {"correction": "none"},
  "is": {"correction": "is"},
  "tis_C2": {"correction": "truncate"},
  "tis_0.5_2": {"correction": "truncate", "low": 0.5, "high": 2.0},
  "icepop_mis_0.5_5": {"correction": "mask"},
  "icepop_gate_0.4_2": {"correction": "mask_unit", "low": 0.4, "high": 2.0},
  "ppo_0.8_1.2": {"correction": "ppo"},
}
KINDS = {
  "uncentered": {"centering": False},
  "sc_exact": {"top_k": 0},
  "sc_top2": {"top_k": 2},
}
# The authors' three tokens: target logits, what the sampler adds to them.
TARGET, OFFSET = np.array([0.5, -0.2, 1.1]), np.array([0.1, 0.3, -0.2])
AUTHORS = {
  "none": Config(),
  "truncate": Config(correction="truncate"),
  "mask": Config(correction="mask", low=0.8, high=1.1),
  "mask_unit": Config(correction="mask_unit", low=0.8, high=1.1),
  "ppo": Config(correction="ppo"),
  "dapo": Config(correction="dapo"),
}
BINDING = {
  "none": Config(),
  "is": Config(correction="is"),
  "truncate": Config(correction="truncate", high=1.1),
  "truncate_both": Config(correction="truncate", low=0.9, high=1.1),
  "mask": Config(correction="mask", low=0.9, high=1.1),
  "mask_unit": Config(correction="mask_unit", low=0.9, high=1.1),
  "ppo": Config(correction="ppo", low=0.9, dual_clip=1.2),
  "dapo": Config(correction="dapo", low=0.9, high=1.25, dual_clip=1.2),
}
# No ratio there reaches what these take away.
WITHOUT_DRIFT = {("truncate", 1.0), ("truncate", -1.0), ("dapo", 1.0)}


@pytest.fixture
def double_precision():
  with jax.enable_x64(True):
    yield


def means(metrics):
  return {name: float(m.mean(empty=0.0)) for name, m in metrics.items()}


def head_of(kind):
  size = len(GOLDEN["inputs"]["p"])
  return GOLDEN["topk"]["head"] if kind == "sc_top2" else list(range(size))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_golden_cell(correction, kind, logit_gradient, double_precision):
  """Per token: the loss and its gradient by the logits, in f64."""
  config = Config(**CORRECTIONS[correction], **KINDS[kind])
  inputs, head = GOLDEN["inputs"], head_of(kind)
  target, behavior = inputs["policy_logits"], inputs["sampler_logits"]
  for size in (1.5, -1.5):
    advantages = size * jnp.eye(len(target))
    losses, slopes = jax.vmap(
      lambda advantage: logit_gradient(
        score_centering, config, target, behavior, advantage, head
      )
    )(advantages)
    for token in (0, 1, 4):
      name = f"A={size:+}|y={token}|{correction}|{kind}"
      cell = GOLDEN["grads"][name]
      np.testing.assert_allclose(losses[token], cell["loss"], atol=1e-8)
      np.testing.assert_allclose(slopes[token], cell["grad"], atol=1e-8)


def test_no_golden_cell_is_left_out():
  assert len(GOLDEN["grads"]) == 2 * 3 * len(CORRECTIONS) * len(KINDS)
  expected = GOLDEN["expected_grad_constant_advantage"]
  assert len(expected) == 2 * len(CORRECTIONS) * len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_golden_gradients_expected_of_a_constant_advantage(
  correction, kind, logit_gradient, double_precision
):
  config = Config(**CORRECTIONS[correction], **KINDS[kind])
  inputs = GOLDEN["inputs"]
  target, behavior = (
    inputs["policy_logits"],
    jnp.array(inputs["sampler_logits"]),
  )
  for sign in ("+1.5", "-1.5"):
    expected = GOLDEN["expected_grad_constant_advantage"]
    advantages = float(sign) * jax.nn.softmax(behavior)
    _, slopes = logit_gradient(
      score_centering, config, target, behavior, advantages, head_of(kind)
    )
    expected = expected[f"A={sign}|{correction}|{kind}"]
    np.testing.assert_allclose(slopes, expected, atol=1e-8)


def test_what_is_left_is_the_covariance_of_reward_and_score(
  logit_gradient, double_precision
):
  """The golden split of the vanilla ascent into drift and signal."""
  inputs, golden = GOLDEN["inputs"], GOLDEN["covariance_identity"]
  target, behavior = (
    inputs["policy_logits"],
    jnp.array(inputs["sampler_logits"]),
  )
  q, reward = jax.nn.softmax(behavior), jnp.array(golden["reward"])
  ascent = {}
  for kind in ("uncentered", "sc_exact"):
    config = Config(**KINDS[kind])
    _, slopes = logit_gradient(
      score_centering, config, target, behavior, q * reward, head_of(kind)
    )
    ascent[kind] = -slopes
  close = functools.partial(np.testing.assert_allclose, atol=1e-8)
  close(q @ reward, golden["E_q[R]"])
  close(ascent["uncentered"], golden["vanilla_ascent"])
  close(ascent["sc_exact"], golden["signal"])
  close(ascent["sc_exact"], golden["sc_ascent_equals_signal = q*(R-E_q R)"])
  close(ascent["uncentered"] - ascent["sc_exact"], golden["drift"])
  score = np.array(golden["drift"]) / golden["E_q[R]"]
  close(score, GOLDEN["drift"]["expected_score_wrt_logits = q - p"])
  config = Config(correction="is", centering=False)
  _, slopes = logit_gradient(
    score_centering, config, target, behavior, q * reward, head_of("")
  )
  close(-slopes, golden["on_policy_ascent = p*(R-E_p R)"])


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("correction", AUTHORS)
def test_a_constant_advantage_moves_nothing_in_expectation(
  correction, top_k, advantage, logit_gradient
):
  """The authors' case; a tail of one token is exact as well."""
  behavior = TARGET + OFFSET
  advantages = advantage * jax.nn.softmax(behavior)
  config = dataclasses.replace(AUTHORS[correction], top_k=top_k)
  head = [2, 0] if top_k else [0, 1, 2]
  rest = TARGET, behavior, advantages, head
  _, slopes = logit_gradient(score_centering, config, *rest)
  assert np.abs(slopes).max() < 1e-6
  without = dataclasses.replace(config, centering=False)
  _, slopes = logit_gradient(score_centering, without, *rest)
  drifts = (correction, advantage) not in WITHOUT_DRIFT
  assert (np.abs(slopes).max() > 1e-3) == drifts


def test_importance_sampling_has_no_drift_with_or_without_centering(
  logit_gradient,
):
  behavior = TARGET + OFFSET
  rest = TARGET, behavior, jax.nn.softmax(behavior), [2, 0]
  single = TARGET, behavior, jnp.array([0.0, 1.0, 0.0]), [2, 0]
  slopes = {}
  for centering in (True, False):
    config = Config(correction="is", centering=centering)
    assert (
      np.abs(logit_gradient(score_centering, config, *rest)[1]).max() < 1e-6
    )
    slopes[centering] = logit_gradient(score_centering, config, *single)[1]
  np.testing.assert_allclose(slopes[True], slopes[False], atol=1e-7)


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("correction", BINDING)
def test_a_head_of_two_is_the_vocabulary_of_the_tail_it_stands_for(
  correction, advantage, logit_gradient, double_precision
):
  """The authors' five tokens: each one taken, in the head or outside of it."""
  target = np.array([0.7, -0.4, 1.2, 0.1, -1.0])
  behavior = jax.nn.log_softmax(target + np.array([-0.3, 0.5, 0.1, -0.2, 0.4]))
  head = np.array([2, 0])
  p, q = jax.nn.softmax(target), jnp.exp(behavior)
  tail = jnp.log(p * (1 - q[head].sum()) / (1 - p[head].sum()))
  full = tail.at[head].set(behavior[head])

  def slopes(config, sampled, slots):
    return jax.vmap(
      lambda advantages: logit_gradient(
        score_centering, config, target, sampled, advantages, slots
      )[1]
    )(advantage * jnp.eye(5))

  def term(top_k, sampled, slots):
    """The weight of the token taken is its own in both."""
    taken = dataclasses.replace(BINDING[correction], centering=False)
    centered = dataclasses.replace(BINDING[correction], top_k=top_k)
    both = (slopes(config, sampled, slots) for config in (centered, taken))
    return next(both) - next(both)

  short = term(2, behavior, head)
  np.testing.assert_allclose(short, term(0, full, range(5)), atol=1e-6)
  assert np.any(np.abs(short) > 1e-3) == (correction != "is")


@pytest.mark.parametrize("correction", AUTHORS)
def test_where_the_policies_agree_it_is_reinforce(correction, logit_gradient):
  rest = TARGET, jnp.array(TARGET), jnp.array([0.3, -1.0, 2.0]), [2, 0]
  _, slopes = logit_gradient(score_centering, AUTHORS[correction], *rest)
  _, expected = logit_gradient(reinforce, reinforce.Config(), *rest)
  np.testing.assert_allclose(slopes, expected, atol=1e-6)


def test_a_rejected_token_still_counts_and_still_centers(logit_gradient):
  """Weight 0 where p / q = 6: what is left of the token is the term."""
  target, behavior = np.log([0.6, 0.4]), jnp.log(jnp.array([0.1, 0.9]))
  config = Config(correction="mask", top_k=0)
  advantages = jnp.array([2.0, 0.0])
  rest = target, behavior, advantages, [0, 1]
  loss, slopes = logit_gradient(score_centering, config, *rest)
  # Neither ratio, 6 and 0.44, is in [0.5, 5].
  assert loss == 0.0 and not np.any(slopes)
  config = Config(correction="mask", low=0.4, top_k=0)
  _, slopes = logit_gradient(score_centering, config, *rest)
  # The term is p_1 log p_1 alone: A (0.4 - 0.4 p) at token 1.
  expected = 2.0 * 0.4 * np.array([-0.6, 0.6])
  np.testing.assert_allclose(slopes, expected, rtol=1e-5)


def test_the_metrics_say_how_far_the_head_reaches(one_prefix):
  target, behavior = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.6, 0.2, 0.2]]))
  outputs, batch = one_prefix(target, behavior, jnp.ones(3), [0, 1])
  loss, metrics = score_centering.loss(outputs, batch, Config())
  metrics = means(metrics)
  assert loss.count == 3
  assert metrics["head_mass"] == pytest.approx(0.8, rel=1e-5)
  assert metrics["target_head_mass"] == pytest.approx(0.75)
  assert metrics["tail_ratio"] == pytest.approx(0.8, rel=1e-5)
  # c = q - rho p = [0.2, 0]; its logit gradient is 0.2 (e_0 - p).
  assert metrics["centering_coefficients"] == pytest.approx(0.2, rel=1e-5)
  assert metrics["centering_gradient"] == pytest.approx(0.2, rel=1e-5)
  assert metrics["score_gradient"] == pytest.approx(2 * (0.5 + 0.75 * 2) / 3)
  kl = 0.6 * math.log(1.2) + 0.4 * math.log(0.8)
  assert metrics["head_kl"] == pytest.approx(kl, abs=1e-6)


def test_the_metrics_say_what_the_correction_did(one_prefix):
  """Ratios 6 and twice 0.44; a band from 0.4 to 5 masks the first."""
  target, behavior = jnp.log(jnp.array([[0.6, 0.2, 0.2], [0.1, 0.45, 0.45]]))
  outputs, batch = one_prefix(target, behavior, jnp.ones(3), [0, 1])
  config = Config(correction="mask", low=0.4)
  metrics = means(score_centering.loss(outputs, batch, config)[1])
  assert metrics["weight_masked"] == pytest.approx(1 / 3)
  assert metrics["weight"] == pytest.approx(2 * 4 / 9 / 3, rel=1e-5)
  assert metrics["ratio"] == pytest.approx((6 + 2 * 4 / 9) / 3, rel=1e-5)


def distance(p, q):
  """KL(p || q) over the last axis."""
  return jnp.sum(p * (jnp.log(p) - jnp.log(q)), axis=-1)


def follow_a_constant_reward(one_prefix, config, reward, online):
  """400 steps of the expected gradient over 8 tokens, for 5 seeds."""
  generator = np.random.default_rng(0)
  start, offset = 0.5 * generator.normal(size=(2, 5, 8))

  def total(logits, behavior):
    advantages = reward * jax.nn.softmax(behavior)
    outputs, batch = one_prefix(logits, behavior, advantages, range(8))
    return score_centering.loss(outputs, batch, config)[0].total

  def run(start, offset):
    def step(logits, _):
      behavior = (logits if online else start) + offset
      return logits - 0.5 * jax.grad(total)(logits, behavior), None

    return jax.lax.scan(step, start, length=400)[0]

  end = jax.jit(jax.vmap(run))(start, offset)
  p, first = jax.nn.softmax(end), jax.nn.softmax(start)
  return {
    "moved": float(distance(first, p).mean()),
    "entropy": float(-(p * jnp.log(p)).sum(-1).mean()),
    "largest_logit": float(jnp.abs(end).max(-1).mean()),
    "mismatch": float(distance(jax.nn.softmax(start + offset), p).mean()),
  }


@pytest.mark.parametrize("reward", [-1.0, 1.0])
@pytest.mark.parametrize("correction", ["none", "truncate", "mask"])
def test_a_constant_reward_moves_the_plain_gradient_and_not_the_centered(
  correction, reward, one_prefix, double_precision
):
  """The paper's toy while the sampler follows: a collapse, and none."""
  config = Config(correction=correction, top_k=0)
  centered = follow_a_constant_reward(one_prefix, config, reward, online=True)
  assert centered["moved"] < 1e-12
  config = dataclasses.replace(config, centering=False)
  plain = follow_a_constant_reward(one_prefix, config, reward, online=True)
  assert plain["moved"] > (1.0 if correction == "none" else 0.01)
  if correction == "none":
    assert plain["entropy"] < 0.3 * centered["entropy"]


def test_a_fixed_sampler_is_distilled_or_fled(one_prefix, double_precision):
  """Offline the plain drift is benign for a reward of 1, endless for -1."""
  run = functools.partial(follow_a_constant_reward, one_prefix, online=False)
  plain = Config(centering=False)
  assert run(plain, 1.0)["mismatch"] < 1e-4
  assert run(plain, -1.0)["largest_logit"] > 50.0
  assert run(Config(top_k=0), -1.0)["moved"] < 1e-12


def test_only_centering_asks_for_a_head(one_prefix):
  requires = functools.partial(algorithms.requires, score_centering)
  assert requires(Config()) == {"target_topk_logp"}
  assert requires(Config(centering=False)) == frozenset()
  outputs, batch = one_prefix(TARGET, TARGET + OFFSET, jnp.ones(3), [0, 1])
  bare = dataclasses.replace(batch, behavior_topk_ids=None)
  with pytest.raises(ValueError, match=r"batch\.behavior_topk_ids is None"):
    score_centering.loss(outputs, bare, Config())
  bare = dataclasses.replace(outputs, target_topk_logp=None)
  with pytest.raises(ValueError, match=r"outputs\.target_topk_logp is None"):
    score_centering.loss(bare, batch, Config())


def test_the_bands_are_the_papers_unless_said():
  assert Config(correction="truncate").band == (0.0, 2.0)
  assert Config(correction="mask").band == (0.5, 5.0)
  assert Config(correction="ppo").band == (0.8, 1.2)
  assert Config(correction="dapo").band == (0.8, 1.28)
  assert Config(correction="mask", high=3.0).band == (0.5, 3.0)
  assert Config().dual_clip == 3.0 and Config().top_k == 128


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"correction": "tv"}, r"correction is 'tv'.*DPPO.*have no centering"),
    ({"low": 0.5}, "low is 0.5; it must be None, for this"),
    ({"correction": "is", "high": 2.0}, "high is 2.0; it must be None, for"),
    ({"correction": "mask", "low": 1.1}, r"low is 1.1; .* in \[0, 1\]"),
    ({"correction": "mask", "high": 0.9}, "high is 0.9; .* >= 1"),
    ({"dual_clip": 1.0}, "dual_clip is 1.0; .* > 1 or None"),
    ({"top_k": -1}, "top_k is -1; .* >= 0"),
    ({"baseline": "critic"}, "baseline is 'critic'; .*group_mean"),
  ],
)
def test_the_config_names_field_value_and_what_is_allowed(fields, message):
  with pytest.raises(ValueError, match=f"score_centering.Config.{message}"):
    Config(**fields)
