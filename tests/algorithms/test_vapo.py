"""VAPO by hand."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu.algorithms import vapo


def with_critic(build, values, outcome):
  """Actions at the behavior policy; the outcome lies on the last."""
  length = len(values)
  outputs, batch = build([-1.0] * length, [-1.0] * length, [1.0] * length)
  rewards = jnp.zeros((1, length + 1)).at[0, -1].set(outcome)
  outputs = dataclasses.replace(outputs, values=jnp.array([[9.0, *values]]))
  return outputs, dataclasses.replace(batch, rewards=rewards)


def test_lambda_leaves_early_tokens_of_a_short_answer_to_the_critic(build):
  """Below 20 action tokens lambda is 0: one TD error."""
  outputs, batch = with_critic(build, [0.3, 0.5, 0.2], 1.0)
  advantages = vapo.advantages(batch, outputs, vapo.Config())
  np.testing.assert_allclose(advantages, [[0.0, 0.2, -0.3, 0.8]], rtol=1e-5)


def test_lambda_grows_with_length(build):
  """40 tokens: lambda = 1 - 1 / (0.05 * 40) = 1/2."""
  outputs, batch = with_critic(build, [0.0] * 40, 1.0)
  advantages = vapo.advantages(batch, outputs, vapo.Config())
  expected = 0.5 ** np.arange(40)[::-1]
  np.testing.assert_allclose(advantages[0, 1:], expected, rtol=1e-5)


def test_the_critic_learns_the_return_and_its_clip_is_pessimistic(build):
  outputs, batch = with_critic(build, [0.3, 0.5], 1.0)
  returns = vapo.returns(batch, outputs, vapo.Config())
  assert returns.tolist() == [[0.0, 1.0, 1.0]]
  batch = dataclasses.replace(batch, returns=returns, values=jnp.zeros((1, 3)))
  loss, _ = vapo.value_loss(outputs, batch, vapo.Config())
  assert loss.total == pytest.approx(0.7**2 + 0.5**2, rel=1e-5)
  loss, metrics = vapo.value_loss(outputs, batch, vapo.Config(value_clip=0.4))
  assert loss.total == pytest.approx(0.7**2 + 0.6**2, rel=1e-5)
  assert metrics["value_clip_fraction"].mean(empty=0.0) == 0.5


def test_the_clip_is_asymmetric(build, gradient):
  behavior = [-1.0 - math.log(r) for r in (1.25, 1.3, 0.75)]
  outputs, batch = build([-1.0] * 3, behavior, [1.0, 1.0, -1.0])
  slopes = gradient(vapo, outputs, batch, vapo.Config())
  np.testing.assert_allclose(slopes, [-1.25, 0.0, 0.0], rtol=1e-5)


@pytest.mark.parametrize(("outcome", "pull"), [(1.0, -0.1), (-1.0, 0.0)])
def test_what_was_rewarded_is_imitated_at_any_ratio(
  build, gradient, outcome, pull
):
  """Beyond the clip, only the imitation is left."""
  outputs, batch = build([-1.0, -1.0], [-3.0, -3.0], [1.0, 1.0])
  rewards = jnp.array([[0.0, 0.0, outcome]])
  batch = dataclasses.replace(batch, rewards=rewards)
  config = vapo.Config()  # The paper imitates with 0.1.
  slopes = gradient(vapo, outputs, batch, config)
  np.testing.assert_allclose(slopes, [pull, pull], atol=1e-7)
  _, metrics = vapo.loss(outputs, batch, config)
  assert metrics["rewarded_nll"].count == (2.0 if outcome > 0 else 0.0)
  without = vapo.Config(nll_coefficient=0.0)
  assert not gradient(vapo, outputs, batch, without).any()


@pytest.mark.parametrize(
  ("field", "value", "allowed"),
  [
    ("clip_low", 0.0, r"in \(0, 1\]"),
    ("clip_high", 0.0, "> 0"),
    ("nll_coefficient", -0.1, ">= 0"),
    ("gamma", 0.0, r"in \(0, 1\]"),
    ("lambda_alpha", 0.0, "> 0"),
    ("lambda_critic", -0.1, r"in \[0, 1\]"),
    ("critic_updates", 0, ">= 1"),
    ("freeze", "all", "attention"),
    ("values", "mid", "post"),
    ("value_clip", 0.0, "> 0 or None"),
  ],
)
def test_the_config_names_field_value_and_what_is_allowed(
  field, value, allowed
):
  message = f"vapo.Config.{field} is {value!r}; it must be .*{allowed}"
  with pytest.raises(ValueError, match=message):
    vapo.Config(**{field: value})
