"""Reward functions in processes with limits, beside the event loop.

A rule that judges what a policy wrote can hang, crash or exhaust memory on it
(`9^{9^{9^{9}}}` in a computer algebra system does), and no thread can be
stopped. So a function runs in one of a few processes, each served by a thread
that waits with a deadline; a process that misses it is killed and the next call
starts another. The event loop, and with it generation, goes on meanwhile.
"""

import asyncio
import concurrent.futures
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

from rl_tpu.types import EpisodeError

_START_SECONDS = 120.0
"""How long importing a function's module may take."""


class Workers:
  """`await workers(*arguments)` is the function's value.

  Arguments and value are of JSON types. The processes start when they are
  needed and end with this object or with the program.
  """

  def __init__(
    self,
    function: str,
    *,
    count: int = 2,
    seconds: float = 5.0,
    memory_bytes: int = 2 << 30,
  ):
    """Starts nothing yet.

    Args:
      function: `module:name` or `file.py:name`; it should import little.
      count: processes at work at once, >= 1.
      seconds: of one call, > 0; what it waits for a process does not count.
      memory_bytes: of address space, for each process.
    """
    for name, value in (("count", count), ("seconds", seconds)):
      if value <= 0:
        raise ValueError(f"Workers.{name} is {value!r}; it must be > 0")
    self._seconds = seconds
    self._command = [sys.executable, "-m", "rl_tpu.rewards.worker", function]
    # Its own alarm is for when nobody is left to kill it.
    self._command += [str(seconds + 10.0), str(memory_bytes)]
    self._function = function
    self._threads = concurrent.futures.ThreadPoolExecutor(
      count, thread_name_prefix="reward"
    )
    self._own = threading.local()
    self._processes: set[_Process] = set()
    self._end = weakref.finalize(self, _end, self._processes)

  async def __call__(self, *arguments: Any) -> Any:
    """Returns the function's value.

    Raises:
      EpisodeError: `reward_timeout`, `reward_raised` or, where the process
        died, `reward_crashed`.
    """
    line = json.dumps(arguments).encode() + b"\n"
    return await asyncio.wrap_future(self._threads.submit(self._call, line))

  def check(self) -> None:
    """Starts one process, which says whether the function is there.

    Raises:
      ValueError: it is not, or its module does not load.
    """
    self._threads.submit(self._process).result()

  def close(self) -> None:
    """Ends the processes; calls under way fail."""
    self._end()
    self._threads.shutdown(wait=True, cancel_futures=True)
    _end(self._processes)

  def _call(self, line: bytes) -> Any:
    """One call, in the thread that owns the process."""
    process = self._process()
    try:
      reply = process.ask(line, self._seconds)
    except TimeoutError as error:
      self._drop(process)
      raise EpisodeError(
        "reward_timeout",
        f"{self._function} took more than {self._seconds} s",
      ) from error
    except OSError as error:
      self._drop(process)
      raise EpisodeError(
        "reward_crashed", f"the process of {self._function} died: {error}"
      ) from error
    if "raised" in reply:
      where, said = reply["where"], reply["raised"]
      raise EpisodeError(
        "reward_raised",
        f"{self._function} raised {said}" + (f" at {where}" if where else ""),
        same=f"{where} {said.partition('(')[0]}",
        detail=reply["lines"],
      )
    return reply["value"]

  def _process(self) -> "_Process":
    """This thread's process, started if it has none."""
    process = getattr(self._own, "process", None)
    if process is None:
      process = self._own.process = _Process(self._command)
      self._processes.add(process)
      try:
        reply = process.ask(b"", _START_SECONDS)
      except OSError as error:
        self._drop(process)
        raise RuntimeError(
          f"no process could be started for {self._function}: {error!r}; what "
          "it printed says why"
        ) from error
      if "refused" in reply:
        self._drop(process)
        raise ValueError(
          f"{self._function} cannot be loaded: {reply['refused']}"
        )
    return process

  def _drop(self, process: "_Process") -> None:
    self._own.process = None
    self._processes.discard(process)
    process.end()


class _Process:
  """A worker and the way to talk to it."""

  def __init__(self, command: list[str]):
    self._popen = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      bufsize=0,
      start_new_session=True,
    )

  def ask(self, line: bytes, seconds: float) -> dict[str, Any]:
    """Sends a line and returns the answer; nothing to send waits for one.

    Raises:
      TimeoutError: there was none in time.
      OSError: the process is gone.
    """
    assert self._popen.stdin is not None and self._popen.stdout is not None
    deadline = time.monotonic() + seconds
    self._popen.stdin.write(line)
    source, received = self._popen.stdout.fileno(), b""
    while not received.endswith(b"\n"):
      left = max(deadline - time.monotonic(), 0.0)
      if not select.select([source], [], [], left)[0]:
        raise TimeoutError
      piece = os.read(source, 1 << 16)
      if not piece:
        raise ConnectionResetError(f"exit code {self._popen.wait()}")
      received += piece
    return json.loads(received)

  def end(self) -> None:
    """Kills it, and waits until it is gone."""
    self._popen.kill()
    with self._popen:
      pass


def _end(processes: set[_Process]) -> None:
  while processes:
    processes.pop().end()
