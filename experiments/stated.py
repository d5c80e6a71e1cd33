"""What a paper states as a number, beside what a config here has.

A study of settings has a cell for each field that a paper states. Measuring one
builds the config anew and reads the field, so that a table in README.md says
when a config no longer has the paper's numbers.
"""

import functools
from collections.abc import Mapping, Sequence

import ml_collections

from rl_tpu import parts
from rl_tpu.config import build
from rl_tpu.figures import Row, Verdict

Fields = Mapping[str, object]
"""Dotted paths of fields, and what the paper states of each."""


def read(config: ml_collections.ConfigDict, field: str) -> object:
  """The value of a field, of the config that a run is built from.

  Raises:
    AttributeError: there is no such field.
  """
  return functools.reduce(
    getattr, field.split("."), build(parts.Config, config)
  )


def row(config: ml_collections.ConfigDict, field: str, fields: Fields) -> Row:
  """The paper's value and the config's, as a file can have them."""
  return {
    "paper": _plain(fields[field]),
    "here": _plain(read(config, field)),
  }


def _plain(value: object) -> str | int | float:
  return value if isinstance(value, (int, float)) else str(value)


def agree(rows: Sequence[Row]) -> Verdict:
  """Passed if all fields have the paper's value; names those that do not."""
  other = [row for row in rows if row["paper"] != row["here"]]
  seen = f"{len(rows) - len(other)} of {len(rows)} fields equal"
  if other:
    seen += "; not " + ", ".join(
      f"{row['field']} ({row['here']}; the paper {row['paper']})"
      for row in other
    )
  return Verdict(outcome="weaker" if other else "passed", seen=seen)


def draw(rows: Sequence[Row], axes, columns: Mapping[str, str]) -> None:
  """A table of all rows; a field that is not the paper's is marked.

  Args:
    rows: as `row` makes them, with the column `field`.
    axes: where it fills the whole.
    columns: of the rows, those that are shown, by their headings.
  """
  axes.axis("off")
  text = [[str(row[name]) for name in columns.values()] for row in rows]
  shown = axes.table(text, colLabels=list(columns), cellLoc="left", bbox=_WHOLE)
  shown.auto_set_font_size(False)
  shown.set_fontsize(7)
  shown.auto_set_column_width(range(len(columns)))
  for (line, _), cell in shown.get_celld().items():
    cell.set_linewidth(0.3)
    row = rows[line - 1]
    if line and "paper" in columns.values() and row["paper"] != row["here"]:
      cell.set_facecolor("#f0e442")


_WHOLE = (0.0, 0.0, 1.0, 1.0)
"""Left, bottom, width and height of the axes."""
