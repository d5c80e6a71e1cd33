"""A trainer of several processes: one leads, the others do as it does.

A pod's devices belong to the processes of its hosts, and a program over all of
them runs only if each process calls it. Process 0 has the actor, the log and
the loop; before each thing that all must do it tells the others, who wait for
nothing else: first a few words through the key-value store of
`jax.distributed`, then, where there are any, arrays by a collective. Between
two orders nobody sits in a collective, so a wait of hours costs nothing.

No process outlives the others. A failure, or a process whose heartbeat stopped,
is told to all, and each ends with an exit code other than 0, also out of a
collective that will never return. A process that is alive but whose main thread
does nothing for very long says so itself, and prints where it hangs; others who
wait for it in a collective began to wait later, and so would say so later. A
signal to any of them stops the run. With one process all of this is nothing.
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # Its key-value store has no public name.
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_tpu.config import ConfigError

INTERRUPTED = 130
"""Exit code of a process that a signal stopped."""
_REFUSED = 2
_FAILED = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_SECONDS = 0.5
"""How often each process looks at what the others say."""
_LEAVE_SECONDS = 10.0
"""How long process 0 waits for the others to end once one has failed."""
_UNWIND_SECONDS = 20.0
"""For a process that failed to end by itself."""
_DEAD_AFTER = 8
"""Looks without a sign of life after which a process is called dead where
something has failed already."""
_LEAST_WORDS = 2**12
"""Of what is sent by a collective: few sizes, few programs."""


class Stopped(Exception):
  """Somebody asked the run to stop; a checkpoint was written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Which of the trainer's processes this one is."""

  coordinator: str | None = None
  """Address of process 0, host:port, as all of them reach it; `auto` where the
  environment says all of this, as on TPU pods; None: there is one process."""
  processes: int = 1
  """How many there are, >= 1; more than one need a coordinator."""
  process: int = 0
  """Which one this is, in [0, processes)."""
  heartbeat_seconds: int = 60
  """Without a sign of life after which a process counts as dead, >= 5."""
  hang_seconds: int = 3600
  """Between two things that a process's main thread does, a look whether a
  batch is there among them, after which it counts as hanging, >= 60. The
  longest compilation, evaluation and warm start must fit."""

  def __post_init__(self):
    lone = self.coordinator is None
    for name, good, allowed in (
      ("processes", self.processes >= 1, ">= 1"),
      ("processes", not (lone and self.processes > 1), "1, or coordinator set"),
      (
        "process",
        0 <= self.process < self.processes,
        f"in [0, {self.processes})",
      ),
      ("heartbeat_seconds", self.heartbeat_seconds >= 5, ">= 5"),
      ("hang_seconds", self.hang_seconds >= 60, ">= 60"),
    ):
      if not good:
        raise ValueError(
          f"{name} is {getattr(self, name)!r}; it must be {allowed}"
        )


def join(config: Config) -> None:
  """Joins the others, before JAX looks for devices.

  Raises:
    RuntimeError: they did not all come.
  """
  if config.coordinator is None:
    return
  # Signals are the run's own. A heartbeat is too: JAX's aborts the process, and
  # must be the later one.
  jax.config.update("jax_enable_preemption_service", False)
  heartbeat = 2 * config.heartbeat_seconds + round(_UNWIND_SECONDS)
  if config.coordinator == "auto":
    jax.distributed.initialize(heartbeat_timeout_seconds=heartbeat)
    return
  jax.distributed.initialize(
    config.coordinator,
    config.processes,
    config.process,
    heartbeat_timeout_seconds=heartbeat,
  )


def agreed(value: int) -> int:
  """Process 0's value, in every process; all must call it."""
  if jax.process_count() == 1:
    return value
  return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
  """What all processes do next."""

  verb: str
  words: dict[str, Any]
  arrays: dict[str, Any]


class Team:
  """The processes of a trainer, seen from this one."""

  def __init__(self, config: Config):
    self.count, self.index = jax.process_count(), jax.process_index()
    self._heartbeat_seconds = config.heartbeat_seconds
    self._hang_seconds = config.hang_seconds
    self._moved = time.monotonic()
    self._signalled = self._told_to_stop = False
    self._orders = self._forgotten = 0
    self._over = threading.Event()

  @property
  def leads(self) -> bool:
    """Whether this process says what is done."""
    return self.index == 0

  @property
  def stop_requested(self) -> bool:
    """Whether a signal came, here or (in process 0) in any process.

    Whoever waits for long asks it now and then; that is a sign of life.
    """
    self._moved = time.monotonic()
    return self._signalled or self._told_to_stop

  def tell(
    self,
    verb: str,
    words: Mapping[str, Any] | None = None,
    arrays: Mapping[str, np.ndarray] | None = None,
  ) -> None:
    """Has the others do it too; nothing where this process does not lead.

    Args:
      verb: what to do.
      words: any that JSON keeps.
      arrays: of any shapes; a collective takes them there.
    """
    self._moved = time.monotonic()
    if self.count == 1 or not self.leads:
      return
    arrays = {name: np.asarray(array) for name, array in (arrays or {}).items()}
    shapes = {n: (a.shape, a.dtype.str) for n, a in arrays.items()}
    self._set(f"order/{self._orders}", json.dumps([verb, words or {}, shapes]))
    self._orders += 1
    if arrays:
      self._exchange(shapes, arrays)
      self._forget()

  def orders(self) -> Iterator[Order]:
    """What process 0 tells, until the run ends.

    Raises:
      Stopped: it was stopped.
    """
    while True:
      text = self._wait(f"order/{self._orders}")
      self._orders += 1
      verb, words, shapes = json.loads(text)
      if verb == "end":
        if words:
          raise Stopped(words["stopped"])
        return
      arrays = self._exchange(shapes) if shapes else {}
      yield Order(verb=verb, words=words, arrays=arrays)

  @contextlib.contextmanager
  def together(self) -> Iterator[None]:
    """Around all that this process does for the run: none ends alone."""
    if self.count == 1:
      yield
      return
    before = _on_signals(_interrupt)
    watch = threading.Thread(target=self._watch, name="team", daemon=True)
    watch.start()
    try:
      yield
      self.tell("end")
    except Stopped as error:
      self.tell("end", {"stopped": str(error)})
      raise
    except BaseException as error:
      self._over.set()
      watch.join()
      self._fail(error)
      raise
    finally:
      self._over.set()
      watch.join()
      before()

  @contextlib.contextmanager
  def signals(self, note: Callable[[str], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM stops cleanly; the next one at once."""

    def handle(number, frame):
      if self._signalled:
        raise KeyboardInterrupt
      self._signalled = True
      note("stopping; once more stops at once, without a checkpoint")

    before = _on_signals(handle)
    try:
      yield
    finally:
      before()

  # What is said.

  def _set(self, key: str, value: str) -> None:
    client = distributed.global_state.client
    assert client is not None
    client.key_value_set(f"rl_tpu/{key}", value, allow_overwrite=True)

  def _said(self, key: str) -> dict[int, str]:
    """What each process that said anything said last."""
    client = distributed.global_state.client
    assert client is not None
    found = client.key_value_dir_get(f"rl_tpu/{key}/")
    return {int(name.rpartition("/")[2]): value for name, value in found}

  def _wait(self, key: str) -> str:
    client = distributed.global_state.client
    assert client is not None
    while True:
      self._moved = time.monotonic()
      try:
        return client.blocking_key_value_get(
          f"rl_tpu/{key}", int(1000 * _LOOK_SECONDS)
        )
      except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("DEADLINE_EXCEEDED"):
          raise

  def _forget(self) -> None:
    """Orders up to a collective have been read by all."""
    client = distributed.global_state.client
    assert client is not None
    for number in range(self._forgotten, self._orders):
      client.key_value_delete(f"rl_tpu/order/{number}")
    self._forgotten = self._orders

  def _exchange(
    self,
    shapes: Mapping[str, tuple[tuple[int, ...], str]],
    arrays: Mapping[str, np.ndarray] | None = None,
  ) -> dict[str, np.ndarray]:
    """Arrays of process 0, in every process.

    They travel as one array of words, which the processes add up: the others
    have zeros. One device of each process takes part.
    """
    sizes = [
      int(np.prod(shape)) * np.dtype(kind).itemsize
      for shape, kind in shapes.values()
    ]
    words = max(_LEAST_WORDS, 1 << (-(-sum(sizes) // 4) - 1).bit_length())
    flat = np.zeros((1, words), np.uint32)
    if arrays is not None:
      sent = b"".join(arrays[name].tobytes() for name in shapes)
      flat.view(np.uint8)[0, : len(sent)] = np.frombuffer(sent, np.uint8)
    devices = [
      jax.local_devices(process_index=index)[0] for index in range(self.count)
    ]
    mesh = Mesh(np.asarray(devices), ("process",))
    split = NamedSharding(mesh, PartitionSpec("process"))
    here = jax.device_put(flat, devices[self.index])
    everywhere = jax.make_array_from_single_device_arrays(
      (self.count, words), split, [here]
    )
    whole = jax.jit(_sum, out_shardings=NamedSharding(mesh, PartitionSpec()))
    received = np.asarray(whole(everywhere).addressable_data(0)).tobytes()
    starts = np.cumsum([0, *sizes])
    return {
      name: np.frombuffer(received[start : start + size], kind).reshape(shape)
      for (name, (shape, kind)), start, size in zip(
        shapes.items(), starts, sizes, strict=False
      )
    }

  # What ends it.

  def _watch(self) -> None:
    """Passes on what concerns all; ends this process when one has failed."""
    beats: dict[int, tuple[str, float]] = {}
    told, count = False, 0
    while not self._over.wait(_LOOK_SECONDS):
      count += 1
      self._set(f"beat/{self.index}", f"{socket.gethostname()} {count}")
      if self._signalled and not told:
        self._set(f"stop/{self.index}", "")
        told = True
      for text in self._said("failed").values():
        self._leave(*json.loads(text))
      self._check_main_thread()
      if self.leads:
        self._told_to_stop = bool(self._said("stop"))
        self._check(beats)

  def _check(self, beats: dict[int, tuple[str, float]]) -> None:
    """Ends the run if a process has given no sign of life for long."""
    now = time.monotonic()
    for index, beat in self._said("beat").items():
      if beats.get(index, ("", 0.0))[0] != beat:
        beats[index] = beat, now
      elif now - beats[index][1] > self._heartbeat_seconds:
        why = (
          f"trainer process {index} on {beat.partition(' ')[0]} is dead or "
          f"hangs: no sign of life for {self._heartbeat_seconds:g} s"
        )
        self._set("failed/0", json.dumps([why, _FAILED]))
        self._leave(why, _FAILED, dead={index})

  def _check_main_thread(self) -> None:
    """Ends the run if this process's main thread has hung for long."""
    if time.monotonic() - self._moved <= self._hang_seconds:
      return
    faulthandler.dump_traceback(all_threads=True)
    why = (
      f"trainer process {self.index} on {socket.gethostname()} hangs: its main "
      f"thread did nothing for {self._hang_seconds:g} s; it printed where"
    )
    self._set(f"failed/{self.index}", json.dumps([why, _FAILED]))
    self._leave(why, _FAILED)

  def _leave(self, why: str, code: int, dead: Set[int] = frozenset()) -> None:
    """Ends this process, whatever its other threads wait for."""
    _say(why)
    self._part(dead)
    _exit(code)

  def _part(self, dead: Set[int]) -> None:
    """Says that this process ends.

    The store ends with process 0, which waits until the others have said so.
    """
    self._set(f"gone/{self.index}", "")
    deadline = time.monotonic() + _LEAVE_SECONDS
    while self.leads and time.monotonic() < deadline:
      if len({*self._said("gone"), *dead}) == self.count:
        return
      time.sleep(_LOOK_SECONDS / 10)

  def _fail(self, error: BaseException) -> None:
    """Tells the others; this process ends by itself, or else is ended."""
    code, dead = _FAILED, set()
    if isinstance(error, ConfigError):
      code = _REFUSED
    elif isinstance(error, KeyboardInterrupt):
      code = INTERRUPTED
    elif isinstance(error, jax.errors.JaxRuntimeError):
      dead = self._name_the_dead()
    why = f"trainer process {self.index} failed: {type(error).__name__}: "
    self._set(f"failed/{self.index}", json.dumps([f"{why}{error}", code]))

    def end():
      time.sleep(_UNWIND_SECONDS)
      traceback.print_exception(error)
      _exit(code)

    def leave():
      self._part(dead)
      _exit(code)

    threading.Thread(target=end, name="end", daemon=True).start()
    # When the interpreter ends JAX would wait for the others, in vain.
    atexit.register(leave)

  def _name_the_dead(self) -> set[int]:
    """A collective may have failed because another process did."""
    for why, _ in map(json.loads, self._said("failed").values()):
      _say(why)
    before = self._said("beat")
    time.sleep(_DEAD_AFTER * _LOOK_SECONDS)
    after = self._said("beat")
    dead = {index for index in before if before[index] == after[index]}
    for index in sorted(dead - {self.index}):
      host = before[index].partition(" ")[0]
      _say(f"trainer process {index} on {host} gives no sign of life")
    return dead


def _sum(x: jax.Array) -> jax.Array:
  return x.sum(0)


def _say(text: str) -> None:
  print(f"rl_tpu: {text}", file=sys.stderr, flush=True)


def _exit(code: int) -> None:
  """Ends the process at once, with what it has printed."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def _interrupt(number, frame) -> None:
  raise KeyboardInterrupt


def _on_signals(handle: Callable[[int, Any], None]) -> Callable[[], None]:
  """Handles what asks for an end; returns what undoes that.

  Only the main thread may; in others nothing happens.
  """
  if threading.current_thread() is not threading.main_thread():
    return lambda: None
  before = [(kind, signal.signal(kind, handle)) for kind in _SIGNALS]

  def undo():
    for kind, handler in before:
      signal.signal(kind, handler)

  return undo
