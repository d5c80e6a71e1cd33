"""CISPO by hand."""

import math

import numpy as np
import pytest

from rl_tpu.algorithms import cispo


def test_a_clipped_weight_still_teaches(build, gradient):
  """Where PPO's clip would leave no gradient, the weight is the bound."""
  ratios = [0.1, 0.9, 1.1, 8.0]
  behavior = [-1.0 - math.log(r) for r in ratios]
  outputs, batch = build([-1.0] * 4, behavior, [1.0] * 4)
  config = cispo.Config(clip_low=0.2, clip_high=0.3)
  slopes = gradient(cispo, outputs, batch, config)
  np.testing.assert_allclose(slopes, [-0.8, -0.9, -1.1, -1.3], rtol=1e-5)
  _, metrics = cispo.loss(outputs, batch, config)
  assert metrics["clip_fraction"].mean(empty=0.0) == 0.5
  assert metrics["weight"].mean(empty=0.0) == pytest.approx(4.1 / 4, rel=1e-5)


def test_by_default_there_is_no_lower_bound_and_the_upper_is_five(
  build, gradient
):
  behavior = [-1.0 - math.log(r) for r in (0.01, 8.0)]
  outputs, batch = build([-1.0] * 2, behavior, [-1.0, -1.0])
  slopes = gradient(cispo, outputs, batch, cispo.Config())
  np.testing.assert_allclose(slopes, [0.01, 5.0], rtol=1e-5)


@pytest.mark.parametrize(
  ("field", "value", "allowed"),
  [
    ("clip_low", 10.0, r"in \(0, 1\]"),
    ("clip_high", 0.0, "> 0"),
    ("baseline", "none", "group_mean"),
  ],
)
def test_the_config_names_field_value_and_what_is_allowed(
  field, value, allowed
):
  message = f"cispo.Config.{field} is {value!r}; it must be .*{allowed}"
  with pytest.raises(ValueError, match=message):
    cispo.Config(**{field: value})
