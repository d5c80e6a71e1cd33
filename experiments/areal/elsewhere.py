"""Does staleness do as little harm to another task, model and baseline?

  python -m rl_tpu figures areal/elsewhere

The rest of the paper's tables of scores, decoupled PPO as in `learning_curves`
and in lockstep as there, three seeds:

| table | the paper | here |
|---|---|---|
| 5 | code, 14B and 32B | the tool task: 128 members of 16 prompts write calls |
| 6 | another family, Llama 8B | heads that share keys, own output weights |
| 8 | leave-one-out baseline, 8 GPUs | the same on the quickstart's task |

Where tokens are four versions stale or more, the initial weights sampled the
first four batches: their reward is the accuracy before RL. Table 8's column of
throughput is Table 7's to the last digit; `simulated` has it.
"""

from collections.abc import Sequence

import ml_collections
import numpy as np

from experiments import training
from experiments.areal import settings
from experiments.sao import tasks
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing

LIMITS = {
  "Table 5": (0, 4),
  "Table 6": (0, 4, 8),
  "Table 8": (0, 1, 2, 4, 8, 16),
}
PAPER = {
  "Table 5": (56.7, 58.1),
  "Table 6": (None, 58.4, 57.2),
  "Table 8": (32.4, 32.9, 34.1, 32.9, 31.5, 32.7),
}
"""LiveCodeBench of 14B, and AIME 2024, by LIMITS."""
SMOKE = (0, 4)
"""Limits at that scale."""
BEFORE = {"Table 5": 53.4, "Table 6": 50.4}
"""The same before RL; of Table 8 the paper has none."""
FAMILY = {"num_kv_heads": 2, "qk_norm": False, "tied": False, "d_ff": 256}
"""What Llama's layers have unlike the quickstart's."""
COLUMNS = ("heldout_accuracy", "reward", "clip_fraction", "behavior_weight")
CLOSE = 0.03
"""Of accuracy: what counts as level, as in `learning_curves`."""
SIZE = (10.0, 3.0)


def cells(scale: str) -> list[Cell]:
  """Limits of each table by seeds; at scale smoke, two limits."""
  smoke = scale == "smoke"
  return [
    {"item": item, "eta": eta, "seed": seed}
    for seed in ((0,) if smoke else (0, 1, 2))
    for item, limits in LIMITS.items()
    for eta in (SMOKE if smoke else limits)
  ]


def configured(cell: Cell, scale: str) -> ml_collections.ConfigDict:
  """The run of one cell."""
  eta, seed = cell["eta"], cell["seed"]
  if cell["item"] == "Table 5":
    config = tasks.tool_task(seed, eta, scale)
    tasks.set_groups(config)
    config.learner.minibatches, config.learner.microbatch_rows = 4, 8
    config.learner.learning_rate = 2.5e-4
    settings.set_loss(config, "decoupled")
    return config
  config = settings.small(eta, seed, scale)
  if cell["item"] == "Table 6":
    config.model.update(FAMILY)
  else:
    settings.set_loss(config, "decoupled", baseline="leave_one_out")
  return config


def measure(cell: Cell, scale: str) -> list[Row]:
  """Means over each four batches."""
  config = configured(cell, scale)
  every = min(settings.EVERY, config.batches)
  return training.rows_of(config, COLUMNS, every)


def _limits(rows: Sequence[Row], item: str) -> list[int]:
  """A table's limits that were measured."""
  found = {row["eta"] for row in drawing.where(rows, item=item)}
  return [eta for eta in LIMITS[item] if eta in found]


def _final(rows: Sequence[Row], item: str) -> dict[int, list[float]]:
  """Held-out accuracy after the last batch, by limit, in order of seeds."""
  found = {}
  for eta in _limits(rows, item):
    own = drawing.where(rows, item=item, eta=eta)
    last = drawing.where(own, batch=max(row["batch"] for row in own))
    found[eta] = drawing.values(last, "heldout_accuracy")
  return found


def _before(rows: Sequence[Row], item: str) -> list[float]:
  """Reward of what the initial weights sampled, by seed."""
  own = drawing.where(rows, item=item, eta=4)
  first = min(row["batch"] for row in own)
  return drawing.values(own, "reward", batch=first)


def _said(found: dict[int, list[float]]) -> str:
  return "final by eta: " + ", ".join(
    f"{eta}: {drawing.said(values)}" for eta, values in found.items()
  )


def _gap(found: dict[int, list[float]]) -> float:
  """Largest distance of a mean from that of eta 0."""
  means = {eta: float(np.mean(values)) for eta, values in found.items()}
  return max(abs(mean - means[0]) for mean in means.values())


def _learns(rows: Sequence[Row], item: str) -> Verdict:
  """All limits are above what was before, and level with eta 0."""
  found, before = _final(rows, item), _before(rows, item)
  seen = f"before RL {drawing.said(before)}; {_said(found)}"
  gains = [drawing.difference(values, before) for values in found.values()]
  if not all(mean > np.nan_to_num(half) for mean, half in gains):
    return Verdict(outcome="not_seen", seen=seen)
  outcome = "passed" if _gap(found) < CLOSE else "weaker"
  return Verdict(outcome=outcome, seen=seen)


def _level(rows: Sequence[Row]) -> Verdict:
  """Table 8: no limit is far from eta 0, up to 8 none clearly below."""
  found = _final(rows, "Table 8")
  small = [values for eta, values in found.items() if 0 < eta <= 8]
  losses = [drawing.difference(found[0], values) for values in small]
  if any(mean > np.nan_to_num(half) for mean, half in losses):
    return Verdict(outcome="not_seen", seen=_said(found))
  outcome = "passed" if _gap(found) < CLOSE else "weaker"
  return Verdict(outcome=outcome, seen=_said(found))


_LEARNS = (
  "final held-out accuracy: all limits within 0.03 of eta 0, and above what "
  "it was before RL by more than the interval of the difference"
)
ARTEFACTS = {
  "Table 5": Claim(
    shows="LiveCodeBench, base, sync, async: 53.4, 56.7, 58.1 (14B); 57.4, "
    "61.2, 61.0 (32B), and alike on Codeforces and CodeContests",
    rule=_LEARNS,
    judge=lambda rows: _learns(rows, "Table 5"),
  ),
  "Table 6": Claim(
    shows="another family (R1-Distill-Llama 8B), AIME24, base, eta 4, eta 8: "
    "50.4, 58.4, 57.2, and alike on three more benchmarks",
    rule=_LEARNS,
    judge=lambda rows: _learns(rows, "Table 6"),
  ),
  "Table 8": Claim(
    shows="RLOO, AIME24 by eta 0, 1, 2, 4, 8, 16: 32.4, 32.9, 34.1, 32.9, "
    "31.5, 32.7; throughput as in Table 7",
    rule="final held-out accuracy within 0.03 of eta 0's, and none up to 8 "
    "below it by more than the interval of the difference",
    judge=_level,
  ),
}


def draw(rows: Sequence[Row], figure) -> None:
  """Final accuracy by limit for each table, beside the paper's scores."""
  panels = figure.subplots(1, 3)
  for axes, item in zip(panels, LIMITS, strict=True):
    limits = _limits(rows, item)
    places = np.arange(len(limits))
    for place, values in zip(places, _final(rows, item).values(), strict=True):
      color = drawing.COLORS[0]
      axes.plot([place] * len(values), values, "o", color=color, markersize=4)
      axes.plot(place, np.mean(values), "_", color=color, markersize=18)
    if item in BEFORE:
      before = float(np.mean(_before(rows, item)))
      axes.axhline(before, color="#999999", linestyle="--", linewidth=1)
      axes.annotate("before RL", (0, before), va="bottom", fontsize=7)
    paper = dict(zip(LIMITS[item], PAPER[item], strict=True))
    scores = [(paper[eta] or np.nan) / 100 for eta in limits]
    axes.plot(places, scores, **drawing.PAPER, label="the paper's score")
    axes.set_xticks(places, [str(eta) for eta in limits])
    axes.set(xlabel="versions stale (paper: limit)", ylim=(0, 1.05))
    axes.set_title(f"{item}: {_TITLES[item]}", fontsize=9)
  panels[0].set_ylabel("final held-out accuracy")
  panels[0].legend(fontsize=7, loc="lower right")


_TITLES = {
  "Table 5": "another task",
  "Table 6": "another family",
  "Table 8": "leave-one-out",
}
