"""What a person sees while a run goes on.

On a terminal a table of the last batches is redrawn in place, with a progress
bar and the time left. In a plain log every batch is one line under a header
that comes again now and then. Both show the same columns; a value that a batch
does not have is a dash.
"""

import collections
import contextlib
from collections.abc import Iterator, Mapping

import rich.box
import rich.console
import rich.live
import rich.progress_bar
import rich.table

COLUMNS: tuple[tuple[str, str, str], ...] = (
  # heading, metric, format
  ("reward", "reward", "{:.3f}"),
  ("held", "heldout_accuracy", "{:.3f}"),
  ("stale", "staleness_mean", "{:.2f}"),
  ("max", "staleness_max", "{:.0f}"),
  ("weight", "behavior_weight", "{:.3f}"),
  ("clip", "clip_fraction", "{:.3f}"),
  ("gen/s", "generated_tokens_per_second", "{:.0f}"),
  ("train/s", "trained_tokens_per_second", "{:.0f}"),
  ("wait", "learner_wait_share", "{:.0%}"),
)
LEGEND = (
  "reward: mean of the batch; held: accuracy on questions never trained on; "
  "stale, max: versions that consumed tokens lag; weight: proximal/behavior; "
  "clip: share of tokens clipped; gen/s, train/s: tokens a second; "
  "wait: share of time the learner waited; left: time left; "
  "-: no such figure"
)
WARNINGS: tuple[tuple[str, float, str], ...] = (
  # metric, bound, what it means to be above it
  (
    "trajectories_masked",
    0.5,
    "of the batch's trajectories do not train: their behavior weights are out "
    "of bounds. Is staleness too high, or do generator and learner disagree?",
  ),
  (
    "truncated",
    0.25,
    "of the batch's trajectories were cut before their end. Is "
    "sampling.max_tokens too small, or engine.context_length, or max_turns?",
  ),
)
_SHOWN = 12
_HEADER_EVERY = 20


class View:
  """Shows batches as they are trained."""

  def __init__(self, batches: int, console: rich.console.Console | None = None):
    self._batches = batches
    self._console = console or rich.console.Console(highlight=False)
    self._rows = collections.deque[tuple[int, Mapping[str, float], float]](
      maxlen=_SHOWN
    )
    self._live: rich.live.Live | None = None
    self._printed = 0
    self._above: set[str] = set()

  @contextlib.contextmanager
  def open(self) -> Iterator["View"]:
    """Takes the terminal for the duration of the run."""
    self.note(LEGEND)
    if not self._console.is_terminal:
      yield self
      return
    with rich.live.Live(
      console=self._console, auto_refresh=False, transient=False
    ) as live:
      self._live = live
      try:
        yield self
      finally:
        self._live = None

  def note(self, text: str) -> None:
    """A line of its own, above the table on a terminal."""
    self._console.print(text, soft_wrap=True, markup=False)

  def batch(
    self, batch: int, metrics: Mapping[str, float], seconds_left: float
  ) -> None:
    """Shows one trained batch, and a warning where a metric leaves its bound.

    A warning comes again only after the metric was back inside.
    """
    for name, bound, text in WARNINGS:
      if metrics.get(name, 0.0) <= bound:
        self._above.discard(name)
      elif name not in self._above:
        self._above.add(name)
        self.note(f"warning: batch {batch}: {metrics[name]:.0%} {text}")
    self._rows.append((batch, metrics, seconds_left))
    if self._live is not None:
      self._live.update(self._table(), refresh=True)
    else:
      self._print_line()

  def _cells(self, row: tuple[int, Mapping[str, float], float]) -> list[str]:
    batch, metrics, left = row
    cells = [f"{batch}/{self._batches}"]
    for _, name, form in COLUMNS:
      cells.append(form.format(metrics[name]) if name in metrics else "-")
    return [*cells, clock(left)]

  def _table(self) -> rich.console.Group:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 0))
    for heading in ("batch", *(heading for heading, _, _ in COLUMNS), "left"):
      table.add_column(heading, justify="right")
    for row in self._rows:
      table.add_row(*self._cells(row))
    bar = rich.progress_bar.ProgressBar(
      total=self._batches, completed=self._rows[-1][0], width=60
    )
    return rich.console.Group(table, bar)

  def _print_line(self) -> None:
    headings = ["batch", *(heading for heading, _, _ in COLUMNS), "left"]
    cells = self._cells(self._rows[-1])
    widths = [max(len(heading), 6) for heading in headings]
    lines = [cells]
    if self._printed % _HEADER_EVERY == 0:
      lines = [headings, cells]
    self._printed += 1
    for line in lines:
      padded = (c.rjust(w) for c, w in zip(line, widths, strict=True))
      self.note(" ".join(padded))


def clock(seconds: float) -> str:
  """Minutes and seconds, or hours and minutes."""
  minutes, rest = divmod(round(seconds), 60)
  if minutes < 60:
    return f"{minutes}:{rest:02d}"
  return f"{minutes // 60}h{minutes % 60:02d}"
