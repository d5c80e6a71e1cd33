"""What does each correction of Table 1 do to a token?

  python -m rl_tpu figures score_centering/corrections

The weight of a token is the push of its loss on its log-probability over its
advantage: measured, by the derivative of `rl_tpu.algorithms` itself, for an
advantage of 1 and of -1, and with the trajectory's other token on policy or as
far off. The table says what it should be. Seconds.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from experiments import exact
from experiments.score_centering import methods
from rl_tpu import algorithms
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing

METHODS = methods.TEN[:9]
"""Those of the table; centering changes no weight."""
RATIOS = (
  *(0.2, 0.45, 0.55, 0.75, 0.85, 0.95, 0.9995, 0.9998, 1.0003, 1.0006),
  *(1.1, 1.22, 1.3, 1.9, 2.1, 2.9, 3.1, 4.9, 5.1, 8.0),
)
"""Target over behavior; on both sides of every end of a band."""
CLOSE = 1e-4
"""Of a weight; GSPO's band is 3e-4 wide."""
SIZE = (9.0, 3.2)


def cells(scale: str) -> list[Cell]:
  """The methods, at any scale."""
  return [{"method": method} for method in METHODS]


def measure(cell: Cell, scale: str) -> list[Row]:
  """Weights by ratio, sign, and the ratio of the other token."""
  name, fields = methods.loss(str(cell["method"]))
  module, ratios = algorithms.get(name), jnp.asarray(RATIOS)
  config = module.Config(**fields)
  rows = []
  for sign in (1, -1):
    for other, beside in (("on policy", 1.0), ("as far off", ratios)):
      pushes = exact.push(module, config, ratios, float(sign), beside=beside)
      rows += [
        {
          "sign": sign,
          "other": other,
          "ratio": ratio,
          "weight": sign * float(push),
        }
        for ratio, push in zip(RATIOS, pushes, strict=True)
      ]
  return rows


def expected(method: str, ratio: float, beside: float, sign: int) -> float:
  """The paper's table, for a token of behavior probability 0.1.

  Args:
    method: of METHODS.
    ratio: target over behavior, of the token.
    beside: the same of the other token of its trajectory.
    sign: of the advantage.
  """
  geometric_mean, product = math.sqrt(ratio * beside), ratio * beside
  away = (ratio > 1) == (sign > 0)

  def clipped(x: float, low: float, high: float, least: float) -> float:
    """PPO's: 0 where moving on would earn nothing."""
    kept = x <= high if sign > 0 else low <= x <= least
    return x if kept else 0.0

  return {
    "PG": 1.0,
    "IS": ratio,
    "TIS": min(ratio, 2.0),
    "MIS": ratio if 0.5 <= ratio <= 5.0 else 0.0,
    "PPO": clipped(ratio, 0.8, 1.2, 3.0),
    "DAPO": clipped(ratio, 0.8, 1.28, 3.0),
    "GSPO": clipped(geometric_mean, 0.9997, 1.0004, math.inf),
    "TOPR": min(product, 1.0) if sign < 0 else 1.0,
    "DPPO": 0.0 if away and abs(ratio - 1) * 0.1 > 0.2 else ratio,
  }[method]


def _off(row: Row) -> float:
  """How far a weight is from the table's, over the larger one of it and 1."""
  ratio = float(row["ratio"])
  beside = 1.0 if row["other"] == "on policy" else ratio
  wanted = expected(str(row["method"]), ratio, beside, int(row["sign"]))
  return abs(float(row["weight"]) - wanted) / max(wanted, 1.0)


def _as_the_table(rows: Sequence[Row]) -> Verdict:
  """Table 1."""
  wrong = [row for row in rows if not _off(row) < CLOSE]
  named = sorted({str(row["method"]) for row in wrong})
  seen = f"{len(rows) - len(wrong)} of {len(rows)} weights as in the table"
  if named:
    seen += f"; others in {', '.join(named)}"
  return Verdict(outcome="not_seen" if wrong else "passed", seen=seen)


ARTEFACTS = {
  "Table 1": Claim(
    shows="weights by ratio: IS r; TIS at most 2; MIS 0 off [0.5, 5]; PPO, "
    "DAPO 0 where the clip of [0.8, 1.2 or 1.28] binds; GSPO the sequence's "
    "geometric mean in [0.9997, 1.0004]; TOPR the product, at most 1, for "
    "negatives; DPPO 0 where |p - q| > 0.2 would grow",
    rule="every measured weight is within 1e-4 of the table's, on both sides "
    "of each end of a band, for both signs of the advantage",
    judge=_as_the_table,
  )
}


def draw(rows: Sequence[Row], figure) -> None:
  """Weights by ratio, for both signs."""
  panels = figure.subplots(1, 2, sharey=True)
  for axes, sign in zip(panels, (1, -1), strict=True):
    for index, name in enumerate(METHODS):
      own = drawing.where(rows, method=name, sign=sign, other="on policy")
      axes.plot(
        drawing.values(own, "ratio"),
        np.array(drawing.values(own, "weight")) + 0.03 * (index - 4),
        color=drawing.COLORS[index % len(drawing.COLORS)],
        linestyle="--" if index >= len(drawing.COLORS) else "-",
        marker=".",
        label=name,
      )
    axes.set_title(f"advantage {sign:+d}", fontsize=9)
    axes.set_xscale("log")
    axes.set_xlabel("target / behavior of the token")
  panels[0].set_ylabel("weight (lines set apart by 0.03)")
  panels[0].set_ylim(-0.3, 5.4)
  panels[1].legend(fontsize=7, ncols=2)
