"""Runs Python that a policy wrote, in a process that can harm nothing.

`Sandbox.run` starts `sandbox_process.py` for every program, which takes away,
before the program is compiled:

- files: a root of its own, read-only, with Python's library and nothing else;
- the network, other processes, hosts' names: Linux namespaces of its own, no
  system calls that make sockets;
- privileges: no capabilities, none to gain, no new namespaces (seccomp);
- resources: seconds of processor, memory, processes, open files; bytes written
  to files are none;

and reads its output up to a limit and a deadline. At the end of a program,
whichever, the kernel kills all that lives in its process namespace.

A machine that cannot give all of this is refused by `Sandbox`, with what it
lacks; nothing is ever run with less.
"""

import dataclasses
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from typing import Literal

_PROCESS = pathlib.Path(__file__).with_name("sandbox_process.py")
_START_SECONDS = 30.0
"""How long taking everything away may last, on a machine that is busy."""

Ending = Literal["finished", "failed", "killed", "timeout", "output"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What a program may use."""

  seconds: float = 5.0
  """From its start to its end, > 0."""
  cpu_seconds: int = 5
  """Of processor, for each of its processes, >= 1."""
  memory_bytes: int = 256 << 20
  """Of address space, for each of its processes, >= 64 MiB."""
  processes: int = 4
  """Processes and threads at once, itself included, >= 1."""
  output_bytes: int = 16_384
  """Of standard output and error together, >= 1."""

  def __post_init__(self):
    for name, least in (
      ("seconds", 1e-3),
      ("cpu_seconds", 1),
      ("memory_bytes", 64 << 20),
      ("processes", 1),
      ("output_bytes", 1),
    ):
      if getattr(self, name) < least:
        raise ValueError(
          f"sandbox.Limits.{name} is {getattr(self, name)!r}; it must be >= "
          f"{least}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """How a program ended and what it wrote."""

  ending: Ending
  """`finished`; `failed` (it raised or exited with another code than 0);
  `killed` (by a limit of the kernel's); `timeout`; `output` (too much)."""
  output: str
  """Output and errors as they came; bytes that are no UTF-8 are U+FFFD."""


class SandboxError(RuntimeError):
  """This machine cannot contain a program; the message says what it lacks."""


class Sandbox:
  """Runs programs, each in a process of its own.

  `run` blocks and may be called from several threads at once.
  """

  def __init__(self, limits: Limits | None = None):
    """Tries the machine with an empty program.

    Raises:
      SandboxError: it cannot give all of the protection.
    """
    self.limits = limits or Limits()
    # What the programs' own roots are mounted on; it stays empty.
    root = tempfile.mkdtemp(prefix="sandbox-")
    self._root = root
    weakref.finalize(self, os.rmdir, root)
    result = self.run("print(6 * 7)")
    if result != Result(ending="finished", output="42\n"):
      raise SandboxError(f"a first program came back as {result}")

  def run(self, code: str) -> Result:
    """Runs a program to its end, or to its limits.

    Raises:
      SandboxError: the process that should contain it could not be made.
    """
    settings = dataclasses.asdict(self.limits) | {"root": self._root}
    process = subprocess.Popen(
      [sys.executable, "-I", "-S", str(_PROCESS), json.dumps(settings)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      bufsize=0,
      start_new_session=True,
      env={},
      cwd="/",
    )
    try:
      return self._attend(process, code)
    finally:
      # The namespace's first process dies with it, and all others with that.
      process.kill()
      with process:
        _drain(process.stdout)

  def _attend(self, process: subprocess.Popen, code: str) -> Result:
    assert process.stdin and process.stdout and process.stderr
    text = code.encode("utf-8", errors="replace")
    writer = threading.Thread(target=_feed, args=(process.stdin, text))
    writer.start()
    # One line on stderr says that the program is about to start, or why not.
    started = _read(process.stderr.fileno(), 4096, _START_SECONDS, line=True)
    if started.data != b"contained\n":
      process.kill()
      writer.join()
      why = started.data.decode(errors="replace").strip() or "no answer"
      raise SandboxError(f"this machine gives no sandbox: {why}")
    limits = self.limits
    found = _read(process.stdout.fileno(), limits.output_bytes, limits.seconds)
    output = found.data.decode("utf-8", errors="replace")
    if found.why != "end":
      process.kill()
    writer.join()
    if found.why != "end":
      return Result(ending=found.why, output=output)
    code_ = self._exit_code(process)
    ending: Ending = "killed" if code_ >= 128 else "failed"
    return Result(ending=ending if code_ else "finished", output=output)

  def _exit_code(self, process: subprocess.Popen) -> int:
    """Of a process whose output has ended; one that lingers is killed."""
    try:
      return process.wait(timeout=_START_SECONDS)
    except subprocess.TimeoutExpired:
      return 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Read:
  data: bytes
  why: Literal["end", "timeout", "output"]


def _read(source: int, most: int, seconds: float, line: bool = False) -> _Read:
  """Reads up to `most` bytes, the end, a line's end or the deadline."""
  deadline = time.monotonic() + seconds
  data = b""
  while True:
    left = max(deadline - time.monotonic(), 0.0)
    if not select.select([source], [], [], left)[0]:
      return _Read(data=data, why="timeout")
    piece = os.read(source, 1 if line else 1 << 16)
    if not piece:
      return _Read(data=data, why="end")
    data += piece
    if line and piece == b"\n":
      return _Read(data=data, why="end")
    if len(data) > most:
      return _Read(data=data[:most], why="output")


def _drain(stdout) -> None:
  """Waits until no process is left that could still write."""
  while select.select([stdout], [], [], _START_SECONDS)[0] and stdout.read(
    4096
  ):
    pass


def _feed(stdin, text: bytes) -> None:
  """Writes the program; one killed early need not read it."""
  try:
    stdin.write(text)
    stdin.close()
  except BrokenPipeError:
    pass
