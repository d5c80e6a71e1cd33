"""Where the time of a run's loop goes, and a profiler's view of chosen batches.

`Loop` keeps intervals of the thread that trains: waiting for trajectories,
training, handing weights over, checkpoints, evaluations that hold training up.
JAX tells when XLA compiled for that thread, or took a program from the cache on
disk; that time is taken out of what it interrupted and counts as `compile`.

`Profiles` writes XProf traces (TensorBoard's profile plugin and
ui.perfetto.dev read them) of the batches that the config names, and of the next
one whenever a file `trace` appears in the run's directory:

    touch RUN/trace

Of the process that leads, whose generator, if it has one, is in them too.
"""

import contextlib
import dataclasses
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import jax

Kind = Literal["wait", "train", "weights", "checkpoint", "evaluate", "compile"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Interval = tuple[float, float, Kind]
"""Start and end, in seconds of the monotonic clock."""

REQUEST = "trace"
"""File in a run's directory that asks for the next batch's trace."""

_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Which batches are profiled."""

  batches: tuple[int, ...] = ()
  """By number, the first is 1; each trace is a folder RUN/traces/BATCH. Those
  of the first batches show compilation."""

  def __post_init__(self):
    if any(batch < 1 for batch in self.batches):
      raise ValueError(f"batches is {self.batches}; they must be >= 1")


class Loop:
  """Intervals of the thread that makes it."""

  def __init__(self):
    self._intervals: list[Interval] = []
    self._compiled: list[tuple[float, float]] = []

  @contextlib.contextmanager
  def during(self, kind: Kind) -> Iterator[None]:
    """Keeps the time until the block ends, without what compiling took."""
    self._compiled = []
    began = time.monotonic()
    with _told(lambda start, end: self._compiled.append((start, end))):
      yield
    self._keep(began, time.monotonic(), kind)

  def _keep(self, began: float, ended: float, kind: Kind) -> None:
    for start, end in self._compiled:
      start = max(start, began)  # Programs within one are within its time.
      if end > start:
        if start > began:
          self._intervals.append((began, start, kind))
        self._intervals.append((start, end, "compile"))
        began = end
    self._intervals.append((began, ended, kind))

  def take(self) -> list[Interval]:
    """Those since the last call, oldest first."""
    taken, self._intervals = self._intervals, []
    return taken


_Tell = Callable[[float, float], None]
_listening = threading.local()


@contextlib.contextmanager
def _told(tell: _Tell) -> Iterator[None]:
  """Tells of each compilation of this thread while the block runs."""
  _listen()
  before = getattr(_listening, "tell", None)
  _listening.tell = tell
  try:
    yield
  finally:
    _listening.tell = before


def _heard(event: str, duration_secs: float, **_: str | int) -> None:
  tell = getattr(_listening, "tell", None)
  if event == _COMPILED and tell is not None:
    end = time.monotonic()
    tell(end - duration_secs, end)


_once = threading.Lock()
_listens = False


def _listen() -> None:
  """JAX keeps a listener for the life of the process: there is one of ours."""
  global _listens
  with _once:
    if not _listens:
      jax.monitoring.register_event_duration_secs_listener(_heard)
      _listens = True


class Profiles:
  """Traces of chosen batches."""

  def __init__(
    self, config: Config, directory: pathlib.Path, note: Callable[[str], None]
  ):
    """`directory` is the run's; `note` is told where each trace is."""
    self._batches = frozenset(config.batches)
    self._directory = directory
    self._note = note

  @contextlib.contextmanager
  def of(self, batch: int) -> Iterator[None]:
    """Traces the block if this batch was chosen."""
    if not self._chosen(batch):
      yield
      return
    folder = self._directory / "traces" / str(batch)
    jax.profiler.start_trace(folder)
    try:
      yield
    finally:
      jax.profiler.stop_trace()
      self._note(f"the trace of batch {batch} is in {folder}")

  def _chosen(self, batch: int) -> bool:
    asked = self._directory / REQUEST
    requested = asked.exists()
    if requested:
      asked.unlink()
    return requested or batch in self._batches
