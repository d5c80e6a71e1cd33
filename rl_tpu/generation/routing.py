"""Which generator gets a request: circuits, versions, affinity, load.

A pure state machine with an injected clock; `fleet` does what it says and
tells it what happened. A generator's circuit is

    closed --a check or a request fails--> suspect --again and again--> open
      ^------------- a check passes ------------'                        |
      ^---- a check passes, tried after a pause that doubles ------------'

A suspect generator keeps what it has and gets nothing new; one whose circuit
is open loses its requests to the others.

New requests go to generators that serve the newest version that any of them
has served, and to no other: admission (AReaL, arXiv 2505.24298, Eq. 3) lets a
group start at version v because whoever answers samples from v or newer. Once
a version was served, the fleet does not fall behind it, even if the only
generator that had it is gone; requests then wait.

A generator gets few more requests than it has slots. The rest wait here, so
that those who are slower to take new weights get their share of them.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Literal

Circuit = Literal["closed", "suspect", "open"]

_HOMES = 2**16
"""Conversations and groups whose generator is remembered."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """When a generator counts as broken, and how much each gets."""

  health_seconds: float = 2.0
  """Between two checks of a generator that works, > 0."""
  retry_seconds: float = 1.0
  """Until a generator that failed a check is checked again, and the least
  pause before an open circuit, or weights that were refused, are tried again;
  that pause doubles each time. > 0."""
  retry_max_seconds: float = 60.0
  """The longest such pause, >= retry_seconds."""
  failures_to_open: int = 3
  """Checks failed in a row, or requests with no answer completed between
  them, that open a circuit, >= 1."""
  stall_seconds: float = 300.0
  """A generator that has requests and samples nothing for so long fails its
  checks, > 0. It must be allowed to compile."""
  patience_seconds: float = 600.0
  """The run ends when for so long no generator could be used, or none took
  the newest weights, > 0."""
  requests_per_slot: float = 1.25
  """Requests that a generator has at once, as a multiple of its slots, >= 1;
  what is beyond its slots hides the way there and back."""
  affinity_slack: float = 0.5
  """How many more requests per slot than the least loaded generator the one
  that knows a request's prompt may have and still get it, >= 0."""

  def __post_init__(self):
    positive = "health_seconds", "retry_seconds", "stall_seconds"
    for name, good, allowed in (
      *((n, getattr(self, n) > 0, "> 0") for n in positive),
      ("patience_seconds", self.patience_seconds > 0, "> 0"),
      (
        "retry_max_seconds",
        self.retry_max_seconds >= self.retry_seconds,
        f">= retry_seconds = {self.retry_seconds!r}",
      ),
      ("failures_to_open", self.failures_to_open >= 1, ">= 1"),
      ("requests_per_slot", self.requests_per_slot >= 1, ">= 1"),
      ("affinity_slack", self.affinity_slack >= 0, ">= 0"),
    ):
      if not good:
        raise ValueError(
          f"{name} is {getattr(self, name)!r}; it must be {allowed}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """What a generator says of itself when it is checked."""

  version: int | None
  """The newest it took of this run's life; None: it has none of these."""
  slots: int
  max_requests: int
  max_prompt_length: int
  head_size: int
  """K, the size of its heads."""
  records_experts: bool
  """Whether its tokens come with the experts that gave them."""
  refusing: str = ""
  """Why it takes no requests; empty if it does."""
  busy: bool = False
  """Whether it has work."""
  progress: Hashable = None
  """Changes whenever any work was done."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Member:
  """One generator as the router sees it."""

  address: str
  check_at: float
  """When it is to be checked next."""
  offer_at: float
  """Before that it is offered no weights."""
  progress_at: float
  """When its work last moved on."""
  circuit: Circuit = "open"
  report: Report | None = None
  requests: int = 0
  """Sent to it and not ended."""
  full: bool = False
  """It refused a request; no answer has ended and no check passed since."""
  missed: int = 0
  """Checks failed in a row."""
  broken: int = 0
  """Failures of requests since the last completed answer; those between two
  checks are one."""
  pauses: int = 0
  """Times that its open circuit was waited for since its last answer."""
  refused_offers: int = 0
  """In a row."""
  error: str = "it was not reached yet"
  """Why its last check or request failed; empty since a check passed."""
  offer_error: str = ""
  """Why it did not take weights; empty since it did."""

  @property
  def version(self) -> int | None:
    """Of the weights that new requests would get; None: not of this life."""
    return None if self.report is None else self.report.version

  @property
  def load(self) -> float:
    """Requests per slot."""
    return self.requests / self.report.slots if self.report else math.inf


class Router:
  """Knows every generator's standing and picks one for each request."""

  def __init__(self, limits: Limits, clock: Callable[[], float]):
    self.members: dict[str, Member] = {}
    self.newest: int | None = None
    """The last version published."""
    self.served: int | None = None
    """The newest version that new requests have been answered by."""
    self.openings = 0
    """Times that a circuit opened."""
    self._limits = limits
    self._clock = clock
    self._least: int | None = None  # Versions that new requests may get.
    self._kept: tuple[int, bool] | None = None
    self._homes: collections.OrderedDict[Hashable, Member] = (
      collections.OrderedDict()
    )
    self._unusable_since: float | None = None
    self._behind_since: float | None = None

  # Who is there.

  def join(self, address: str) -> Member:
    """Adds a generator, to be checked at once."""
    assert address not in self.members, f"{address} is there already"
    now = self._clock()
    member = Member(
      address=address, check_at=now, offer_at=now, progress_at=now
    )
    self.members[address] = member
    return member

  def leave(self, member: Member) -> None:
    """Takes a generator off the list; what it has must go elsewhere."""
    del self.members[member.address]
    member.circuit = "open"
    self._settle()

  # Checks.

  def seconds_to_check(self, member: Member) -> float:
    """How long its next check has time, >= 0."""
    return max(0.0, member.check_at - self._clock())

  def heard(self, member: Member, report: Report) -> None:
    """A check was answered; this may still find the generator unfit."""
    stalled = self._stalled(member, report)
    member.report = report
    kept = report.head_size, report.records_experts
    self._kept = self._kept or kept
    if stalled:
      seconds = self._limits.stall_seconds
      self.missed(member, f"it has work and did none for {seconds:g} s")
    elif kept != self._kept:
      self.missed(
        member,
        f"its behavior_top_k is {kept[0]} and its record_experts {kept[1]}; "
        f"all generators must have the same, {self._kept[0]} and "
        f"{self._kept[1]}",
      )
    elif member.broken >= self._limits.failures_to_open:
      self._open(member)
    else:
      self._pass(member)
    self._settle()

  def missed(self, member: Member, error: str) -> None:
    """A check failed."""
    member.error = error
    member.missed += 1
    if member.circuit == "open":
      self._pause(member)
    elif member.missed >= self._limits.failures_to_open:
      self._open(member)
    else:
      member.circuit = "suspect"
      member.check_at = self._clock() + self._limits.retry_seconds
    self._settle()

  def _stalled(self, member: Member, report: Report) -> bool:
    """Whether it has had work for too long without doing any."""
    known, now = member.report, self._clock()
    if not report.busy or not known or report.progress != known.progress:
      member.progress_at = now
    return now - member.progress_at >= self._limits.stall_seconds

  def _pass(self, member: Member) -> None:
    member.circuit, member.error = "closed", ""
    member.missed, member.full = 0, False
    member.check_at = self._clock() + self._limits.health_seconds

  def _open(self, member: Member) -> None:
    member.circuit = "open"
    member.missed = member.broken = 0
    member.progress_at = self._clock()
    self.openings += 1
    self._pause(member)

  def _pause(self, member: Member) -> None:
    member.check_at = self._clock() + self._backoff(member.pauses)
    member.pauses += 1

  def _backoff(self, times: int) -> float:
    # A power beyond what a float holds would be an error, not infinity.
    doubled = self._limits.retry_seconds * 2.0 ** min(times, 64)
    return min(doubled, self._limits.retry_max_seconds)

  # Weights.

  def publish(self, version: int) -> None:
    """There are newer weights.

    Raises:
      ValueError: they are not newer.
    """
    if self.newest is not None and version <= self.newest:
      raise ValueError(
        f"version is {version}; it must be greater than {self.newest}, which "
        "was published before"
      )
    now = self._clock()
    if self.newest is None:  # What is older is of an earlier life.
      self._least = version
      self._unusable_since = now
    self.newest = version
    if self._behind_since is None:
      self._behind_since = now
    self._settle()

  def wants_offer(self, member: Member) -> bool:
    """Whether to bring it the newest version now."""
    return (
      member.circuit == "closed"
      and self.newest is not None
      and member.version != self.newest
      and self._clock() >= member.offer_at
    )

  def took(self, member: Member) -> None:
    """An offer ended, and a report since then says that it was taken."""
    member.refused_offers, member.offer_error = 0, ""

  def declined(self, member: Member, error: str) -> None:
    """An offer failed; it goes on with what it has."""
    member.offer_error = error
    pause = self._backoff(member.refused_offers)
    member.offer_at = self._clock() + pause
    member.refused_offers += 1

  # Requests.

  def choose(self, prompt_index: int, member_index: int) -> Member | None:
    """A generator for a request, which counts as sent; None: it must wait.

    The one that has the conversation, else the one that has its group, unless
    it is clearly more loaded than the one with the least requests per slot, or
    has no slot left while that one has.
    """
    able = [m for m in self.members.values() if self._has_room(m)]
    if not able:
      return None
    chosen = min(able, key=lambda member: member.load)
    most = chosen.load + self._limits.affinity_slack
    if chosen.load < 1:
      most = min(most, math.nextafter(1, 0))
    conversation, group = (prompt_index, member_index), prompt_index
    for key in (conversation, group):
      home = self._homes.get(key)
      if home in able and home.load <= most:
        chosen = home
        break
    for key in (conversation, group):
      self._homes[key] = chosen
      self._homes.move_to_end(key)
    while len(self._homes) > _HOMES:
      self._homes.popitem(last=False)
    chosen.requests += 1
    return chosen

  def release(self, member: Member) -> None:
    """A request that was sent ended, in whatever way, or was withdrawn."""
    assert member.requests > 0, f"{member.address} has no requests"
    member.requests -= 1

  def answered(self, member: Member) -> None:
    """A request was answered to its end."""
    member.broken = member.pauses = 0
    member.full = False

  def broke(self, member: Member, error: str) -> None:
    """A request failed that the generator should have answered."""
    if member.circuit == "closed":
      member.circuit, member.error = "suspect", error
      member.broken += 1
      member.check_at = self._clock()
      self._settle()

  def overloaded(self, member: Member) -> None:
    """It refused a request because it has too many; that is no failure."""
    member.full = True

  def usable(self, member: Member) -> bool:
    """Whether it may get new requests, room apart."""
    return (
      member.circuit == "closed"
      and member.report is not None
      and not member.report.refusing
      and member.version is not None
      and self._least is not None
      and self.newest is not None
      and self._least <= member.version <= self.newest
    )

  def _has_room(self, member: Member) -> bool:
    report = member.report
    if report is None or member.full or not self.usable(member):
      return False
    most = math.ceil(report.slots * self._limits.requests_per_slot)
    return member.requests < min(most, report.max_requests)

  # Patience.

  def overdue(self) -> str:
    """Why the run should end; empty if it should go on."""
    now, patience = self._clock(), self._limits.patience_seconds
    since = self._unusable_since
    if since is not None and now - since >= patience:
      what = f"no generator could be used for {now - since:.1f} s"
    elif self._behind_since is None or now - self._behind_since < patience:
      return ""
    else:
      seconds = now - self._behind_since
      what = f"no generator took version {self.newest} for {seconds:.1f} s"
    standing = [
      f"{member.address}: {self.standing(member)}"
      for member in self.members.values()
    ]
    said = "; ".join(standing) or "no address is known"
    return f"{what} (patience_seconds is {patience:g}); {said}"

  def standing(self, member: Member) -> str:
    """In words, with its last error."""
    words = []
    if member.error:
      words.append(member.error)
    elif member.report is not None and member.report.refusing:
      words.append(member.report.refusing)
    if self.newest is not None and member.version != self.newest:
      words.append(f"it has version {member.version} of {self.newest}")
    if member.offer_error:
      words.append(f"it did not take weights: {member.offer_error}")
    return ", ".join(words) or "it works"

  def _settle(self) -> None:
    """Notes what the last event changed for the fleet as a whole."""
    versions = [m.version for m in self.members.values() if self.usable(m)]
    best = max((v for v in versions if v is not None), default=None)
    if best is not None:
      self._unusable_since = None
    elif self.newest is not None and self._unusable_since is None:
      self._unusable_since = self._clock()
    if best is not None and best != self.served:
      assert self.served is None or best > self.served
      self.served = self._least = best
      self._behind_since = self._clock()
    if self.served == self.newest:
      self._behind_since = None
