"""Which baseline teaches an agent fastest, at equal trajectories?

  python -m rl_tpu figures agents/baselines

SAO, GRPO with SAO's mask and the prompt's running mean (`methods.py`) on the
calculator task: 60 batches of 128 trajectories, asynchronously and at most 2
versions stale, three seeds. What was measured says more than the rule asks:
README.md has it by column.
"""

import math
import pathlib
import statistics
import tempfile
from collections.abc import Sequence

from experiments import training
from rl_tpu import metrics
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing

METHODS = ("sao", "grpo_dis", "running_mean")
METRICS = (
  *("reward", "heldout_accuracy", "heldout_greedy", "heldout_failed"),
  *("env_tool_calls", "env_tool_errors", "truncated", "action_tokens"),
  *("staleness_max", "clip_fraction", "explained_variance", "known_baseline"),
  "failed_groups",
)
SIZE = (10.0, 3.2)
_SMOKE = {
  "batches": 2,
  "evaluation.every": 2,
  "evaluation.problems": 8,
  "critic.pretraining_batches": 1,
  "warm_start.batches": 20,
  "warm_start.wrong_batches": 2,
}


def cells(scale: str) -> list[Cell]:
  """Methods by seeds."""
  seeds = (0,) if scale == "smoke" else (0, 1, 2)
  return [{"method": name, "seed": s} for name in METHODS for s in seeds]


def measure(cell: Cell, scale: str) -> list[Row]:
  """Every batch of the run, and the evaluation before it."""
  values = {"seed": cell["seed"]} | (_SMOKE if scale == "smoke" else {})
  file = f"experiments/agents/methods.py:{cell['method']}"
  with tempfile.TemporaryDirectory(prefix="study-") as directory:
    training.train_apart(file, directory, values)
    log = metrics.read_csv(pathlib.Path(directory) / "metrics.csv")
  return [
    {"batch": int(row["batch"])}
    | {n: row[n] for n in METRICS if n in row and math.isfinite(row[n])}
    for row in log
  ]


def describe(rows: Sequence[Row]) -> dict[str, float]:
  """A run's figures.

  Returns:
    before, after: held-out accuracy; curve: its mean over the evaluations
    after the first, which says how soon it rose; calls, refused: an episode,
    of the last ten batches.
  """
  heldout = [r["heldout_accuracy"] for r in rows if "heldout_accuracy" in r]
  last = [row for row in rows if "reward" in row][-10:]
  return {
    "before": float(heldout[0]),
    "after": float(heldout[-1]),
    "curve": statistics.fmean(map(float, heldout[1:])),
    "calls": statistics.fmean(float(row["env_tool_calls"]) for row in last),
    "refused": statistics.fmean(float(row["env_tool_errors"]) for row in last),
  }


def _learned(rows: Sequence[Row]) -> Verdict:
  """Every run ends at 0.9 or more."""
  runs: dict[str, list[dict[str, float]]] = {}
  for name in METHODS:
    own = drawing.where(rows, method=name)
    seeds = sorted({row["seed"] for row in own})
    runs[name] = [describe(drawing.where(own, seed=seed)) for seed in seeds]
  seen = "; ".join(
    f"{name}: "
    + ", ".join(
      f"{figure} {drawing.said([run[figure] for run in found], 3)}"
      for figure in found[0]
    )
    for name, found in runs.items()
  )
  ends = [run["after"] for found in runs.values() for run in found]
  learned = [end >= 0.9 for end in ends]
  outcome = "passed" if all(learned) else "weaker"
  return Verdict(outcome=outcome if any(learned) else "not_seen", seen=seen)


ARTEFACTS = {
  "baselines of an agent": Claim(
    shows="no paper's; with SAO's mask, a critic, the group and a running mean "
    "of the prompt are each said to be enough of a baseline by someone",
    rule="held-out accuracy at the end: 0.9 or more in every run",
    judge=_learned,
  )
}


def draw(rows: Sequence[Row], figure) -> None:
  """Accuracy, calls, and the share of calls that were refused."""
  panels = figure.subplots(1, 3)
  shared = [
    row | {"refused": float(row["env_tool_errors"]) / row["env_tool_calls"]}
    for row in rows
    if row.get("env_tool_calls")
  ]
  for name in METHODS:
    for axes, column, source in zip(
      panels,
      ("heldout_accuracy", "env_tool_calls", "refused"),
      (rows, rows, shared),
      strict=True,
    ):
      own = drawing.where(source, method=name)
      drawing.curve(axes, own, "batch", column, label=name)
  for axes, what in zip(
    panels,
    ("held-out accuracy", "calls an episode", "share of calls refused"),
    strict=True,
  ):
    axes.set(xlabel="batch of 128 trajectories", ylabel=what, ylim=(0, None))
  panels[0].legend(fontsize=7)
