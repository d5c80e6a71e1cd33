"""How generating and learning share time: one thread, or three.

`Serial` runs everything in the caller's thread. Before each batch the generator
works until admission has no more room, then the learner trains. With lag n the
batch of version v was sampled n versions earlier (at the start of a run: by
version 0), exactly and reproducibly; lag 0 is synchronous training.

`Concurrent` is asynchronous training: the generator decodes in its own thread,
the episodes live on an event loop in another, and the caller's thread learns.
It waits only when no full batch is there. The first part that fails ends the
run: its error comes out of `take`.

Both have the same verbs; the loop in `train.py` does not know which it
drives.
"""

import asyncio
import contextlib
import logging
import re
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from rl_tpu.actor import Actor
from rl_tpu.buffer import Buffer
from rl_tpu.generation.driver import GenerationDriver
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


class Schedule(Protocol):
  """What the training loop needs of either."""

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

  def publish(self, versioned: VersionedParams) -> None:
    """Gives the generator new weights, then the actor their version."""
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

  def call(self, work: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine to its end while the generator takes its turns."""
    task = self._loop.create_task(work)
    self._loop.run_until_complete(self._pump(task, lambda: False))
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
    self._loop.run_until_complete(self._pump(drained, stopping))
    if not drained.done():
      return None
    drained.result()
    return self._buffer.take(version, timeout=0)

  def publish(self, versioned: VersionedParams) -> None:
    """Weights first: what starts at a version must sample from it."""
    self._driver.update(versioned)
    self._actor.set_version(versioned.version)

  def stop(self) -> None:
    """Cancels all that runs and closes the loop."""
    self._loop.run_until_complete(_cancel_others())
    self._driver.stop()
    self._loop.close()

  async def _pump(
    self, task: asyncio.Task[Any], stopping: Callable[[], bool]
  ) -> None:
    while not (task.done() or stopping()):
      self._driver.step()
      await asyncio.sleep(0)


class Concurrent:
  """Generates and learns at the same time."""

  def __init__(self, actor: Actor, driver: GenerationDriver, buffer: Buffer):
    self._actor = actor
    self._driver = driver
    self._buffer = buffer
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name="actor", daemon=True
    )
    self._run: Any = None
    self._driver.start()
    self._thread.start()

  def call(self, work: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine on the actor's loop and waits for its result."""
    return self.submit(work).result()

  def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
    """Runs a coroutine on the actor's loop."""
    return asyncio.run_coroutine_threadsafe(work, self._loop)

  def start(self) -> None:
    """Starts the actor on its loop; a failure of its reaches the buffer."""
    self._run = asyncio.run_coroutine_threadsafe(self._actor.run(), self._loop)

  def take(
    self, version: int, stopping: Callable[[], bool]
  ) -> list[Group] | None:
    """Waits for the oldest batch that is fresh enough."""
    while not stopping():
      with contextlib.suppress(TimeoutError):
        return self._buffer.take(version, timeout=_LOOK_SECONDS)
    return None

  def publish(self, versioned: VersionedParams) -> None:
    """Weights first: what starts at a version must sample from it."""
    self._driver.update(versioned)
    self._actor.set_version(versioned.version)

  def stop(self) -> None:
    """Cancels all that runs, ends the generator, joins both threads.

    A thread that an environment blocks cannot be ended; it is left behind, so
    that the run still ends, with the error that it ends for.
    """
    ended = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
    try:
      ended.result(_LEAVE_SECONDS)
    except TimeoutError:
      _log.warning("an environment blocks the actor's thread; it is left")
      self._driver.stop()
      return
    self._driver.stop()
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()


async def _cancel_others() -> None:
  """Cancels every other task of this loop and waits for its end."""
  others = asyncio.all_tasks() - {asyncio.current_task()}
  for task in others:
    task.cancel()
  await asyncio.gather(*others, return_exceptions=True)
