"""Which baseline and which clip carry stale single trajectories?

  python -m rl_tpu figures sao/arms

SAO, GRPO with SAO's mask, GRPO with clip-higher, and the mask alone, on
`tasks.half_taught`: 120 batches of 128 trajectories each, every token 4 or 16
versions stale, three seeds. The paper's tables are scores of one run each.

The paper states no lag. With 4 versions, where SAO masks few tokens, the arms
came out level (SAO less GRPO 0.03 ± 0.04) and none fell. In `clips` 16 versions
then told clips apart, so the arms were run there too; the rules, fixed before
the first sweep, judge that. SAO masks about 5% of the tokens there.
"""

from collections.abc import Sequence

import numpy as np

from experiments import training
from experiments.sao import comparing, tasks
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing

SIZE = (9.5, 6.0)
LAGS = (4, 16)
METHODS = ("SAO", "GRPO+DIS", "DIS only", "GRPO")
COLUMNS = (
  *("reward", "heldout_accuracy", "entropy", "behavior_weight"),
  *("clip_fraction", "weight_masked", "grad_norm"),
)


def cells(scale: str) -> list[Cell]:
  """Methods by lags by seeds; at scale smoke, only the long lag."""
  return [
    {"method": cell["method"], "lag": lag, "seed": cell["seed"]}
    for lag in (LAGS[-1:] if scale == "smoke" else LAGS)
    for cell in comparing.cells("method", METHODS, scale)
  ]


def measure(cell: Cell, scale: str) -> list[Row]:
  """Means over every twelfth of the run."""
  config = tasks.half_taught(cell["seed"], scale, lag=cell["lag"])
  tasks.set_method(config, cell["method"])
  return training.rows_of(config, COLUMNS, max(config.batches // 12, 1))


def _lags(rows: Sequence[Row]) -> list[int]:
  """Those measured."""
  found = {row["lag"] for row in rows}
  return [lag for lag in LAGS if lag in found]


def _table(rows: Sequence[Row]) -> Verdict:
  """SAO level with GRPO+DIS or above; both above GRPO."""
  by_lag = {
    lag: comparing.late(drawing.where(rows, lag=lag), "method", METHODS)
    for lag in _lags(rows)
  }
  late = by_lag[LAGS[-1]]
  seen = "; ".join(
    f"{lag} versions: {comparing.leads(found, 'SAO')}"
    for lag, found in by_lag.items()
  )
  behind, doubt = drawing.difference(late["SAO"], late["GRPO+DIS"])
  above = [
    drawing.difference(late[name], late["GRPO"]) for name in ("SAO", "GRPO+DIS")
  ]
  if behind < -np.nan_to_num(doubt):
    return Verdict(outcome="not_seen", seen=seen)
  return comparing.verdict(above, seen)


def _collapse(rows: Sequence[Row]) -> Verdict:
  """How far reward fell from its peak."""
  by_lag = {lag: _falls(drawing.where(rows, lag=lag)) for lag in _lags(rows)}
  falls = by_lag[LAGS[-1]]
  seen = "reward lost from its peak: " + "; ".join(
    f"{lag} versions: "
    + ", ".join(f"{name} {np.mean(fall):.0%}" for name, fall in found.items())
    for lag, found in by_lag.items()
  )
  kept = max(max(falls[name]) for name in ("SAO", "GRPO+DIS")) < 0.1
  if kept and min(falls["GRPO"]) > 0.5:
    return Verdict(outcome="passed", seen=seen)
  right = kept and np.mean(falls["GRPO"]) > 0.1
  return Verdict(outcome="weaker" if right else "not_seen", seen=seen)


def _falls(rows: Sequence[Row]) -> dict[str, list[float]]:
  """The share of its highest reward that each run has lost, by method."""
  falls = {}
  for name in METHODS:
    own = drawing.where(rows, method=name)
    curves = [
      drawing.values(own, "reward", seed=seed)
      for seed in sorted({row["seed"] for row in own})
    ]
    falls[name] = [1 - curve[-1] / max(*curve, 1e-9) for curve in curves]
  return falls


_TABLE = Claim(
  shows="SAO 97.3, GRPO+DIS 93.5, GRPO 84.2 before it collapses (AIME 2025, "
  "from 80.4)",
  rule="held-out accuracy, mean of the second half, 16 versions: SAO not below "
  "GRPO+DIS by more than the interval of their difference; both above GRPO by "
  "more than it",
  judge=_table,
)
ARTEFACTS = {
  "Table 1": _TABLE,
  "Fig. 1": _TABLE,
  "Fig. 3": Claim(
    shows="GRPO collapses at 160 batches; SAO and GRPO+DIS go on to 1000",
    rule="16 versions: SAO and GRPO+DIS end within 10% of their peak reward on "
    "every seed, GRPO below half of its",
    judge=_collapse,
  ),
}


def draw(rows: Sequence[Row], figure) -> None:
  """Reward of training and held-out accuracy over batches, by lag."""
  lags = _lags(rows)
  parts = figure.subfigures(len(lags), 1, squeeze=False).flat
  for part, lag in zip(parts, lags, strict=True):
    part.suptitle(f"{lag} versions stale", fontsize=9)
    comparing.draw(drawing.where(rows, lag=lag), part, "method", METHODS)
