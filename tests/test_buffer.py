"""The buffer: order, waiting, staleness on consumption, endings."""

import dataclasses
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_tpu.buffer import Buffer, Closed
from rl_tpu.types import Group, Prompt, Trajectory


def trajectory(index, versions, member=0):
  """One prompt token, then one action per version; the outcome is 1."""
  n = len(versions)
  return Trajectory(
    prompt_id=index,
    group_id=index,
    member=member,
    tokens=np.arange(n + 1, dtype=np.int32),
    action_mask=np.array([False] + [True] * n),
    behavior_logp=np.array([0.0] + [-0.5] * n, np.float32),
    token_version=np.array([-1, *versions], np.int32),
    rewards=np.array([0.0] * n + [1.0], np.float32),
  )


def group(index, *members):
  """A group whose members were sampled by the given versions."""
  prompt = Prompt(index=index, tokens=np.zeros(1, np.int32))
  return Group(
    prompt=prompt,
    trajectories=tuple(
      trajectory(index, versions, member)
      for member, versions in enumerate(members)
    ),
  )


def indices(groups):
  return [g.prompt.index for g in groups]


def buffer(groups_per_batch=1, max_staleness=0, on_stale="refuse"):
  """A buffer that writes the indices it refuses to `refused`."""
  made = Buffer(
    groups_per_batch=groups_per_batch,
    max_staleness=max_staleness,
    on_stale=on_stale,
  )
  made.refused = []
  made.on_refused = lambda g: made.refused.append(g.prompt.index)
  return made


@given(st.permutations(range(6)))
def test_groups_leave_by_prompt_index_whatever_the_order_of_arrival(order):
  b = buffer(groups_per_batch=2)
  for index in order:
    b.put(group(index, [0]))
  taken = [indices(b.take(0, timeout=0)) for _ in range(3)]
  assert taken == [[0, 1], [2, 3], [4, 5]]
  assert len(b) == 0


def test_take_waits_for_a_full_batch_and_names_what_was_missing():
  b = buffer(groups_per_batch=2)
  b.put(group(0, [0]))
  with pytest.raises(TimeoutError, match="1 of 2 groups"):
    b.take(0, timeout=0)
  assert len(b) == 1


def test_a_put_from_another_thread_ends_the_wait():
  b = buffer(groups_per_batch=2)
  taken = []
  learner = threading.Thread(
    target=lambda: taken.extend(b.take(0)), daemon=True
  )
  learner.start()
  b.put(group(1, [0]))
  b.put(group(0, [0]))
  learner.join(60)
  assert indices(taken) == [0, 1]


@pytest.mark.parametrize(
  ("versions", "at", "limit", "fits"),
  [
    ([0, 0, 1, 1], 1, 1, True),  # one update on the way: lag exactly 1
    ([0, 0, 1, 1], 1, 0, False),
    ([0, 1, 2], 2, 1, False),  # lag 2
    ([1, 2], 2, 1, True),
  ],
)
def test_H07_one_update_is_lag_one_and_the_limit_is_strict(
  versions, at, limit, fits
):
  b = buffer(max_staleness=limit)
  b.put(group(0, versions))
  if fits:
    (taken,) = b.take(at, timeout=0)
    assert taken.staleness(at) == at - versions[0] <= limit
  else:
    with pytest.raises(TimeoutError):
      b.take(at, timeout=0)
    assert b.refused == [0]
    assert b.counts == {"groups_refused": 1}


def test_H07_a_stale_group_is_refused_at_the_moment_it_arrives():
  # The learner already waits at the version after the update.
  b = buffer(max_staleness=1)
  refused = threading.Event()
  b.on_refused = lambda g: refused.set()
  taken = []
  learner = threading.Thread(
    target=lambda: taken.extend(b.take(2)), daemon=True
  )
  learner.start()
  b.put(group(0, [0, 1]))
  assert refused.wait(60)
  b.put(group(1, [1, 2]))
  learner.join(60)
  assert indices(taken) == [1]


def test_every_stale_group_is_refused_at_once_not_only_the_next_batch():
  b = buffer(max_staleness=0)
  b.put(group(0, [1]))
  for index in (1, 2):
    b.put(group(index, [0]))
  assert indices(b.take(1, timeout=0)) == [0]
  assert b.refused == [1, 2]


def test_one_stale_member_makes_its_group_stale():
  b = buffer(max_staleness=0)
  b.put(group(0, [1], [0, 1]))
  with pytest.raises(TimeoutError):
    b.take(1, timeout=0)
  assert b.refused == [0]


def test_allow_trains_stale_groups_and_counts_them():
  b = buffer(groups_per_batch=2, on_stale="allow")
  b.put(group(0, [0]))
  b.put(group(1, [3]))
  assert indices(b.take(3, timeout=0)) == [0, 1]
  assert b.counts == {"groups_allowed": 1}
  assert b.refused == []


def test_mask_tokens_makes_stale_tokens_context_and_counts_them():
  b = buffer(max_staleness=1, on_stale="mask_tokens")
  b.put(group(0, [0, 1, 2], [2, 2]))
  (taken,) = b.take(2, timeout=0)
  mixed, fresh = taken.trajectories
  np.testing.assert_array_equal(mixed.action_mask, [0, 0, 1, 1])
  np.testing.assert_array_equal(mixed.token_version, [-1, -1, 1, 2])
  np.testing.assert_array_equal(mixed.behavior_logp, [0, 0, -0.5, -0.5])
  np.testing.assert_array_equal(mixed.tokens, [0, 1, 2, 3])
  assert (mixed.outcome, mixed.staleness(2)) == (1.0, 1)
  np.testing.assert_array_equal(fresh.action_mask, [0, 1, 1])
  assert b.counts == {"tokens_masked": 1}


def test_mask_tokens_keeps_the_outcome_on_action_tokens_that_are_left():
  b = buffer(max_staleness=1, on_stale="mask_tokens")
  stale = group(0, [0, 0, 2, 2])
  rewards = np.array([0, 0.5, 0, 0, 1.0], np.float32)
  rewarded = dataclasses.replace(stale.trajectories[0], rewards=rewards)
  b.put(dataclasses.replace(stale, trajectories=(rewarded,)))
  masked = b.take(3, timeout=0)[0].trajectories[0]
  np.testing.assert_array_equal(masked.action_mask, [0, 0, 0, 1, 1])
  np.testing.assert_array_equal(masked.rewards, [0, 0, 0, 0.5, 1.0])


def test_mask_tokens_takes_the_samplers_head_with_the_token():
  b = buffer(max_staleness=1, on_stale="mask_tokens")
  mixed = group(0, [0, 2])
  headed = dataclasses.replace(
    mixed.trajectories[0],
    behavior_topk_ids=np.array([[-1, -1], [4, 5], [6, 7]], np.int32),
    behavior_topk_logp=np.array(
      [[-np.inf, -np.inf], [-1, -2], [-3, -4]], np.float32
    ),
  )
  b.put(dataclasses.replace(mixed, trajectories=(headed,)))
  masked = b.take(2, timeout=0)[0].trajectories[0]
  np.testing.assert_array_equal(masked.action_mask, [0, 0, 1])
  assert masked.behavior_topk_ids.tolist() == [[-1, -1], [-1, -1], [6, 7]]
  assert masked.behavior_topk_ids.dtype == np.int32
  np.testing.assert_array_equal(
    masked.behavior_topk_logp, [[-np.inf] * 2, [-np.inf] * 2, [-3, -4]]
  )
  assert masked.behavior_topk_logp.dtype == np.float32


def test_mask_tokens_refuses_a_group_with_nothing_left_of_a_trajectory():
  b = buffer(max_staleness=0, on_stale="mask_tokens")
  b.put(group(0, [0, 0], [0, 1]))
  b.put(group(1, [0, 1]))
  assert indices(b.take(1, timeout=0)) == [1]
  assert b.refused == [0]


def test_without_a_limit_nothing_is_stale():
  b = buffer(max_staleness=None)
  b.put(group(0, [0]))
  assert indices(b.take(10**6, timeout=0)) == [0]
  assert not b.counts


def test_may_refuse_looks_ahead_without_refusing():
  b = buffer(max_staleness=1)
  b.put(group(0, [3]))
  assert (b.may_refuse(4), b.may_refuse(5)) == (False, True)
  assert b.refused == []


def test_a_failure_wakes_the_waiting_learner_and_is_its_cause():
  b = buffer()
  raised = []

  def learn():
    with pytest.raises(Closed, match="engine died") as caught:
      b.take(0)
    raised.append(caught.value.__cause__)

  learner = threading.Thread(target=learn, daemon=True)
  learner.start()
  error = OSError("engine died")
  b.fail(error)
  learner.join(60)
  assert raised == [error]


def test_a_failure_comes_before_a_full_batch_and_ends_the_actor_too():
  b = buffer()
  b.put(group(0, [0]))
  error = OSError("engine died")
  b.fail(error)
  with pytest.raises(Closed):
    b.take(0, timeout=0)
  with pytest.raises(Closed) as caught:
    b.put(group(1, [0]))
  assert caught.value.__cause__ is error


def test_a_closed_buffer_gives_full_batches_and_then_says_so():
  b = buffer(groups_per_batch=2)
  for index in range(3):
    b.put(group(index, [0]))
  b.close()
  assert indices(b.take(0)) == [0, 1]
  with pytest.raises(Closed, match="1 of 2 groups"):
    b.take(0)
  with pytest.raises(Closed):
    b.put(group(3, [0]))


def test_one_prompt_is_not_in_the_buffer_twice():
  b = buffer()
  b.put(group(0, [0]))
  with pytest.raises(AssertionError, match="prompt 0"):
    b.put(group(0, [0]))


def test_X04_a_restored_full_batch_is_taken_at_once():
  b = buffer(groups_per_batch=2)
  b.put(group(3, [0]))
  b.put(group(2, [0]))
  saved = b.snapshot()
  assert indices(saved) == [2, 3]
  resumed = buffer(groups_per_batch=2)
  resumed.restore(saved)
  assert indices(resumed.take(0, timeout=0)) == [2, 3]
  assert len(b) == 2


@pytest.mark.parametrize(
  ("field", "value"),
  [("groups_per_batch", 0), ("max_staleness", -1), ("on_stale", "drop")],
)
def test_a_wrong_setting_is_named_with_its_value(field, value):
  with pytest.raises(ValueError, match=rf"{field} is {value!r}"):
    buffer(**{field: value})
