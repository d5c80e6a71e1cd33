"""What do the papers' methods, and what they make together, hold out against?

  python -m rl_tpu figures beyond/matrix

No paper has this matrix: AReaL, SAO, Score Centering and their compositions,
beside GRPO, each under staleness (8 versions), under a generator with weights
of int4, and under both. The quickstart's task, 24 batches of 256 trajectories
in four minibatches, three seeds; equal budgets (`methods.py`). The rules were
written before the first of its runs.
"""

from collections.abc import Sequence

import numpy as np

from experiments import training
from experiments.areal import settings
from experiments.beyond import methods
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing

BATCHES = 24
CONDITIONS = {
  "stale": {"lag": 8, "weights": "none"},
  "quantized": {"lag": 0, "weights": "int4"},
  "both": {"lag": 8, "weights": "int4"},
}
COLUMNS = (
  *("heldout_accuracy", "reward", "behavior_weight", "clip_fraction"),
  "grad_norm",
)
CORRECTED = ("AReaL", "SAO", "SC")
SIZE = (9.0, 3.4)


def cells(scale: str) -> list[Cell]:
  """Methods by conditions by seeds; at scale smoke, only the hardest."""
  smoke = scale == "smoke"
  return [
    {"method": method, "condition": condition, "seed": seed}
    for seed in ((0,) if smoke else (0, 1, 2))
    for condition in (["both"] if smoke else CONDITIONS)
    for method in methods.METHODS
  ]


def measure(cell: Cell, scale: str) -> list[Row]:
  """Means over the batches since the last evaluation."""
  config = methods.configured(
    cell["method"],
    **CONDITIONS[cell["condition"]],
    seed=cell["seed"],
    scale=scale,
  )
  config.batches = min(config.batches, BATCHES)
  return training.rows_of(config, COLUMNS, settings.EVERY)


def _measured(rows: Sequence[Row]) -> list[str]:
  """The conditions that rows have."""
  found = {row["condition"] for row in rows}
  return [name for name in CONDITIONS if name in found]


def _accuracy(rows: Sequence[Row], method: str, condition: str) -> list[float]:
  """Mean over the run's evaluations, by seed."""
  own = drawing.where(rows, method=method, condition=condition)
  own = [row for row in own if "heldout_accuracy" in row]
  seeds = sorted({row["seed"] for row in own})
  return [
    float(np.mean(drawing.values(own, "heldout_accuracy", seed=seed)))
    for seed in seeds
  ]


def _said(rows: Sequence[Row], names: Sequence[str], conditions) -> str:
  return "; ".join(
    f"{condition}: "
    + ", ".join(
      f"{name} {drawing.said(_accuracy(rows, name, condition))}"
      for name in names
    )
    for condition in conditions
  )


def _above(
  rows: Sequence[Row], method: str, other: str, condition: str
) -> tuple[float, float]:
  """How far a method is above another, and the interval of that."""
  a, b = (_accuracy(rows, name, condition) for name in (method, other))
  mean, half = drawing.difference(a, b)
  return mean, float(np.nan_to_num(half))


def _corrections(rows: Sequence[Row]) -> Verdict:
  """Each paper's method is above GRPO where data is stale."""
  conditions = [name for name in _measured(rows) if name != "quantized"]
  found = [
    _above(rows, method, "GRPO", condition)
    for condition in conditions
    for method in CORRECTED
  ]
  seen = _said(rows, ("GRPO", *CORRECTED), conditions)
  passed = all(mean > half for mean, half in found)
  right = all(mean > 0 for mean, _ in found)
  outcome = "passed" if passed else "weaker" if right else "not_seen"
  return Verdict(outcome=outcome, seen=seen)


def _compositions(rows: Sequence[Row]) -> Verdict:
  """Centering takes nothing from what it is added to, and gives somewhere."""
  found = [
    _above(rows, method, parent, condition)
    for method, parent in methods.PARENTS.items()
    for condition in _measured(rows)
  ]
  names = [n for pair in methods.PARENTS.items() for n in reversed(pair)]
  seen = _said(rows, names, _measured(rows))
  if any(-mean > half for mean, half in found):
    return Verdict(outcome="not_seen", seen=seen)
  gives = any(mean > half for mean, half in found)
  return Verdict(outcome="passed" if gives else "weaker", seen=seen)


ARTEFACTS = {
  "matrix: corrections": Claim(
    shows="no paper's; each one's claim is that it learns from data on which "
    "methods without its correction fail",
    rule="held-out accuracy, mean of the run's evaluations: AReaL, SAO and SC "
    "each above GRPO by more than the interval of the difference, where data "
    "is stale, quantized generator or not",
    judge=_corrections,
  ),
  "matrix: compositions": Claim(
    shows="no paper's; Score Centering's claim is that centering adds to other "
    "corrections",
    rule="the same accuracy: under no condition AReaL + SC below AReaL or SAO "
    "+ SC below SAO by more than the interval of the difference, and under "
    "one at least above it by more than that",
    judge=_compositions,
  ),
}


def draw(rows: Sequence[Row], figure) -> None:
  """Accuracy of each method under each condition, seeds as points."""
  axes = figure.subplots()
  width = 0.8 / len(methods.METHODS)
  for index, method in enumerate(methods.METHODS):
    color = drawing.COLORS[index]
    for place, condition in enumerate(_measured(rows)):
      found = _accuracy(rows, method, condition)
      at = place + (index - (len(methods.METHODS) - 1) / 2) * width
      label = method if place == 0 else None
      axes.bar(
        at, np.mean(found), 0.9 * width, color=color, alpha=0.75, label=label
      )
      axes.plot(
        [at] * len(found), found, "o", color="black", markersize=2.5, zorder=3
      )
  names = []
  for name in _measured(rows):
    lag, grid = CONDITIONS[name]["lag"], CONDITIONS[name]["weights"]
    whose = "the learner's" if grid == "none" else grid
    names.append(f"{name}\n({lag} versions, weights: {whose})")
  axes.set_xticks(range(len(names)), names)
  axes.set(
    xlabel="condition",
    ylabel="held-out accuracy,\nmean of the run's evaluations",
    ylim=(0, 1),
  )
  figure.legend(
    fontsize=7, ncols=len(methods.METHODS), loc="outside upper center"
  )
