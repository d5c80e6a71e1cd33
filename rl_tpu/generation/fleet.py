"""Several generators behind the contract of one, with nothing lost.

Each generator is a `python -m rl_tpu serve` of its own; any may be slow, hang,
die, come back or join late. `routing` decides who gets what; this module does
it on one asyncio loop. Each generator has a task that checks it, and while it
lags one that brings it to the newest weights, versions between left out.

A request whose generator fails goes on elsewhere from the tokens that it has.
The key of a token depends on identity and position only (`types.Request`), so
it reads as if it had never moved. A request whose end has arrived is not sent
again; what a generator says after its circuit was opened is heard by nobody.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import pathlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rl_tpu.generation import roster, routing, server, timeline, wire
from rl_tpu.generation.client import GenerationClient
from rl_tpu.generation.roster import Config
from rl_tpu.generation.timeline import FleetCounters
from rl_tpu.generation.wire import OverloadedError
from rl_tpu.types import Chunk, Completion, Request

Offer = Callable[[GenerationClient], Awaitable[None]]
"""Has one generator take the weights published; returns when it did."""

_FAULTS = (OSError, RuntimeError, ValueError)
"""What a generator that is not there, or not well, raises."""
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, kw_only=True)
class _Link:
  """What we hold of one generator."""

  member: routing.Member
  client: GenerationClient
  due: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
  """Its next check may have moved."""
  asking: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
  """Reports are taken in the order in which they were asked for."""
  watch: asyncio.Task[None] | None = None
  update: asyncio.Task[None] | None = None


_Place = tuple[_Link, GenerationClient]
"""Where a request goes; the client is replaced when a circuit opens."""


class Fleet:
  """Generates like a `GenerationDriver`, on the loop that enters it."""

  def __init__(
    self,
    config: Config,
    *,
    life: str = "",
    on_served: Callable[[int], None] = lambda version: None,
    on_failure: Callable[[BaseException], None] = lambda error: None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Reads secrets; connects when entered.

    Args:
      config: who belongs to it, and the limits.
      life: of the run, to be told in every offer; weights that a generator
        took in another one are not ours, whatever version they say.
      on_served: is told, on the loop, each version that new requests are
        surely answered by from now on; it only rises.
      on_failure: is told, on the loop, what ended the fleet.
      clock: in seconds.

    Raises:
      ValueError: no generator is named; or a secret is not there, or not fit
        for its use.
    """
    if not config.names_any:
      raise ValueError(
        "addresses is (); it must name a generator, or addresses_file a file"
      )
    self.failure: BaseException | None = None
    self._config = config
    self._life = life
    self._on_served = on_served
    self._on_failure = on_failure
    self._clock = clock
    self._token = server.secret(
      "token_file", config.token_file, server.TOKEN_VARIABLE
    )
    self._credentials = roster.credentials(config)
    self._router = routing.Router(config, clock)
    self._links: dict[str, _Link] = {}
    self._published: tuple[int, Offer] | None = None
    self._told: int | None = None
    self._sums = FleetCounters()
    self._events = timeline.Events()
    self._waiting: collections.deque[tuple[Request, asyncio.Future[_Place]]] = (
      collections.deque()
    )
    self._tasks: set[asyncio.Task[None]] = set()
    self._changed = asyncio.Event()
    self._unread = ""
    """What is wrong with addresses_file, for the error of the end."""

  async def __aenter__(self) -> "Fleet":
    for address in self._config.addresses:
      self._join(address)
    self._start(self._supervise())
    return self

  async def __aexit__(self, *_) -> None:
    await self.close()

  async def close(self) -> None:
    """Ends every connection; open requests fail with RuntimeError."""
    if self.failure is None:
      self._end(RuntimeError("the fleet was closed"))
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)
    for link in self._links.values():
      await link.client.close()

  # Requests.

  async def generate(
    self, request: Request, progress: list[Chunk] | None = None
  ) -> Completion:
    """Completes a request; cancelling the caller withdraws it.

    It waits while no generator may have it.

    Args:
      request: what to continue.
      progress: what was sampled for it before, which counts against its
        budget; what arrives is appended.

    Raises:
      ValueError: the request cannot be served; says why.
      RuntimeError: the fleet failed or was closed.
    """
    chunks = [] if progress is None else progress
    sent = False
    while wire.remainder(request, chunks) is not None:
      link, client = await self._place(request, first=sent)
      try:
        if sent:
          self._sums.retries += 1
          self._sums.moved += bool(chunks)
        sent = True
        await self._follow(link, client, request, chunks)
      finally:
        self._router.release(link.member)
        self._settle()
    self._sums.completions += 1
    return wire.join(chunks)

  async def _follow(
    self,
    link: _Link,
    client: GenerationClient,
    request: Request,
    chunks: list[Chunk],
  ) -> None:
    """Collects what one generator samples, until it ends or breaks."""
    rest = wire.remainder(request, chunks)
    assert rest is not None and link.member.report is not None
    if chunks and len(rest.tokens) > link.member.report.max_prompt_length:
      rest = request
      chunks.clear()
      self._sums.restarts += 1
    try:
      async with contextlib.aclosing(client.stream(rest)) as stream:
        async for chunk in stream:
          chunks.append(chunk)
          self._sums.tokens += len(chunk.tokens)
    except OverloadedError:
      self._router.overloaded(link.member)
    except (ConnectionError, RuntimeError) as error:
      if link.member.circuit == "closed":
        address, why = link.member.address, _words(error)
        _log.warning("%s failed requests: %s", address, why)
      self._router.broke(link.member, _words(error))
      link.due.set()
    else:
      self._router.answered(link.member)

  async def _place(self, request: Request, *, first: bool) -> _Place:
    """Where a request may go now; it counts as sent there.

    Args:
      request: what is to be sent.
      first: whether it goes before those that wait already.
    """
    while True:
      self._refuse_when_dead()
      place = self._choose(request)
      if place is not None:
        return place
      future = asyncio.get_running_loop().create_future()
      if first:
        self._waiting.appendleft((request, future))
      else:
        self._waiting.append((request, future))
      try:
        link, client = await future
      except asyncio.CancelledError:
        if future.done() and not future.cancelled() and not future.exception():
          self._router.release(future.result()[0].member)
          self._settle()
        raise
      if link.client is client and link.member.circuit != "open":
        return link, client
      self._router.release(link.member)

  def _choose(self, request: Request) -> _Place | None:
    member = self._router.choose(request.prompt_index, request.member)
    if member is None:
      return None
    link = self._links[member.address]
    return link, link.client

  def _settle(self) -> None:
    """Tells what changed, and hands out what has become free."""
    served = self._router.served
    if served is not None and served != self._told:
      self._told = served
      self._on_served(served)
    self._changed.set()
    while self._waiting:
      request, future = self._waiting[0]
      if not future.done():
        place = self._choose(request)
        if place is None:
          return
        future.set_result(place)
      self._waiting.popleft()

  # Weights.

  async def publish(self, version: int, offer: Offer) -> None:
    """Brings a version to every generator, in the background.

    One that is slow goes from one newest version to the next. One that fails
    keeps what it has and is tried again.

    Raises:
      ValueError: the version is not greater than the last.
      RuntimeError: the fleet failed or was closed.
    """
    self._refuse_when_dead()
    self._router.publish(version)
    self._published = version, offer
    for link in self._links.values():
      self._update_if_due(link)
    self._settle()

  async def wait_served(self, version: int) -> None:
    """Waits until new requests are answered by this version or newer.

    Raises:
      RuntimeError: the fleet failed or was closed before that.
    """
    while self.served is None or self.served < version:
      self._refuse_when_dead()
      self._changed.clear()
      await self._changed.wait()

  @property
  def served(self) -> int | None:
    """The least version that a new request is answered by."""
    return self._router.served

  def _update_if_due(self, link: _Link) -> None:
    updating = link.update is not None and not link.update.done()
    if not updating and self._router.wants_offer(link.member):
      link.update = self._start(self._update(link))

  async def _update(self, link: _Link) -> None:
    """Brings one generator to the newest version, whichever it is by then."""
    while self._router.wants_offer(link.member):
      await self._offer(link)
      self._settle()

  async def _offer(self, link: _Link) -> None:
    assert self._published is not None
    member, (version, offer) = link.member, self._published
    began = self._clock()
    try:
      async with asyncio.timeout(self._config.update_seconds):
        await offer(link.client)
        await self._ask(link)
      if member.version is None or member.version < version:
        raise RuntimeError(
          f"it said that it took version {version}, but has {member.version}"
        )
    except _FAULTS as error:
      self._sums.failed_publishes += 1
      self._router.declined(member, _words(error))
      _log.warning(
        "%s did not take version %d: %s", member.address, version, _words(error)
      )
    else:
      self._sums.publishes += 1
      ended = self._clock()
      self._sums.publish_seconds[member.address] = ended - began
      self._events.append((began, ended, "weights"))
      self._router.took(member)

  # Health.

  async def _watch(self, link: _Link) -> None:
    """Checks one generator for as long as it belongs to the fleet."""
    member = link.member
    while True:
      link.due.clear()
      seconds = self._router.seconds_to_check(member)
      if seconds > 0:
        with contextlib.suppress(TimeoutError):
          async with asyncio.timeout(seconds):
            await link.due.wait()
        continue
      circuit = member.circuit
      try:
        await self._ask(link)
      except _FAULTS as error:
        self._router.missed(member, _words(error))
      if member.circuit == "open":
        await self._disconnect(link)
      if member.circuit != circuit:
        standing = self._router.standing(member)
        _log.info("%s is %s: %s", member.address, member.circuit, standing)
      self._update_if_due(link)
      self._settle()

  async def _ask(self, link: _Link) -> None:
    """Checks a generator; the router hears its report."""
    async with link.asking:
      async with asyncio.timeout(self._config.timeout_seconds):
        status = await link.client.status()
      self._router.heard(link.member, roster.read_report(status, self._life))

  async def _disconnect(self, link: _Link) -> None:
    """Breaks off all that a generator does for us; the rest is another's."""
    if link.update is not None:
      link.update.cancel()
      await asyncio.wait([link.update])
    client, link.client = link.client, self._connect(link.member.address)
    await client.close()

  def _connect(self, address: str) -> GenerationClient:
    return GenerationClient(
      address, token=self._token, credentials=self._credentials
    )

  async def _supervise(self) -> None:
    """Keeps the list of generators, and the patience.

    Raises:
      RuntimeError: it is at an end.
    """
    while True:
      await self._read_list()
      overdue = self._router.overdue()
      if overdue:
        raise RuntimeError(overdue + self._unread)
      await asyncio.sleep(self._config.health_seconds)

  async def _read_list(self) -> None:
    """Lets generators join and leave as the file says."""
    file = self._config.addresses_file
    if file is None:
      return
    try:
      text = await asyncio.to_thread(pathlib.Path(file).read_text)
      listed = roster.parse_addresses(file, text)
    except (OSError, ValueError) as error:
      unread = f"; addresses_file cannot be used: {error}"
      if unread != self._unread:
        _log.warning("addresses_file cannot be used: %s", error)
      self._unread = unread
      return
    self._unread = ""
    wanted = dict.fromkeys((*self._config.addresses, *listed))
    for address in [a for a in self._links if a not in wanted]:
      await self._leave(address)
    for address in wanted:
      if address not in self._links:
        self._join(address)

  def _join(self, address: str) -> None:
    member = self._router.join(address)
    link = _Link(member=member, client=self._connect(address))
    self._links[address] = link
    link.watch = self._start(self._watch(link))

  async def _leave(self, address: str) -> None:
    """Takes a generator off; its requests go on elsewhere."""
    link = self._links.pop(address)
    self._router.leave(link.member)
    assert link.watch is not None
    link.watch.cancel()
    await asyncio.wait([link.watch])
    await self._disconnect(link)
    _log.info("%s left", address)

  # Figures.

  def counters(self) -> FleetCounters:
    """A copy of the sums so far."""
    return dataclasses.replace(
      self._sums,
      openings=self._router.openings,
      publish_seconds=dict(self._sums.publish_seconds),
    )

  def take_events(self) -> list[timeline.Event]:
    """When generators took weights, since the last call; the rest is theirs."""
    return self._events.take()

  def status(self) -> dict[str, Any]:
    """For logs: versions, what waits, and each generator's standing."""
    return {
      "newest": self._router.newest,
      "served": self.served,
      "waiting": sum(not future.done() for _, future in self._waiting),
      "generators": {
        address: {
          "circuit": link.member.circuit,
          "version": link.member.version,
          "requests": link.member.requests,
          "slots": link.member.report.slots if link.member.report else None,
          "standing": self._router.standing(link.member),
        }
        for address, link in self._links.items()
      },
    }

  # The end.

  def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Runs a part of the fleet; its failure is the fleet's."""
    task = asyncio.get_running_loop().create_task(work)
    self._tasks.add(task)
    task.add_done_callback(self._ended)
    return task

  def _ended(self, task: asyncio.Task[None]) -> None:
    self._tasks.discard(task)
    error = None if task.cancelled() else task.exception()
    if error is not None and self.failure is None:
      self._end(error)
      self._on_failure(error)

  def _end(self, error: BaseException) -> None:
    """Fails what waits; what runs ends when its connection does."""
    self.failure = error
    self._changed.set()
    while self._waiting:
      _, future = self._waiting.popleft()
      if not future.done():
        future.set_exception(_dead(error))

  def _refuse_when_dead(self) -> None:
    if self.failure is not None:
      raise _dead(self.failure)


def _dead(cause: BaseException) -> RuntimeError:
  error = RuntimeError(f"no generator can be asked any more: {cause!r}")
  error.__cause__ = cause
  return error


def _words(error: Exception) -> str:
  """An error in a line; some, such as a timeout's, have no text."""
  return str(error) or type(error).__name__
