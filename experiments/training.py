"""One training run of a study, and the rows that it measured.

Studies train the quickstart's model (0.13M parameters, spelling backward) under
a lockstep schedule, so that the same seed gives the same numbers: every change
to the config is an argument of the study's cells.
"""

import math
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections
import rich.console

from rl_tpu import algorithms, metrics, parts, train
from rl_tpu.config import Choice, build, to_config_dict
from rl_tpu.figures import Row
from rl_tpu.view import View

COLLAPSE_BATCHES, COLLAPSE_SHARE = 10, 0.5
"""A run has collapsed when its reward was below half its peak for ten batches
in a row: the rule by which Score Centering's authors stop runs."""


def set_loss(
  config: ml_collections.ConfigDict, name: str, **fields: Any
) -> None:
  """Gives a config another loss, by its name in `rl_tpu.algorithms`."""
  loss = algorithms.get(name).Config(**fields)
  config.algorithm = to_config_dict(Choice(name=name, config=loss))


def train_in(
  config: ml_collections.ConfigDict, directory: str
) -> dict[str, Any]:
  """Trains without a terminal view, leaving the run in `directory`.

  Returns:
    The headline figures, as of `train.run`.
  """
  config.directory = directory
  config.checkpoint_every = config.batches
  built = build(parts.Config, config)
  with open(os.devnull, "w") as nowhere:
    view = View(built.batches, rich.console.Console(file=nowhere))
    return train.run(built, view)


def train_apart(file: str, directory: str, values: Mapping[str, Any]) -> None:
  """Trains in a process of its own, whose two sides have a device each.

  Args:
    file: of the config, with its argument.
    directory: where the run is left.
    values: of fields that differ from the file's.

  Raises:
    CalledProcessError: it failed.
  """
  command = [sys.executable, "-m", "rl_tpu", "train", f"--config={file}"]
  fields = {"directory": directory, **values}
  command += [f"--config.{name}={value}" for name, value in fields.items()]
  subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def rows_of(
  config: ml_collections.ConfigDict, columns: Sequence[str], every: int
) -> list[Row]:
  """Trains, and returns means of metrics over each `every` batches.

  Args:
    config: of the run; directory and cache are set here.
    columns: metrics.csv's that are wanted; a batch without one, or where it
      is not finite, counts not: values explain no variance where there is none.
    every: batches that share a row; the row's `batch` is the last of them.
  """
  with tempfile.TemporaryDirectory(prefix="study-") as directory:
    train_in(config, directory)
    log = metrics.read_csv(pathlib.Path(directory) / "metrics.csv")
  found = []
  for last in range(every, config.batches + 1, every):
    span = [row for row in log if last - every < row["batch"] <= last]
    row: Row = {"batch": last}
    for name in columns:
      values = [r[name] for r in span if name in r]
      values = [value for value in values if math.isfinite(value)]
      if values:
        row[name] = sum(values) / len(values)
    found.append(row)
  return found
