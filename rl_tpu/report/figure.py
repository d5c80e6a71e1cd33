"""A finished run as one picture, drawn from the files in its directory.

Reward and held-out accuracy over batches; how stale the consumed tokens were;
and a stretch from the middle of the run that shows when the generator and the
learner worked. In asynchronous training the two bars overlap; in synchronous
training they alternate.
"""

import collections
import os
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from rl_tpu import metrics

_BATCHES_SHOWN = 4
_COLORS = {
  "generate": "#4477aa",
  "prefill": "#66ccee",
  "weights": "#ccbb44",
  "train": "#ee6677",
  "wait": "#dddddd",
  "checkpoint": "#228833",
  "evaluate": "#aa3377",
  "compile": "#555555",
}


def plot(directory: str | os.PathLike) -> pathlib.Path:
  """Draws DIRECTORY/run.png.

  Args:
    directory: of a run: its metrics.csv, batches.jsonl and events.jsonl.

  Raises:
    FileNotFoundError: there is no trained batch to draw.
  """
  directory = pathlib.Path(directory)
  rows = metrics.read_csv(directory / "metrics.csv")
  batches = metrics.read_jsonl(directory / "batches.jsonl")
  if not batches:
    raise FileNotFoundError(f"{directory} holds no trained batch")
  figure, axes = plt.subplot_mosaic(
    [["reward", "staleness"], ["timeline", "timeline"]],
    figsize=(10, 6.5),
    height_ratios=[3, 2],
    width_ratios=[3, 2],
    layout="constrained",
  )
  _plot_reward(axes["reward"], rows)
  _plot_staleness(axes["staleness"], batches)
  _plot_timeline(
    axes["timeline"], metrics.read_jsonl(directory / "events.jsonl")
  )
  path = directory / "run.png"
  figure.savefig(path, dpi=120)
  plt.close(figure)
  return path


def _plot_reward(axes, rows: list[metrics.Row]) -> None:
  """Rewards of a task of one's own may lie outside [0, 1]."""
  shown = [0.0, 1.0]
  for name, label, style in (
    ("reward", "training reward", {"color": "#4477aa", "linewidth": 1}),
    (
      "heldout_accuracy",
      "held-out accuracy",
      {"color": "#ee6677", "marker": "o", "markersize": 4},
    ),
  ):
    points = [(row["batch"], row[name]) for row in rows if name in row]
    shown += [value for _, value in points]
    axes.plot(*zip(*points, strict=True), label=label, **style)
  limits = (min(shown), max(shown))
  axes.set(xlabel="batch", ylabel="mean reward", ylim=limits)
  axes.legend(loc="lower right", frameon=False)


def _plot_staleness(axes, batches: list[dict]) -> None:
  counts: collections.Counter[int] = collections.Counter()
  for batch in batches:
    for staleness, tokens in batch["staleness_tokens"].items():
      counts[int(staleness)] += tokens
  total = sum(counts.values())
  shares = [counts[s] / total for s in sorted(counts)]
  axes.bar([str(s) for s in sorted(counts)], shares, color="#4477aa")
  axes.set(
    xlabel="staleness of consumed tokens (versions)",
    ylabel="share of action tokens",
    ylim=(0, 1),
  )


def _plot_timeline(axes, events: list[dict]) -> None:
  """Bars of a few batches around the middle of the run."""
  bars = [tuple(bar) for event in events for bar in event["intervals"]]
  trained = sorted(end for _, kind, _, end in bars if kind == "train")
  first = max((len(trained) - _BATCHES_SHOWN) // 2, 0)
  last = min(first + _BATCHES_SHOWN, len(trained) - 1)
  start = trained[first] if first < last else 0.0
  end = trained[last]
  parts = ("learner", "generator")
  seen = []
  for part, kind, since, until in bars:
    if until < start or since > end:
      continue
    axes.barh(
      parts.index(part),
      until - since,
      left=since,
      color=_COLORS[kind],
      height=0.6,
      label=None if kind in seen else kind,
    )
    seen.append(kind)
  axes.set(
    xlim=(start, end),
    yticks=range(len(parts)),
    yticklabels=parts,
    xlabel="seconds since the first batch was asked for",
  )
  if seen:
    axes.legend(
      loc="upper center", ncols=5, frameon=False, bbox_to_anchor=(0.5, 1.25)
    )
