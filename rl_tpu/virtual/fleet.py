"""Generators that take time instead of computing: continuous batching.

A generator is one device that does one thing at a time. As the real driver's
(`generation/driver.py`), its turn is weights, then admission of what waits into
free slots, then decoding. Between two of those moments nothing changes but the
caches, which grow by a token per sequence and step, so that the k steps up to
the next one take, with n sequences and C cached tokens at first,

    sum_{j<k} (step + n per_sequence + (C + n j) per_cached_token)

and a simulation costs work per request, not per token. Steps come in
dispatches of d: requests and weights that arrive in the middle of one wait for
its end, and so does a sequence that has its last token; its slot and its caches
are not free before.
"""

import asyncio
import bisect
import collections
import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from rl_tpu.types import Chunk, Completion, Request, StopReason
from rl_tpu.virtual.config import Service

KINDS = ("idle", "decode", "prefill", "recompute", "swap", "slots")
"""What a generator's time goes to; `slots` is not a kind of its own but the
time of decoding weighted by the share of slots in use."""

_MOST_INTERVALS = 100_000
"""Kept of one generator; the oldest are dropped."""
_FUZZ = 1e-6
"""Of a step; what is closer to a step's end than this is at its end."""

Length = Callable[[Request], tuple[int, StopReason]]
"""How many tokens a request will get, and why it will end."""


class Interval(NamedTuple):
  """What a generator did for a while; it was idle in between."""

  start: float
  """In virtual seconds."""
  end: float
  kind: str
  """Of KINDS, neither `idle` nor `slots`."""
  running: int
  """Sequences that had slots."""


@dataclasses.dataclass(eq=False)
class _Sequence:
  """A request, waiting or running."""

  request: Request
  done: asyncio.Future[Completion]
  length: int
  stop_reason: StopReason
  begin: int = -1
  """The generator's count of steps when it got its slot."""

  @property
  def end(self) -> int:
    return self.begin + self.length


class VirtualGenerator:
  """One slice that generates; `run` is its life, on a virtual clock."""

  def __init__(
    self,
    service: Service,
    *,
    slots: int,
    prefill_batch: int,
    interruption: Literal["recompute", "keep", "drain"],
    grain: int,
    steps: int = 1,
    length: Length,
  ):
    """A generator at version 0 with nothing to do.

    Args:
      service: complete, without None.
      slots: sequences that run side by side.
      prefill_batch: prompts of one prefill call.
      interruption: what new weights mean for running sequences.
      grain: tokens that one simulated token stands for.
      steps: simulated ones of one dispatch.
      length: decides each request's answer.
    """
    self._service = service
    self._slots = slots
    self._prefill_batch = prefill_batch
    self._interruption = interruption
    self._grain = grain
    self._dispatch = steps
    self._length = length
    self._waiting: collections.deque[_Sequence] = collections.deque()
    self._running: list[tuple[int, int, _Sequence]] = []  # a heap, by end
    self._admitted = 0
    self._cached = 0
    self._steps = 0
    self._taken_over = [0]  # step at which each version of `_versions` came
    self._versions = [0]
    self._pending: int | None = None
    self._change: asyncio.Future[None] | None = None
    self._seconds: dict[str, float] = {kind: 0.0 for kind in KINDS}
    self._kind, self._since = "idle", 0.0
    self.intervals = collections.deque[Interval](maxlen=_MOST_INTERVALS)

  @property
  def load(self) -> int:
    """Requests that it has, waiting or running."""
    return len(self._waiting) + len(self._running)

  async def generate(
    self, request: Request, progress: list[Chunk] | None = None
  ) -> Completion:
    """Answers a request; one that is cancelled keeps its slot to its end.

    `progress` stays empty: nothing here is resumed.
    """
    length, stop_reason = self._length(request)
    done = asyncio.get_running_loop().create_future()
    self._waiting.append(_Sequence(request, done, length, stop_reason))
    if len(self._running) < self._slots:
      self._notify()
    return await done

  def update(self, version: int) -> None:
    """Puts weights into service at the next moment between two steps."""
    self._pending = version
    self._notify()

  def spent(self) -> dict[str, float]:
    """Seconds since time 0, by kind."""
    self._turn_to(self._kind)
    return dict(self._seconds)

  async def run(self) -> None:
    """Serves for ever."""
    while True:
      drains = self._interruption == "drain" and self._running
      if self._pending is not None and not drains:
        await self._take_over(self._pending)
      elif self._pending is None and self._waiting and self._room:
        await self._admit()
      elif self._running:
        await self._decode()
      else:
        self._turn_to("idle")
        await self._changed(None)

  @property
  def _room(self) -> int:
    return self._slots - len(self._running)

  async def _take_over(self, version: int) -> None:
    self._pending = None
    self._taken_over.append(self._steps)
    self._versions.append(version)
    await self._spend("swap", self._service.swap)
    if self._running and self._interruption == "recompute":
      seconds = self._prefill_seconds(len(self._running), self._cached)
      await self._spend("recompute", seconds)

  async def _admit(self) -> None:
    admitted = []
    while self._waiting and len(admitted) < self._room:
      sequence = self._waiting.popleft()
      if not sequence.done.done():
        admitted.append(sequence)
    tokens = sum(len(sequence.request.tokens) for sequence in admitted)
    for sequence in admitted:
      sequence.begin = self._steps
      self._admitted += 1
      end = self._steps + self._whole(sequence.length)
      heapq.heappush(self._running, (end, self._admitted, sequence))
    self._cached += tokens
    seconds = self._prefill_seconds(len(admitted), tokens)
    await self._spend("prefill", seconds)

  def _prefill_seconds(self, sequences: int, tokens: int) -> float:
    """Of `tokens` simulated tokens, in as few calls as possible."""
    service, calls = self._service, -(-sequences // self._prefill_batch)
    assert service.prefill_per_token is not None
    return (
      calls * service.prefill_call
      + tokens * self._grain * service.prefill_per_token
    )

  async def _decode(self) -> None:
    """Steps until a sequence ends or something arrives."""
    self._turn_to("decode")
    loop = asyncio.get_running_loop()
    running, began = len(self._running), loop.time()
    steps = self._running[0][0] - self._steps
    await self._changed(self._decode_seconds(steps))
    steps = min(steps, self._whole(self._steps_by(loop.time() - began)))
    rest = began + self._decode_seconds(steps) - loop.time()
    if rest > 0:
      await asyncio.sleep(rest)
    self._turn_to("idle")
    self._steps += steps
    self._cached += steps * running
    while self._running and self._running[0][0] <= self._steps:
      self._finish(heapq.heappop(self._running)[2])

  def _pace(self) -> tuple[float, float]:
    """Seconds of the next step, and how many more each later one takes."""
    service, grain, running = self._service, self._grain, len(self._running)
    assert service.decode_step is not None
    per_token = service.decode_per_cached_token * grain
    first = service.decode_step + running * service.decode_per_sequence
    first += self._cached * per_token
    return first * grain, running * per_token * grain

  def _decode_seconds(self, steps: int) -> float:
    first, growth = self._pace()
    return steps * first + growth * steps * (steps - 1) / 2

  def _steps_by(self, seconds: float) -> int:
    """Steps that have begun after so many seconds of decoding."""
    first, growth = self._pace()
    steps = seconds / first
    if growth > 0:
      half = first - growth / 2
      root = math.sqrt(half**2 + 2 * growth * seconds)
      steps = 2 * seconds / (half + root)
    return math.ceil(steps - _FUZZ)

  def _whole(self, steps: int) -> int:
    """Those of as many dispatches as have so many steps."""
    return -(-steps // self._dispatch) * self._dispatch

  def _finish(self, sequence: _Sequence) -> None:
    self._cached -= len(sequence.request.tokens)
    self._cached -= self._whole(sequence.length)
    if sequence.done.done():
      return
    n = sequence.length
    sequence.done.set_result(
      Completion(
        tokens=np.zeros(n, np.int32),
        logp=np.zeros(n, np.float32),
        version=np.concatenate(list(self._segments(sequence))),
        stop_reason=sequence.stop_reason,
      )
    )

  def _segments(self, sequence: _Sequence) -> Iterator[np.ndarray]:
    """The versions of its tokens, weights after weights."""
    begin = sequence.begin
    place = bisect.bisect_right(self._taken_over, begin) - 1
    while begin < sequence.end:
      following = self._taken_over[place + 1 : place + 2] or [sequence.end]
      end = min(following[0], sequence.end)
      yield np.full(end - begin, self._versions[place], np.int32)
      begin, place = end, place + 1

  async def _spend(self, kind: str, seconds: float) -> None:
    self._turn_to(kind)
    if seconds:
      await asyncio.sleep(seconds)

  def _turn_to(self, kind: str) -> None:
    """Books the time up to now; what follows is of `kind`."""
    now = asyncio.get_running_loop().time()
    if now > self._since and self._kind != "idle":
      running = len(self._running)
      self.intervals.append(Interval(self._since, now, self._kind, running))
    elapsed, self._since = now - self._since, now
    self._seconds[self._kind] += elapsed
    if self._kind == "decode":
      self._seconds["slots"] += elapsed * len(self._running) / self._slots
    self._kind = kind

  async def _changed(self, seconds: float | None) -> None:
    """Waits for a request that finds room, weights, or the time to pass."""
    loop = asyncio.get_running_loop()
    change = self._change = loop.create_future()
    timer = seconds is not None and loop.call_later(seconds, self._notify)
    try:
      await change
    finally:
      self._change = None
      if timer:
        timer.cancel()

  def _notify(self) -> None:
    if self._change is not None and not self._change.done():
      self._change.set_result(None)


class Fleet:
  """Several generators; a request goes to the one that has the fewest."""

  def __init__(self, generators: list[VirtualGenerator]):
    self.generators = generators

  async def generate(
    self, request: Request, progress: list[Chunk] | None = None
  ) -> Completion:
    """Samples one turn on the least loaded generator."""
    least = min(self.generators, key=lambda generator: generator.load)
    return await least.generate(request)

  def update(self, version: int) -> None:
    """Gives all of them new weights."""
    for generator in self.generators:
      generator.update(version)
