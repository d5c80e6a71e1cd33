"""M2PO by hand and against a loop that drops one token at a time."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu.algorithms import m2po

# A group of two, outcomes 1 and 0: advantages +-1/2.
GROUP_MEAN = m2po.Config(baseline="group_mean")
EVERY = m2po.Config(baseline="group_mean", candidates="all")


def group(build, log_ratios):
  """Two rows with these proximal/behavior log ratios."""
  length = len(log_ratios[0])
  outputs, batch = build([-1.0] * length, [-1.0] * length, [0.0] * length)
  batch = batch.map_rows(lambda x: jnp.repeat(x, 2, axis=0))
  batch = dataclasses.replace(
    batch,
    trajectory_ids=jnp.array([[0], [1]]) + jnp.zeros((1, length + 1), int),
    rewards=jnp.zeros((2, length + 1)).at[0, -1].set(1.0),
    group_ids=jnp.zeros(2, jnp.int32),
    truncated=jnp.zeros(2, bool),
  )
  shift = jnp.pad(jnp.array(log_ratios), ((0, 0), (1, 0)))
  proximal = batch.behavior_logp + shift
  outputs = dataclasses.replace(
    outputs, target_logp=proximal, proximal_logp=proximal
  )
  return outputs, batch


def slow_outliers(squares, threshold):
  """Drops the largest until the mean is small enough."""
  kept = sorted(range(len(squares)), key=lambda i: squares[i])
  while kept and np.mean([squares[i] for i in kept]) > threshold:
    kept.pop()
  return [i not in kept for i in range(len(squares))]


def test_the_largest_leave_until_the_second_moment_is_small(build):
  log_ratios = np.random.default_rng(0).normal(0.0, 0.4, (2, 20))
  outputs, batch = group(build, log_ratios.tolist())
  advantages = np.asarray(m2po.advantages(batch, outputs, EVERY))[:, 1:]
  expected = slow_outliers((log_ratios**2).ravel().tolist(), 0.04)
  assert (advantages == 0).ravel().tolist() == expected
  assert 0 < sum(expected) < 40


def test_by_default_only_tokens_that_move_further_away_may_leave(build):
  """In row 0 (A > 0) ratios above 1, in row 1 (A < 0) those below."""
  outputs, batch = group(build, [[2.0, -2.0, 0.1], [2.0, -2.0, -0.1]])
  advantages = m2po.advantages(batch, outputs, GROUP_MEAN)
  left = (advantages[:, 1:] == 0).tolist()
  assert left == [[True, False, False], [False, True, False]]


def test_within_the_threshold_every_token_stays(build):
  outputs, batch = group(build, [[0.2, -0.2], [0.19, 0.1]])
  for config in (GROUP_MEAN, EVERY):
    assert m2po.advantages(batch, outputs, config)[:, 1:].all()


def test_equal_outliers_leave_together_wherever_they_lie(build):
  outputs, batch = group(build, [[0.5, 0.01], [0.01, 0.5]])
  advantages = m2po.advantages(batch, outputs, EVERY)
  assert (advantages[:, 1:] == 0).tolist() == [[True, False], [False, True]]


def test_what_leaves_counts_in_the_denominator_and_nothing_is_clipped(
  build, gradient
):
  outputs, batch = build([-1.0] * 3, [-1.0, -3.0, -1.0], [1.0, 1.0, 0.0])
  loss, metrics = m2po.loss(outputs, batch, m2po.Config())
  assert loss.count == 3
  slopes = gradient(m2po, outputs, batch, m2po.Config())
  np.testing.assert_allclose(slopes, [-1.0, -np.exp(2.0), 0.0], rtol=1e-6)
  assert metrics["second_moment"].mean(empty=0.0) == pytest.approx(4 / 3)
  assert metrics["second_moment_kept"].mean(empty=0.0) == pytest.approx(2.0)


@pytest.mark.parametrize(
  ("field", "value", "allowed"),
  [
    ("threshold", 0.0, "> 0"),
    ("candidates", "inward", "outward"),
    ("baseline", "batch", "group_mean"),
  ],
)
def test_the_config_names_field_value_and_what_is_allowed(
  field, value, allowed
):
  message = f"m2po.Config.{field} is {value!r}; it must be .*{allowed}"
  with pytest.raises(ValueError, match=message):
    m2po.Config(**{field: value})
