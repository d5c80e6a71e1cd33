"""GRPO by hand."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu import algorithms
from rl_tpu.algorithms import grpo
from rl_tpu.types import PolicyOutputs


@pytest.fixture
def group(build):
  """Rows of one prompt and two actions; groups 0, 0, 0 and 1."""
  _, batch = build([-1.0, -1.0], [-1.0, -1.0], [0.0, 0.0])
  batch = batch.map_rows(lambda x: jnp.repeat(x, 4, axis=0))
  rewards = jnp.zeros((4, 3)).at[:, 2].set(jnp.array([1.0, 3.0, 8.0, 5.0]))
  return dataclasses.replace(
    batch,
    trajectory_ids=jnp.arange(4)[:, None] + jnp.zeros((1, 3), jnp.int32),
    rewards=rewards,
    group_ids=jnp.array([0, 0, 0, 1]),
    truncated=jnp.zeros(4, bool),
  )


@pytest.mark.parametrize(
  ("baseline", "expected"),
  [
    ("group", np.array([-3.0, -1.0, 4.0, 0.0]) / math.sqrt(13)),
    ("group_mean", [-3.0, -1.0, 4.0, 0.0]),
  ],
)
def test_outcomes_are_compared_within_their_group(group, baseline, expected):
  outputs = PolicyOutputs(target_logp=group.behavior_logp)
  config = grpo.Config(baseline=baseline)
  advantages = grpo.advantages(group, outputs, config)
  assert not advantages[:, 0].any()
  for column in (1, 2):
    np.testing.assert_allclose(advantages[:, column], expected, rtol=1e-6)


def test_the_ratio_is_clipped_around_the_behavior_policy(build, gradient):
  log2 = math.log(2.0)
  outputs, batch = build(
    [-1.0] * 4, [-1.0 - log2] * 2 + [-1.0] * 2, [1, -1] * 2
  )
  config = grpo.Config(clip_high=0.3)
  loss, metrics = grpo.loss(outputs, batch, config)
  # Ratios 2, 2, 1, 1: clipped to 1.3 only where that is worse.
  assert loss.total == pytest.approx(-1.3 + 2.0 - 1.0 + 1.0, rel=1e-6)
  assert metrics["clip_fraction"].mean(empty=0.0) == 0.25
  slopes = gradient(grpo, outputs, batch, config)
  np.testing.assert_allclose(slopes, [0.0, 2.0, -1.0, 1.0], rtol=1e-6)


def test_the_kl_term_pulls_towards_the_reference_only_if_asked(build, gradient):
  outputs, batch = build([-1.0, -1.0], [-1.0, -1.0], [0.0, 0.0])
  reference = jnp.array([[0.0, -0.5, -1.5]])
  outputs = dataclasses.replace(outputs, reference_logp=reference)
  config = grpo.Config(kl_coefficient=0.5)
  assert algorithms.requires(grpo, grpo.Config()) == frozenset()
  assert algorithms.requires(grpo, config) == {"reference_logp"}
  loss, metrics = grpo.loss(outputs, batch, config)
  kl = [math.exp(d) - 1 - d for d in (0.5, -0.5)]
  assert loss.total == pytest.approx(0.5 * sum(kl), rel=1e-5)
  estimate = metrics["target_reference_kl"].mean(empty=0.0)
  assert estimate == pytest.approx(sum(kl) / 2, rel=1e-5)
  slopes = gradient(grpo, outputs, batch, config)
  expected = [-0.5 * (math.exp(d) - 1) for d in (0.5, -0.5)]
  np.testing.assert_allclose(slopes, expected, rtol=1e-5)
  without = PolicyOutputs(target_logp=outputs.target_logp)
  with pytest.raises(ValueError, match=r"outputs\.reference_logp is None"):
    grpo.loss(without, batch, config)


@pytest.mark.parametrize(
  ("field", "value", "allowed"),
  [
    ("clip_low", 0.0, r"in \(0, 1\]"),
    ("clip_high", 0.0, "> 0"),
    ("baseline", "batch", "group_mean"),
    ("kl_coefficient", -1.0, ">= 0"),
    ("kl_estimator", "k0", "k3"),
  ],
)
def test_the_config_names_field_value_and_what_is_allowed(
  field, value, allowed
):
  message = f"grpo.Config.{field} is {value!r}; it must be .*{allowed}"
  with pytest.raises(ValueError, match=message):
    grpo.Config(**{field: value})
