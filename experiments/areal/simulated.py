"""What does asynchrony gain on AReaL's pods, in simulated time?

  python -m rl_tpu figures areal/simulated

Throughput by staleness limit (Fig. 5c and Table 7), hours of synchronous over
asynchronous training (Table 1), and tokens/s by number of GPUs (Fig. 4). The
actor, admission and buffer are those of a real run, on a virtual clock; what a
GPU is assumed to take stands in `simulated_pod.py`. Pods are an eighth of the
paper's, with an eighth of its batch, but for Table 7's, which has 8 GPUs and 64
prompts as the paper's. Simulated synchronous pods use all their GPUs in turns.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from experiments.areal import simulated_pod
from rl_tpu import simulate
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing

LIMITS = (0, 1, 2, 4, 8, 16, math.inf)
FIGURE_5C = dict(
  zip(LIMITS, (128.7, 269.3, 356.6, 356.6, 371.7, 382.4, 396.8), strict=True)
)
"""Effective throughput, 1000 tokens/s, by staleness limit."""
TABLE_7 = dict(
  zip(LIMITS[:-1], (27.1, 47.8, 47.8, 49.0, 51.5, 52.0), strict=True)
)
"""The same on 8 GPUs."""
TABLE_1 = {
  "1.5b": (41.0, 14.8),
  "7b": (57.7, 25.4),
  "14b": (48.8, 21.9),
  "32b": (51.1, 31.1),
}
"""Hours of synchronous and of asynchronous AReaL, for as many batches."""
FIGURE_4 = {
  ("1.5b", 15_360): {
    32: (29, 29),
    64: (55, 46),
    128: (100, 59),
    256: (146, 77),
  },
  ("7b", 15_360): {64: (19, 22), 128: (37, 34), 256: (64, 49), 512: (91, 62)},
  ("32b", 15_360): {256: (19, 12), 512: (36, 19)},
  ("1.5b", 31_744): {
    32: (31, 27),
    64: (56, 40),
    128: (102, 44),
    256: (152, 59),
  },
  ("7b", 31_744): {64: (19, 19), 128: (34, 26), 256: (62, 34), 512: (86, 38)},
  ("32b", 31_744): {256: (18, None), 512: (34, None)},
}
"""1000 tokens/s of AReaL and of verl (None: out of memory), by GPUs; answers of
the paper's contexts of 16k and 32k tokens."""
FIGURES = (
  *("tokens_per_second", "batch_seconds", "learner_idle_share"),
  *("generator_idle_share", "staleness_mean"),
)
SIZE = (10.0, 6.0)


def _cell(item, model, schedule, limit, gpus, longest) -> Cell:
  return {
    "item": item,
    "model": model,
    "schedule": schedule,
    "limit": limit,
    "gpus": gpus,
    "longest": longest,
  }


def _pods() -> Iterator[Cell]:
  for limit in LIMITS:
    yield _cell("Fig. 5c", "1.5b", "async", limit, 128, 8192)
  for limit in TABLE_7:
    yield _cell("Table 7", "1.5b", "async", limit, 8, 8192)
  for name in TABLE_1:
    model = simulated_pod.MODELS[name]
    for schedule, limit in (("sync", 0), ("async", model.staleness)):
      yield _cell("Table 1", name, schedule, limit, 8 * model.gpus, 27_648)
  for (name, longest), counts in FIGURE_4.items():
    for gpus in counts:
      for schedule, limit in (("sync", 0), ("async", 8)):
        yield _cell("Fig. 4", name, schedule, limit, gpus, longest)


def cells(scale: str) -> list[Cell]:
  """The paper's pods, by figure and table."""
  del scale  # Decides how much of them is simulated.
  return list(_pods())


def measure(cell: Cell, scale: str) -> list[Row]:
  """One pod; tokens/s are those of all the paper's GPUs."""
  share = 1 if cell["item"] == "Table 7" else 8
  limit = cell["limit"]
  config = simulated_pod.pod(
    cell["model"],
    cell["schedule"],
    gpus=cell["gpus"] // share,
    longest=cell["longest"],
    limit=None if limit == math.inf else int(limit),
    groups=8 if scale == "smoke" else simulated_pod.GROUPS,
  )
  if scale == "smoke":
    settings = dataclasses.replace(
      config.simulate, batches=3, warm_up=1, grain=1024
    )
    config = dataclasses.replace(config, simulate=settings)
  found = simulate.simulate(config, simulate.service_times(config)).figures()
  row = {name: found[name] for name in FIGURES}
  return [row | {"tokens_per_second": share * row["tokens_per_second"]}]


def _gains(rows: Sequence[Row], item: str) -> dict[float, float]:
  """Throughput by staleness limit, over that of limit 0."""
  own = drawing.where(rows, item=item)
  rate = {float(r["limit"]): float(r["tokens_per_second"]) for r in own}
  return {limit: rate[limit] / rate[0] for limit in rate}


def _said(gains: dict[float, float], paper: dict[float, float]) -> str:
  """Simulated gains, and the paper's in brackets."""
  return "gain by limit (the paper's): " + ", ".join(
    f"{limit:g}: {gain:.2f} ({paper[limit] / paper[0]:.2f})"
    for limit, gain in gains.items()
  )


def _plateau(
  rows: Sequence[Row], item: str, paper: dict[float, float], first: int
) -> Verdict:
  """A big step from limit 0 to 1, then a plateau from limit `first`."""
  gains = _gains(rows, item)
  late = [gain for limit, gain in gains.items() if limit >= first]
  rising = all(b > 0.99 * a for a, b in zip(gains.values(), late, strict=False))
  step = gains[1] > 1.5
  flat = max(late) / min(late) < 1.25
  outcome = "passed" if step and flat and rising else "weaker"
  if gains[1] <= 1:
    outcome = "not_seen"
  return Verdict(outcome=outcome, seen=_said(gains, paper))


def _hours(rows: Sequence[Row]) -> dict[str, float]:
  """Seconds of a synchronous batch over those of an asynchronous one."""
  found = {}
  for name in TABLE_1:
    sync, overlapped = (
      drawing.values(
        rows, "batch_seconds", item="Table 1", model=name, schedule=schedule
      )[0]
      for schedule in ("sync", "async")
    )
    found[name] = sync / overlapped
  return found


def _faster(rows: Sequence[Row]) -> Verdict:
  """Table 1: each model saves hours."""
  found = _hours(rows)
  seen = "hours of sync over async (the paper's): " + ", ".join(
    f"{name} {ratio:.2f} ({TABLE_1[name][0] / TABLE_1[name][1]:.2f})"
    for name, ratio in found.items()
  )
  least = min(found.values())
  outcome = "passed" if least > 1.5 else "weaker" if least > 1 else "not_seen"
  return Verdict(outcome=outcome, seen=seen)


def _rates(
  rows: Sequence[Row], name: str, longest: int
) -> tuple[list[int], list[float], list[float]]:
  """GPUs, asynchronous and synchronous 1000 tokens/s of Fig. 4."""
  own = drawing.where(rows, item="Fig. 4", model=name, longest=longest)
  gpus = sorted({int(row["gpus"]) for row in own})
  overlapped, sync = (
    [
      drawing.values(own, "tokens_per_second", gpus=n, schedule=schedule)[0]
      / 1e3
      for n in gpus
    ]
    for schedule in ("async", "sync")
  )
  return gpus, overlapped, sync


def _scales(rows: Sequence[Row]) -> Verdict:
  """Fig. 4: the more GPUs, the more asynchrony gains."""
  ends = []
  for name, longest in FIGURE_4:
    _, overlapped, sync = _rates(rows, name, longest)
    ends.append((overlapped[0] / sync[0], overlapped[-1] / sync[-1]))
  seen = "async over sync, fewest to most GPUs: " + ", ".join(
    f"{name} {(longest + 1024) // 1024}k {first:.2f} to {last:.2f}"
    for (name, longest), (first, last) in zip(FIGURE_4, ends, strict=True)
  )
  growing = all(last > first for first, last in ends)
  ahead = all(last > 1 for _, last in ends)
  outcome = "passed" if growing and ahead else "weaker" if ahead else "not_seen"
  return Verdict(outcome=outcome, seen=seen)


ARTEFACTS = {
  "Fig. 4": Claim(
    shows="from the fewest to the most GPUs AReaL goes from 0.9 to 1.6 times "
    "verl's tokens/s to 1.5 to 2.6 times; it scales at 0.56 to 0.63 of linear "
    "over 8 times the GPUs",
    rule="for each model and context async is ahead of sync at the most GPUs, "
    "and by more than at the fewest",
    judge=_scales,
  ),
  "Fig. 5c": Claim(
    shows="throughput by limit 0, 1, 2, 4, 8, 16, none: 1, 2.09, 2.77, 2.77, "
    "2.89, 2.97, 3.08 times that of limit 0",
    rule="limit 1 over 1.5 times limit 0; no limit below the one before; from "
    "2 on all within a quarter of each other",
    judge=lambda rows: _plateau(rows, "Fig. 5c", FIGURE_5C, 2),
  ),
  "Table 1: hours": Claim(
    shows="hours of sync over async: 2.77 (1.5B), 2.27 (7B), 2.23 (14B), 1.64 "
    "(32B)",
    rule="over 1.5 for each model",
    judge=_faster,
  ),
  "Table 7: throughput": Claim(
    shows="8 GPUs, by limit 0, 1, 2, 4, 8, 16: 27.1, 47.8, 47.8, 49.0, 51.5, "
    "52.0 thousand tokens/s",
    rule="limit 1 over 1.5 times limit 0; no limit below the one before; from "
    "1 on all within a quarter of each other",
    judge=lambda rows: _plateau(rows, "Table 7", TABLE_7, 1),
  ),
}


def draw(rows: Sequence[Row], figure) -> None:
  """Gain by limit, gain by model, and tokens/s by GPUs."""
  above, below = figure.subplots(2, 2)
  _draw_limits(rows, above[0])
  _draw_models(rows, above[1])
  for axes, longest in zip(below, (15_360, 31_744), strict=True):
    _draw_scaling(rows, axes, longest)


def _draw_limits(rows: Sequence[Row], axes) -> None:
  papers = {"Fig. 5c": FIGURE_5C, "Table 7": TABLE_7}
  for color, (item, paper) in zip(drawing.COLORS, papers.items(), strict=False):
    gains = _gains(rows, item)
    places = range(len(gains))
    axes.plot(places, gains.values(), color=color, marker="o", label=item)
    axes.plot(
      places,
      [paper[limit] / paper[0] for limit in gains],
      **drawing.PAPER | {"color": color, "markerfacecolor": "white"},
      label=f"{item}, the paper",
    )
  names = ["none" if limit == math.inf else f"{limit:g}" for limit in LIMITS]
  axes.set_xticks(range(len(LIMITS)), names)
  axes.set(
    xlabel="staleness limit, versions",
    ylabel="tokens/s over those of limit 0",
    ylim=(0, None),
  )
  axes.legend(fontsize=7, loc="lower right")


def _draw_models(rows: Sequence[Row], axes) -> None:
  found = _hours(rows)
  axes.bar(range(len(found)), found.values(), 0.5, label="simulated")
  axes.plot(
    range(len(found)),
    [TABLE_1[name][0] / TABLE_1[name][1] for name in found],
    **drawing.PAPER | {"linestyle": ""},
    label="the paper, Table 1",
  )
  axes.axhline(1, color="#999999", linewidth=0.8)
  axes.set_xticks(range(len(found)), [name.upper() for name in found])
  axes.set(xlabel="model", ylabel="hours, sync over async")
  axes.legend(fontsize=7)


def _draw_scaling(rows: Sequence[Row], axes, longest: int) -> None:
  for color, name in zip(drawing.COLORS, ("1.5b", "7b", "32b"), strict=False):
    gpus, overlapped, sync = _rates(rows, name, longest)
    paper = FIGURE_4[name, longest]
    axes.plot(
      gpus, overlapped, "-o", color=color, label=f"{name.upper()} async"
    )
    axes.plot(gpus, sync, "--o", color=color, markerfacecolor="white")
    axes.plot(
      gpus,
      [paper[n][0] for n in gpus],
      **drawing.PAPER | {"color": color, "linestyle": ":"},
    )
  axes.plot([], [], "--o", color="#444444", markerfacecolor="w", label="sync")
  axes.plot([], [], **drawing.PAPER, label="AReaL, the paper")
  axes.set(xscale="log", yscale="log", ylim=(10, 4000))
  axes.set_xticks([32, 64, 128, 256, 512], [32, 64, 128, 256, 512])
  axes.set_yticks([10, 30, 100, 300, 1000], [10, 30, 100, 300, 1000])
  axes.minorticks_off()
  axes.set_title(f"contexts of {(longest + 1024) // 1024}k", fontsize=9)
  axes.set(xlabel="GPUs", ylabel="1000 tokens/s consumed")
  axes.legend(fontsize=7, loc="upper left", ncols=2)
