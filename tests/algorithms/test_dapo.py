"""DAPO by hand: clip-higher, length, truncation, dynamic sampling."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu.algorithms import dapo
from rl_tpu.types import Group, Prompt, Trajectory


def test_the_upper_clip_is_wider_than_the_lower(build, gradient):
  ratios = [1.25, 1.3, 0.79, 0.81]
  behavior = [-1.0 - math.log(r) for r in ratios]
  outputs, batch = build([-1.0] * 4, behavior, [1.0, 1.0, -1.0, -1.0])
  slopes = gradient(dapo, outputs, batch, dapo.Config())
  np.testing.assert_allclose(slopes, [-1.25, 0.0, 0.0, 0.81], rtol=1e-5)
  _, metrics = dapo.loss(outputs, batch, dapo.Config())
  assert metrics["clip_fraction"].mean(empty=0.0) == 0.5


@pytest.fixture
def lengths(build):
  """One group; answers of 2, 4, 6 and 8 action tokens, all rewarded 1."""
  outputs, batch = build([-1.0] * 8, [-1.0] * 8, [0.0] * 8)
  batch = batch.map_rows(lambda x: jnp.repeat(x, 4, axis=0))
  places = jnp.arange(9)[None]
  length = jnp.array([2, 4, 6, 8])[:, None]
  inside = places <= length
  batch = dataclasses.replace(
    batch,
    trajectory_ids=jnp.where(inside, jnp.arange(4)[:, None], -1),
    action_mask=inside & (places > 0),
    rewards=jnp.where(places == length, 1.0, 0.0),
    group_ids=jnp.zeros(4, jnp.int32),
    truncated=jnp.array([False, False, False, True]),
  )
  return dataclasses.replace(outputs, target_logp=batch.behavior_logp), batch


def test_the_penalty_grows_over_the_margin_to_one_at_the_limit(lengths):
  outputs, batch = lengths
  config = dapo.Config(length_limit=7, length_margin=4)
  advantages = dapo.advantages(batch, outputs, config)
  outcomes = np.array([1.0, 1.0 - 1 / 4, 1.0 - 3 / 4, 0.0])
  expected = (outcomes - outcomes.mean()) / outcomes.std(ddof=1)
  np.testing.assert_allclose(advantages[:, 1], expected, rtol=1e-5)
  plain = dapo.advantages(batch, outputs, dapo.Config())
  assert not plain.any()


def test_what_the_budget_cut_may_teach_nothing(lengths):
  outputs, batch = lengths
  config = dapo.Config(length_limit=7, length_margin=4, truncated="mask")
  advantages = dapo.advantages(batch, outputs, config)
  assert not advantages[3].any()
  assert advantages[2, 1] != 0.0


def group_of(*outcomes):
  trajectories = tuple(
    Trajectory(
      prompt_id=0,
      group_id=0,
      member=member,
      tokens=np.zeros(2, np.int32),
      action_mask=np.array([False, True]),
      behavior_logp=np.zeros(2, np.float32),
      token_version=np.array([-1, 0], np.int32),
      rewards=np.array([0.0, outcome], np.float32),
    )
    for member, outcome in enumerate(outcomes)
  )
  prompt = Prompt(index=0, tokens=np.zeros(1, np.int32))
  return Group(prompt=prompt, trajectories=trajectories)


@pytest.mark.parametrize(
  ("outcomes", "kept"),
  [
    ((1.0, 1.0), False),
    ((0.0, 0.0), False),
    ((0.0, 1.0), True),
    ((1.0,), False),
  ],
)
def test_dynamic_sampling_keeps_groups_whose_outcomes_differ(outcomes, kept):
  assert dapo.keep(group_of(*outcomes)) is kept


@pytest.mark.parametrize(
  ("field", "value", "allowed"),
  [
    ("clip_low", 0.0, r"in \(0, 1\]"),
    ("clip_high", 0.0, "> 0"),
    ("length_limit", 100, ">= length_margin = 4096"),
    ("length_margin", 0, ">= 1"),
    ("truncated", "drop", "mask"),
  ],
)
def test_the_config_names_field_value_and_what_is_allowed(
  field, value, allowed
):
  message = f"dapo.Config.{field} is {value!r}; it must be .*{allowed}"
  with pytest.raises(ValueError, match=message):
    dapo.Config(**{field: value})
