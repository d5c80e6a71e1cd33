"""How this folder's studies read and draw arms that trained side by side."""

import math
from collections.abc import Sequence

import numpy as np

from rl_tpu.figures import Cell, Row, Verdict, drawing
from rl_tpu.models import quantization


def cells(column: str, arms: Sequence[str], scale: str) -> list[Cell]:
  """Arms by three seeds, or by one at scale smoke."""
  seeds = (0,) if scale == "smoke" else (0, 1, 2)
  return [{column: arm, "seed": seed} for arm in arms for seed in seeds]


Setting = tuple[int, quantization.Grid]
"""Versions stale, and the grid of the generator's weights."""


def cells_of(
  settings: Sequence[Setting], column: str, arms: Sequence[str], scale: str
) -> list[Cell]:
  """Arms under each setting; at scale smoke under the last, which is judged."""
  return [
    {"lag": lag, "weights": grid} | cell
    for lag, grid in (settings[-1:] if scale == "smoke" else settings)
    for cell in cells(column, arms, scale)
  ]


def by_setting(
  rows: Sequence[Row], settings: Sequence[Setting]
) -> dict[str, list[Row]]:
  """The rows of each setting that was measured, by its words, in order."""
  found = {}
  for lag, grid in settings:
    words = f"{lag} versions" + (f", {grid}" if grid != "none" else "")
    if own := drawing.where(rows, lag=lag, weights=grid):
      found[words] = own
  return found


def late(
  rows: Sequence[Row],
  column: str,
  arms: Sequence[str],
  name: str = "heldout_accuracy",
) -> dict[str, list[float]]:
  """A figure's mean over the second half of the run, by arm and seed.

  One evaluation of 200 problems is off by 0.03 or so; six are by less. NaN
  where a run's second half has none.
  """
  half = max(row["batch"] for row in rows) / 2
  second = [row for row in rows if row["batch"] > half]
  seeds = sorted({row["seed"] for row in rows if row[column] in arms})
  found = {}
  for arm in arms:
    own = drawing.where(second, **{column: arm})
    had = [row for row in own if name in row]
    by_seed = [drawing.values(had, name, seed=seed) for seed in seeds]
    found[arm] = [float(np.mean(v)) if v else math.nan for v in by_seed]
  return found


def final(
  rows: Sequence[Row], column: str, arms: Sequence[str]
) -> dict[str, list[float]]:
  """Held-out accuracy at the end, by arm, in order of seeds."""
  last = drawing.where(rows, batch=max(row["batch"] for row in rows))
  return {
    arm: drawing.values(last, "heldout_accuracy", **{column: arm})
    for arm in arms
  }


def said(found: dict[str, list[float]]) -> str:
  """Each arm with mean and interval."""
  return "; ".join(f"{arm} {drawing.said(v)}" for arm, v in found.items())


def leads(found: dict[str, list[float]], first: str) -> str:
  """Each arm, then what the first is above the others by, paired by seed."""
  gains = {
    arm: [a - b for a, b in zip(found[first], values, strict=True)]
    for arm, values in found.items()
    if arm != first
  }
  return f"{said(found)}; {first} less the others: {said(gains)}"


def verdict(differences: Sequence[tuple[float, float]], seen: str) -> Verdict:
  """Passed if all exceed their intervals, weaker if all are above 0."""
  if all(mean > half for mean, half in differences):
    return Verdict(outcome="passed", seen=seen)
  right = all(mean > 0 for mean, _ in differences)
  return Verdict(outcome="weaker" if right else "not_seen", seen=seen)


def above(
  found: dict[str, list[float]], first: str, others: Sequence[str]
) -> Verdict:
  """The verdict on one arm being above others, paired by seed."""
  differences = [drawing.difference(found[first], found[o]) for o in others]
  return verdict(differences, leads(found, first))


def draw(rows: Sequence[Row], figure, column: str, arms: Sequence[str]) -> None:
  """Reward and held-out accuracy over batches, and what arms add to the first.

  Seeds start apart, so bands of the curves would hide what differs: only the
  difference to the first arm, of the same seed, has one.
  """
  panels = figure.subplots(1, 3)
  first = drawing.where(rows, **{column: arms[0]})
  for arm in arms:
    own = drawing.where(rows, **{column: arm})
    drawing.curve(panels[0], own, "batch", "reward", band=False, label=arm)
    drawing.curve(panels[1], own, "batch", "heldout_accuracy", band=False)
    gains = _gains(own, first)
    drawing.curve(panels[2], gains, "batch", "gain", band=arm != arms[0])
  panels[0].set(xlabel="batch", ylabel="reward of training", ylim=(0, 1))
  panels[1].set(xlabel="batch", ylabel="held-out accuracy", ylim=(0, 1))
  panels[2].set(xlabel="batch", ylabel=f"the same less that of {arms[0]}")
  panels[0].legend(fontsize=7)


def draw_settings(
  rows: Sequence[Row],
  figure,
  settings: Sequence[Setting],
  column: str,
  arms: Sequence[str],
) -> None:
  """As `draw`, a row of panels for each setting."""
  found = by_setting(rows, settings)
  parts = figure.subfigures(len(found), 1, squeeze=False).flat
  for part, (words, own) in zip(parts, found.items(), strict=True):
    part.suptitle(words, fontsize=9)
    draw(own, part, column, arms)


def _gains(rows: Sequence[Row], first: Sequence[Row]) -> list[Row]:
  """Held-out accuracy less the first arm's, of the same seed and batch."""
  base = {
    (row["seed"], row["batch"]): row["heldout_accuracy"]
    for row in first
    if "heldout_accuracy" in row
  }
  return [
    {"batch": row["batch"], "gain": row["heldout_accuracy"] - base[at]}
    for row in rows
    if "heldout_accuracy" in row and (at := (row["seed"], row["batch"])) in base
  ]
