"""REINFORCE by hand."""

import numpy as np
import pytest

from rl_tpu.algorithms import reinforce


def test_the_loss_is_minus_advantage_times_logp(build, gradient):
  outputs, batch = build([-1.0, -3.0], [-1.0, -3.0], [2.0, -0.5])
  loss, _ = reinforce.loss(outputs, batch, reinforce.Config())
  assert (loss.total, loss.count) == (0.5, 2.0)
  slopes = gradient(reinforce, outputs, batch, reinforce.Config())
  assert slopes.tolist() == [-2.0, 0.5]


def test_stale_data_changes_the_metrics_but_not_the_loss(build, gradient):
  fresh = build([-1.0, -3.0], [-1.0, -3.0], [2.0, -0.5])
  stale = build([-1.0, -3.0], [-2.0, -3.5], [2.0, -0.5])
  config = reinforce.Config()
  loss, metrics = reinforce.loss(*stale, config)
  assert loss == reinforce.loss(*fresh, config)[0]
  np.testing.assert_array_equal(
    gradient(reinforce, *stale, config), gradient(reinforce, *fresh, config)
  )
  expected = (np.exp(1.0) + np.exp(0.5)) / 2
  assert metrics["ratio"].mean(empty=0.0) == pytest.approx(expected, rel=1e-6)


def test_the_baseline_is_one_of_those_without_a_deviation():
  with pytest.raises(ValueError, match=r"reinforce.Config.baseline is 'group'"):
    reinforce.Config(baseline="group")
