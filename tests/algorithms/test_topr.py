"""TOPR by hand."""

import math

import numpy as np
import pytest

from rl_tpu.algorithms import topr


def means(metrics):
  return {name: float(m.mean(empty=0.0)) for name, m in metrics.items()}


@pytest.mark.parametrize(
  ("ratios", "advantage", "weight"),
  [
    ([0.5, 0.5], -1.0, 0.25),
    ([0.5, 0.5], 1.0, 1.0),
    ([3.0, 2.0], -1.0, 1.0),
    ([4.0, 0.125], -1.0, 0.5),
  ],
)
def test_only_bad_trajectories_are_tapered_by_the_product_of_their_ratios(
  build, gradient, ratios, advantage, weight
):
  behavior = [-1.0 - math.log(r) for r in ratios]
  outputs, batch = build([-1.0] * 2, behavior, [advantage] * 2)
  slopes = gradient(topr, outputs, batch, topr.Config())
  np.testing.assert_allclose(slopes, [-advantage * weight] * 2, rtol=1e-5)


def test_X07_three_hundred_ratios_of_seven_tenths_are_finite_and_counted(
  build, gradient
):
  behavior = [-1.0 - math.log(0.7)] * 300
  outputs, batch = build([-1.0] * 300, behavior, [-1.0] * 300)
  loss, metrics = topr.loss(outputs, batch, topr.Config())
  assert np.isfinite(loss.total)
  slopes = gradient(topr, outputs, batch, topr.Config())
  assert np.isfinite(slopes).all() and slopes.max() < 1e-6
  assert means(metrics)["masked_trajectories"] == 1.0
  mean = topr.Config(weight="geometric_mean")
  slopes = gradient(topr, outputs, batch, mean)
  np.testing.assert_allclose(slopes, 0.7, rtol=1e-4)
  _, metrics = topr.loss(outputs, batch, mean)
  assert means(metrics)["masked_trajectories"] == 0.0


@pytest.mark.parametrize(
  ("field", "value", "allowed"),
  [("weight", "sum", "geometric_mean"), ("baseline", "group", "leave_one_out")],
)
def test_the_config_names_field_value_and_what_is_allowed(
  field, value, allowed
):
  message = f"topr.Config.{field} is {value!r}; it must be .*{allowed}"
  with pytest.raises(ValueError, match=message):
    topr.Config(**{field: value})
