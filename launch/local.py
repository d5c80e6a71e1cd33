r"""A run as on a pod, on this machine: trainer and generators in processes.

  python launch/local.py --config=experiments/quickstart.py \
    --trainers=2 --generators=2

starts N processes of `python -m rl_tpu train`, which are one trainer, and M of
`python -m rl_tpu serve`, which generate for it (none: the trainer's first
process generates too). Flags that are not listed by --help go to all of them.
Every line that one prints comes out with its name in front; the last line is
the trainer's JSON.

They end together. SIGINT or SIGTERM stops the trainer with a checkpoint, from
which the same command goes on; a second one kills. No process stays. The exit
code is 0 when the run is complete, 130 when a signal stopped it (either one), 2
when it was refused, else that of the process that failed first, 128 + n if
signal n killed it; the last line names that process. With --restarts=N a
generator that died is started again, and a trainer that died goes on from its
newest checkpoint, N times each in all. --dry_run starts nothing and prints the
commands; ports are free ones, anew each time.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import queue
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
STOPPED, REFUSED = 130, 2
_LEAVE_SECONDS = 40.0
"""For trainer processes to end by themselves when the run is complete."""
_FAILED_SECONDS = 12.0
"""The same when one of them failed, then again for generators that were told:
a run that failed has ended within half a minute."""
_LAST_WORDS_SECONDS = 5.0
"""For lines of a process that has ended to be read."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclasses.dataclass(frozen=True)
class Part:
  """A process to start."""

  role: str
  index: int
  command: tuple[str, ...]

  @property
  def name(self) -> str:
    """In front of its lines."""
    return f"{self.role} {self.index}"


@dataclasses.dataclass(eq=False)
class Running:
  """A process that was started, in a group of its own."""

  part: Part
  process: subprocess.Popen
  readers: list[threading.Thread]
  last: str = ""
  """The last line of its stdout."""

  def signal(self, number: int) -> None:
    """Sends a signal to it and to all that it started."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.process.pid, number)

  @property
  def code(self) -> int:
    """Its exit code, as a shell has it."""
    code = self.process.wait()
    return code if code >= 0 else 128 - code


Event = Running | int
"""A process that ended, or the number of a signal to this one."""


class Launcher:
  """Starts the parts of a run, watches them, and ends them together."""

  def __init__(
    self,
    trainer: Callable[[], list[Part]],
    generators: Sequence[Part],
    *,
    restarts: int,
    grace_seconds: float,
  ):
    """Starts nothing yet.

    Args:
      trainer: makes its processes, anew for every start.
      generators: that it trains with.
      restarts: of generators in all, and of the trainer.
      grace_seconds: between SIGTERM and SIGKILL.
    """
    self._trainer = trainer
    self._generators = generators
    self._restarts = {"trainer": restarts, "generator": restarts}
    self._grace_seconds = grace_seconds
    self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    self._running: list[Running] = []
    self._printing = threading.Lock()
    self._json = self._failed = ""
    self._signalled = False

  def run(self) -> int:
    """Until the run ends; returns the exit code."""
    before = {
      kind: signal.signal(kind, lambda number, frame: self._events.put(number))
      for kind in _SIGNALS
    }
    try:
      self._start(self._generators)
      self._start(self._trainer())
      code = self._watch()
      grace = self._grace_seconds
      if self._failed:
        grace = min(grace, _FAILED_SECONDS)
      self._end(self._of("generator"), grace)
    finally:
      for running in self._running:
        running.signal(signal.SIGKILL)
      self._reap(self._running)
      for kind, handler in before.items():
        signal.signal(kind, handler)
    if self._json and code == 0:
      print(self._json, flush=True)
    if self._failed:
      self._say(f"the run ended because {self._failed}")
    return code

  def _watch(self) -> int:
    """Until the trainer has ended for good; returns the exit code."""
    while True:
      event = self._events.get()
      if isinstance(event, int):
        return self._stop()
      if event not in self._running:
        continue
      code = self._forget(event)
      what = f"{event.part.name} ended with exit code {code}"
      if event.part.role == "generator":
        self._say(what)
        if self._may_restart("generator"):
          self._start([event.part])
          continue
        self._end(self._of("trainer"), self._grace_seconds)
        self._failed = what
        return code or 1
      if code == 0 and event.part.index > 0:
        continue
      self._leave(
        self._of("trainer"), _FAILED_SECONDS if code else _LEAVE_SECONDS
      )
      if code == 0:
        self._json = event.last
        return 0
      self._say(what)
      if code in (STOPPED, REFUSED) or not self._may_restart("trainer"):
        self._failed = what if code != STOPPED else ""
        return code
      if self._signalled:
        return STOPPED
      self._start(self._trainer())

  def _stop(self) -> int:
    """Lets the trainer write a checkpoint; it may be complete by chance."""
    self._say("stopping; once more kills")
    trainers = self._of("trainer")
    self._end(trainers, self._grace_seconds)
    if any(running.code for running in trainers):
      return STOPPED
    self._json = trainers[0].last
    return 0

  def _may_restart(self, role: str) -> bool:
    """Takes one of what is left."""
    self._restarts[role] -= 1
    return self._restarts[role] >= 0

  def _of(self, role: str) -> list[Running]:
    return [running for running in self._running if running.part.role == role]

  # Processes.

  def _start(self, parts: Iterable[Part]) -> None:
    for part in parts:
      process = subprocess.Popen(
        part.command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env=_environment(),
      )
      running = Running(part, process, [])
      for stream in (process.stdout, process.stderr):
        reader = threading.Thread(
          target=self._read, args=(running, stream), daemon=True
        )
        running.readers.append(reader)
        reader.start()
      threading.Thread(target=self._await, args=(running,), daemon=True).start()
      self._running.append(running)

  def _read(self, running: Running, stream) -> None:
    """Passes on its lines."""
    for line in stream:
      if stream is running.process.stdout and line.strip():
        running.last = line.rstrip("\n")
      self._say(line.rstrip("\n"), running.part.name)

  def _await(self, running: Running) -> None:
    running.process.wait()
    self._events.put(running)

  def _say(self, line: str, name: str = "launcher") -> None:
    with self._printing:
      print(f"[{name}] {line}", flush=True)

  def _forget(self, running: Running) -> int:
    """Takes one off that has ended, with all that it left behind."""
    self._running.remove(running)
    running.signal(signal.SIGKILL)
    self._reap([running])
    return running.code

  def _reap(self, ended: Sequence[Running]) -> None:
    """Waits for the ends of processes that were killed, and their lines."""
    for running in ended:
      running.process.wait()
      for reader in running.readers:
        reader.join(_LAST_WORDS_SECONDS)

  def _end(self, these: list[Running], grace_seconds: float) -> None:
    """Asks these to end, and kills what does not."""
    for running in these:
      running.signal(signal.SIGTERM)
    self._leave(these, grace_seconds)

  def _leave(self, these: list[Running], seconds: float) -> None:
    """Lets these end by themselves; kills those that take too long.

    A signal to this process kills them at once, and all that comes later.
    """
    deadline = time.monotonic() + seconds
    left, others = set(these), []
    while left and (wait := deadline - time.monotonic()) > 0:
      if self._signalled:
        break
      try:
        event = self._events.get(timeout=wait)
      except queue.Empty:
        break
      if isinstance(event, int):
        self._signalled = True
        break
      if event in left:
        left.remove(event)
      else:
        others.append(event)
    for event in others:
      self._events.put(event)
    for running in left:
      self._say(f"{running.part.name} does not end; it is killed")
    for running in these:
      self._forget(running)


def _environment() -> dict[str, str]:
  """Finds the package from anywhere.

  A CPU device that waits for another process holds one of the threads that send
  weights; there must be more threads than devices.
  """
  paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
  return {
    "PJRT_NPROC": "8",
    "PYTHONUNBUFFERED": "1",
    **os.environ,
    "PYTHONPATH": os.pathsep.join(paths),
  }


def _free_ports(count: int) -> list[int]:
  """Ports that nobody listens on, all different."""
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for one in sockets:
      one.bind(("127.0.0.1", 0))
    return [one.getsockname()[1] for one in sockets]


def _commands(
  arguments: argparse.Namespace, flags: list[str], scratch: pathlib.Path
) -> tuple[Callable[[], list[Part]], list[Part]]:
  """What makes the trainer's processes, and the generators'."""
  python = (sys.executable, "-m", "rl_tpu")
  generators: list[Part] = []
  remote: list[str] = []
  if arguments.generators:
    token, addresses = scratch / "token", scratch / "addresses"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    ports = _free_ports(arguments.generators)
    addresses.write_text("".join(f"127.0.0.1:{port}\n" for port in ports))
    remote = [
      f"--config.remote.addresses_file={addresses}",
      f"--config.remote.token_file={token}",
    ]
    serve = [
      *(*flags, *remote),
      "--config.serve.weights=awaited",
      f"--config.serve.token_file={token}",
    ]
    generators = [
      Part("generator", i, (*python, "serve", *serve, f"--port={port}"))
      for i, port in enumerate(ports)
    ]
  resume = [arguments.resume]

  def trainer() -> list[Part]:
    here = [*flags, *remote, f"--resume={resume[0]}"]
    resume[0] = "auto"  # A restart goes on.
    if arguments.trainers > 1:
      (port,) = _free_ports(1)
      here.append(f"--coordinator=127.0.0.1:{port}")
      here.append(f"--processes={arguments.trainers}")
    return [
      Part(
        "trainer",
        i,
        (*python, "train", *here, *([f"--process={i}"] if i else [])),
      )
      for i in range(arguments.trainers)
    ]

  return trainer, generators


def main(given: list[str]) -> int:
  """Runs the launcher; returns the exit code."""
  parser = argparse.ArgumentParser(
    usage="%(prog)s --config=FILE[:ARG] [--config.FIELD=VALUE ...] [options]",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  for name, kind, default, what in (
    ("trainers", int, 1, "processes that train, >= 1"),
    ("generators", int, 1, "processes that generate, >= 0"),
    ("resume", str, "auto", "auto, never or must: of --config.resume"),
    ("restarts", int, 0, "of generators in all, and of the trainer, >= 0"),
    ("grace_seconds", float, 120.0, "between SIGTERM and SIGKILL, > 0"),
  ):
    parser.add_argument(
      f"--{name}", type=kind, default=default, help=f"{what} ({default})"
    )
  parser.add_argument("--dry_run", action="store_true")
  arguments, flags = parser.parse_known_args(given)
  for name, least in (("trainers", 1), ("generators", 0), ("restarts", 0)):
    if getattr(arguments, name) < least:
      parser.error(f"--{name} must be >= {least}")
  if not any(flag.startswith("--config=") for flag in flags):
    parser.error("--config is missing")
  with tempfile.TemporaryDirectory(prefix="rl_tpu-") as scratch:
    trainer, generators = _commands(arguments, flags, pathlib.Path(scratch))
    if arguments.dry_run:
      for part in (*generators, *trainer()):
        print(f"{shlex.join(part.command)} # {part.name}")
      return 0
    return Launcher(
      trainer,
      generators,
      restarts=arguments.restarts,
      grace_seconds=arguments.grace_seconds,
    ).run()


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
