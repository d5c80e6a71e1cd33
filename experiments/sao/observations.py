"""What do advantages that skip observations change?

  python -m rl_tpu figures sao/observations

The ablation that the paper lacks. Two ways to count a trajectory's length l in
lambda = 1 - 1/(alpha l): its action tokens, which is SAO, or all tokens of the
response, observations among them; over alpha. On `tasks.half_taught`, 60
batches of 128 trajectories, every token 4 versions stale, three seeds. At alpha
= inf lambda is 1 and nothing may differ.
"""

import math
from collections.abc import Sequence

from experiments import training
from experiments.sao import tasks
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing

BATCHES = 60
ALPHAS = (0.05, 0.5, 1.5, math.inf)
LENGTHS = ("action", "response")
COLUMNS = ("reward", "heldout_accuracy", "explained_variance")


def cells(scale: str) -> list[Cell]:
  """Alphas by what is counted, by seeds."""
  smoke = scale == "smoke"
  return [
    {"alpha": alpha, "length": length, "seed": seed}
    for alpha in (ALPHAS[-1:] if smoke else ALPHAS)
    for length in LENGTHS
    for seed in ((0,) if smoke else (0, 1, 2))
  ]


def measure(cell: Cell, scale: str) -> list[Row]:
  """Means over every twelfth of the run."""
  config = tasks.half_taught(cell["seed"], scale, BATCHES)
  training.set_loss(
    config,
    "sao",
    band="math",
    lambda_alpha=float(cell["alpha"]),
    lambda_length=cell["length"],
  )
  return training.rows_of(config, COLUMNS, max(config.batches // 12, 1))


def _alike_at_one(rows: Sequence[Row]) -> Verdict:
  """At lambda 1 the two are the same run."""
  counted = [
    drawing.values(rows, "reward", alpha=math.inf, length=length)
    for length in LENGTHS
  ]
  gap = max(abs(a - b) for a, b in zip(*counted, strict=True))
  last = drawing.where(rows, batch=max(row["batch"] for row in rows))
  finals = "; ".join(
    f"alpha {alpha:g}: "
    + ", ".join(
      f"{length} "
      + drawing.said(
        drawing.values(last, "heldout_accuracy", alpha=alpha, length=length)
      )
      for length in LENGTHS
    )
    for alpha in sorted({row["alpha"] for row in rows})
  )
  seen = f"rewards at lambda 1 differ by {gap:g}; {finals}"
  return Verdict(outcome="passed" if gap == 0 else "not_seen", seen=seen)


ARTEFACTS = {
  "ablation: observations": Claim(
    shows="not in the paper; by Eq. 4 and 5 the skip matters only where "
    "lambda < 1",
    rule="at lambda 1 both are the same run to the last digit; the rest is "
    "reported",
    judge=_alike_at_one,
  )
}


def draw(rows: Sequence[Row], figure) -> None:
  """Held-out accuracy over batches, a panel for each alpha."""
  alphas = sorted({row["alpha"] for row in rows})
  panels = figure.subplots(1, len(alphas), sharey=True, squeeze=False)[0]
  for axes, alpha in zip(panels, alphas, strict=True):
    for length in LENGTHS:
      own = drawing.where(rows, alpha=alpha, length=length)
      drawing.curve(axes, own, "batch", "heldout_accuracy", label=length)
    axes.set(xlabel="batch", title=f"alpha {alpha:g}", ylim=(0, 1))
  panels[0].set_ylabel("held-out accuracy")
  panels[0].legend(title="l counts")
