"""What a generator did and when: sums, and intervals for a timeline."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

Kind = Literal["generate", "prefill", "weights"]
"""What the devices were busy with; `weights` includes recomputing the keys and
values of interrupted sequences."""

Event = tuple[float, float, Kind]
"""Start and end, in seconds of the injected clock."""

_MOST_EVENTS = 100_000
"""Events kept while nobody takes them; the oldest are dropped."""


class Events:
  """Intervals that one thread adds and another takes."""

  def __init__(self):
    self._events = collections.deque[Event](maxlen=_MOST_EVENTS)

  def append(self, event: Event) -> None:
    """Adds one."""
    self._events.append(event)

  def take(self) -> list[Event]:
    """Those since the last call, oldest first."""
    return [self._events.popleft() for _ in range(len(self._events))]


@dataclasses.dataclass(kw_only=True)
class Counters:
  """Sums since the generator was made."""

  tokens: int = 0
  """Sampled tokens."""
  prompts: int = 0
  """Requests prefilled, not counting interrupted ones."""
  shared_tokens: int = 0
  """Of their tokens, those whose keys and values another slot had already."""
  missing_tokens: int = 0
  """Tokens that prefills were asked for, interrupted sequences' too."""
  prefilled_tokens: int = 0
  """Tokens that they computed, padding included."""
  completions: int = 0
  """Requests that ended by themselves."""
  cancellations: int = 0
  """Requests that were cancelled, waiting or running."""
  updates: int = 0
  """Weights put into service."""
  interruptions: int = 0
  """Running sequences that were interrupted by new weights."""
  recomputed_tokens: int = 0
  """Tokens prefilled again after an interruption."""
  queue_seconds: float = 0.0
  """Time that these `prompts` had waited for their slots, summed."""
  busy_seconds: float = 0.0
  """Time spent in events."""
  idle_seconds: float = 0.0
  """The rest."""


@dataclasses.dataclass(kw_only=True)
class FleetCounters:
  """Sums since a fleet of generators was made, as its client sees them."""

  tokens: int = 0
  """Tokens that arrived."""
  completions: int = 0
  """Requests answered to their end."""
  retries: int = 0
  """Times that a request was sent again, because its generator failed or had
  too many."""
  moved: int = 0
  """Of these, those that went on from tokens that they had."""
  restarts: int = 0
  """Of these, those that began anew: no prefill bucket held their tokens."""
  openings: int = 0
  """Times that a circuit opened."""
  publishes: int = 0
  """Weights taken, over all generators."""
  failed_publishes: int = 0
  """Weights not taken, over all generators; each is tried again."""
  publish_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
  """How long each generator took for the last weights that it took."""


class Timeline:
  """Counts and times; written by one thread, read by any."""

  def __init__(self, clock: Callable[[], float]):
    self.sums = Counters()
    self._clock = clock
    self._began = self._busy_until = clock()
    self._events = Events()

  @contextlib.contextmanager
  def during(self, kind: Kind) -> Iterator[None]:
    """Records the time until the block ends; a failed block leaves none."""
    start = self.now()
    yield
    self.ended(kind, start)

  def now(self) -> float:
    """Seconds of the clock."""
    return self._clock()

  def ended(self, kind: Kind, start: float) -> None:
    """Records the time since `start` that no other event has."""
    start, end = max(start, self._busy_until), self._clock()
    self._busy_until = end
    self._events.append((start, end, kind))
    self.sums.busy_seconds += end - start

  def counters(self) -> Counters:
    """A copy of the sums so far."""
    elapsed = self._clock() - self._began
    return dataclasses.replace(
      self.sums, idle_seconds=elapsed - self.sums.busy_seconds
    )

  def take_events(self) -> list[Event]:
    """The events since the last call, oldest first."""
    return self._events.take()
