"""Is a token or a turn the better unit of advantage?

  python -m rl_tpu figures sao/levels

SAO with one value a token, and with one a turn (the mean over its tokens, or
its last token's, which alone trains the critic), on `tasks.half_taught`: 120
batches of 128 trajectories each, every token 4 versions stale, three seeds. An
episode here has two turns, the paper's up to 50.
"""

from collections.abc import Sequence

import numpy as np

from experiments import training
from experiments.sao import comparing, tasks
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing

SIZE = (9.5, 3.2)
LEVELS = ("token", "step_average", "step_last")
COLUMNS = ("reward", "heldout_accuracy", "explained_variance")


def cells(scale: str) -> list[Cell]:
  """Levels by seeds."""
  return comparing.cells("level", LEVELS, scale)


def measure(cell: Cell, scale: str) -> list[Row]:
  """Means over every twelfth of the run."""
  config = tasks.half_taught(cell["seed"], scale)
  training.set_loss(config, "sao", band="math", level=cell["level"])
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
  return comparing.above(means, "token", LEVELS[1:])


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
  comparing.draw(rows, figure, "level", LEVELS)
