"""How figures look: colours that all eyes tell apart, intervals, files.

One message each, axes with units, the paper's numbers marked where they fit.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

import cycler
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from rl_tpu.figures.study import Row, Scale, Study

COLORS = (
  *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
  *("#e69f00", "#56b4e9", "#000000", "#999999"),
)
"""Okabe and Ito's, in the order in which they are told apart best."""
PAPER = {"color": "#444444", "marker": "D", "linestyle": ":", "markersize": 4}
"""The style of a paper's own numbers."""
STYLE = {
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.prop_cycle": cycler.cycler(color=COLORS),
  "figure.dpi": 120,
  "font.size": 9,
  "legend.frameon": False,
  "svg.hashsalt": "rl_tpu",
}
"""matplotlib's parameters."""


def interval(values: Sequence[float]) -> tuple[float, float]:
  """Mean, and half the width of its 95% interval by Student's t.

  The half width is NaN for one value: nothing says how it spreads.
  """
  array = np.asarray(values, float)
  if array.size < 2:
    return float(array.mean()), math.nan
  t = stats.t.ppf(0.975, array.size - 1)
  half = t * array.std(ddof=1) / math.sqrt(array.size)
  return float(array.mean()), float(half)


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
  """Interval of the mean of a - b, of values paired by seed."""
  return interval([x - y for x, y in zip(a, b, strict=True)])


def said(values: Sequence[float], digits: int = 2) -> str:
  """Mean and interval as text, `0.61 ± 0.05`."""
  mean, half = interval(values)
  return f"{mean:.{digits}f} ± {half:.{digits}f}"


def where(rows: Sequence[Row], **columns: object) -> list[Row]:
  """The rows that have these values in these columns."""
  return [r for r in rows if all(r.get(n) == v for n, v in columns.items())]


def values(rows: Sequence[Row], name: str, **columns: object) -> list[float]:
  """One column of the rows that have these values in others."""
  return [float(row[name]) for row in where(rows, **columns)]


def curve(
  axes, rows: Sequence[Row], x: str, y: str, *, band: bool = True, **style
) -> None:
  """Means over rows of equal `x`, with their range over seeds as a band.

  The range, not an interval: three seeds say little about a spread, and the
  range says only what was seen. Rows without `y` are left out. Many bands in
  one panel hide the lines: there, without.
  """
  rows = [row for row in rows if y in row]
  places = sorted({float(row[x]) for row in rows})
  groups = [values(rows, y, **{x: place}) for place in places]
  (line,) = axes.plot(places, [np.mean(g) for g in groups], **style)
  if not band:
    return
  axes.fill_between(
    places,
    [min(g) for g in groups],
    [max(g) for g in groups],
    color=line.get_color(),
    alpha=0.15,
    linewidth=0,
  )


@contextlib.contextmanager
def _styled(size: tuple[float, float]) -> Iterator:
  with plt.style.context(STYLE):
    figure = plt.figure(figsize=size, layout="constrained")
    yield figure
    plt.close(figure)


def draw(study: Study, scale: Scale, rows: Sequence[Row]) -> None:
  """Writes the study's picture as PNG and SVG."""
  path = study.picture(scale)
  path.parent.mkdir(parents=True, exist_ok=True)
  with _styled(getattr(study.module, "SIZE", (7.0, 3.2))) as figure:
    study.module.draw(rows, figure)
    figure.savefig(path.with_suffix(".png"))
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
