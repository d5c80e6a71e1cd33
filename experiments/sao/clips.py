"""Which clip holds at a long lag: mask or clamp, one side or two?

  python -m rl_tpu figures sao/clips

The ablation that the paper lacks: SAO's advantages are the batch's here, so
that nothing but the treatment of the ratio differs. On `tasks.half_taught` with
every token 16 versions stale, 120 batches of 128 trajectories, three seeds.

| clip | ratio r = target/behavior |
|---|---|
| mask | r in (0.7, 6), else 0: SAO's, two sides whatever the advantage |
| narrow mask | r in (0.8, 1.28), else 0 |
| clamp | r held in [0.7, 6] |
| one side | PPO: 0 above 6 if A > 0, below 0.7 if A < 0 |
| none | r |
"""

from collections.abc import Sequence

import numpy as np

from experiments import training
from experiments.sao import comparing, tasks
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing

SIZE = (9.5, 3.2)
LAG = 16
CLIPS = {
  "mask": {"correction": "mask", "low": 0.7, "high": 6.0},
  "narrow mask": {"correction": "mask", "low": 0.8, "high": 1.28},
  "clamp": {"correction": "truncate", "low": 0.7, "high": 6.0},
  "one side": {"correction": "ppo", "low": 0.7, "high": 6.0, "dual_clip": None},
  "none": {"correction": "is"},
}
COLUMNS = ("reward", "heldout_accuracy", "weight_masked", "weight")


def cells(scale: str) -> list[Cell]:
  """Clips by seeds."""
  return comparing.cells("clip", tuple(CLIPS), scale)


def measure(cell: Cell, scale: str) -> list[Row]:
  """Means over every twelfth of the run."""
  config = tasks.half_taught(cell["seed"], scale, lag=LAG)
  fields = CLIPS[cell["clip"]]
  training.set_loss(
    config, "score_centering", centering=False, baseline="batch", **fields
  )
  return training.rows_of(config, COLUMNS, max(config.batches // 12, 1))


def _mask_first(rows: Sequence[Row]) -> Verdict:
  """The mask is not below any other, and above no clip at all."""
  late = comparing.late(rows, "clip", tuple(CLIPS))
  found = {
    name: drawing.difference(late["mask"], late[name])
    for name in ("clamp", "one side", "none")
  }
  level = all(m >= -np.nan_to_num(half) for m, half in found.values())
  if not level:
    return Verdict(outcome="not_seen", seen=comparing.leads(late, "mask"))
  clear = all(mean > half for mean, half in found.values())
  outcome = "passed" if clear else "weaker"
  return Verdict(outcome=outcome, seen=comparing.leads(late, "mask"))


ARTEFACTS = {
  "ablation: clips": Claim(
    shows="not in the paper, whose argument is that masking beats clamping and "
    "one side once data is stale",
    rule="held-out accuracy, mean of the second half: mask above clamp, one "
    "side and none by more than the interval of the difference",
    judge=_mask_first,
  )
}


def draw(rows: Sequence[Row], figure) -> None:
  """Reward of training and held-out accuracy over batches."""
  comparing.draw(rows, figure, "clip", tuple(CLIPS))
