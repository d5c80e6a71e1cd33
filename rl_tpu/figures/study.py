"""What a study is, where it is found, and the file of its rows."""

import csv
import dataclasses
import importlib
import io
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from rl_tpu import metrics
from rl_tpu.config import ConfigError

Value = str | int | float | bool
Cell = dict[str, Value]
"""Columns that say what is measured."""
Key = tuple[tuple[str, str], ...]
"""Of a cell, the same before and after a file."""
Row = dict[str, Value]
"""A cell's columns and what was measured of it."""
Scale = Literal["smoke", "cpu", "paper"]
Outcome = Literal["passed", "weaker", "not_seen"]
PARTS = ("ARTEFACTS", "cells", "measure", "draw")
_ABOUT = ("seconds", "commit")
"""Columns that say how a row came about: they may differ when it is remade."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
  """What a study found."""

  outcome: Outcome
  """`passed`: the paper's claim by the study's rule; `weaker`: its direction,
  but not the rule; `not_seen`: neither."""
  seen: str
  """In a sentence with the figures."""

  def __post_init__(self):
    if self.outcome not in get_args(Outcome):
      raise ValueError(
        f"outcome is {self.outcome!r}; it must be one of {get_args(Outcome)}"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
  """What a paper shows in a figure or table, and how it is tested."""

  shows: str
  """The paper's, in a sentence with its numbers."""
  rule: str
  """When rows show the same, in a sentence; `judge` follows it."""
  judge: Callable[[Sequence[Row]], Verdict]
  """Of the rows of all cells."""


@dataclasses.dataclass(frozen=True)
class Study:
  """One file of a folder of experiments/."""

  name: str
  """FOLDER/FILE without its ending."""
  root: pathlib.Path
  """The folder that `experiments` is."""

  @property
  def module(self) -> Any:
    """The file, imported."""
    return importlib.import_module(
      ".".join([self.root.name, *self.name.split("/")])
    )

  @property
  def folder(self) -> str:
    """Of the file: a paper's."""
    return self.name.split("/")[0]

  @property
  def claims(self) -> Mapping[str, Claim]:
    """The file's ARTEFACTS."""
    return self.module.ARTEFACTS

  def cells(self, scale: Scale) -> list[Cell]:
    """What is measured at a scale.

    Raises:
      ValueError: two cells are the same.
    """
    cells = list(self.module.cells(scale))
    if len({key(cell) for cell in cells}) < len(cells):
      raise ValueError(f"{self.name}: cells({scale!r}) repeats a cell")
    return cells

  def csv(self, scale: Scale) -> pathlib.Path:
    """Of its rows: committed at scale cpu, otherwise among the runs."""
    folder, file = self.name.split("/")
    if scale == "cpu":
      return self.root / folder / "results" / f"{file}.csv"
    return pathlib.Path("runs/figures") / scale / folder / f"{file}.csv"

  def picture(self, scale: Scale) -> pathlib.Path:
    """Its path without an ending; PNG and SVG lie side by side."""
    csv = self.csv(scale)
    if scale != "cpu":
      return csv.with_suffix("")
    return csv.parents[1] / "figures" / csv.stem


def find(root: pathlib.Path, names: Sequence[str] = ()) -> list[Study]:
  """All studies below `root`, or those named FOLDER, FILE or FOLDER/FILE.

  Raises:
    ConfigError: there is no such folder, or a name fits no study.
    ValueError: a file defines `ARTEFACTS` but not all that a study must.
  """
  if not root.is_dir():
    raise ConfigError(
      f"{root} is not there; figures runs in the folder of the repository"
    )
  files = sorted(root.glob("*/*.py"))
  studies = [
    Study(f"{file.parent.name}/{file.stem}", root)
    for file in files
    if "\nARTEFACTS = " in file.read_text()
  ]
  for study in studies:
    lacking = [name for name in PARTS if not hasattr(study.module, name)]
    if lacking:
      raise ValueError(f"{study.name} defines no {', '.join(lacking)}")
  if not names:
    return studies
  for name in names:
    if not any(_fits(study, name) for study in studies):
      known = ", ".join(study.name for study in studies)
      raise ConfigError(f"{name!r} is no study; they are {known}")
  return [s for s in studies if any(_fits(s, name) for name in names)]


def _fits(study: Study, name: str) -> bool:
  return name in (study.name, *study.name.split("/"))


def key(cell: Mapping[str, Value]) -> Key:
  """What tells cells apart, the same before and after a file."""
  return tuple((name, written(value)) for name, value in sorted(cell.items()))


def written(value: Value) -> str:
  """A value as the file has it: of floats, the nine digits of a float32."""
  if isinstance(value, bool):
    return str(int(value))
  return f"{value:.9g}" if isinstance(value, float) else str(value)


def read(path: pathlib.Path) -> list[Row]:
  """Rows of a file, numbers as numbers; [] if there is none."""
  if not path.exists():
    return []
  with open(path, newline="") as file:
    return [
      {name: _number(text) for name, text in row.items() if text != ""}
      for row in csv.DictReader(file)
    ]


def _number(text: str) -> Value:
  for kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      continue
  return text


def write(path: pathlib.Path, rows: Iterable[Row]) -> None:
  """Writes rows so that the file is never half there."""
  rows = list(rows)
  columns = list(dict.fromkeys(name for row in rows for name in row))
  columns = [name for name in columns if name not in _ABOUT] + [*_ABOUT]
  text = io.StringIO()
  lines = csv.DictWriter(text, columns, restval="", lineterminator="\n")
  lines.writeheader()
  for row in rows:
    lines.writerow({name: written(value) for name, value in row.items()})
  path.parent.mkdir(parents=True, exist_ok=True)
  metrics.write_text(path, text.getvalue())


def by_cell(cells: Iterable[Cell], rows: Iterable[Row]) -> dict[Key, list[Row]]:
  """The rows of each cell, in its order; those of no cell are left out."""
  found: dict[Key, list[Row]] = {key(cell): [] for cell in cells}
  names = {name for cell in found for name, _ in cell}
  for row in rows:
    own = found.get(key({name: row.get(name, "") for name in names}))
    if own is not None:
      own.append(row)
  return found


def measured(cell: Cell, rows: Iterable[Row]) -> list[Row]:
  """The rows of one cell."""
  return by_cell([cell], rows)[key(cell)]


def figures(row: Row) -> Row:
  """A row without what may differ when it is remade, as a file has it."""
  return {n: written(v) for n, v in row.items() if n not in _ABOUT}
