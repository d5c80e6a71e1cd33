"""What does interrupting generation for new weights save?

  python -m rl_tpu figures areal/interruption

The real generator with 32 slots on long-tailed answers (log-normal, mean 64, at
most 512), always more requests waiting than slots. Every so many sampled tokens
new weights arrive: they interrupt what runs, whose keys and values are computed
again (recompute), or wait until it has ended while nothing is admitted (drain).
The more tokens lie between two weights, the less either costs: the paper does
not say how many did. Rates are tokens a processor second, never the same twice.
"""

import argparse
import itertools
from collections.abc import Sequence

import numpy as np

from experiments.benchmarks import serving
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing
from rl_tpu.models import transformer

PAPER = {"1.5B": (231, 207), "7B": (130, 111)}
"""1000 tokens/s of 4 nodes, with interruption and without."""
INTERVALS = (4096, 8192, 16_384, 32_768)
"""Sampled tokens between two weights."""
MODELS = ("tiny", "1m")
KINDS = ("recompute", "drain")
SIZES = argparse.Namespace(
  rows=32, prompt=32, group=4, new=64, most=512, steps=8, tails=4
)


def cells(scale: str) -> list[Cell]:
  """Models by intervals."""
  models, intervals = MODELS, INTERVALS
  if scale == "smoke":
    models, intervals = MODELS[:1], (512,)
  return [{"model": m, "interval": n} for m in models for n in intervals]


def measure(cell: Cell, scale: str) -> list[Row]:
  """Rates with and without interruption, by turns, after a warm-up."""
  sizes = SIZES
  if scale == "smoke":
    sizes = argparse.Namespace(**vars(SIZES) | {"new": 16, "most": 64})
  policy = transformer.Policy(
    transformer.sized(cell["model"], vocab_size=serving.MODEL.vocab_size)
  )
  interval, lengths = cell["interval"], serving.long_tail(sizes)
  running = {
    kind: serving.Generator(
      sizes,
      itertools.cycle(lengths),
      most=sizes.most,
      policy=policy,
      interruption=kind,
    )
    for kind in KINDS
  }
  turns = max(2 * INTERVALS[-1] // interval, 2) if scale != "smoke" else 2
  costs: dict[str, list] = {kind: [] for kind in KINDS}
  for generator in running.values():
    generator.flow(2 * sizes.rows * sizes.new, interval)
  for _ in range(turns):
    for kind, generator in running.items():
      costs[kind].append(generator.flow(interval, interval))
  row: Row = {"updates": turns}
  for kind, generator in running.items():
    rate = serving.pooled(costs[kind])["tokens_per_cpu_second"]
    row[f"tokens_per_cpu_second_{kind}"] = rate
    generator.close()
  return [row]


def _gains(rows: Sequence[Row], model: str) -> dict[int, float]:
  """With interruption over without, by interval."""
  rate = "tokens_per_cpu_second_"
  return {
    int(row["interval"]): float(row[f"{rate}recompute"])
    / float(row[f"{rate}drain"])
    for row in drawing.where(rows, model=model)
  }


def _models(rows: Sequence[Row]) -> list[str]:
  return [name for name in MODELS if drawing.where(rows, model=name)]


def _faster(rows: Sequence[Row]) -> Verdict:
  """Fig. 6b."""
  gains = {model: _gains(rows, model) for model in _models(rows)}
  seen = "with interruption over without, by tokens between weights: "
  seen += "; ".join(
    f"{model} " + ", ".join(f"{n}: {gain:.2f}" for n, gain in found.items())
    for model, found in gains.items()
  )
  values = [gain for found in gains.values() for gain in found.values()]
  passed = min(values) > 1.1
  right = float(np.mean(values)) > 1
  outcome = "passed" if passed else "weaker" if right else "not_seen"
  return Verdict(outcome=outcome, seen=seen)


ARTEFACTS = {
  "Fig. 6b": Claim(
    shows="generated tokens/s with interruption over without, 4 nodes: 231k "
    "to 207k (1.12, 1.5B), 130k to 111k (1.17, 7B)",
    rule="tokens a processor second, with interruption over without: over 1.1 "
    "for each model and interval",
    judge=_faster,
  )
}


def draw(rows: Sequence[Row], figure) -> None:
  """Gain over the tokens between two weights, beside the paper's."""
  axes = figure.subplots()
  for model in _models(rows):
    gains = _gains(rows, model)
    axes.plot(gains.keys(), gains.values(), marker="o", label=f"{model}, here")
  for name, (with_, without) in PAPER.items():
    axes.axhline(with_ / without, color=drawing.PAPER["color"], linestyle=":")
    axes.annotate(
      f"{name}, the paper (interval not stated)",
      (0.01, with_ / without),
      xycoords=("axes fraction", "data"),
      ha="left",
      va="bottom" if name == "7B" else "top",
      fontsize=7,
    )
  axes.axhline(1, color="#999999", linewidth=0.8)
  axes.set(
    xscale="log",
    xlabel="sampled tokens between two weights (32 slots, mean answer 64)",
    ylabel="tokens/s, interrupting over draining",
  )
  intervals = sorted({int(row["interval"]) for row in rows})
  axes.set_xticks(intervals, intervals)
  axes.minorticks_off()
  axes.legend(fontsize=7)
