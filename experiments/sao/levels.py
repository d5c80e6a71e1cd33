"""Is a token or a turn the better unit of advantage?

  python -m rl_tpu figures sao/levels

SAO with one value a token, and with one a turn (the mean over its tokens, or
its last token's, which alone trains the critic), on the tool task with every
token 8 versions stale: 60 batches of 128 trajectories each, three seeds. An
episode here has two turns, the paper's up to 50.
"""

from collections.abc import Sequence

import numpy as np

from experiments import training
from experiments.sao import tasks
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing

LAG = 8
LEVELS = ("token", "step_average", "step_last")
COLUMNS = ("reward", "heldout_accuracy", "explained_variance")


def cells(scale: str) -> list[Cell]:
  """Levels by seeds."""
  seeds = (0,) if scale == "smoke" else (0, 1, 2)
  return [{"level": name, "seed": seed} for name in LEVELS for seed in seeds]


def measure(cell: Cell, scale: str) -> list[Row]:
  """Means over every twelfth of the run."""
  config = tasks.tool_task(cell["seed"], LAG, scale)
  tasks.set_loss(config, "sao", band="math", level=cell["level"])
  return training.rows_of(config, COLUMNS, max(config.batches // 12, 1))


def _token_first(rows: Sequence[Row], column: str) -> Verdict:
  """The token's mean over the run above both others'."""
  rows = [row for row in rows if column in row]
  seeds = sorted({row["seed"] for row in rows})
  means = {
    name: [
      float(np.mean(drawing.values(rows, column, level=name, seed=seed)))
      for seed in seeds
    ]
    for name in LEVELS
  }
  seen = "; ".join(f"{n} {drawing.said(v)}" for n, v in means.items())
  found = [drawing.difference(means["token"], means[n]) for n in LEVELS[1:]]
  if all(mean > half for mean, half in found):
    return Verdict(outcome="passed", seen=seen)
  right = all(mean > 0 for mean, _ in found)
  return Verdict(outcome="weaker" if right else "not_seen", seen=seen)


ARTEFACTS = {
  "Table 5": Claim(
    shows="token 89.8, last token of a step 87.3, step average 85.8 (AIME "
    "2025, 400 steps)",
    rule="held-out accuracy, mean of the run's evaluations: token above both "
    "by more than the interval of the difference",
    judge=lambda rows: _token_first(rows, "heldout_accuracy"),
  ),
  "Fig. 6": Claim(
    shows="reward of training ends at 0.54 for tokens, about 0.49 for steps",
    rule="reward, mean of the run: token above both by more than the interval "
    "of the difference",
    judge=lambda rows: _token_first(rows, "reward"),
  ),
}


def draw(rows: Sequence[Row], figure) -> None:
  """Reward of training and held-out accuracy over batches."""
  panels = figure.subplots(1, 2)
  for name in LEVELS:
    own = drawing.where(rows, level=name)
    drawing.curve(panels[0], own, "batch", "reward", label=name)
    drawing.curve(panels[1], own, "batch", "heldout_accuracy", marker="o")
  panels[0].set(xlabel="batch", ylabel="reward of training", ylim=(0, 1))
  panels[1].set(xlabel="batch", ylabel="held-out accuracy", ylim=(0, 1))
  panels[0].legend()
