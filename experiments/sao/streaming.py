"""What does a trajectory's freedom from its group save in lag and idle time?

  python -m rl_tpu figures sao/streaming

Batches of 128 trajectories, of 128 prompts (G = 1) or 16 prompts with eight
members each (G = 8), on a simulated pod of 7B: 18 GPUs generate, 24 train, at
most 256 trajectories in flight, no limit of staleness. The actor and the buffer
are those of a real run: a group is trainable when its slowest member has ended.
Lengths are log-normal with a tail of `sigma`; service times are those of
`areal/simulated_pod.py`. The paper's Fig. 2 is a drawing without numbers.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from experiments.areal import simulated_pod
from rl_tpu import simulate
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing
from rl_tpu.virtual.config import Distribution

BATCH, FLYING, LONGEST, MEAN = 128, 256, 15_360, 4000
"""Trajectories of a batch, in flight at most; tokens."""
SIGMAS = (0.5, 1.0, 1.5)
"""Of the logarithm of lengths."""
GROUPS = (1, 8)
GPUS, SLOTS, TRAINERS = 24, 16, 24
"""Three quarters of the GPUs generate, with so many slots each; a learner on so
many more, fast enough that lag is not a queue before it."""
SIZE = (9.0, 3.0)


def cells(scale: str) -> list[Cell]:
  """Group sizes by tails by seeds."""
  seeds = (0,) if scale == "smoke" else (0, 1, 2)
  return [
    {"sigma": sigma, "group": group, "seed": seed}
    for seed in seeds
    for sigma in SIGMAS
    for group in GROUPS
  ]


def measure(cell: Cell, scale: str) -> list[Row]:
  """Lag of the tokens consumed, and who waits."""
  size = cell["group"]
  config = simulated_pod.pod(
    "7b",
    "async",
    gpus=GPUS,
    longest=LONGEST,
    limit=None,
    groups=BATCH // size,
  )
  model = simulated_pod.MODELS["7b"]
  assumed = dataclasses.replace(
    config.simulate,
    service=simulated_pod.service(model, TRAINERS),
    grain=128,
    lengths=Distribution(
      kind="lognormal", mean=MEAN, sigma=cell["sigma"], least=64
    ),
    batches=6 if scale == "smoke" else 24,
    warm_up=3 if scale == "smoke" else 8,
  )
  config = dataclasses.replace(
    config,
    seed=cell["seed"],
    group_size=size,
    max_running_groups=FLYING // size,
    engine=dataclasses.replace(config.engine, slots=SLOTS),
    simulate=assumed,
  )
  found = simulate.simulate(config, simulate.service_times(config))
  figures = found.figures()
  lag = {int(s): n for s, n in figures["staleness"].items()}
  used = found.generator_seconds["slots"] / found.seconds / found.generators
  return [
    {
      "lag_mean": figures["staleness_mean"],
      "lag_95": _quantile(lag, 0.95),
      "lag_max": figures["staleness_max"],
      "slots_unused": 1 - used,
      "learner_waits": figures["learner_idle_share"],
      "tokens_per_second": figures["tokens_per_second"],
    }
  ]


def _quantile(counts: dict[int, int], share: float) -> int:
  """The smallest value that so large a share does not exceed."""
  values = sorted(counts)
  below = np.cumsum([counts[value] for value in values])
  return values[int(np.searchsorted(below, share * below[-1]))]


def _means(rows: Sequence[Row], name: str, group: int) -> list[float]:
  """By sigma."""
  return [
    float(np.mean(drawing.values(rows, name, sigma=sigma, group=group)))
    for sigma in SIGMAS
  ]


def _sooner(rows: Sequence[Row]) -> Verdict:
  """Less lag at the mean and the tail, fewer empty slots, for every tail."""
  names = {
    "lag_mean": "mean lag",
    "lag_95": "95% of lag",
    "slots_unused": "slots unused",
  }
  found = {
    name: [_means(rows, name, group) for group in GROUPS] for name in names
  }
  seen = "G = 1 against 8 by sigma: " + "; ".join(
    f"{names[name]} "
    + ", ".join(
      f"{s:g}: {a:.2f} / {b:.2f}" for s, a, b in zip(SIGMAS, *pair, strict=True)
    )
    for name, pair in found.items()
  )
  less = {
    name: [a < b for a, b in zip(*pair, strict=True)]
    for name, pair in found.items()
  }
  mean = all(less["lag_mean"])
  level = all(a <= b for a, b in zip(*found["lag_95"], strict=True))
  passed = mean and level and all(less["slots_unused"])
  outcome = "passed" if passed else "weaker" if mean else "not_seen"
  return Verdict(outcome=outcome, seen=seen)


ARTEFACTS = {
  "Fig. 2": Claim(
    shows="a drawing: GRPO waits for all members of a group, SAO streams what "
    "has ended, so that data are fresher and devices busier",
    rule="simulated, for each tail of lengths: mean lag and share of slots "
    "unused lower with G = 1 than with G = 8, 95% of lag not higher",
    judge=_sooner,
  )
}


def draw(rows: Sequence[Row], figure) -> None:
  """Lag, empty slots and the learner's waits over the tail of lengths."""
  panels = figure.subplots(1, 3)
  names = {
    "lag_mean": "lag of tokens, versions\n(dashed: 95%)",
    "slots_unused": "share of slots unused",
    "learner_waits": "share of time the learner waits",
  }
  for axes, (name, label) in zip(panels, names.items(), strict=True):
    for color, group in zip(drawing.COLORS, GROUPS, strict=False):
      own = drawing.where(rows, group=group)
      style = {"color": color, "marker": "o", "label": f"G = {group}"}
      drawing.curve(axes, own, "sigma", name, **style)
      if name == "lag_mean":
        axes.plot(SIGMAS, _means(rows, "lag_95", group), "--", color=color)
    axes.set(xlabel="tail of lengths, sigma", ylabel=label, ylim=(0, None))
  panels[0].legend(fontsize=7)
