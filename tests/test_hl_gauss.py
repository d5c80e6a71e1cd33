"""HL-Gauss: the histogram of a return, its mean, and the loss by it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gae import one_row

from rl_tpu import ops

SUPPORT = ops.Support(low=0.0, high=1.0, bins=51, sigma=0.75)
INSIDE = np.linspace(0.1, 0.9, 97)


def case(logits, returns, values=0.0):
  """(outputs, batch) of action tokens with these logits, after a prompt."""
  outputs, batch = one_row([values] * len(returns), returns, None)
  logits = jnp.concatenate([jnp.zeros_like(logits[:1]), logits])[None]
  return dataclasses.replace(outputs, value_logits=logits), batch


@pytest.mark.parametrize("sigma", [1e-3, 0.75, 51.0])
def test_the_mass_of_any_target_sums_to_one(sigma):
  support = dataclasses.replace(SUPPORT, sigma=sigma)
  targets = jnp.array([-1e6, -0.3, 0.0, 0.2, 0.5, 1 / 51, 1.0, 1.7, 1e6])
  mass = ops.gaussian_mass(targets, support)
  assert mass.shape == (9, 51)
  assert (mass >= 0).all()
  np.testing.assert_allclose(mass.sum(-1), 1.0, rtol=1e-6)


def test_the_mass_is_that_of_scipys_normal_distribution_far_into_the_tails():
  stats = pytest.importorskip("scipy.stats")
  scale = SUPPORT.sigma * SUPPORT.width
  targets = np.array([0.0, 0.03, 0.4, 0.5, 0.77, 1.0])[:, None]
  edges = np.linspace(0.0, 1.0, 52)
  below = stats.norm.cdf(edges, targets, scale)
  beyond = stats.norm.sf(edges, targets, scale)
  # Each half by the function that is small there.
  right = edges[:-1] >= targets
  expected = np.where(right, -np.diff(beyond), np.diff(below))
  expected /= below[:, -1:] - below[:, :1]
  mass = ops.gaussian_mass(jnp.asarray(targets[:, 0]), SUPPORT)
  known = expected > 1e-30
  assert expected[known].min() < 1e-25
  np.testing.assert_allclose(mass[known], expected[known], rtol=1e-3)
  np.testing.assert_allclose(mass, expected, atol=1e-5)


def test_the_mass_by_hand_of_two_bins():
  """Edges 0, 1, 2 and a target of 1/2, one deviation of 1/2 from the first."""
  support = ops.Support(low=0.0, high=2.0, bins=2, sigma=0.5)
  first = math.erf(1 / math.sqrt(2))
  second = (math.erf(3 / math.sqrt(2)) - first) / 2
  expected = np.array([first, second]) / (first + second)
  mass = ops.gaussian_mass(jnp.array(0.5), support)
  np.testing.assert_allclose(mass, expected, rtol=1e-5)


def test_the_mean_of_a_target_inside_is_the_target():
  mass = ops.gaussian_mass(jnp.asarray(INSIDE), SUPPORT)
  mean = ops.histogram_mean(jnp.log(mass), SUPPORT)
  np.testing.assert_allclose(mean, INSIDE, atol=1e-3 * SUPPORT.width)


@pytest.mark.parametrize(("target", "sign"), [(0.0, 1), (1.0, -1)])
def test_at_an_end_the_mass_is_mirrored_and_leans_inward(target, sign):
  mass = ops.gaussian_mass(jnp.array(target), SUPPORT)[::sign]
  whole = [math.erf(k / 0.75 / math.sqrt(2)) for k in range(4)]
  np.testing.assert_allclose(mass[:3], np.diff(whole), rtol=1e-4)
  mean = float(mass @ SUPPORT.centers[::sign])
  lean = (mean - target) * sign / SUPPORT.width
  assert lean == pytest.approx(0.69, abs=0.01)


@pytest.mark.parametrize(("target", "end"), [(-0.4, 0.0), (7.0, 1.0)])
def test_what_is_outside_is_learnt_as_the_end_and_counted(target, end):
  logits = jnp.zeros((2, 51)).at[:, 3].set(1.0)
  loss, metrics = ops.hl_gauss_loss(
    *case(logits, [target, end]), jnp.array([[False, True, True]]), SUPPORT
  )
  alone, _ = ops.hl_gauss_loss(
    *case(logits, [target, end]), jnp.array([[False, False, True]]), SUPPORT
  )
  assert loss.total == pytest.approx(2 * float(alone.total), rel=1e-6)
  assert metrics["return_clip_fraction"].mean(empty=0.0) == 0.5
  # What is reported is the return as it was.
  assert metrics["return"].total == pytest.approx(target + end)


def test_logits_of_nothing_stand_for_the_middle_and_cost_log_b():
  support = ops.Support(low=-1.0, high=3.0, bins=8, sigma=0.75)
  logits = jnp.zeros((3, 8))
  np.testing.assert_allclose(ops.histogram_mean(logits, support), 1.0)
  outputs, batch = case(logits, [-1.0, 0.5, 3.0])
  loss, _ = ops.hl_gauss_loss(outputs, batch, batch.action_mask, support)
  assert loss.count == 3
  assert loss.total == pytest.approx(3 * math.log(8), rel=1e-6)


def test_the_least_loss_is_the_entropy_of_the_target():
  mass = ops.gaussian_mass(jnp.array([0.3]), SUPPORT)
  outputs, batch = case(jnp.log(jnp.maximum(mass, 1e-37)), [0.3])
  least, _ = ops.hl_gauss_loss(outputs, batch, batch.action_mask, SUPPORT)
  some = np.asarray(mass[mass > 0], np.float64)
  assert least.total == pytest.approx(-np.sum(some * np.log(some)), rel=1e-4)
  near = dataclasses.replace(
    outputs, value_logits=outputs.value_logits.at[0, 1, 14].add(0.3)
  )
  more, _ = ops.hl_gauss_loss(near, batch, batch.action_mask, SUPPORT)
  assert more.total > least.total


def test_the_gradient_is_the_finite_difference():
  with jax.enable_x64(True):
    support = ops.Support(low=-1.0, high=1.0, bins=7, sigma=0.75)
    generator = np.random.default_rng(0)
    logits = jnp.asarray(generator.normal(0.0, 2.0, (3, 7)))
    mass = ops.gaussian_mass(jnp.array([-1.0, 0.2, 5.0]), support)

    def total(logits):
      outputs, batch = case(logits, [-1.0, 0.2, 5.0])
      mask = batch.action_mask
      return ops.hl_gauss_loss(outputs, batch, mask, support)[0].total

    gradient = jax.grad(total)(logits)
    assert gradient.dtype == jnp.float64
    steps = 1e-6 * jnp.eye(logits.size).reshape(-1, *logits.shape)
    moved = jax.jit(jax.vmap(lambda step: total(logits + step)))
    sides = [moved(steps), moved(-steps)]
    slopes = ((sides[0] - sides[1]) / 2e-6).reshape(logits.shape)
    np.testing.assert_allclose(gradient, slopes, atol=1e-8)
    expected = jax.nn.softmax(logits) - mass
    np.testing.assert_allclose(gradient, expected, atol=1e-12)


def test_the_worst_logits_cost_a_finite_loss_and_a_slope_below_one():
  logits = jnp.full((1, 51), -1e4).at[0, 0].set(1e4)
  outputs, batch = case(logits, [1.0])

  def total(logits):
    live = dataclasses.replace(outputs, value_logits=logits)
    loss, _ = ops.hl_gauss_loss(live, batch, batch.action_mask, SUPPORT)
    return loss.total

  loss, slopes = jax.value_and_grad(total)(outputs.value_logits)
  assert loss == pytest.approx(2e4, rel=1e-5)
  assert np.abs(slopes).max() == pytest.approx(1.0)


@pytest.mark.parametrize("missing", ["values", "value_logits", "returns"])
def test_it_says_what_it_lacks(missing):
  outputs, batch = case(jnp.zeros((1, 51)), [0.5])
  owner = "batch" if missing == "returns" else "outputs"
  if missing == "returns":
    batch = dataclasses.replace(batch, returns=None)
  else:
    outputs = dataclasses.replace(outputs, **{missing: None})
  with pytest.raises(ValueError, match=rf"{owner}\.{missing} is None"):
    ops.hl_gauss_loss(outputs, batch, batch.action_mask, SUPPORT)


def test_logits_of_other_bins_are_refused():
  outputs, batch = case(jnp.zeros((1, 5)), [0.5])
  with pytest.raises(ValueError, match=r"\(1, 2, 5\).*B = 51"):
    ops.hl_gauss_loss(outputs, batch, batch.action_mask, SUPPORT)
