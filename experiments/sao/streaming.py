"""What does a trajectory's freedom from its group save in lag and idle time?

  python -m rl_tpu figures sao/streaming

Batches of 128 trajectories, of 128 prompts (G = 1) or 16 prompts with eight
members each (G = 8), on a simulated pod of 7B: 18 GPUs generate, 24 train, no
limit of staleness, and so many trajectories in flight at most. The actor and
the buffer are those of a real run: a group is trainable, and gives its place to
another, when its slowest member has ended. Lengths are log-normal with a tail
of `sigma`; service times are those of `areal/simulated_pod.py`.

Lag is compared at equal throughput, between limits in proportion: at an equal
limit G = 1 trains up to twice as many batches meanwhile, which makes its tokens
older in versions (2.8 against 1.9 at sigma 1 and a limit of 256, the first
design of this study) though they wait for nobody. The paper's Fig. 2 is a
drawing without numbers.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from experiments.areal import simulated_pod
from rl_tpu import simulate
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing
from rl_tpu.virtual.config import Distribution

BATCH, LONGEST, MEAN = 128, 15_360, 4000
"""Trajectories; tokens of an answer at most, and in the mean."""
LIMITS = (64, 128, 256, 512)
"""Trajectories in flight at most."""
SIGMAS = (0.5, 1.0, 1.5)
"""Of the logarithm of lengths."""
GROUPS = (1, 8)
GPUS, SLOTS, TRAINERS = 24, 16, 24
"""Three quarters of the GPUs generate, with so many slots each; a learner on so
many more, fast enough that lag is not a queue before it."""
SIZE = (11.0, 3.0)


def cells(scale: str) -> list[Cell]:
  """Group sizes by tails, limits and seeds."""
  seeds = (0,) if scale == "smoke" else (0, 1, 2)
  return [
    {"sigma": sigma, "group": group, "flying": flying, "seed": seed}
    for seed in seeds
    for sigma in SIGMAS
    for group in GROUPS
    for flying in LIMITS
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
    batches=6 if scale == "smoke" else 16,
    warm_up=3 if scale == "smoke" else 6,
  )
  config = dataclasses.replace(
    config,
    seed=cell["seed"],
    group_size=size,
    max_running_groups=cell["flying"] // size,
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


def _line(
  rows: Sequence[Row], name: str, sigma: float, group: int
) -> np.ndarray:
  """Means over seeds, by limit."""
  own = drawing.where(rows, sigma=sigma, group=group)
  found = [drawing.values(own, name, flying=flying) for flying in LIMITS]
  return np.array([np.mean(values) for values in found])


def lags(
  rows: Sequence[Row], name: str, sigma: float
) -> tuple[np.ndarray, np.ndarray]:
  """Lag of G = 1 and of G = 8, at throughputs that G = 8 was measured at.

  G = 1's lies between its limits; a throughput outside of them has no pair.
  """
  rate, lag = (
    _line(rows, column, sigma, 1) for column in ("tokens_per_second", name)
  )
  asked, wanted = (
    _line(rows, column, sigma, 8) for column in ("tokens_per_second", name)
  )
  order = np.argsort(rate)
  inside = (asked >= rate.min()) & (asked <= rate.max())
  own = np.interp(asked[inside], rate[order], lag[order])
  return own, wanted[inside]


def _fresher(rows: Sequence[Row]) -> Verdict:
  """For every tail: less lag at equal throughput, fewer empty slots."""
  lag, tail, unused = [], [], []
  for sigma in SIGMAS:
    lag.append([np.mean(x) for x in lags(rows, "lag_mean", sigma)])
    tail.append([np.mean(x) for x in lags(rows, "lag_95", sigma)])
    unused.append(
      [np.mean(_line(rows, "slots_unused", sigma, g)) for g in GROUPS]
    )
  names = ("mean lag at equal tokens/s", "95% of lag", "slots unused")
  seen = "G = 1 against 8 by sigma: " + "; ".join(
    f"{name} "
    + ", ".join(
      f"{sigma:g}: {a:.2f} / {b:.2f}"
      for sigma, (a, b) in zip(SIGMAS, pairs, strict=True)
    )
    for name, pairs in zip(names, (lag, tail, unused), strict=True)
  )
  mean = all(a < b for a, b in lag)
  passed = mean and all(a <= b for a, b in tail)
  passed = passed and all(a < b for a, b in unused)
  outcome = "passed" if passed else "weaker" if mean else "not_seen"
  return Verdict(outcome=outcome, seen=seen)


ARTEFACTS = {
  "Fig. 2": Claim(
    shows="a drawing: GRPO waits for all members of a group, SAO streams what "
    "has ended, so that data are fresher and devices busier",
    rule="simulated, for each tail of lengths: mean lag lower with G = 1 than "
    "with G = 8 at equal throughput, 95% of lag not higher, and at equal "
    "limits a smaller share of slots unused",
    judge=_fresher,
  )
}


def draw(rows: Sequence[Row], figure) -> None:
  """Lag over throughput by tail, and empty slots over the limit."""
  panels = figure.subplots(1, 1 + len(SIGMAS))
  for axes, sigma in zip(panels, SIGMAS, strict=False):
    for color, group in zip(drawing.COLORS, GROUPS, strict=False):
      rate = _line(rows, "tokens_per_second", sigma, group) / 1e3
      for name, style in (("lag_mean", "-o"), ("lag_95", ":")):
        label = f"G = {group}" + ", 95%" * (name == "lag_95")
        lag = _line(rows, name, sigma, group)
        axes.plot(rate, lag, style, color=color, label=label)
    axes.set_title(f"tail of lengths: sigma {sigma:g}", fontsize=9)
    axes.set(xlabel="1000 tokens/s consumed", ylim=(0, None))
  panels[0].set_ylabel("lag of tokens, versions")
  panels[0].legend(fontsize=7)
  for color, group in zip(drawing.COLORS, GROUPS, strict=False):
    for sigma, style in zip(SIGMAS, (":", "--", "-"), strict=True):
      unused = _line(rows, "slots_unused", sigma, group)
      panels[-1].plot(
        LIMITS, unused, style, color=color, label=f"G = {group}, {sigma:g}"
      )
  panels[-1].set(
    xscale="log",
    xlabel="trajectories in flight at most",
    ylabel="share of slots unused",
    ylim=(0, 1),
  )
  panels[-1].set_xticks(LIMITS, LIMITS)
  panels[-1].minorticks_off()
  panels[-1].legend(fontsize=6, title="G, sigma", title_fontsize=6)
