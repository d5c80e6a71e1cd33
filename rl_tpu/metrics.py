"""What a run leaves behind: metrics.csv, TensorBoard, JSON lines.

A row belongs to a batch and stays so, whatever order rows arrive in. When a
run resumes from version v, rows of batches that the checkpoint does not hold
are dropped, so the files tell the history of the weights that exist.
"""

import csv
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorboardX

from rl_tpu.types import Group, Trajectory

Row = dict[str, float]


class Writer(Protocol):
  """Who else is told of each row."""

  def write(self, batch: int, metrics: Mapping[str, float]) -> None:
    """Takes a row of scalars that belong to `batch`."""
    ...

  def close(self) -> None:
    """There are no more."""
    ...


class RunLog:
  """Writes one run's records into its directory.

  metrics.csv has a column `batch` (the version after training it; 0 = before
  the first) and one per metric, empty where a row has no value. Every row is
  on disk when `write` returns.
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    resume_at: int | None,
    writers: Sequence[Writer] = (),
  ):
    """Opens the log; keeps rows up to batch `resume_at`, or none if None.

    Each row goes to `writers` too, whose owner closes them.
    """
    self._writers = writers
    self.directory = pathlib.Path(directory)
    self.directory.mkdir(parents=True, exist_ok=True)
    self._csv = self.directory / "metrics.csv"
    self._rows: list[Row] = []
    self._columns = ["batch"]
    last = -1 if resume_at is None else resume_at
    self.dropped: list[Row] = []
    """Rows of batches that have to be trained again."""
    for row in read_csv(self._csv):
      if row["batch"] <= last:
        self._remember(row)
      else:
        self.dropped.append(row)
    self._rewrite()
    for path in self.directory.glob("*.jsonl"):
      kept = [row for row in read_jsonl(path) if row["batch"] <= last]
      write_text(path, "".join(json.dumps(row) + "\n" for row in kept))
    self._tensorboard = tensorboardX.SummaryWriter(
      str(self.directory / "tensorboard"),
      purge_step=None if resume_at is None else resume_at + 1,
    )

  @property
  def rows(self) -> list[Row]:
    """All rows so far, oldest first."""
    return self._rows

  def write(self, batch: int, metrics: Mapping[str, float]) -> None:
    """Adds a row of scalars that belong to `batch`."""
    row = {"batch": batch, **metrics}
    new_column = self._remember(row)
    if new_column:
      self._rewrite()
    else:
      with open(self._csv, "a", newline="") as file:
        csv.DictWriter(file, self._columns).writerow(row)
    for name, value in metrics.items():
      if math.isfinite(value):  # It warns of others in the terminal's view.
        self._tensorboard.add_scalar(name, value, batch)
    for writer in self._writers:
      writer.write(batch, metrics)

  def record(self, kind: str, batch: int, values: Mapping[str, Any]) -> None:
    """Appends one JSON line that belongs to `batch` to `kind`.jsonl."""
    with open(self.directory / f"{kind}.jsonl", "a") as file:
      file.write(json.dumps({"batch": batch, **values}) + "\n")

  def close(self) -> None:
    """Flushes TensorBoard."""
    self._tensorboard.close()

  def _remember(self, row: Row) -> bool:
    self._rows.append(row)
    new = [name for name in row if name not in self._columns]
    self._columns += new
    return bool(new)

  def _rewrite(self) -> None:
    lines = [",".join(self._columns)] + [
      ",".join(str(row.get(name, "")) for name in self._columns)
      for row in self._rows
    ]
    write_text(self._csv, "\r\n".join(lines) + "\r\n")


def read_csv(path: str | os.PathLike) -> list[Row]:
  """Rows of a metrics.csv without their empty cells; [] if there is none.

  A last line cut short by a kill is left out.
  """
  if not os.path.exists(path):
    return []
  with open(path, newline="") as file:
    text = file.read()
  whole = text[: text.rfind("\n") + 1]
  return [
    {
      name: int(cell) if name == "batch" else float(cell)
      for name, cell in row.items()
      if cell
    }
    for row in csv.DictReader(whole.splitlines())
  ]


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Objects of a JSON-lines file; [] if there is none.

  A last line cut short by a kill is left out.
  """
  if not os.path.exists(path):
    return []
  with open(path) as file:
    return [json.loads(line) for line in file if line.endswith("\n")]


def read_json(path: str | os.PathLike) -> Any:
  """The value that `write_json` wrote."""
  with open(path) as file:
    return json.load(file)


def write_json(path: str | os.PathLike, value: Any) -> None:
  """Writes JSON so that the file is never half there."""
  write_text(pathlib.Path(path), json.dumps(value, indent=2) + "\n")


def commit() -> str | None:
  """The commit that this code was checked out at, if anybody knows.

  An image has no git; whoever builds it may leave the commit in RL_TPU_COMMIT.
  """
  if shutil.which("git") is None:
    return os.environ.get("RL_TPU_COMMIT") or None
  found = subprocess.run(
    ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"],
    capture_output=True,
    text=True,
    check=False,
  )
  return found.stdout.strip() or None


def environment() -> dict[str, Any]:
  """What this process runs on: versions, commit, command."""
  return {
    "commit": commit(),
    "command": sys.argv,
    "python": platform.python_version(),
    "platform": platform.platform(),
    "packages": {
      package.metadata["Name"]: package.version
      for package in importlib.metadata.distributions()
    },
  }


def write_text(path: pathlib.Path, text: str) -> None:
  """Writes a file so that it is never half there."""
  partial = path.with_name(path.name + ".partial")
  with open(partial, "w", newline="") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(partial, path)


def describe(groups: Sequence[Group], version: int) -> dict[str, float]:
  """Metrics of a batch trained at `version` that need no device."""
  trajectories = [t for group in groups for t in group.trajectories]
  stale = staleness_of_tokens(groups, version)
  mixed = [len(set(t.token_version[t.action_mask])) > 1 for t in trajectories]
  truncated = [t.stop_reason == "length" for t in trajectories]
  return {
    "reward": float(np.mean([t.outcome for t in trajectories])),
    "action_tokens": float(len(stale)),
    "truncated": float(np.mean(truncated)),
    "staleness_mean": float(stale.mean()),
    "staleness_max": float(stale.max()),
    "mixed_version_trajectories": float(sum(mixed)),
  } | describe_environments(trajectories)


def describe_environments(
  trajectories: Sequence[Trajectory],
) -> dict[str, float]:
  """Means of what environments counted, over the trajectories that have it."""
  values: dict[str, list[float]] = {}
  for trajectory in trajectories:
    for name, value in trajectory.metrics.items():
      values.setdefault(f"env_{name}", []).append(value)
  return {name: float(np.mean(some)) for name, some in sorted(values.items())}


def staleness_of_tokens(groups: Sequence[Group], version: int) -> np.ndarray:
  """Version less token version of every action token."""
  return np.concatenate(
    [
      version - t.token_version[t.action_mask]
      for group in groups
      for t in group.trajectories
    ]
  )
