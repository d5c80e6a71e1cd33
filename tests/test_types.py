"""The contracts refuse what would be misread later."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu.types import Batch, Estimate, Group, Prompt, Sampling, Trajectory

GOOD = {
  "prompt_id": 4,
  "group_id": 4,
  "member": 0,
  "tokens": np.array([9, 5, 6, 7, 2], np.int32),
  "action_mask": np.array([False, True, False, True, True]),
  "behavior_logp": np.array([0.0, -1.0, 0.0, -2.0, -3.0], np.float32),
  "token_version": np.array([-1, 3, -1, 2, 4], np.int32),
  "rewards": np.array([0.0, 0.5, 0.0, 0.0, 1.0], np.float32),
}


@pytest.mark.parametrize(
  ("field", "value", "allowed"),
  [
    ("temperature", -0.1, ">= 0"),
    ("max_tokens", 0, ">= 1"),
    ("top_k", -2, ">= -1"),
    ("top_p", 0.0, r"in \(0, 1\]"),
    ("top_p", 1.1, r"in \(0, 1\]"),
    ("min_p", 1.0, r"in \[0, 1\)"),
  ],
)
def test_sampling_names_field_value_and_what_is_allowed(field, value, allowed):
  with pytest.raises(
    ValueError, match=f"Sampling.{field} is {value}.*{allowed}"
  ):
    Sampling(**{field: value})


@pytest.mark.parametrize(
  ("fields", "filtered"),
  [
    ({}, False),
    ({"top_k": -1}, False),
    ({"temperature": 0.5}, False),
    ({"top_k": 5}, True),
    ({"top_p": 0.9}, True),
    ({"min_p": 0.1}, True),
  ],
)
def test_filters_other_than_temperature_shrink_the_support(fields, filtered):
  assert Sampling(**fields).filtered is filtered


def test_staleness_is_that_of_the_oldest_action_token():
  trajectory = Trajectory(**GOOD)
  assert trajectory.oldest_version == 2
  assert trajectory.staleness(version=5) == 3
  assert trajectory.outcome == 1.5
  assert len(trajectory) == 5
  fresh = Trajectory(**GOOD | {"token_version": np.full(5, 4)})
  prompt = Prompt(index=4, tokens=GOOD["tokens"][:1])
  group = Group(prompt=prompt, trajectories=(fresh, trajectory))
  assert group.staleness(version=5) == 3


@pytest.mark.parametrize(
  "field", ["action_mask", "behavior_logp", "token_version", "rewards"]
)
def test_a_trajectory_array_of_another_length_is_refused(field):
  short = {field: GOOD[field][:-1]}
  with pytest.raises(ValueError, match=rf"Trajectory.{field} has shape \(4,\)"):
    Trajectory(**GOOD | short)


@pytest.mark.parametrize(
  "mask",
  [[True, True, False, False, False], [False] * 5],
  ids=["the first token is an action", "no action"],
)
def test_a_trajectory_starts_with_its_prompt_and_holds_an_action(mask):
  with pytest.raises(ValueError, match="must start with False and hold an act"):
    Trajectory(**GOOD | {"action_mask": np.array(mask)})


def test_an_unknown_stop_reason_is_refused():
  with pytest.raises(ValueError, match=r"'eos'.*'stop', 'length'"):
    Trajectory(**GOOD | {"stop_reason": "eos"})


def test_H04_pooled_estimates_are_a_mean_of_tokens_not_of_means():
  first = Estimate(total=jnp.asarray(2.0), count=jnp.asarray(2.0))
  second = Estimate(total=jnp.asarray(24.0), count=jnp.asarray(6.0))
  assert (first + second).mean(empty=0.0) == 3.25


def test_an_empty_estimate_is_the_named_value_without_nan_gradients():
  none = jnp.asarray(0.0)

  def mean(total):
    return Estimate(total=total, count=none).mean(empty=-1.0)

  assert mean(none) == -1.0
  assert jax.grad(mean)(none) == 0.0


def test_map_rows_leaves_the_fields_of_trajectories_whole():
  rows = jnp.zeros((4, 3))
  batch = Batch(
    **{name: rows for name in Batch.ROW_FIELDS if name != "values"},
    truncated=jnp.zeros(7, bool),
    group_ids=jnp.zeros(7, int),
    version=jnp.asarray(2),
  )
  part = batch.map_rows(lambda x: x[:1])
  for name in Batch.ROW_FIELDS:
    if name != "values":
      assert getattr(part, name).shape == (1, 3)
  assert part.values is None
  assert part.truncated.shape == part.group_ids.shape == (7,)


def test_every_row_field_is_a_field_of_the_batch():
  fields = {field.name for field in dataclasses.fields(Batch)}
  assert fields - set(Batch.ROW_FIELDS) == {
    *("truncated", "group_ids", "version", "baselines"),
  }


def test_a_head_must_have_a_row_for_each_token():
  ids, logp = np.zeros((5, 2), np.int32), np.zeros((5, 2), np.float32)
  kept = Trajectory(**GOOD, behavior_topk_ids=ids, behavior_topk_logp=logp)
  assert kept.behavior_topk_ids is ids
  for bad in (
    {"behavior_topk_ids": ids},
    {"behavior_topk_ids": ids[:2], "behavior_topk_logp": logp[:2]},
    {"behavior_topk_ids": ids[:, 0], "behavior_topk_logp": logp[:, 0]},
  ):
    with pytest.raises(ValueError, match="behavior_topk_ids"):
      Trajectory(**GOOD, **bad)
