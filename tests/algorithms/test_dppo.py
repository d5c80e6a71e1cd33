"""DPPO by hand."""

import math

import numpy as np
import pytest

from rl_tpu.algorithms import dppo


def slopes_of(build, gradient, pairs, advantages, config):
  """Gradients of tokens with these (target, behavior) probabilities."""
  target = [math.log(p) for p, _ in pairs]
  behavior = [math.log(q) for _, q in pairs]
  outputs, batch = build(target, behavior, advantages)
  return gradient(dppo, outputs, batch, config), dppo.loss(
    outputs, batch, config
  )


def test_a_rare_token_may_grow_a_hundredfold_a_common_one_may_not_lose_a_fifth(
  build, gradient
):
  pairs = [(1e-3, 1e-5), (0.79, 0.99), (0.9, 0.95)]
  slopes, (loss, metrics) = slopes_of(
    build, gradient, pairs, [1.0, -1.0, -1.0], dppo.Config()
  )
  np.testing.assert_allclose(slopes, [-100.0, 0.0, 0.9 / 0.95], rtol=1e-4)
  assert metrics["clip_fraction"].mean(empty=0.0) == pytest.approx(1 / 3)
  assert loss.count == 3


def test_a_step_back_to_the_behavior_policy_is_never_masked(build, gradient):
  pairs = [(0.2, 0.8), (0.8, 0.2)]
  slopes, _ = slopes_of(build, gradient, pairs, [1.0, -1.0], dppo.Config())
  np.testing.assert_allclose(slopes, [-0.25, 4.0], rtol=1e-5)


def test_the_divergence_of_two_bernoullis(build, gradient):
  """KL(behavior || target), which a lost likely token makes large."""
  p, q = 0.5, 0.9
  kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
  for threshold, expected in ((kl + 0.01, p / q), (kl - 0.01, 0.0)):
    config = dppo.Config(divergence="kl", threshold=threshold)
    slopes, (_, metrics) = slopes_of(build, gradient, [(p, q)], [-1.0], config)
    np.testing.assert_allclose(slopes, [expected], rtol=1e-5)
    divergence = metrics["divergence"].mean(empty=0.0)
    assert divergence == pytest.approx(kl, rel=1e-5)


def test_a_certain_token_has_a_finite_divergence(build, gradient):
  config = dppo.Config(divergence="kl")
  slopes, (_, metrics) = slopes_of(
    build, gradient, [(1.0, 1.0), (0.5, 1.0)], [-1.0, -1.0], config
  )
  np.testing.assert_allclose(slopes, [1.0, 0.0], rtol=1e-5)
  assert np.isfinite(metrics["divergence"].total)


@pytest.mark.parametrize(
  ("field", "value", "allowed"),
  [
    ("divergence", "js", "kl"),
    ("threshold", 0.0, "> 0 or None"),
    ("baseline", "batch", "group_mean"),
  ],
)
def test_the_config_names_field_value_and_what_is_allowed(
  field, value, allowed
):
  message = f"dppo.Config.{field} is {value!r}; it must be .*{allowed}"
  with pytest.raises(ValueError, match=message):
    dppo.Config(**{field: value})
