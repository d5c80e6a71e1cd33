"""What do two critic updates, frozen attention and the double mask each add?

  python -m rl_tpu figures sao/critic

SAO with its critic's updates per batch (K) and trained weights varied, VAPO,
and a running mean of the prompt's outcomes, on the tool task with every token
8 versions stale: 60 batches of 128 trajectories each, three seeds.
"""

from collections.abc import Sequence

import numpy as np

from experiments import training
from experiments.sao import comparing, tasks
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing

LAG = 8
ARMS = {
  "SAO": {},
  "K = 1": {"critic_updates": 1},
  "all trained": {"freeze": "none"},
  "all trained, K = 1": {"freeze": "none", "critic_updates": 1},
  "VAPO": None,
  "running mean": None,
}
COLUMNS = (
  *("reward", "heldout_accuracy", "explained_variance", "critic_grad_norm"),
  *("clip_fraction", "grad_norm"),
)
SIZE = (9.0, 3.0)


def cells(scale: str) -> list[Cell]:
  """Arms by seeds."""
  return comparing.cells("arm", tuple(ARMS), scale)


def measure(cell: Cell, scale: str) -> list[Row]:
  """Means over every twelfth of the run."""
  config = tasks.tool_task(cell["seed"], LAG, scale)
  fields = ARMS[cell["arm"]]
  if fields is not None:
    training.set_loss(config, "sao", band="math", **fields)
  elif cell["arm"] == "VAPO":
    training.set_loss(config, "vapo")
  else:
    tasks.set_method(config, "running mean")
  return training.rows_of(config, COLUMNS, max(config.batches // 12, 1))


def _ablations(rows: Sequence[Row], arms: Sequence[str]) -> Verdict:
  """SAO above each of the arms, by more than their difference's interval."""
  final = comparing.final(rows, "arm", ("SAO", *arms))
  return comparing.above(final, "SAO", arms)


def _late(rows: Sequence[Row], name: str, arm: str) -> list[float]:
  """A column's mean over the second half of the run, by seed; NaN: has none."""
  half = max(row["batch"] for row in rows) / 2
  own = [r for r in drawing.where(rows, arm=arm) if r["batch"] > half]
  had = [row for row in own if name in row]
  found = []
  for seed in sorted({row["seed"] for row in own}):
    values = drawing.values(had, name, seed=seed)
    found.append(float(np.mean(values)) if values else float("nan"))
  return found


def _more(rows: Sequence[Row], name: str, more: str, less: str) -> Verdict:
  """A column is larger in one arm than in another, in the second half."""
  late = {arm: _late(rows, name, arm) for arm in (more, less)}
  return comparing.above(late, more, [less])


def _masked(rows: Sequence[Row]) -> Verdict:
  """SAO masks few tokens, but some."""
  shares = drawing.values(rows, "clip_fraction", arm="SAO")
  seen = f"SAO masks {np.mean(shares):.2%} of tokens, at most {max(shares):.2%}"
  small = 0 < np.mean(shares) < 0.02
  return Verdict(outcome="passed" if small else "not_seen", seen=seen)


ARTEFACTS = {
  "Table 3": Claim(
    shows="frozen attention and K = 2: 97.3; K = 1: 95.0; all trained: 90.6 "
    "(AIME 2025)",
    rule="final held-out accuracy: SAO above both by more than the interval of "
    "the difference",
    judge=lambda rows: _ablations(rows, ("K = 1", "all trained")),
  ),
  "Table 4": Claim(
    shows="SAO 97.3, VAPO 91.3 before it collapses, running mean 79.8",
    rule="final held-out accuracy: SAO above both by more than the interval of "
    "the difference",
    judge=lambda rows: _ablations(rows, ("VAPO", "running mean")),
  ),
  "Fig. 4a": Claim(
    shows="late explained variance is 0.60 with K = 2, about 0.51 with K = 1",
    rule="its mean over the second half is larger with K = 2, by more than the "
    "interval of the difference",
    judge=lambda rows: _more(rows, "explained_variance", "SAO", "K = 1"),
  ),
  "Fig. 4b": Claim(
    shows="the critic's gradient norm is 4 to 5 with frozen attention and "
    "climbs to 10 without",
    rule="its mean over the second half is larger where all is trained, by "
    "more than the interval of the difference",
    judge=lambda rows: _more(rows, "critic_grad_norm", "all trained", "SAO"),
  ),
  "Fig. 4c": Claim(
    shows="SAO masks 0.04 to 0.6% of tokens",
    rule="SAO masks some tokens, and under 2% on average",
    judge=_masked,
  ),
}


def draw(rows: Sequence[Row], figure) -> None:
  """Explained variance, the critic's gradient, and accuracy over batches."""
  panels = figure.subplots(1, 3)
  for name in ARMS:
    own = drawing.where(rows, arm=name)
    for axes, column in zip(
      panels,
      ("explained_variance", "critic_grad_norm", "heldout_accuracy"),
      strict=True,
    ):
      if any(column in row for row in own):
        drawing.curve(axes, own, "batch", column, label=name)
      axes.set(xlabel="batch", ylabel=column.replace("_", " "))
  panels[2].legend(fontsize=7)
