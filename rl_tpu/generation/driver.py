"""Continuous batching: requests in, completions out, weights at any time.

JetStream's Driver runs a thread per stage, cannot swap weights, cancel or
stop without leaving clients hanging, and may kill its process when the last
request ends (see `jetstream`). This subclass keeps its place in the serving
code and replaces the loop. One turn of it:

    cancellations -> weights -> admission -> one dispatch -> record

Everything that changes the batch happens between two dispatches. With
`dispatch_ahead` the record is that of the dispatch before, read while the
devices work on the next one; what it sampled for requests that left meanwhile
is dropped, and new weights wait until it is read. `step` runs
a turn in the caller's thread, which makes schedules deterministic; `start`
runs them in a thread that sleeps while there is nothing to do.

Running sequences meet new weights in one of three ways:

- `recompute` (AReaL, section 2): they are interrupted, their keys and values
  are computed again from prompt and partial answer under the new weights, and
  they go on in the same slot with the budget and keys they had;
- `keep` (PipelineRL): they go on with the keys and values of the old weights;
- `drain`: they end under the old weights; nothing is admitted meanwhile.

In all three each token's logp and version are those of the weights that
sampled it (AReaL, proposition 1).
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from rl_tpu.generation import decoding, requests, timeline, wire
from rl_tpu.generation.decoding import Admission
from rl_tpu.generation.engine import PolicyEngine
from rl_tpu.generation.jetstream import ReportingThread, orchestrator
from rl_tpu.generation.requests import Client, OpenRequest
from rl_tpu.types import Chunk, Completion, Request, Sampling, VersionedParams

Interruption = Literal["recompute", "keep", "drain"]
INTERRUPTIONS = ("recompute", "keep", "drain")


class Flight(NamedTuple):
  """A dispatch that is under way."""

  result: decoding.Result
  tenants: Int[np.ndarray, " S"]
  """Who held the slots when it began (`SlotTable.tenants`)."""
  began: float
  """Clock's seconds."""


class GenerationDriver(orchestrator.Driver):
  """Feeds one engine."""

  def __init__(
    self,
    engine: PolicyEngine,
    *,
    interruption: Interruption = "recompute",
    clock: Callable[[], float] = time.perf_counter,
    on_failure: Callable[[BaseException], None] | None = None,
    decode_sampling: Sampling | None = None,
  ):
    """Allocates the decode state; requests wait until weights are given.

    Args:
      engine: what computes.
      interruption: what new weights mean for running sequences.
      clock: of events, in seconds.
      on_failure: is told, in the failing thread, what ended the loop.
      decode_sampling: for clients of JetStream's own service, whose requests
        carry nothing but `max_tokens`; by default temperature 1.

    Raises:
      ValueError: `interruption` is unknown, or `recompute` could meet a
        sequence that is longer than the largest prefill bucket.
    """
    if interruption not in INTERRUPTIONS:
      raise ValueError(
        f"interruption is {interruption!r}; it must be one of {INTERRUPTIONS}"
      )
    config = engine.config
    if interruption == "recompute":
      longest = config.context_length - 1
      if config.prefill_buckets[-1] < longest:
        raise ValueError(
          f"prefill_buckets is {config.prefill_buckets}; with interruption "
          f"'recompute' the last must be >= {longest}, the longest sequence "
          "that can be interrupted"
        )
    super().__init__()  # Without engines it starts none of its threads.
    self._generate_engines = [engine]

    self.engine = engine
    self.failure: BaseException | None = None
    self._interruption = interruption
    self._on_failure = on_failure
    self._decode_sampling = decode_sampling or Sampling()
    self._thread: ReportingThread | None = None

    # Of the loop alone.
    self._state = engine.init_decode_state()
    self._table = requests.SlotTable(
      config.slots,
      config.context_length,
      config.behavior_top_k,
      engine.routed,
      config.min_shared_prefix if config.shares_prefixes else 0,
    )
    self._weights: VersionedParams | None = None
    self._flight: Flight | None = None
    self._outbox = requests.Outbox()
    self._timeline = timeline.Timeline(clock)

    # Of everybody, under this condition.
    self._changed = threading.Condition()
    self._waiting: dict[OpenRequest, None] = {}
    self._cancelled: list[OpenRequest] = []
    self._pending: VersionedParams | None = None
    self._accepted: int | None = None
    self._life = ""
    self._paused = False
    self._turning = False
    self._arrivals = 0

  # Requests.

  async def generate(
    self, request: Request, progress: list[Chunk] | None = None
  ) -> Completion:
    """Completes a request; cancelling the caller frees the slot.

    Callable from any asyncio loop. The budget is cut to what the context
    leaves; a completion that used it up has stop_reason "length".

    Args:
      request: what to continue.
      progress: what was sampled for it before, which counts against its
        budget; every dispatch's tokens are appended.

    Raises:
      ValueError: the request cannot be served; says why.
      RuntimeError: the driver failed or was stopped.
    """
    rest = wire.remainder(request, progress or ())
    if rest is None:
      return wire.join(progress or ())
    if len(rest.tokens) > self.engine.config.max_prompt_length and progress:
      progress.clear()
      rest = request
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Completion] = loop.create_future()
    receive = functools.partial(_resolve, future, progress)
    client = Client(loop=loop, receive=receive, streams=progress is not None)
    opened = self.open(rest, client)
    try:
      return await future
    finally:
      self.cancel(opened)

  async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
    """Completes a request, handing over every dispatch's tokens.

    As `generate`; closing the generator frees the slot.
    """
    arrived: asyncio.Queue[Any] = asyncio.Queue()
    client = Client(
      loop=asyncio.get_running_loop(),
      receive=arrived.put_nowait,
      streams=True,
    )
    opened = self.open(request, client)
    try:
      ended = False
      while not ended:
        outcome = await arrived.get()
        if isinstance(outcome, Exception):
          raise outcome
        yield outcome
        ended = outcome.stop_reason is not None
    finally:
      self.cancel(opened)

  def open(self, request: Request, client: Client) -> OpenRequest:
    """Lets a request wait for a slot; its client is told what comes of it.

    Raises:
      ValueError: the request cannot be served; says why.
      RuntimeError: the driver failed or was stopped.
    """
    return self._open(request, client=client)

  def cancel(self, opened: OpenRequest) -> None:
    """Withdraws a request, unless it ended; thread-safe, may be repeated.

    Its client may still be called with what was on the way.
    """
    with self._changed:
      if opened.ended:
        return
      opened.ended = True
      self._timeline.sums.cancellations += 1
      if opened.slot < 0:
        self._waiting.pop(opened, None)
      else:
        self._cancelled.append(opened)
        self._changed.notify_all()

  def place_request_on_prefill_queue(
    self, request: orchestrator.ActiveRequest
  ) -> None:
    """Takes a request of JetStream's own service; tokens only."""
    if not isinstance(request.prefill_content, list):
      self.engine.get_tokenizer()
    with self._changed:
      self._arrivals += 1
      index = self._arrivals
    sampling = dataclasses.replace(
      self._decode_sampling, max_tokens=request.max_tokens
    )
    tokens = np.asarray(request.prefill_content, np.int32)
    self._open(
      Request(prompt_index=index, member=0, tokens=tokens, sampling=sampling),
      return_channel=request.return_channel,
    )

  def _open(self, request: Request, **destination) -> OpenRequest:
    """Checks a request and lets it wait for a slot."""
    self.engine.check_request(request)
    room = self.engine.config.context_length - len(request.tokens)
    opened = OpenRequest(
      request=request,
      max_tokens=min(request.sampling.max_tokens, room),
      arrived=self._timeline.now(),
      **{"return_channel": None, **destination},
    )
    with self._changed:
      self._refuse_when_dead()
      self._waiting[opened] = None
      self._changed.notify_all()
    return opened

  # Control.

  def update(self, weights: VersionedParams, life: str = "") -> None:
    """Puts weights into service at the next dispatch boundary; thread-safe.

    Of several that come before the boundary only the newest is used.

    Args:
      weights: what to serve.
      life: whose versions these are. A trainer that went back to a checkpoint
        counts from there again, and its versions are other weights than those
        of the same numbers before; so another life may go back.

    Raises:
      ValueError: the weights are not of this model, not on the engine's mesh,
        or not newer than those that the same life gave already.
      RuntimeError: the driver failed or was stopped.
    """
    self.engine.check_params(weights.params)
    with self._changed:
      self._refuse_when_dead()
      newest = self._accepted if life == self._life else None
      if weights.version >= 2**31:
        raise ValueError(
          f"weights have version {weights.version}; it must be < 2**31"
        )
      if newest is not None and weights.version <= newest:
        raise ValueError(
          f"weights have version {weights.version}; it must be greater than "
          f"{newest}, which was given before"
        )
      self._pending = weights
      self._accepted, self._life = weights.version, life
      self._changed.notify_all()

  def pause(self) -> None:
    """Stops after the dispatch that is running, and waits for its end."""
    with self._changed:
      self._paused = True
      if threading.current_thread() is not self._thread:
        self._changed.wait_for(self._at_rest)

  def _at_rest(self) -> bool:
    """Whether nothing runs that the loop's thread will see to by itself."""
    flying = self._flight and self._thread is not None and self.live
    return not self._turning and not flying

  def resume(self) -> None:
    """Goes on after `pause`."""
    with self._changed:
      self._paused = False
      self._changed.notify_all()

  def warm_up(self) -> None:
    """Compiles every program; without weights, with zeros in their place.

    Raises:
      RuntimeError: the loop runs already.
    """
    if self._thread is not None:
      raise RuntimeError("warm_up belongs before start")
    weights = self._pending or self._weights or self.engine.zeros()
    self._state = self.engine.warm_up(weights, self._state)

  def start(self) -> None:
    """Runs the loop in its own thread until `stop`."""
    with self._changed:
      self._refuse_when_dead()
      if self._thread is not None:
        raise RuntimeError("the driver was started already")
      self._thread = ReportingThread(
        target=self._run, name="generation", daemon=True
      )
      self._thread.start()

  def stop(self) -> None:
    """Ends the loop; requests that are open fail. May be called again."""
    with self._changed:
      self.live = False
      self._changed.notify_all()
    thread = self._thread
    if thread is not None and thread is not threading.current_thread():
      thread.join()
    self._fail_open("the generation driver was stopped", None)

  def step(self) -> bool:
    """Runs one turn here; returns whether there was anything to do.

    Raises:
      RuntimeError: the loop has its own thread, or the driver is dead.
      Exception: what went wrong in the turn; open requests fail with it.
    """
    if self._thread is not None:
      raise RuntimeError("step is for drivers that were not started")
    self._refuse_when_dead()
    with self._failure_handed_on():
      worked = self._turn()
      self._outbox.deliver()
    return worked

  # Figures.

  @property
  def version(self) -> int | None:
    """Of the weights in service."""
    weights = self._weights
    return None if weights is None else weights.version

  @property
  def accepted(self) -> tuple[str, int | None]:
    """Life and version of the weights that the next request surely meets."""
    with self._changed:
      return self._life, self._accepted

  @property
  def free_slots(self) -> int:
    """Slots that no request holds."""
    return self._table.free_slots

  @property
  def waiting(self) -> int:
    """Requests that wait for a slot."""
    return len(self._waiting)

  def counters(self) -> timeline.Counters:
    """A copy of the sums so far."""
    return self._timeline.counters()

  def take_events(self) -> list[timeline.Event]:
    """The events since the last call, oldest first."""
    return self._timeline.take_events()

  # The loop.

  def _run(self) -> None:
    with self._failure_handed_on():
      while self.live:
        if not self._turn():
          self._outbox.deliver()
          with self._changed:
            self._changed.wait_for(lambda: not self.live or self._ready())
      self._outbox.deliver()

  def _ready(self) -> bool:
    """Whether a turn would do something."""
    if self._flight is not None:
      return True
    weights = self._pending or self._weights
    work = (
      self._cancelled
      or self._pending
      or not self._table.empty
      or (self._waiting and weights)
    )
    return bool(work) and not self._paused

  def _turn(self) -> bool:
    with self._changed:
      if not self._ready():
        return False
      self._turning = True
      landing = self._lands_first()
    try:
      if landing:
        self._land()
      if not self._paused:
        self._go_on()
    finally:
      with self._changed:
        self._turning = False
        self._changed.notify_all()
    return True

  def _lands_first(self) -> bool:
    """Whether the last dispatch must be read before the batch changes."""
    if self._flight is None:
      return False
    ending = self._table.ending(self.engine.config.steps_per_dispatch)
    refill = ending > 0 and bool(self._waiting)
    all_end = ending == len(self._table.running)
    return self._paused or self._pending is not None or refill or all_end

  def _go_on(self) -> None:
    """Changes the batch, and dispatches."""
    began = self._timeline.now()
    with self._changed:
      freed = self._collect_cancelled()
      weights = self._collect_weights()
      interrupted = self._interrupt() if weights else []
      admitted = self._collect_waiting(weights)
    if freed:
      self._state = self.engine.release(self._state, freed)
    if weights is not None:
      self._swap(weights, interrupted)
    if admitted:
      self._start(admitted)
    if not self._table.empty:
      self._dispatch(began)

  def _collect_cancelled(self) -> list[int]:
    """Frees the slots of cancelled requests."""
    gone = [opened for opened in self._table.running if opened.client_gone]
    self._timeline.sums.cancellations += len(gone)
    freed = []
    for opened in (*self._cancelled, *gone):
      if self._table.holds(opened):
        freed.append(self._table.free(opened))
    self._cancelled = []
    return freed

  def _collect_weights(self) -> VersionedParams | None:
    """Weights whose time has come."""
    if self._flight is not None:  # They came just now.
      return None
    if self._interruption == "drain" and not self._table.empty:
      return None
    weights, self._pending = self._pending, None
    return weights

  def _interrupt(self) -> list[Admission]:
    """What new weights mean for running sequences: their new admissions."""
    self._table.forget_caches()
    if self._interruption != "recompute":
      return []
    return self._table.admit(self._table.running)

  def _collect_waiting(
    self, weights: VersionedParams | None
  ) -> list[Admission]:
    """Gives free slots to the requests that came first."""
    draining = self._pending is not None
    if draining or not (weights or self._weights):
      return []
    first = list(itertools.islice(self._waiting, self.free_slots))
    now = self._timeline.now() if first else 0.0
    for opened in first:
      del self._waiting[opened]
      self._timeline.sums.queue_seconds += now - opened.arrived
    return self._table.admit(first)

  def _swap(
    self, weights: VersionedParams, interrupted: list[Admission]
  ) -> None:
    """Puts weights into service, and interrupted sequences back to work."""
    with self._timeline.during("weights"):
      self._weights = weights
      self._timeline.sums.updates += 1
      if interrupted:
        self._admit(interrupted)
        self._timeline.sums.interruptions += len(interrupted)
        self._timeline.sums.recomputed_tokens += sum(
          len(admission.missing) for admission in interrupted
        )

  def _start(self, admitted: list[Admission]) -> None:
    """Puts new requests to work."""
    if self._ahead:
      self._admit(admitted)
    else:
      with self._timeline.during("prefill"):
        self._admit(admitted)
    self._timeline.sums.prompts += len(admitted)
    shared = sum(admission.shared for admission in admitted)
    self._timeline.sums.shared_tokens += shared

  def _admit(self, admissions: list[Admission]) -> None:
    """Prefills sequences into their slots."""
    assert self._weights is not None
    self._state = self.engine.admit(self._weights, self._state, admissions)
    sums = self._timeline.sums
    sums.missing_tokens += sum(len(one.missing) for one in admissions)
    sums.prefilled_tokens = self.engine.prefilled_tokens
    if not self._ahead:
      jax.block_until_ready(self._state)

  @property
  def _ahead(self) -> bool:
    return self.engine.config.dispatch_ahead

  def _dispatch(self, began: float) -> None:
    """Samples, and hands over the last dispatch's completions meanwhile."""
    assert self._weights is not None
    tenants = self._table.tenants
    self._state, result = self.engine.generate(self._weights, self._state)
    if self._flight is not None:
      self._land()
    self._flight = Flight(result, tenants, began)
    self._outbox.deliver()
    if not self._ahead:
      self._land()

  def _land(self) -> None:
    """Waits for the dispatch under way, and records it."""
    assert self._flight is not None
    flight, self._flight = self._flight, None
    result = flight.result.convert_to_numpy()
    self._timeline.ended("generate", flight.began)
    result = self._table.kept(result, flight.tenants)
    self._timeline.sums.tokens += self._table.record(result)
    with self._changed:
      ended = self._table.ended(result)
      self._timeline.sums.completions += sum(not one.ended for one in ended)
      self._table.stream(result, self._outbox)
      for opened in ended:
        if not opened.ended:  # Streams ended with their last chunk.
          completion = self._table.completion(opened, result)
          self._outbox.post(opened, completion)
        self._table.free(opened)

  # Failure.

  @contextlib.contextmanager
  def _failure_handed_on(self) -> Iterator[None]:
    """Fails every open request with what goes wrong inside, and raises it."""
    try:
      yield
    except BaseException as error:
      with self._changed:
        self.live = False
        self.failure = error
        self._changed.notify_all()
      self._fail_open("the generation driver failed", error)
      if self._on_failure is not None:
        self._on_failure(error)
      raise

  def _fail_open(self, message: str, cause: BaseException | None) -> None:
    with self._changed:
      for opened in (*self._waiting, *self._table.running):
        if not opened.ended:
          error = RuntimeError(message)
          error.__cause__ = cause
          self._outbox.post(opened, error)
      self._waiting.clear()
    self._outbox.deliver()

  def _refuse_when_dead(self) -> None:
    if self.failure is not None:
      raise RuntimeError("the generation driver failed") from self.failure
    if not self.live:
      raise RuntimeError("the generation driver was stopped")


def _resolve(
  future: asyncio.Future,
  progress: list[Chunk] | None,
  outcome: Completion | Chunk | Exception,
) -> None:
  """Runs in the client's loop; chunks come only where there is a progress."""
  if future.done():
    return
  if isinstance(outcome, Exception):
    future.set_exception(outcome)
  elif isinstance(outcome, Completion):
    future.set_result(outcome)
  else:
    assert progress is not None
    progress.append(outcome)
    if outcome.stop_reason is not None:
      future.set_result(wire.join(progress))
