"""Is a token or a turn the better unit of advantage?

  python -m rl_tpu figures sao/levels

SAO with one value a token, and with one a turn (the mean over its tokens, or
its last token's, which alone trains the critic), on `tasks.half_taught`: 120
batches of 128 trajectories each, every token 4 versions stale, three seeds. An
episode here has two turns, the paper's up to 50.

With the learner's own weights in the generator, a token and the mean over a
turn were level (0.00 ± 0.02). The rules are judged with int4, as those of
`arms` are, which was decided before any run of it.
"""

from collections.abc import Sequence

import numpy as np

from experiments import training
from experiments.sao import comparing, tasks
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing

SIZE = (9.5, 6.0)
SETTINGS = ((4, "none"), (4, "int4"))
LEVELS = ("token", "step_average", "step_last")
COLUMNS = ("reward", "heldout_accuracy", "explained_variance")


def cells(scale: str) -> list[Cell]:
  """Settings by levels by seeds."""
  return comparing.cells_of(SETTINGS, "level", LEVELS, scale)


def measure(cell: Cell, scale: str) -> list[Row]:
  """Means over every twelfth of the run."""
  config = tasks.half_taught(
    cell["seed"], scale, lag=cell["lag"], weights=cell["weights"]
  )
  training.set_loss(config, "sao", band="math", level=cell["level"])
  return training.rows_of(config, COLUMNS, max(config.batches // 12, 1))


def _token_first(rows: Sequence[Row], column: str) -> Verdict:
  """The token's mean over the run above both others', in the last setting."""
  found = {
    words: comparing.above(_means(own, column), "token", LEVELS[1:])
    for words, own in comparing.by_setting(rows, SETTINGS).items()
  }
  seen = "; ".join(f"{words}: {one.seen}" for words, one in found.items())
  return Verdict(outcome=list(found.values())[-1].outcome, seen=seen)


def _means(rows: Sequence[Row], column: str) -> dict[str, list[float]]:
  """A figure's mean over the run, by level and seed."""
  rows = [row for row in rows if column in row]
  seeds = sorted({row["seed"] for row in rows})
  return {
    name: [
      float(np.mean(drawing.values(rows, column, level=name, seed=seed)))
      for seed in seeds
    ]
    for name in LEVELS
  }


ARTEFACTS = {
  "Table 5": Claim(
    shows="token 89.8, last token of a step 87.3, step average 85.8 (AIME "
    "2025, 400 steps)",
    rule="held-out accuracy, mean of the run's evaluations, with int4: token "
    "above both by more than the interval of the difference",
    judge=lambda rows: _token_first(rows, "heldout_accuracy"),
  ),
  "Fig. 6": Claim(
    shows="reward of training ends at 0.54 for tokens, about 0.49 for steps",
    rule="reward, mean of the run, with int4: token above both by more than "
    "the interval of the difference",
    judge=lambda rows: _token_first(rows, "reward"),
  ),
}


def draw(rows: Sequence[Row], figure) -> None:
  """Reward of training and held-out accuracy over batches, by setting."""
  comparing.draw_settings(rows, figure, SETTINGS, "level", LEVELS)
