"""Who waits for whom: synchronous, one step ahead, and interrupted?

  python -m rl_tpu figures areal/timelines

Three ways to run, each twice:

| | schedule | limit | new weights |
|---|---|---|---|
| synchronous | sync: the same devices by turns | 0 | between batches |
| one step ahead | async | 1 | wait until running answers have ended |
| asynchronous | async | 8 | interrupt running answers |

`clock`: eight GPUs of the paper's 1.5B pod (`simulated_pod.py`) on the virtual
clock, six of them generating (all, where they take turns), 32 slots each, 16
prompts of 16 answers a batch. This is where idle devices show: on the two cores
of `run` both sides share what computes. `run`: the quickstart, 16 batches, its
recorded events; what it shows is that the code does these things in this order.
"""

import collections
import dataclasses
import pathlib
import tempfile
from collections.abc import Sequence

from experiments import training
from experiments.areal import simulated_pod
from rl_tpu import metrics, simulate
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing
from rl_tpu.generation.driver import Interruption
from rl_tpu.virtual.config import Config

SCHEDULES: dict[str, tuple[str, int, Interruption]] = {
  "synchronous": ("sync", 0, "recompute"),
  "one step ahead": ("async", 1, "drain"),
  "asynchronous": ("async", 8, "recompute"),
}
"""Schedule, staleness limit, and what new weights do."""
GPUS, GROUPS, SLOTS, BATCHES, WARM_UP = 8, 16, 32, 12, 6
SHOWN = 3
"""Batches in a picture."""
LANES = 3
"""Generators in a picture."""
RUN_BATCHES = 16
KINDS = {
  "generate": "#0072b2",
  "prefill": "#56b4e9",
  "recompute": "#e69f00",
  "weights": "#f0e442",
  "train": "#d55e00",
  "wait": "#dddddd",
  "evaluate": "#009e73",
  "checkpoint": "#cc79a7",
  "compile": "#777777",
}
_NAMES = {"decode": "generate", "swap": "weights"}
"""Of a simulated generator's kinds, those that a run has other names for."""
SIZE = (10.0, 6.5)
Bar = tuple[str, str, float, float, float]
"""Lane, kind, start, end, and the share of slots in use."""


def cells(scale: str) -> list[Cell]:
  """Schedules by sources."""
  del scale
  return [
    {"source": source, "schedule": name}
    for source in ("clock", "run")
    for name in SCHEDULES
  ]


def measure(cell: Cell, scale: str) -> list[Row]:
  """A row for each bar of the picture; shares are those of the whole run."""
  how = SCHEDULES[cell["schedule"]]
  if cell["source"] == "clock":
    bars, shares = clocked(*how)
  else:
    bars, shares = recorded(*how, smoke=scale == "smoke")
  return [
    {"lane": lane, "kind": kind, "start": start, "end": end, "slots": slots}
    | shares
    for lane, kind, start, end, slots in bars
  ]


def clocked(
  schedule: str, limit: int, interruption: Interruption
) -> tuple[list[Bar], Row]:
  """A pod on the virtual clock."""
  config = simulated_pod.pod(
    "1.5b", schedule, gpus=GPUS, longest=8192, limit=limit, groups=GROUPS
  )
  settings: Config = dataclasses.replace(
    config.simulate, batches=BATCHES, warm_up=WARM_UP
  )
  config = dataclasses.replace(
    config,
    interruption=interruption,
    engine=dataclasses.replace(config.engine, slots=SLOTS),
    simulate=settings,
  )
  found = simulate.simulate(config, simulate.service_times(config))
  bars: list[Bar] = []
  for batch in found.batches:
    bars.append(("learner", "wait", batch.asked, batch.taken, 1.0))
    bars.append(("learner", "train", batch.taken, batch.trained, 1.0))
  for index, intervals in enumerate(found.intervals[:LANES]):
    for start, end, kind, running in intervals:
      name = _NAMES.get(kind, kind)
      share = running / SLOTS if kind == "decode" else 1.0
      bars.append((f"generator {index}", name, start, end, share))
  whole = found.seconds * found.generators
  # Where both sides take turns, devices that train are not idle.
  trained = sum(b.trained - b.taken for b in found.batches[WARM_UP:])
  turns = trained / found.seconds if schedule == "sync" else 0.0
  busy = found.generator_seconds["slots"] / whole
  mixed = [max(batch.staleness) for batch in found.batches[WARM_UP:]]
  shares: Row = {
    "learner_waits": found.figures()["learner_idle_share"],
    "slots_unused": 1.0 - busy - turns,
    "generator_idle": found.figures()["generator_idle_share"] - turns,
    "interrupted": found.generator_seconds["recompute"],
    "staleness_max": max(mixed),
  }
  first = found.batches[WARM_UP + 1].taken
  last = found.batches[WARM_UP + 1 + SHOWN].taken
  return _shown(bars, first, last), shares


def recorded(
  schedule: str, limit: int, interruption: Interruption, *, smoke: bool
) -> tuple[list[Bar], Row]:
  """A real run in a process of its own, whose two sides have a device each."""
  batches = SHOWN + 3 if smoke else RUN_BATCHES
  with tempfile.TemporaryDirectory(prefix="study-") as directory:
    values = {
      "batches": batches,
      "max_staleness": limit,
      "interruption": interruption,
      "checkpoint_every": batches,
      "evaluation.problems": 32,
    }
    if smoke:
      values |= {"warm_start.batches": 60, "warm_start.wrong_batches": 6}
    file = f"experiments/quickstart.py:{schedule}"
    training.train_apart(file, directory, values)
    folder = pathlib.Path(directory)
    rows = [
      r for r in metrics.read_csv(folder / "metrics.csv") if "reward" in r
    ]
    events = metrics.read_jsonl(folder / "events.jsonl")
  bars: list[Bar] = [
    (_lane(part), kind, start, end, 1.0)
    for event in events
    for part, kind, start, end in event["intervals"]
  ]
  trained = sorted(end for _, kind, _, end, _ in bars if kind == "train")
  first, last = trained[1], trained[-1]
  spent = _spent(bars, first, last)
  turns = spent["train"] if schedule == "sync" else 0.0
  busy = spent["generate"] + spent["prefill"] + spent["weights"] + turns
  shares: Row = {
    "learner_waits": spent["wait"],
    "generator_idle": 1.0 - busy,
    "interrupted": sum(r["mixed_version_trajectories"] for r in rows),
    "staleness_max": max(row["staleness_max"] for row in rows),
  }
  # Early: a generator that is ahead by the whole limit would only wait later.
  return _shown(bars, trained[1], trained[1 + SHOWN]), shares


def _lane(part: str) -> str:
  return "learner" if part == "learner" else "generator 0"


def _spent(bars: Sequence[Bar], first: float, last: float) -> dict[str, float]:
  """Share of the time between two moments, by kind."""
  spent = collections.Counter[str]()
  for _, kind, start, end, _ in bars:
    spent[kind] += max(min(end, last) - max(start, first), 0.0)
  return {kind: spent[kind] / (last - first) for kind in KINDS}


def _shown(bars: Sequence[Bar], first: float, last: float) -> list[Bar]:
  """The bars between two moments, from 0 to 1; neighbours alike are one."""
  found: list[Bar] = []
  near = 2e-3 * (last - first)
  for lane, kind, start, end, slots in sorted(bars):
    start, end = max(start, first), min(end, last)
    if end <= start:
      continue
    slots = max(round(4 * slots) / 4, 0.25)
    if found:
      *before, begun, ended, used = found[-1]
      if before == [lane, kind] and used == slots and start - ended < near:
        found[-1] = (lane, kind, begun, end, slots)
        continue
    found.append((lane, kind, start, end, slots))
  span = last - first
  return [
    (lane, kind, (start - first) / span, (end - first) / span, slots)
    for lane, kind, start, end, slots in found
    if end - start > near / 4
  ]


def _share(rows: Sequence[Row], source: str, name: str) -> dict[str, float]:
  """One of the shares by schedule."""
  return {
    schedule: drawing.values(rows, name, source=source, schedule=schedule)[0]
    for schedule in SCHEDULES
  }


def _said(found: dict[str, float]) -> str:
  return ", ".join(f"{name} {share:.0%}" for name, share in found.items())


def _idle(rows: Sequence[Row]) -> Verdict:
  """Fig. 1: waiting for the longest answer leaves slots empty."""
  unused = _share(rows, "clock", "slots_unused")
  waits = _share(rows, "run", "learner_waits")
  seen = f"slots unused (clock): {_said(unused)}; "
  seen += f"learner waits (run): {_said(waits)}"
  least = min(unused["synchronous"], unused["one step ahead"])
  right = unused["asynchronous"] < least
  passed = least > 0.25 and unused["asynchronous"] < least / 2
  less = waits["asynchronous"] < waits["synchronous"]
  outcome = "passed" if passed and less else "weaker" if right else "not_seen"
  return Verdict(outcome=outcome, seen=seen)


def _interrupts(rows: Sequence[Row]) -> Verdict:
  """Fig. 3: new weights come in the middle of answers, which go on."""
  mixed = _share(rows, "run", "interrupted")
  idle = _share(rows, "clock", "generator_idle")["asynchronous"]
  own = drawing.where(rows, schedule="asynchronous", source="clock")
  kinds = {str(row["kind"]) for row in own}
  limit = max(
    _share(rows, s, "staleness_max")["asynchronous"] for s in _SOURCES
  )
  seen = (
    "trained answers of several weights (run): "
    + ", ".join(f"{name} {count:.0f}" for name, count in mixed.items())
    + f"; generators idle (clock) {idle:.0%}; at most {limit:.0f} versions "
    "stale"
  )
  others = mixed["synchronous"] + mixed["one step ahead"]
  passed = mixed["asynchronous"] > 0 and others == 0 and idle < 0.02
  whole = passed and {"recompute", "weights", "generate"} <= kinds
  outcome = "passed" if whole and limit <= 8 else "not_seen"
  return Verdict(outcome=outcome, seen=seen)


_SOURCES = ("clock", "run")
ARTEFACTS = {
  "Fig. 1": Claim(
    shows="timelines: a synchronous system and one that overlaps by one step "
    "both leave devices idle until the longest answer has ended",
    rule="simulated clock: both leave over a quarter of their slots unused, "
    "asynchronous less than half of either; real run: the learner waits a "
    "smaller share asynchronous than synchronous",
    judge=_idle,
  ),
  "Fig. 3": Claim(
    shows="timeline: weights arrive in the middle of answers, caches are "
    "computed again, generation goes on",
    rule="simulated clock: generators load weights, compute caches again and "
    "are idle under 2%; real run: answers of several weights are trained on, "
    "at most 8 versions stale, and none of them where weights wait for the "
    "answers",
    judge=_interrupts,
  ),
}


def draw(rows: Sequence[Row], figure) -> None:
  """Three timelines of the clock beside three of runs."""
  panels = figure.subplots(len(SCHEDULES), len(_SOURCES), sharex=True)
  for axes, schedule in zip(panels, SCHEDULES, strict=True):
    for one, source in zip(axes, _SOURCES, strict=True):
      own = drawing.where(rows, schedule=schedule, source=source)
      _draw_lanes(own, one)
      one.set_title(f"{schedule}: {_note(own, source)}", fontsize=8)
  for one, what in zip(
    panels[-1], ("simulated pod", "quickstart on two cores"), strict=True
  ):
    one.set_xlabel(f"{what}: time, {SHOWN} batches = 1")
  for one in panels[:-1].flat:
    one.set_xlabel(" ")
  handles = [
    figure.axes[0].barh(0, 0, color=color, label=kind)
    for kind, color in KINDS.items()
  ]
  figure.legend(
    handles=handles,
    loc="outside upper center",
    ncols=len(KINDS),
    fontsize=8,
    title="generate: the paler, the fewer slots are in use",
    title_fontsize=8,
  )


def _note(own: Sequence[Row], source: str) -> str:
  """The share that the picture is about."""
  name, what = "slots_unused", "of all slots unused"
  if source == "run":
    name, what = "learner_waits", "of the time the learner waits"
  return f"{float(own[0][name]):.0%} {what}"


def _draw_lanes(own: Sequence[Row], axes) -> None:
  """A bar for each row; as pale as slots are empty."""
  lanes = sorted({str(row["lane"]) for row in own})
  for row in own:
    start, end = float(row["start"]), float(row["end"])
    axes.barh(
      lanes.index(str(row["lane"])),
      end - start,
      left=start,
      height=0.7,
      color=KINDS[str(row["kind"])],
      alpha=float(row["slots"]),
      linewidth=0,
    )
  axes.set_yticks(range(len(lanes)), lanes, fontsize=7)
  axes.set_xlim(0, 1)
