"""KL estimators by hand, by their gradients, and in expectation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu import ops

ON = jnp.ones((1, 1), bool)


def of(d, estimator, cap=10.0):
  """The estimate where log reference - log target = d."""
  target = jnp.full((1, 1), -2.0)
  return ops.target_reference_kl(target, target + d, ON, estimator, cap)[0, 0]


@pytest.mark.parametrize(
  ("estimator", "value", "slope"),
  [("k1", -0.5, -1.0), ("k2", 0.125, 0.5), ("k3", 0.148721, 0.648721)],
)
def test_X19_at_a_log_ratio_of_one_half(estimator, value, slope):
  assert of(0.5, estimator) == pytest.approx(value, abs=1e-6)
  assert jax.grad(of)(0.5, estimator) == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("estimator", ops.KL_ESTIMATORS)
@pytest.mark.parametrize("d", [100.0, -100.0])
def test_X19_beyond_the_cap_the_gradient_is_zero_and_all_is_finite(
  estimator, d
):
  assert jnp.isfinite(of(d, estimator))
  assert jax.grad(of)(d, estimator) == 0.0


def test_in_expectation_k1_and_k3_are_the_divergence_to_the_reference():
  """And not the divergence from it: the direction is in the name."""
  target = jax.nn.log_softmax(jnp.array([1.0, -0.5, 0.3, 0.0]))
  reference = jax.nn.log_softmax(jnp.array([0.0, 0.4, -1.0, 0.9]))
  exact = float(jnp.sum(jnp.exp(target) * (target - reference)))
  inverse = float(jnp.sum(jnp.exp(reference) * (reference - target)))
  assert abs(exact - inverse) > 0.01
  mask = jnp.ones((1, 4), bool)
  for estimator in ("k1", "k3"):
    kl = ops.target_reference_kl(target[None], reference[None], mask, estimator)
    assert jnp.sum(jnp.exp(target) * kl) == pytest.approx(exact, rel=1e-5)
    kl = ops.behavior_reference_kl(
      target[None], reference[None], mask, estimator
    )
    assert jnp.sum(jnp.exp(target) * kl) == pytest.approx(exact, rel=1e-5)


def test_off_the_mask_neither_policy_is_read():
  mask = jnp.array([[True, False]])
  logp = jnp.array([[-1.0, jnp.nan]])

  def total(target):
    return ops.target_reference_kl(target, logp - 0.2, mask, "k3").sum()

  value, gradient = jax.value_and_grad(total)(logp)
  assert jnp.isfinite(value)
  assert np.isfinite(gradient).all() and gradient[0, 1] == 0.0


def test_X02_a_logp_that_the_engine_lacks_costs_nothing():
  behavior = jnp.array([[jnp.nan, -1.0]])
  reference = jnp.array([[-3.0, -1.5]])
  mask = jnp.ones((1, 2), bool)
  kl = ops.behavior_reference_kl(behavior, reference, mask, "k1")
  np.testing.assert_allclose(kl, [[0.0, 0.5]])


def test_an_unknown_estimator_is_told_the_known_ones():
  with pytest.raises(ValueError, match=r"'k4'.*k3"):
    of(0.0, "k4")
