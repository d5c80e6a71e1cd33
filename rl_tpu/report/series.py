"""Fewer points that draw the same line.

A screen has some hundred columns of pixels; a run may have ten thousand
batches. Of the points that fall into one column only the lowest and the highest
can be seen, so only they are kept.
"""

from collections.abc import Sequence

COLUMNS = 600


def thin(
  xs: Sequence[float], ys: Sequence[float], columns: int = COLUMNS
) -> tuple[list[float], list[float]]:
  """At most two points a column, in order: the extremes of y.

  Args:
    xs: ascending.
    ys: finite.
    columns: >= 1.
  """
  if len(xs) <= 2 * columns:
    return list(xs), list(ys)
  width = (xs[-1] - xs[0]) / columns or 1.0
  kept: list[int] = []
  column: list[int] = []

  def close() -> None:
    extremes = {
      min(column, key=ys.__getitem__),
      max(column, key=ys.__getitem__),
    }
    kept.extend(sorted(extremes))

  for i, x in enumerate(xs):
    last = int((xs[column[0]] - xs[0]) / width) if column else 0
    if column and int((x - xs[0]) / width) != last:
      close()
      column = []
    column.append(i)
  close()
  return [xs[i] for i in kept], [ys[i] for i in kept]


def merge(
  bars: Sequence[tuple[str, float, float]], most: int
) -> tuple[list[tuple[str, float, float]], float]:
  """Joins bars of one kind across gaps, the shortest first, until few remain.

  Args:
    bars: kind, start and end, ascending in start.
    most: bars to keep, >= 1 for each kind.

  Returns:
    The bars, and the longest gap in seconds that was closed (0: none).
  """
  gap, joined = 0.0, list(bars)
  while len(joined) > most:
    span = joined[-1][2] - joined[0][1]
    gap = 2 * gap or span / (8 * most)
    joined = _join(joined, gap)
    if gap > span:
      break
  return joined, gap


def _join(
  bars: Sequence[tuple[str, float, float]], gap: float
) -> list[tuple[str, float, float]]:
  open_bars: dict[str, list] = {}
  joined: list[list] = []
  for kind, start, end in bars:
    bar = open_bars.get(kind)
    if bar is not None and start - bar[2] <= gap:
      bar[2] = max(bar[2], end)
    else:
      open_bars[kind] = bar = [kind, start, end]
      joined.append(bar)
  return [(kind, start, end) for kind, start, end in joined]
