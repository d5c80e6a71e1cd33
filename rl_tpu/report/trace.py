"""A run's timeline for Perfetto: every interval, in Chrome's trace format.

ui.perfetto.dev opens the file. Times are microseconds since the first batch was
asked for. https://github.com/google/perfetto (docs, "JSON trace format").
"""

import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from rl_tpu import metrics
from rl_tpu.metrics import Row
from rl_tpu.report.goodput import Bar

_COUNTERS = ("reward", "staleness_mean", "behavior_weight", "clip_fraction")


def write(
  path: str | os.PathLike, bars: Sequence[Bar], rows: Sequence[Row]
) -> pathlib.Path:
  """Writes the trace; returns where it is."""
  path = pathlib.Path(path)
  lanes = list(dict.fromkeys(bar[0] for bar in bars))
  events = [*_names(lanes), *_intervals(bars, lanes), *_counts(rows)]
  text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
  metrics.write_text(path, text)
  return path


def _names(lanes: Sequence[str]) -> Iterator[dict[str, Any]]:
  for lane, name in enumerate(lanes):
    yield {
      "ph": "M",
      "name": "thread_name",
      "pid": 0,
      "tid": lane,
      "args": {"name": name},
    }


def _intervals(
  bars: Sequence[Bar], lanes: Sequence[str]
) -> Iterator[dict[str, Any]]:
  for part, kind, start, end in bars:
    yield {
      "ph": "X",
      "name": kind,
      "cat": part,
      "pid": 0,
      "tid": lanes.index(part),
      "ts": round(1e6 * start, 1),
      "dur": round(1e6 * (end - start), 1),
    }


def _counts(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
  for row in rows:
    for name in _COUNTERS:
      if name in row and "seconds" in row:
        yield {
          "ph": "C",
          "name": name,
          "pid": 0,
          "ts": round(1e6 * row["seconds"], 1),
          "args": {name: row[name]},
        }
