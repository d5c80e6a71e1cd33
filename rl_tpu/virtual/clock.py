"""An event loop whose time is a number, not the wall's.

    time <- time of the next timer      whenever nothing is ready to run

Code that waits by asyncio alone runs on it unchanged and in an order that
depends on nothing but itself: a day of sleeping takes as long as its events
take to compute, and twice the same program is twice the same run.

Where nothing is ready and no timer is left, a real loop would wait for ever for
a thread or a socket. Here there are none: it is a deadlock, and an error.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class VirtualLoop(asyncio.SelectorEventLoop):
  """Jumps to the next timer instead of waiting for it.

  Times are doubles and timers less than 1 ns apart run together, so that a run
  may last about a hundred days.
  """

  def __init__(self):
    self._now = 0.0
    super().__init__(_Jump(self))

  def time(self) -> float:
    """Virtual seconds since the loop was made."""
    return self._now

  def advance(self, seconds: float) -> None:
    """Lets time pass at once."""
    self._now += seconds


class _Jump(selectors.DefaultSelector):
  """Never waits; the loop's own wake-up calls still come through it."""

  def __init__(self, loop: VirtualLoop):
    super().__init__()
    self._loop = loop

  def select(self, timeout: float | None = None):
    events = super().select(0)
    if events or timeout == 0:
      return events
    if timeout is None:
      raise RuntimeError(
        f"deadlock at {self._loop.time():.6g} virtual seconds: every task "
        "waits for another one"
      )
    self._loop.advance(timeout)
    return events


def run(main: Coroutine[Any, Any, _T]) -> _T:
  """Runs a coroutine to its end on a virtual clock that starts at 0.

  Raises:
    RuntimeError: every task waits for another one.
  """
  with asyncio.Runner(loop_factory=VirtualLoop) as runner:
    return runner.run(main)
