"""Who follows a preference that switches on the way?

  python -m rl_tpu figures sao/styles

The style bandit: of three ways to write a word one is rewarded, and which one
changes after a third and after two thirds of the run; in the last third one
candidate is another. SAO against a mean of the last 128 outcomes, as in the
paper, and against the batch's mean. 96 batches of 128 trajectories, 2 versions
stale, three seeds. Held-out accuracy asks for all three preferences, so that
the shares of styles are what shows.
"""

from collections.abc import Sequence

import numpy as np

from experiments import training
from experiments.sao import comparing, tasks
from rl_tpu import envs
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing

METHODS = ("SAO", "running mean of all", "DIS only")
STYLES = ("academic", "cute", "chuunibyou", "classical")
PHASES = 3
COLUMNS = ("reward", *(f"env_style_{name}" for name in STYLES))


def cells(scale: str) -> list[Cell]:
  """Methods by seeds."""
  return comparing.cells("method", METHODS, scale)


def measure(cell: Cell, scale: str) -> list[Row]:
  """Means over every 24th of the run."""
  batches = 6 if scale == "smoke" else 96
  config = tasks.tool_task(cell["seed"], 2, scale)
  task = envs.get("style_bandit").Config(
    phase_prompts=batches // PHASES * config.groups_per_batch
  )
  config.task = to_config_dict(Choice(name="style_bandit", config=task))
  config.batches, config.max_turns = batches, 1
  config.sampling.max_tokens = 8
  config.evaluation.every = 0
  config.learner.learning_rate = 1e-3
  if cell["method"] == "running mean of all":
    training.set_loss(config, "running_mean", scope="global")
  else:
    tasks.set_method(config, cell["method"])
  return training.rows_of(config, COLUMNS, max(batches // 24, 1))


def _phases(rows: Sequence[Row], method: str) -> list[list[float]]:
  """Mean reward of the second half of each phase, by seed."""
  length = max(row["batch"] for row in rows) / PHASES
  found = []
  for phase in range(PHASES):
    start = (phase + 0.5) * length
    own = [r for r in rows if start < r["batch"] <= (phase + 1) * length]
    seeds = sorted({row["seed"] for row in own})
    found.append(
      [
        float(np.mean(drawing.values(own, "reward", method=method, seed=seed)))
        for seed in seeds
      ]
    )
  return found


def _recovers(rows: Sequence[Row]) -> Verdict:
  """After the switches SAO earns more than the running mean."""
  sao, mean = (_phases(rows, name) for name in METHODS[:2])
  seen = "; ".join(
    f"phase {index}: SAO {drawing.said(a)}, running mean {drawing.said(b)}"
    for index, (a, b) in enumerate(zip(sao, mean, strict=True), 1)
  )
  found = [drawing.difference(sao[p], mean[p]) for p in (1, 2)]
  return comparing.verdict(found, seen)


def _switches(rows: Sequence[Row]) -> Verdict:
  """SAO's text is mostly in the preferred style at the end of each phase."""
  length = max(row["batch"] for row in rows) / PHASES
  preferred = ("cute", "chuunibyou", "classical")
  shares = []
  for phase, style in enumerate(preferred):
    ends = [r["batch"] for r in rows if r["batch"] <= (phase + 1) * length]
    own = drawing.where(rows, method="SAO", batch=max(ends))
    shares.append(float(np.mean(drawing.values(own, f"env_style_{style}"))))
  seen = ", ".join(
    f"{style} {share:.2f}"
    for style, share in zip(preferred, shares, strict=True)
  )
  whole = min(shares) > 0.5
  some = min(shares) > 1 / 3
  return Verdict(
    outcome="passed" if whole else "weaker" if some else "not_seen", seen=seen
  )


ARTEFACTS = {
  "Fig. 5a": Claim(
    shows="each preferred style peaks at 0.65 to 0.78, the one before falls "
    "to 0",
    rule="at the end of each phase over half of SAO's texts are good ones in "
    "the preferred style",
    judge=_switches,
  ),
  "Fig. 5b": Claim(
    shows="SAO recovers faster and higher after the switches than a running "
    "mean of the last 128 outcomes",
    rule="reward, second half of phases 2 and 3: SAO above it by more than the "
    "interval of the difference",
    judge=_recovers,
  ),
}


def draw(rows: Sequence[Row], figure) -> None:
  """SAO's styles, and everyone's reward, over batches."""
  panels = figure.subplots(1, 2)
  own = drawing.where(rows, method="SAO")
  for name in STYLES:
    drawing.curve(panels[0], own, "batch", f"env_style_{name}", label=name)
  for name in METHODS:
    part = drawing.where(rows, method=name)
    drawing.curve(panels[1], part, "batch", "reward", label=name)
  last = max(row["batch"] for row in rows)
  for axes, what in zip(panels, ("SAO's good texts", "reward"), strict=True):
    axes.set(xlabel="batch", ylabel=what, ylim=(0, 1))
    axes.legend(fontsize=7)
    for phase in (1, 2):
      axes.axvline(phase * last / PHASES, color="#bbbbbb", linewidth=1)
