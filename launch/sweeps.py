"""Many runs of one config file, some at a time, each until it is done.

A config file says which: its `sweep(add)` calls `add(**fields)` for each run,
fields of the config by their dotted names:

  def sweep(add):
    for seed in range(3):
      for rate in (1e-4, 4e-4):
        add(seed=seed, **{"learner.learning_rate": rate})

A run is known by its fields, so runs may be added, reordered and removed
between two starts of the same command. Each has a directory of its own. The
state file remembers how each ended: a run that is done is skipped, one that
failed is tried again, and one that was running goes on, here from its newest
checkpoint, on a cloud by watching it again. All are checked before any starts.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from launch import backends, here, plan
from launch import steps as sending
from launch.settings import Settings
from launch.steps import Step
from rl_tpu import metrics
from rl_tpu.config import ConfigError, digest

STOPPED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """One of a sweep."""

  id: str
  """Follows from its fields."""
  fields: dict[str, Any]
  """That the sweep sets."""
  flags: tuple[str, ...]
  """Of its command."""


class Started(Protocol):
  """A run that was started."""

  def outcome(self) -> str:
    """How it is: running, done, failed or stopped."""
    ...

  def interrupt(self) -> bool:
    """Somebody stops the sweep; whether this run ends because of it."""
    ...


class Launcher(Protocol):
  """Where the runs of a sweep go."""

  name: str
  poll_seconds: float

  def check(self, run: Run) -> None:
    """Refuses a run that cannot be launched, by ConfigError."""
    ...

  def steps(self, run: Run) -> list[Step]:
    """What is sent for it, from its start to its end."""
    ...

  def start(self, run: Run, log: pathlib.Path, resumed: bool) -> Started:
    """Starts it; `resumed`: it may be running already."""
    ...


class Here:
  """Runs on this machine, by local.py."""

  name, poll_seconds = "local", 0.2

  def check(self, run: Run) -> None:
    """See Launcher."""
    plan.read_config(_of_config(run.flags))

  def steps(self, run: Run) -> list[Step]:
    """See Launcher."""
    return [here.start(run.flags)]

  def start(self, run: Run, log: pathlib.Path, resumed: bool) -> Started:
    """See Launcher; output goes to the log."""
    (step,) = self.steps(run)
    with open(log, "a") as file:
      process = subprocess.Popen(
        step.argv,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # A signal comes by us, once.
      )
    return _Process(process)


class _Process:
  def __init__(self, process: subprocess.Popen):
    self._process = process

  def outcome(self) -> str:
    code = self._process.poll()
    if code is None:
      return "running"
    return {0: "done", STOPPED: "stopped"}.get(code, "failed")

  def interrupt(self) -> bool:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, signal.SIGTERM)
    return True


class Cloud:
  """Runs on one of the clouds."""

  poll_seconds = 30.0

  def __init__(self, name: str, settings: Settings):
    self.name = name
    self._settings = settings
    self._backend = backends.CLOUDS[name]

  def check(self, run: Run) -> None:
    """See Launcher."""
    self._backend.start(self._plan(run))

  def steps(self, run: Run) -> list[Step]:
    """See Launcher."""
    planned = self._plan(run)
    status = self._backend.status(planned)
    return [
      *self._backend.start(planned),
      dataclasses.replace(status, may_fail=True),
      *self._backend.stop(planned),
    ]

  def start(self, run: Run, log: pathlib.Path, resumed: bool) -> Started:
    """See Launcher; what the run says stays on the cloud."""
    started = _OnCloud(self._backend, self._plan(run))
    if not resumed or not started.is_there:
      started.send()
    return started

  def _plan(self, run: Run) -> plan.Plan:
    settings = dataclasses.replace(
      self._settings, name=f"{self._settings.name}-{run.id}"
    )
    return backends.plan_on(self.name, settings, run.flags)


class _OnCloud:
  def __init__(self, backend: backends.Backend, planned: plan.Plan):
    self._backend, self._plan = backend, planned
    self._refused = False

  @property
  def is_there(self) -> bool:
    return self._ask() != "absent"

  def send(self) -> None:
    self._refused = bool(sending.run(self._backend.start(self._plan)))

  def outcome(self) -> str:
    """Once it has ended, what was created for it is deleted."""
    outcome = "failed" if self._refused else self._ask()
    if outcome == "absent":  # It was there: the service does not answer.
      outcome = "running"
    if outcome != "running":
      sending.run(self._backend.stop(self._plan))
    return outcome

  def interrupt(self) -> bool:
    """It goes on without us."""
    return False

  def _ask(self) -> str:
    return self._backend.outcome(self._backend.status(self._plan).ask())


def command(
  launcher: Launcher, options: argparse.Namespace, flags: Sequence[str]
) -> int:
  """Sends a sweep to a launcher, or prints what it would send.

  Raises:
    ConfigError: an option or a run is refused; nothing was started.
  """
  if options.do != "start":
    raise ConfigError(
      f"--do is {options.do!r}; with --sweep it must be 'start'"
    )
  if options.concurrency < 1:
    raise ConfigError(
      f"--concurrency is {options.concurrency}; it must be >= 1"
    )
  runs = read(flags)
  for run in runs:
    launcher.check(run)
  path = pathlib.Path(options.state or _default_path(flags))
  described = {"to": launcher.name, "flags": list(flags)}
  if options.dry_run:
    state = State.read(path, described)
    left = [run for run in runs if state.of(run) != "done"]
    print("\n".join(_described(launcher, left, options.concurrency)))
    return 0
  path.parent.mkdir(parents=True, exist_ok=True)
  with _held(path):
    state = State.read(path, described)
    return Sweep(launcher, runs, state, options.concurrency).run()


def read(flags: Sequence[str]) -> list[Run]:
  """The runs that a config file's `sweep(add)` adds.

  Raises:
    ConfigError: it has none, or adds a run twice.
  """
  file = _config_file(flags)
  sweep = runpy.run_path(file).get("sweep")
  if sweep is None:
    raise ConfigError(
      f"--config is {file!r}; with --sweep it must define sweep(add)"
    )
  runs: dict[str, Run] = {}

  def add(**fields: Any) -> None:
    known = digest(fields)[:8]
    if known in runs:
      raise ConfigError(f"sweep(add) of {file} adds {fields} twice")
    own = [*flags, *(f"--config.{k}={v}" for k, v in fields.items())]
    if "directory" not in fields:
      directory = plan.read_config(_of_config(own)).directory
      own.append(f"--config.directory={directory}-{known}")
    runs[known] = Run(id=known, fields=fields, flags=tuple(own))

  sweep(add)
  if not runs:
    raise ConfigError(f"sweep(add) of {file} adds no run")
  return list(runs.values())


class State:
  """How the runs of a sweep ended, in a file."""

  def __init__(self, path: pathlib.Path, content: dict[str, Any]):
    self._path, self._content = path, content

  @classmethod
  def read(cls, path: pathlib.Path, described: dict[str, Any]) -> "State":
    """Reads it, or begins a new one.

    Raises:
      ConfigError: the file is another sweep's.
    """
    content = {**described, "runs": {}}
    if path.exists():
      content = metrics.read_json(path)
      for name, value in described.items():
        if content.get(name) != value:
          raise ConfigError(
            f"--state is {str(path)!r}, of a sweep with {name} "
            f"{content.get(name)!r}; this one has {value!r}: choose another "
            "file"
          )
    return cls(path, content)

  def of(self, run: Run) -> str:
    """new, running, done, failed or stopped."""
    return self._content["runs"].get(run.id, {}).get("state", "new")

  def set(self, run: Run, state: str) -> None:
    """Writes it down at once."""
    self._content["runs"][run.id] = {"fields": run.fields, "state": state}
    metrics.write_json(self._path, self._content)

  def log(self, run: Run) -> pathlib.Path:
    """Where a run on this machine writes."""
    folder = self._path.with_suffix("")
    folder.mkdir(exist_ok=True)
    return folder / f"{run.id}.log"


class Sweep:
  """Starts runs, so many at a time, and watches them."""

  def __init__(
    self,
    launcher: Launcher,
    runs: Sequence[Run],
    state: State,
    concurrency: int,
  ):
    """Starts nothing yet."""
    self._launcher, self._state = launcher, state
    self._concurrency = concurrency
    self._runs = runs
    self._waiting = [run for run in runs if state.of(run) != "done"]
    self._skipped = len(runs) - len(self._waiting)
    self._started: dict[str, tuple[Run, Started]] = {}
    self._signalled = threading.Event()

  def run(self) -> int:
    """Until all have ended, or a signal came; returns the exit code."""
    before = {kind: signal.signal(kind, self._on_signal) for kind in _SIGNALS}
    try:
      while self._waiting or self._started:
        self._fill()
        self._look()
        if self._signalled.wait(self._launcher.poll_seconds):
          return self._stop()
    finally:
      for kind, handler in before.items():
        signal.signal(kind, handler)
    return self._report(0)

  def _fill(self) -> None:
    # Those that may be running are watched first: they take places already.
    self._waiting.sort(key=lambda run: self._state.of(run) != "running")
    while self._waiting and len(self._started) < self._concurrency:
      run = self._waiting.pop(0)
      resumed = self._state.of(run) == "running"
      self._state.set(run, "running")
      started = self._launcher.start(run, self._state.log(run), resumed)
      self._started[run.id] = run, started
      _say(f"{run.id} {'goes on' if resumed else 'starts'}: {run.fields}")

  def _look(self) -> None:
    for run, started in list(self._started.values()):
      outcome = started.outcome()
      if outcome != "running":
        del self._started[run.id]
        self._state.set(run, outcome)
        _say(f"{run.id} is {outcome}")

  def _stop(self) -> int:
    """Local runs end with a checkpoint; others go on."""
    for run, started in list(self._started.values()):
      if not started.interrupt():
        del self._started[run.id]
    while self._started:
      self._look()
      self._signalled.clear()
      if self._started and self._signalled.wait(self._launcher.poll_seconds):
        for _, started in self._started.values():
          started.interrupt()
    return self._report(STOPPED)

  def _report(self, code: int) -> int:
    states = [self._state.of(run) for run in self._runs]
    counts = {name: states.count(name) for name in sorted(set(states))}
    print(json.dumps({**counts, "skipped": self._skipped}), flush=True)
    return code or int(any(state != "done" for state in states))

  def _on_signal(self, number, frame) -> None:
    self._signalled.set()


def _described(
  launcher: Launcher, runs: Sequence[Run], concurrency: int
) -> Iterator[str]:
  """A script of what is sent, in order."""
  yield "#!/usr/bin/env bash"
  yield "set -euo pipefail"
  yield f"# {len(runs)} runs, {concurrency} at once."
  for run in runs:
    yield f"# {run.id}: {json.dumps(run.fields)}"
    yield from map(str, launcher.steps(run))


@contextlib.contextmanager
def _held(path: pathlib.Path) -> Iterator[None]:
  """Two launchers of one sweep would start its runs twice."""
  with open(path.with_suffix(".lock"), "w") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ConfigError(
        f"--state is {str(path)!r}; another launcher works on it"
      ) from error
    yield


def _of_config(flags: Sequence[str]) -> list[str]:
  """Those that are the run's, not local.py's."""
  return [flag for flag in flags if flag.startswith("--config")]


def _config_file(flags: Sequence[str]) -> str:
  for flag in flags:
    if flag.startswith("--config="):
      return flag.partition("=")[2].partition(":")[0]
  raise ConfigError("--config is missing; see --help")


def _default_path(flags: Sequence[str]) -> str:
  return f"runs/sweeps/{pathlib.Path(_config_file(flags)).stem}.json"


def _say(text: str) -> None:
  print(f"[sweep] {text}", file=sys.stderr, flush=True)
