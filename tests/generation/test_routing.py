import dataclasses
import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
  RuleBasedStateMachine,
  invariant,
  precondition,
  rule,
)

from rl_tpu.generation import routing

LIMITS = routing.Limits(
  health_seconds=2.0,
  retry_seconds=1.0,
  retry_max_seconds=5.0,
  failures_to_open=3,
  stall_seconds=50.0,
  patience_seconds=100.0,
  requests_per_slot=1.25,
  affinity_slack=0.5,
)


class Clock:
  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


def says(version=0, **changes):
  return dataclasses.replace(
    routing.Report(
      version=version,
      slots=4,
      max_requests=64,
      max_prompt_length=15,
      head_size=0,
      records_experts=False,
    ),
    **changes,
  )


def made(*versions, newest=0, **limits):
  """A router whose generators have these versions; None: not yet heard."""
  clock = Clock()
  router = routing.Router(dataclasses.replace(LIMITS, **limits), clock)
  router.publish(newest)
  members = [router.join(f"h:{i}") for i in range(len(versions))]
  for member, version in zip(members, versions, strict=True):
    if version is not None:
      router.heard(member, says(version))
  return router, clock, members


def chosen(router, count, index=0):
  """Where so many members of a group go."""
  places = [router.choose(index, member) for member in range(count)]
  return [place.address if place else None for place in places]


# Circuits.


def test_a_generator_is_unknown_until_its_first_check_passes():
  router, _, (member,) = made(None)
  assert router.choose(0, 0) is None
  assert router.seconds_to_check(member) == 0
  router.heard(member, says())
  assert router.choose(0, 0) is member
  assert router.seconds_to_check(member) == 2.0


def test_checks_failed_in_a_row_open_the_circuit_and_pauses_double():
  router, clock, (member,) = made(0)
  for circuit, pause in (
    ("suspect", 1.0),
    ("suspect", 1.0),
    ("open", 1.0),
    ("open", 2.0),
    ("open", 4.0),
    ("open", 5.0),
    ("open", 5.0),
  ):
    router.missed(member, "no answer")
    assert (member.circuit, router.seconds_to_check(member)) == (circuit, pause)
    assert router.choose(0, 0) is None
    clock.now += pause
  assert router.openings == 1
  router.heard(member, says())
  assert member.circuit == "closed"
  assert router.choose(0, 0) is member


def test_a_check_that_passes_forgives_the_ones_missed():
  router, _, (member,) = made(0)
  for _ in range(5):
    router.missed(member, "no answer")
    router.missed(member, "no answer")
    assert member.circuit == "suspect"
    router.heard(member, says())
    assert member.circuit == "closed"


def test_a_failed_request_has_the_generator_checked_at_once():
  router, clock, (member, _) = made(0, 0)
  clock.now += 1
  router.broke(member, "the connection broke")
  assert member.circuit == "suspect"
  assert router.seconds_to_check(member) == 0
  assert set(chosen(router, 5)) == {"h:1"}


def test_the_many_requests_of_one_broken_connection_are_one_failure():
  router, _, (member,) = made(0)
  for _ in range(10):
    router.broke(member, "the connection broke")
  router.heard(member, says())
  assert member.circuit == "closed"


def test_a_generator_that_passes_checks_but_answers_nothing_is_opened():
  router, _, (member,) = made(0)
  for circuit in ("closed", "closed", "open"):
    router.broke(member, "failed")
    router.heard(member, says())
    assert member.circuit == circuit


def test_an_answer_forgives_the_requests_that_failed_before():
  router, _, (member,) = made(0)
  for _ in range(5):
    for _ in range(2):
      router.broke(member, "failed")
      router.heard(member, says())
      assert member.circuit == "closed"
    router.answered(member)


def test_a_generator_that_has_work_and_does_none_fails_its_checks():
  router, clock, (member,) = made(0)
  busy = says(busy=True, progress=(7,))
  router.heard(member, busy)
  clock.now = 49.0
  router.heard(member, busy)
  assert member.circuit == "closed"
  clock.now = 50.0
  router.heard(member, busy)
  assert member.circuit == "suspect"
  assert "did none for 50 s" in router.standing(member)
  router.heard(member, dataclasses.replace(busy, progress=(8,)))
  assert member.circuit == "closed"


def test_a_generator_with_heads_of_another_size_is_not_used():
  router, _, (_, other) = made(0, None)
  router.heard(other, says(head_size=5))
  assert "behavior_top_k is 5" in router.standing(other)
  assert set(chosen(router, 6)) == {"h:0", None}


@pytest.mark.parametrize("why", ["it is paused", "it is draining"])
def test_a_generator_that_takes_no_requests_gets_none(why):
  router, _, (member,) = made(0)
  router.heard(member, says(refusing=why))
  assert router.choose(0, 0) is None
  assert why in router.standing(member)


# Versions.


def test_only_those_that_serve_the_newest_version_get_new_requests():
  router, _, (first, second) = made(0, 0)
  assert set(chosen(router, 8)) == {"h:0", "h:1"}
  router.publish(1)
  assert router.served == 0
  for member in (first, second):
    for _ in range(4):
      router.release(member)
  assert set(chosen(router, 8)) == {"h:0", "h:1"}  # Nobody has 1 yet.
  router.heard(second, says(1))
  assert router.served == 1
  assert chosen(router, 2, index=1) == ["h:1", None]


def test_what_was_served_once_is_not_gone_back_on():
  router, _, (fast, slow) = made(0, 0)
  router.publish(1)
  router.heard(fast, says(1))
  for _ in range(3):
    router.missed(fast, "dead")
  assert router.choose(0, 0) is None
  assert router.served == 1
  router.heard(slow, says(1))
  assert router.choose(0, 0) is slow


def test_a_resumed_run_does_not_serve_what_is_older_than_its_first_version():
  router, _, (member,) = made(3, newest=5)
  assert router.served is None
  assert router.choose(0, 0) is None
  router.heard(member, says(5))
  assert router.served == 5


def test_a_generator_ahead_of_the_newest_version_is_not_used():
  router, _, (member,) = made(6, newest=5)
  assert router.choose(0, 0) is None
  assert router.served is None
  assert router.wants_offer(member)


def test_weights_of_another_life_are_not_ours():
  router, _, (member,) = made(None, newest=5)
  router.heard(member, says(None))
  assert router.choose(0, 0) is None
  assert router.wants_offer(member)


def test_H14_a_generator_that_came_back_with_old_weights_gets_new_ones_first():
  router, _, (member,) = made(2, newest=2)
  for _ in range(3):
    router.missed(member, "dead")
  assert not router.wants_offer(member)
  router.heard(member, says(0))
  assert router.choose(0, 0) is None
  assert router.wants_offer(member)
  router.heard(member, says(2))
  assert router.choose(0, 0) is member


def test_an_offer_that_failed_is_made_again_after_pauses_that_double():
  router, clock, (member,) = made(0)
  router.publish(1)
  for pause in (1.0, 2.0, 4.0, 5.0):
    assert router.wants_offer(member)
    router.declined(member, "disk full")
    assert "disk full" in router.standing(member)
    clock.now += pause - 0.01
    assert not router.wants_offer(member)
    clock.now += 0.01
  router.heard(member, says(1))
  router.took(member)
  assert not router.wants_offer(member)
  router.publish(2)
  router.declined(member, "disk full")
  clock.now += 1.0
  assert router.wants_offer(member)


@pytest.mark.parametrize("version", [3, 2])
def test_versions_that_are_not_newer_are_refused(version):
  router, _, _ = made(newest=3)
  with pytest.raises(ValueError, match=f"version is {version}.*than 3"):
    router.publish(version)


# Load and affinity.


def test_requests_go_to_the_least_loaded_per_slot():
  router, _, (small, large) = made(0, None)
  router.heard(small, says(slots=2))
  router.heard(large, says(slots=6))
  places = [router.choose(index, 0).address for index in range(8)]
  assert (places.count("h:0"), places.count("h:1")) == (2, 6)


def test_what_is_beyond_the_slots_waits_for_whoever_is_free_first():
  router, _, (first, _) = made(0, None)
  assert chosen(router, 7) == ["h:0"] * 5 + [None] * 2
  router.release(first)
  assert router.choose(0, 9) is first


def test_a_conversation_returns_to_the_generator_that_has_it():
  router, _, _ = made(0, 0)
  siblings = range(8)  # More than one generator has slots for.
  places = [router.choose(0, sibling) for sibling in siblings]
  assert len(set(places)) == 2
  for member in places:
    router.release(member)
  for sibling in reversed(siblings):
    assert router.choose(0, sibling) is places[sibling]


def test_siblings_share_a_generator_unless_it_is_clearly_more_loaded():
  router, _, _ = made(0, 0)
  assert chosen(router, 4) == ["h:0"] * 3 + ["h:1"]
  router, _, _ = made(0, 0, affinity_slack=0.0)
  assert chosen(router, 4).count("h:0") == 2
  router, _, _ = made(0, 0, affinity_slack=9.0)
  assert chosen(router, 8) == ["h:0"] * 4 + ["h:1"] * 4


def test_a_generator_that_is_full_gets_no_more_until_something_ends():
  router, _, (member, _) = made(0, 0)
  assert router.choose(0, 0) is member
  router.overloaded(member)
  router.release(member)
  assert set(chosen(router, 3)) == {"h:1"}
  router.answered(member)
  assert router.choose(9, 0) is member
  router.overloaded(member)
  router.heard(member, says())
  assert "h:0" in chosen(router, 4, index=9)
  assert router.openings == 0


def test_a_generator_gets_no_more_than_it_says_it_takes():
  router, _, (member,) = made(None)
  router.heard(member, says(max_requests=2))
  assert chosen(router, 3) == ["h:0", "h:0", None]


def test_what_is_remembered_of_conversations_is_bounded(monkeypatch):
  monkeypatch.setattr(routing, "_HOMES", 10)
  router, _, _ = made(0)
  for index in range(100):
    router.release(router.choose(index, 0))
  assert len(router._homes) == 10


# Patience.


def test_patience_ends_when_no_generator_can_be_used_and_names_each():
  router, clock, (first, second) = made(None, None)
  router.missed(first, "connection refused")
  router.heard(second, says(None))
  clock.now = 99.0
  assert router.overdue() == ""
  clock.now = 100.0
  for part in ("no generator could be used", "h:0: connection refused", "h:1"):
    assert part in router.overdue()


def test_patience_starts_with_the_first_weights():
  clock = Clock()
  router = routing.Router(LIMITS, clock)
  router.join("h:0")
  clock.now = 1000.0
  assert router.overdue() == ""
  router.publish(0)
  clock.now = 1099.0
  assert router.overdue() == ""
  clock.now = 1100.0
  assert "not reached yet" in router.overdue()


def test_patience_starts_anew_when_a_generator_is_back():
  router, clock, (member,) = made(0)
  for now, circuit in ((90.0, "gone"), (180.0, "back"), (270.0, "gone")):
    clock.now = now
    if circuit == "back":
      router.heard(member, says())
    for _ in range(3 if circuit == "gone" else 0):
      router.missed(member, "dead")
    assert router.overdue() == ""
  clock.now = 370.0
  assert "dead" in router.overdue()


def test_H15_weights_that_nobody_takes_end_the_run_though_all_answer():
  router, clock, (member,) = made(0)
  clock.now = 500.0
  router.publish(1)
  router.declined(member, "weight x is (2, 3); it must be (3, 2)")
  clock.now = 560.0
  router.publish(2)
  router.heard(member, says(0))
  clock.now = 599.0
  assert router.overdue() == ""
  clock.now = 600.0
  for part in ("took version 2", "version 0 of 2", r"weight x is (2, 3)"):
    assert part in router.overdue()
  router.heard(member, says(1))
  assert router.overdue() == ""


@pytest.mark.parametrize(
  "wrong, message",
  [
    ({"health_seconds": 0}, "health_seconds is 0; it must be > 0"),
    ({"retry_seconds": -1.0}, "retry_seconds is -1.0"),
    ({"retry_max_seconds": 0.5}, r"must be >= retry_seconds = 1.0"),
    ({"failures_to_open": 0}, "failures_to_open is 0; it must be >= 1"),
    ({"stall_seconds": 0}, "stall_seconds is 0"),
    ({"patience_seconds": math.nan}, "patience_seconds is nan"),
    ({"requests_per_slot": 0.9}, "requests_per_slot is 0.9; it must be >= 1"),
    ({"affinity_slack": -0.1}, "affinity_slack is -0.1; it must be >= 0"),
  ],
)
def test_limits_that_make_no_sense_are_refused(wrong, message):
  with pytest.raises(ValueError, match=message):
    routing.Limits(**wrong)


class Fleets(RuleBasedStateMachine):
  """Any order of events; the model is what each generator really has."""

  def __init__(self):
    super().__init__()
    self.clock = Clock()
    self.router = routing.Router(LIMITS, self.clock)
    self.version = {}  # By member: what its process has, None: not of ours.
    self.sent = {}
    self.served = []
    self.joined = 0

  def member(self, data):
    return data.draw(st.sampled_from(sorted(self.version, key=id)))

  some = precondition(lambda self: self.version)

  @rule()
  def join(self):
    if len(self.router.members) < 4:
      member = self.router.join(f"h:{self.joined}")
      self.joined += 1
      self.version[member] = None
      self.sent[member] = 0

  @some
  @rule(data=st.data())
  def leave(self, data):
    member = self.member(data)
    self.router.leave(member)
    del self.version[member]
    for _ in range(self.sent.pop(member)):
      self.router.broke(member, "it left")
      self.router.release(member)
    assert member.requests == 0

  @rule(seconds=st.sampled_from([0.5, 1.0, 7.0]))
  def wait(self, seconds):
    self.clock.now += seconds

  @rule(skip=st.integers(1, 3))
  def publish(self, skip):
    newest = self.router.newest
    self.router.publish(5 if newest is None else newest + skip)

  @some
  @rule(data=st.data(), refusing=st.sampled_from(["", "", "", "paused"]))
  def check_passes(self, data, refusing):
    member = self.member(data)
    if self.router.seconds_to_check(member) == 0 or member.circuit != "open":
      self.router.heard(member, says(self.version[member], refusing=refusing))

  @some
  @rule(data=st.data(), times=st.integers(1, 4))
  def checks_fail(self, data, times):
    member = self.member(data)
    for _ in range(times):
      before, missed = member.circuit, member.missed
      self.router.missed(member, "no answer")
      opens = before == "open" or missed + 1 >= LIMITS.failures_to_open
      assert member.circuit == ("open" if opens else "suspect")
    assert 0 < self.router.seconds_to_check(member) <= LIMITS.retry_max_seconds
    if member.circuit == "open":  # Its connection is closed.
      for _ in range(self.sent[member]):
        self.router.broke(member, "closed here")
        self.router.release(member)
      self.sent[member] = 0

  @some
  @rule(data=st.data())
  def restarts(self, data):
    self.version[self.member(data)] = None

  @some
  @rule(data=st.data(), works=st.booleans())
  def is_offered(self, data, works):
    member = self.member(data)
    if not self.router.wants_offer(member):
      return
    assert member.circuit == "closed"
    if works:
      self.version[member] = self.router.newest
      self.router.heard(member, says(self.version[member]))
      self.router.took(member)
    else:
      self.router.declined(member, "no")
      assert not self.router.wants_offer(member)

  @rule(index=st.integers(0, 5), sibling=st.integers(0, 3))
  def sends(self, index, sibling):
    could = [
      m
      for m in self.router.members.values()
      if self.router.usable(m) and m.requests < 5 and not m.full
    ]
    member = self.router.choose(index, sibling)
    assert (member is None) == (not could)
    if member is not None:
      assert member in could
      self.sent[member] += 1

  @some
  @rule(data=st.data(), how=st.sampled_from(["ends", "breaks", "full"]))
  def request(self, data, how):
    member = self.member(data)
    if self.sent[member]:
      self.sent[member] -= 1
      if how == "ends":
        self.router.answered(member)
      elif how == "breaks":
        self.router.broke(member, "failed")
      else:
        self.router.overloaded(member)
      self.router.release(member)

  @invariant()
  def nothing_is_lost_or_sent_twice(self):
    for member, sent in self.sent.items():
      assert member.requests == sent <= 5

  @invariant()
  def served_only_rises_and_nobody_lags_behind_it(self):
    router = self.router
    self.served.append(router.served)
    known = [v for v in self.served if v is not None]
    assert known == sorted(known)
    for member in router.members.values():
      if router.usable(member):
        assert member.circuit == "closed" and member.report.refusing == ""
        assert router.served <= member.version <= router.newest

  @invariant()
  def patience_runs_exactly_while_nobody_can_be_used(self):
    router = self.router
    some = any(router.usable(m) for m in router.members.values())
    idle = router._unusable_since is not None
    assert idle == (router.newest is not None and not some)

  def teardown(self):
    """Whatever happened, generators that work again get everything."""
    router = self.router
    if router.newest is None:
      router.publish(1)
    if not router.members:
      self.join()
    self.clock.now += LIMITS.retry_max_seconds
    for member in list(router.members.values()):
      for _ in range(2):  # The first may find that requests kept failing.
        self.clock.now += router.seconds_to_check(member)
        router.heard(member, says(self.version[member]))
      if self.version[member] != router.newest:
        assert router.wants_offer(member)
        router.heard(member, says(router.newest))
      assert router.usable(member)
    assert router.served == router.newest
    assert router.overdue() == ""


TestFleets = Fleets.TestCase
TestFleets.settings = settings(
  max_examples=60, stateful_step_count=40, deadline=None
)
