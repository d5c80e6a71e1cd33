"""A run, or two side by side, as one HTML page that needs no network.

Everything is in the page: figures as JSON, thinned to what a screen can show
(see `series`; the page says so), a script and a style sheet of ours. While the
run goes on, `live` serves the same page, which then asks for new figures.
"""

import dataclasses
import html
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_tpu import health, metrics
from rl_tpu.report import goodput, series, trace
from rl_tpu.report.goodput import Bar

BARS = 8_000
"""Most intervals of one part on the page's timeline; the trace has all."""
_COLUMNS = 120
"""Most columns of a histogram."""
_HERE = pathlib.Path(__file__).parent


def write(
  directories: Sequence[str | os.PathLike],
  path: str | os.PathLike | None = None,
  tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
  """Writes the page of these runs, and each run's trace.json beside it.

  Args:
    directories: one or two runs.
    path: where; if None, in the first directory: report.html, or
      report_with_OTHER.html of two.
    tell: takes a line for each warning.

  Returns:
    `report` and `traces` (paths), `warnings` (how many).

  Raises:
    FileNotFoundError: a directory holds no run.
  """
  runs = [read(directory) for directory in directories]
  for directory, run in zip(directories, runs, strict=True):
    for warning in run["warnings"]:
      tell(f"{directory}: {warning['rule']} {warning['said']}")
  first, *others = (pathlib.Path(d) for d in directories)
  name = "_with_".join(["report", *(d.resolve().name for d in others)])
  target = pathlib.Path(path or first / f"{name}.html")
  metrics.write_text(target, page(runs, live=False))
  traces = [
    trace.write(pathlib.Path(d) / "trace.json", bars(d), rows(d))
    for d in directories
  ]
  return {
    "report": str(target),
    "traces": [str(path) for path in traces],
    "warnings": sum(len(run["warnings"]) for run in runs),
  }


def page(runs: Sequence[Mapping[str, Any]], live: bool) -> str:
  """The page's text."""
  # "<" could end the script that holds the figures.
  data = as_json(runs).replace("<", "\\u003c")
  title = html.escape(" and ".join(run["name"] for run in runs))
  parts = {
    "TITLE": title,
    "STYLE": (_HERE / "page.css").read_text(),
    "SCRIPT": (_HERE / "page.js").read_text(),
    "LIVE": "true" if live else "false",
    "DATA": data,
  }
  text = (_HERE / "page.html").read_text()
  head, *rest = text.split("{{")
  pieces = [head]
  for piece in rest:
    name, _, after = piece.partition("}}")
    pieces += [parts[name], after]
  return "".join(pieces)


def as_json(runs: Sequence[Mapping[str, Any]]) -> str:
  """The figures as the page reads them."""
  return json.dumps(runs, separators=(",", ":"), allow_nan=False)


def rows(directory: str | os.PathLike) -> list[metrics.Row]:
  """The run's metrics."""
  return metrics.read_csv(pathlib.Path(directory) / "metrics.csv")


def bars(directory: str | os.PathLike) -> list[Bar]:
  """The run's intervals, ascending in start."""
  path = pathlib.Path(directory) / "events.jsonl"
  found = [
    (part, kind, start, end)
    for event in metrics.read_jsonl(path)
    for part, kind, start, end in event["intervals"]
  ]
  return sorted(found, key=lambda bar: bar[2])


def read(directory: str | os.PathLike) -> dict[str, Any]:
  """What the page shows of a run.

  Raises:
    FileNotFoundError: the directory holds no run.
  """
  directory = pathlib.Path(directory)
  if not (directory / "config.json").exists():
    raise FileNotFoundError(
      f"{directory} holds no run: there is no config.json; give the directory "
      "that train named in its last line"
    )
  config = metrics.read_json(directory / "config.json")
  summary, ended = directory / "summary.json", None
  if summary.exists():
    ended = _finite(metrics.read_json(summary))
  measured, intervals = rows(directory), bars(directory)
  starts = metrics.read_jsonl(directory / "starts.jsonl")
  return {
    "name": f"{config['name']} {config['schedule']} seed {config['seed']}",
    "directory": str(directory),
    "asked": config["batches"],
    "summary": ended,
    "config": _finite(config),
    "environment": metrics.read_json(directory / "environment.json"),
    "series": _series(measured),
    "points": len(measured),
    "warnings": [
      _finite(dataclasses.asdict(warning) | {"said": warning.said})
      for warning in health.warnings(measured, config)
    ],
    "goodput": goodput.account(measured, intervals, starts),
    "staleness": _staleness(metrics.read_jsonl(directory / "batches.jsonl")),
    "timeline": _timeline(intervals),
    "samples": metrics.read_jsonl(directory / "samples.jsonl"),
  }


def _finite(value: Any) -> Any:
  """The same with words for numbers that JSON does not know."""
  if isinstance(value, Mapping):
    return {name: _finite(inner) for name, inner in value.items()}
  if isinstance(value, list):
    return [_finite(inner) for inner in value]
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value


def _series(measured: Sequence[metrics.Row]) -> dict[str, list[list[float]]]:
  """Every metric over batches, thinned; what is not finite is left out."""
  points: dict[str, tuple[list[float], list[float]]] = {}
  for row in sorted(measured, key=lambda row: row["batch"]):
    for name, value in row.items():
      if name != "batch" and math.isfinite(value):
        xs, ys = points.setdefault(name, ([], []))
        xs.append(row["batch"])
        ys.append(float(f"{value:.6g}"))
  return {name: [*series.thin(*both)] for name, both in sorted(points.items())}


def _staleness(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Tokens by staleness, over stretches of batches and of versions."""
  last = max((batch["batch"] for batch in batches), default=0)
  width = max(-(-(last + 1) // _COLUMNS), 1)
  by_batch: dict[int, dict[int, int]] = {}
  by_version: dict[int, int] = {}
  whole: dict[int, int] = {}
  for batch in batches:
    column = by_batch.setdefault(batch["batch"] // width, {})
    for key, tokens in batch["staleness_tokens"].items():
      staleness = int(key)
      column[staleness] = column.get(staleness, 0) + tokens
      whole[staleness] = whole.get(staleness, 0) + tokens
      version = max(batch["batch"] - 1 - staleness, 0) // width
      by_version[version] = by_version.get(version, 0) + tokens
  return {
    "width": width,
    "whole": sorted(whole.items()),
    "by_batch": [[c, sorted(t.items())] for c, t in sorted(by_batch.items())],
    "by_version": sorted(by_version.items()),
  }


def _timeline(intervals: Sequence[Bar]) -> list[dict[str, Any]]:
  """A lane for each part."""
  lanes = []
  for part in dict.fromkeys(bar[0] for bar in intervals):
    own = [bar[1:] for bar in intervals if bar[0] == part]
    joined, gap = series.merge(own, BARS)
    kinds = list(dict.fromkeys(bar[0] for bar in joined))
    lanes.append(
      {
        "part": part,
        "kinds": kinds,
        "gap": gap,
        "bars": [
          [kinds.index(kind), round(start, 4), round(end, 4)]
          for kind, start, end in joined
        ],
      }
    )
  return lanes
