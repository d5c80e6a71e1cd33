"""RLOO by hand."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu import algorithms
from rl_tpu.algorithms import reinforce, rloo


@pytest.fixture
def group(build):
  """Rows of one prompt and two actions; groups 0, 0, 0 and 1."""
  outputs, batch = build([-1.0, -1.0], [-1.0, -2.0], [0.0, 0.0])
  repeat = lambda x: jnp.repeat(x, 4, axis=0)  # noqa: E731
  batch = batch.map_rows(repeat)
  batch = dataclasses.replace(
    batch,
    trajectory_ids=jnp.arange(4)[:, None] + jnp.zeros((1, 3), jnp.int32),
    rewards=jnp.zeros((4, 3)).at[:, 2].set(jnp.array([1.0, 3.0, 8.0, 5.0])),
    group_ids=jnp.array([0, 0, 0, 1]),
    truncated=jnp.zeros(4, bool),
  )
  return dataclasses.replace(outputs, target_logp=batch.behavior_logp), batch


def test_an_outcome_is_compared_with_the_others_and_a_lone_one_teaches_nothing(
  group,
):
  outputs, batch = group
  advantages = rloo.advantages(batch, outputs, rloo.Config())
  expected = [1.0 - 5.5, 3.0 - 4.5, 8.0 - 2.0, 0.0]
  for column in (1, 2):
    np.testing.assert_allclose(advantages[:, column], expected, rtol=1e-6)


def test_without_a_penalty_it_is_reinforce_with_that_baseline(group):
  outputs, batch = group
  config = reinforce.Config(baseline="leave_one_out")
  expected = reinforce.advantages(batch, outputs, config)
  batch = dataclasses.replace(batch, advantages=expected)
  actual = rloo.advantages(batch, outputs, rloo.Config())
  np.testing.assert_array_equal(actual, expected)
  assert rloo.loss(outputs, batch, rloo.Config()) == reinforce.loss(
    outputs, batch, config
  )


def test_the_penalty_is_paid_out_of_the_reward_under_the_behavior_policy(group):
  """Member 0 is 0.5 + 0.25 nats surer of its tokens than the reference."""
  outputs, batch = group
  reference = batch.behavior_logp - jnp.zeros((4, 3)).at[0, 1:].set(
    jnp.array([0.5, 0.25])
  )
  config = rloo.Config(kl_coefficient=2.0)
  assert algorithms.requires(rloo, config) == {"reference_logp"}
  outputs = dataclasses.replace(
    outputs, reference_logp=reference, target_logp=reference - 7.0
  )
  advantages = rloo.advantages(batch, outputs, config)
  first = 1.0 - 2.0 * 0.75
  expected = [first - 5.5, 3.0 - (first + 8.0) / 2, 8.0 - (first + 3.0) / 2, 0]
  np.testing.assert_allclose(advantages[:, 1], expected, rtol=1e-6)
  unknown = batch.behavior_logp.at[0, 1].set(math.nan)
  batch = dataclasses.replace(batch, behavior_logp=unknown)
  advantages = rloo.advantages(batch, outputs, config)
  assert advantages[0, 1] == pytest.approx(1.0 - 2.0 * 0.25 - 5.5)


def test_a_penalty_needs_a_reference(group):
  outputs, batch = group
  with pytest.raises(ValueError, match=r"outputs\.reference_logp is None"):
    rloo.advantages(batch, outputs, rloo.Config(kl_coefficient=1.0))


@pytest.mark.parametrize(
  ("field", "value", "allowed"),
  [("kl_coefficient", -0.1, ">= 0"), ("kl_estimator", "k4", "k3")],
)
def test_the_config_names_field_value_and_what_is_allowed(
  field, value, allowed
):
  message = f"rloo.Config.{field} is {value!r}; it must be .*{allowed}"
  with pytest.raises(ValueError, match=message):
    rloo.Config(**{field: value})
