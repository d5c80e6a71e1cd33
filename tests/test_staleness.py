"""Admission: the rule, its bookkeeping, and the bound it promises."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_tpu.staleness import Admission


def dispatch_all(admission, version):
  """Starts groups while there is room; returns how many."""
  started = 0
  while admission.capacity(version) > 0 and started < 100:
    admission.dispatch(version)
    started += 1
  return started


@pytest.mark.parametrize(
  ("max_staleness", "version", "groups"),
  [(0, 0, 4), (0, 3, 16), (1, 0, 8), (2, 5, 32)],
)
def test_capacity_is_equation_3(max_staleness, version, groups):
  admission = Admission(groups_per_batch=4, max_staleness=max_staleness)
  # Eq. 3 with N_r = accepted + running + 1: floor((N_r - 1) / B) <= i + eta.
  assert dispatch_all(admission, version) == groups
  assert admission.running // 4 == version + max_staleness + 1


def test_no_limit_is_infinite_unless_max_running_bounds_it():
  free = Admission(groups_per_batch=2, max_staleness=None)
  assert free.capacity(0) == math.inf
  bounded = Admission(groups_per_batch=2, max_staleness=None, max_running=3)
  assert dispatch_all(bounded, 0) == 3
  bounded.accept()
  assert bounded.capacity(0) == 1


def test_max_running_does_not_count_accepted_groups():
  admission = Admission(groups_per_batch=4, max_staleness=0, max_running=3)
  assert dispatch_all(admission, 0) == 3
  admission.accept()
  admission.accept()
  assert dispatch_all(admission, 0) == 1  # the fourth and last of the batch


@pytest.mark.parametrize("reason", ["failed", "rejected", "cancelled"])
def test_a_group_that_never_reaches_the_buffer_gives_its_place_back(reason):
  admission = Admission(groups_per_batch=1, max_staleness=0)
  admission.dispatch(0)
  assert admission.capacity(0) == 0
  admission.give_back(reason)
  assert admission.capacity(0) == 1
  assert admission.given_back == {reason: 1}


def test_a_refused_group_gives_its_place_back():
  admission = Admission(groups_per_batch=1, max_staleness=0)
  admission.dispatch(0)
  admission.accept()
  admission.refuse()
  assert (admission.accepted, admission.capacity(0)) == (0, 1)
  assert admission.given_back == {"stale": 1}


def test_resume_counts_what_earlier_lives_consumed():
  # AReaL #1388: from 0 the capacity would be 10 * 4 too large.
  admission = Admission(groups_per_batch=4, max_staleness=1)
  admission.resume(10, 3, {"given_back": {"failed": 2}})
  assert admission.capacity(10) == 2 * 4 - 3
  assert admission.snapshot() == {"given_back": {"failed": 2}}


def test_a_tighter_limit_on_resume_waits_instead_of_going_negative():
  admission = Admission(groups_per_batch=2, max_staleness=0)
  admission.resume(1, 6, {"given_back": {}})
  assert admission.capacity(1) == 0


@pytest.mark.parametrize("transition", ["accept", "refuse", "give_back"])
def test_a_transition_without_its_group_is_an_error(transition):
  admission = Admission(groups_per_batch=1, max_staleness=0)
  arguments = ("failed",) if transition == "give_back" else ()
  with pytest.raises(AssertionError):
    getattr(admission, transition)(*arguments)


def test_dispatch_beyond_capacity_is_an_error():
  admission = Admission(groups_per_batch=1, max_staleness=0)
  admission.dispatch(0)
  with pytest.raises(AssertionError, match="version 0"):
    admission.dispatch(0)


@pytest.mark.parametrize(
  ("field", "value"),
  [("groups_per_batch", 0), ("max_staleness", -1), ("max_running", 0)],
)
def test_a_wrong_field_is_named_with_its_value(field, value):
  good = {"groups_per_batch": 1, "max_staleness": 0}
  with pytest.raises(ValueError, match=rf"{field} is {value}"):
    Admission(**(good | {field: value}))


def test_H07_lag_is_one_after_one_update_and_admission_alone_reaches_limit():
  # Limit 1, batches of 1: two groups start at version 0, a third must wait
  # for the update; the second is trained at version 1 with lag exactly 1.
  admission = Admission(groups_per_batch=1, max_staleness=1)
  assert dispatch_all(admission, 0) == 2
  admission.accept()  # and consumed: version 1
  assert dispatch_all(admission, 0) == 0
  assert dispatch_all(admission, 1) == 1


EVENTS = st.lists(
  st.tuples(
    st.sampled_from(["dispatch", "accept", "give_back", "refuse", "consume"]),
    st.integers(0, 50),
  ),
  max_size=200,
)


@given(
  events=EVENTS,
  groups_per_batch=st.integers(1, 4),
  max_staleness=st.integers(0, 3),
  max_running=st.none() | st.integers(1, 5),
)
def test_groups_consumed_in_order_of_dispatch_never_exceed_the_limit(
  events, groups_per_batch, max_staleness, max_running
):
  admission = Admission(
    groups_per_batch=groups_per_batch,
    max_staleness=max_staleness,
    max_running=max_running,
  )
  version = next_rank = 0
  waiting, running, accepted = [], {}, {}  # rank -> version of dispatch
  for event, choice in events:
    if event == "dispatch":
      assert admission.capacity(version) >= 0
      if admission.capacity(version) > 0:
        if waiting:
          rank = waiting.pop(waiting.index(min(waiting)))
        else:
          rank, next_rank = next_rank, next_rank + 1
        admission.dispatch(version)
        running[rank] = version
    elif event in ("accept", "give_back") and running:
      rank = sorted(running)[choice % len(running)]
      born = running.pop(rank)
      if event == "accept":
        admission.accept()
        accepted[rank] = born
      else:
        admission.give_back("failed")
    elif event == "refuse" and accepted:
      rank = sorted(accepted)[choice % len(accepted)]
      del accepted[rank]
      admission.refuse()
      waiting.append(rank)
    elif event == "consume":
      batch = sorted([*waiting, *running, *accepted])[:groups_per_batch]
      if len(batch) == groups_per_batch and set(batch) <= set(accepted):
        lags = [version - accepted.pop(rank) for rank in batch]
        assert max(lags) <= max_staleness
        version += 1
    assert admission.running == len(running)
    assert admission.accepted == version * groups_per_batch + len(accepted)
    assert len(running) <= (max_running or math.inf)
