"""How generating and learning share time: one thread, three, or processes.

`Serial` runs everything in the caller's thread. Before each batch the generator
works until admission has no more room, then the learner trains. With lag n the
batch of version v was sampled n versions earlier (at the start of a run: by
version 0), exactly and reproducibly; lag 0 is synchronous training.

`Concurrent` is asynchronous training: the generator decodes in its own thread,
the episodes live on an event loop in another, and the caller's thread learns.
It waits only when no full batch is there. The first part that fails ends the
run: its error comes out of `take`.

`Remote` is the same with generators that have processes of their own. They
take weights in their own time, so two versions count: what is trained, which
the actor's books follow, and what new requests are surely answered by, which
admission follows (`Actor.set_served`).

All have the same verbs; the loop in `train.py` does not know which it drives.
"""

import asyncio
import contextlib
import logging
import re
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from rl_tpu import episode
from rl_tpu.actor import Actor
from rl_tpu.buffer import Buffer
from rl_tpu.generation import timeline
from rl_tpu.generation.driver import GenerationDriver
from rl_tpu.generation.fleet import Fleet
from rl_tpu.transport import Transport
from rl_tpu.types import Group, VersionedParams

_T = TypeVar("_T")
_LOCKSTEP = re.compile(r"lockstep\((\d+)\)")
_LOOK_SECONDS = 0.5
"""How often whoever waits for a batch looks whether it should stop."""
_LEAVE_SECONDS = 30.0
"""How long an end waits for an environment that blocks its thread."""
_log = logging.getLogger(__name__)


def parse(name: str) -> int | None:
  """The lag of a serial schedule, or None for `async`.

  Raises:
    ValueError: it is none of sync, lockstep(n), async.
  """
  if name == "async":
    return None
  if name == "sync":
    return 0
  if match := _LOCKSTEP.fullmatch(name):
    return int(match[1])
  raise ValueError(
    f"schedule is {name!r}; it must be 'sync', 'lockstep(n)' or 'async'"
  )


class Generator(episode.Generator, Protocol):
  """What training needs to know of whatever generates for it."""

  failure: BaseException | None
  """What ended it."""

  def counters(self) -> timeline.Counters | timeline.FleetCounters:
    """Sums so far; of any generator, `tokens` sampled."""
    ...

  def take_events(self) -> list[timeline.Event]:
    """What it did and when, since the last call."""
    ...


class Schedule(Protocol):
  """What the training loop needs of each."""

  def serve(self, first: VersionedParams) -> None:
    """Has the generator answer, with the weights that it takes first."""
    ...

  def call(self, work: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine that needs the generator, such as an evaluation."""
    ...

  def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
    """The same without waiting, where generating goes on by itself."""
    ...

  def start(self) -> None:
    """Lets the actor dispatch."""
    ...

  def take(
    self, version: int, stopping: Callable[[], bool]
  ) -> list[Group] | None:
    """The next batch's groups; None if it was to stop before they were there.

    A batch is taken whole or not at all, so the actor's books stay right.
    """
    ...

  def publish(self, published: VersionedParams) -> None:
    """Gives the generator new weights, then the actor their version."""
    ...

  def figures(self) -> dict[str, float]:
    """Metrics of weights on their way since the last call."""
    ...

  def stop(self) -> None:
    """Ends every part; what was running is left to a later resumption."""
    ...


class Serial:
  """Generates, then learns, in one thread."""

  def __init__(self, actor: Actor, driver: GenerationDriver, buffer: Buffer):
    self._actor = actor
    self._driver = driver
    self._buffer = buffer
    self._loop = asyncio.new_event_loop()
    self._run: asyncio.Task[None] | None = None

  def serve(self, first: VersionedParams) -> None:
    """Has the generator compile everything; it moves with the loop."""
    self._driver.update(self._driver.engine.serve(first))
    self._driver.warm_up()

  def call(self, work: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine to its end while the generator takes its turns."""
    task = self._loop.create_task(work)
    self._complete(self._pump(task, lambda: False))
    return task.result()

  def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
    """Runs it to its end at once."""
    future: Future[_T] = Future()
    future.set_result(self.call(work))
    return future

  def start(self) -> None:
    """Creates the actor's task; it moves when the loop does."""
    self._run = self._loop.create_task(self._actor.run())

  def take(
    self, version: int, stopping: Callable[[], bool]
  ) -> list[Group] | None:
    """Generates all that admission allows, then takes the oldest batch."""
    drained = self._loop.create_task(self._actor.drain())
    self._complete(self._pump(drained, stopping))
    if not drained.done():
      return None
    drained.result()
    return self._buffer.take(version, timeout=0)

  def publish(self, published: VersionedParams) -> None:
    """Weights first: what starts at a version must sample from it."""
    self._driver.update(self._driver.engine.serve(published))
    self._actor.set_version(published.version)

  def figures(self) -> dict[str, float]:
    """None: weights do not leave the process."""
    return {}

  def stop(self) -> None:
    """Cancels all that runs and closes the loop."""
    self._complete(_cancel_others())
    self._driver.stop()
    self._loop.close()

  def _complete(self, work: Coroutine[Any, Any, None]) -> None:
    """Runs the loop until it is done, also where another runs, as in Jupyter.

    That one stands still meanwhile, as for any call that takes its time.
    """
    other = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
      self._loop.run_until_complete(work)
    finally:
      asyncio._set_running_loop(other)

  async def _pump(
    self, task: asyncio.Task[Any], stopping: Callable[[], bool]
  ) -> None:
    while not (task.done() or stopping()):
      self._driver.step()
      await asyncio.sleep(0)


class _Threaded:
  """The actor on a loop of its own, in a thread of its own."""

  def __init__(
    self, actor: Actor, buffer: Buffer, stop_generating: Callable[[], None]
  ):
    self._actor = actor
    self._buffer = buffer
    self._stop_generating = stop_generating
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name="actor", daemon=True
    )
    self._run: Any = None
    self._thread.start()

  def call(self, work: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine on the actor's loop and waits for its result."""
    return self.submit(work).result()

  def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
    """Runs a coroutine on the actor's loop."""
    return self._post(work)

  def _post(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
    return asyncio.run_coroutine_threadsafe(work, self._loop)

  def start(self) -> None:
    """Starts the actor on its loop; a failure of its reaches the buffer."""
    self._run = self._post(self._actor.run())

  def take(
    self, version: int, stopping: Callable[[], bool]
  ) -> list[Group] | None:
    """Waits for the oldest batch that is fresh enough."""
    while not stopping():
      with contextlib.suppress(TimeoutError):
        return self._buffer.take(version, timeout=_LOOK_SECONDS)
    return None

  def stop(self) -> None:
    """Cancels all that runs, ends the generator, joins the threads.

    A thread that an environment blocks cannot be ended; it is left behind, so
    that the run still ends, with the error that it ends for.
    """
    ended = self._post(self._end())
    try:
      ended.result(_LEAVE_SECONDS)
    except TimeoutError:
      _log.warning("an environment blocks the actor's thread; it is left")
      self._stop_generating()
      return
    self._stop_generating()
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()

  async def _end(self) -> None:
    """Ends what lives on the loop."""
    await _cancel_others()


class Concurrent(_Threaded):
  """Generates and learns at the same time."""

  def __init__(self, actor: Actor, driver: GenerationDriver, buffer: Buffer):
    super().__init__(actor, buffer, driver.stop)
    self._driver = driver

  def serve(self, first: VersionedParams) -> None:
    """Has the generator compile everything, then lets it run."""
    self._driver.update(self._driver.engine.serve(first))
    self._driver.warm_up()
    self._driver.start()

  def publish(self, published: VersionedParams) -> None:
    """Weights first: what starts at a version must sample from it."""
    self._driver.update(self._driver.engine.serve(published))
    self._actor.set_version(published.version)

  def figures(self) -> dict[str, float]:
    """None: weights do not leave the process."""
    return {}


class Remote(_Threaded):
  """Learns while generators in other processes generate.

  The fleet lives on the actor's loop. It is told of a version when a copy of
  the weights is made; they travel while the next batch is trained.
  """

  def __init__(
    self, actor: Actor, fleet: Fleet, buffer: Buffer, transport: Transport
  ):
    super().__init__(actor, buffer, transport.close)
    self._fleet = fleet
    self._transport = transport
    self._offered = -1

  def serve(self, first: VersionedParams) -> None:
    """Waits until a generator answers with these weights."""
    self._post(self._fleet.__aenter__()).result()
    self._offer(first)
    self._post(self._fleet.wait_served(first.version)).result()

  def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
    """Runs a coroutine once generators answer with what was published last."""
    return self._post(self._when_served(work, self._offered))

  async def _when_served(
    self, work: Coroutine[Any, Any, _T], version: int
  ) -> _T:
    with contextlib.closing(work):
      await self._fleet.wait_served(version)
      return await work

  def publish(self, published: VersionedParams) -> None:
    """Admission goes on when generators have the weights, not before."""
    self._offer(published)
    self._actor.set_version(published.version)

  def _offer(self, published: VersionedParams) -> None:
    version = self._offered = published.version
    self._transport.publish(published.params, version)
    self._post(self._fleet.publish(version, self._transport.offer)).result()

  def figures(self) -> dict[str, float]:
    """Bytes, seconds and bandwidth of what was published and pulled."""
    return self._transport.metrics()

  async def _end(self) -> None:
    await _cancel_others()
    await self._fleet.close()


async def _cancel_others() -> None:
  """Cancels every other task of this loop and waits for its end."""
  others = asyncio.all_tasks() - {asyncio.current_task()}
  for task in others:
    task.cancel()
  await asyncio.gather(*others, return_exceptions=True)
