"""GSPO by hand and against the sequence form of its paper."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu.algorithms import gspo

WIDE = gspo.Config(clip_low=0.5, clip_high=1.0)


def means(metrics):
  return {name: float(m.mean(empty=0.0)) for name, m in metrics.items()}


def test_every_token_has_the_geometric_mean_of_its_trajectory(build, gradient):
  """Ratios 2 and 1/8: their geometric mean is one half."""
  behavior = [-1.0 - math.log(2), -1.0 - math.log(1 / 8)]
  outputs, batch = build([-1.0] * 2, behavior, [1.0, 1.0])
  config = gspo.Config(clip_low=0.6, clip_high=1.0)
  loss, metrics = gspo.loss(outputs, batch, config)
  assert loss.total == pytest.approx(-1.0, rel=1e-6)
  assert means(metrics)["ratio"] == pytest.approx(0.5 ** (2 / 2), rel=1e-6)
  slopes = gradient(gspo, outputs, batch, config)
  np.testing.assert_allclose(slopes, [-0.5, -0.5], rtol=1e-6)


def test_for_a_constant_advantage_it_is_the_papers_sequence_form(
  build, gradient
):
  generator = np.random.default_rng(0)
  behavior = -generator.uniform(0.1, 3.0, 20)
  target = behavior + generator.normal(0.0, 0.3, 20)
  outputs, batch = build(target.tolist(), behavior.tolist(), [-0.7] * 20)

  def sequence(target_logp):
    ratio = jnp.exp(jnp.mean((target_logp - batch.behavior_logp)[0, 1:]))
    return -20 * jnp.minimum(ratio * -0.7, jnp.clip(ratio, 0.5, 2.0) * -0.7)

  value, expected = jax.value_and_grad(sequence)(outputs.target_logp)
  loss, _ = gspo.loss(outputs, batch, WIDE)
  assert loss.total == pytest.approx(float(value), rel=1e-5)
  slopes = gradient(gspo, outputs, batch, WIDE)
  np.testing.assert_allclose(slopes, expected[0, 1:], rtol=1e-5)


def test_a_token_answers_for_its_own_advantage(build, gradient):
  """Ratios 2 and 1/8 again; the sequence form would share the advantages."""
  behavior = [-1.0 - math.log(2), -1.0 - math.log(1 / 8)]
  outputs, batch = build([-1.0] * 2, behavior, [1.0, 3.0])
  slopes = gradient(gspo, outputs, batch, gspo.Config(clip_low=0.6))
  np.testing.assert_allclose(slopes, [-0.5, -1.5], rtol=1e-5)


def test_the_band_takes_whole_trajectories_and_counts_them(build, gradient):
  behavior = [-1.0 - 0.01, -1.0 + 0.002]
  outputs, batch = build([-1.0] * 2, behavior, [1.0, 1.0])
  assert not gradient(gspo, outputs, batch, gspo.Config()).any()
  _, metrics = gspo.loss(outputs, batch, gspo.Config())
  assert means(metrics)["masked_trajectories"] == 1.0
  _, metrics = gspo.loss(outputs, batch, WIDE)
  assert means(metrics)["masked_trajectories"] == 0.0


def test_X07_three_hundred_ratios_of_seven_tenths_are_finite(build, gradient):
  behavior = [-1.0 - math.log(0.7)] * 300
  outputs, batch = build([-1.0] * 300, behavior, [1.0] * 300)
  loss, metrics = gspo.loss(outputs, batch, WIDE)
  assert means(metrics)["ratio"] == pytest.approx(0.7, rel=1e-4)
  assert loss.total == pytest.approx(-210.0, rel=1e-4)
  slopes = gradient(gspo, outputs, batch, WIDE)
  np.testing.assert_allclose(slopes, -0.7, rtol=1e-4)


@pytest.mark.parametrize(
  ("field", "value", "allowed"),
  [
    ("clip_low", 0.0, r"in \(0, 1\]"),
    ("clip_high", 0.0, "> 0"),
    ("baseline", "batch", "group_mean"),
  ],
)
def test_the_config_names_field_value_and_what_is_allowed(
  field, value, allowed
):
  message = f"gspo.Config.{field} is {value!r}; it must be .*{allowed}"
  with pytest.raises(ValueError, match=message):
    gspo.Config(**{field: value})
