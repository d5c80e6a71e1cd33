"""How fast and how lean is the learner beside its peers, on CPUs?

    python -m experiments.benchmarks.learner [--peers=hf=DIR,tunix=DIR]

Runs rl_tpu and, where there are environments for them, TRL's GRPO (in the
environment `hf`) and Tunix's, on the same decoder in float32, each in a process
of its own that works only when it is asked; batches take turns. An environment
lies in `.peers/NAME`: `.peers/hf` with torch 2.13.0+cpu, transformers 5.24.0
and trl 1.16.0, `.peers/tunix` with google-tunix 0.1.7 and jax 0.10.2. What is
compared is tokens of trajectories, prompts included, a processor second (user
and system, all threads).

- fixed: one optimizer step on `--rows` trajectories of one length: loss,
  backward, clip and AdamW of all three. Ours includes packing, GRPO's
  advantages and metrics, TRL's and Tunix's include the entropy that they
  compute; both get their batch as tensors.
- ceiling: the matrix products of that step alone (see `ceiling`).
- long tail: new tokens are log-normal (sigma 1, mean `--new`, cut at `--most`).
  Ours packs them in rows of prompt + most; peers pad the batch, TRL to its
  longest, Tunix to the limit. Where Tunix could pack it is left off, as it is
  by default.
- padded: the same in our learner with a trajectory a row, as many rows, and so
  tokens, in a microbatch as in the packed one.
- step: `generate`, reward, loss, backward, update as each one's trainer does
  it, `train.run` of ours under the schedule sync with its actor, environment,
  log and weights for the engine. `first` is from launch to the end of the first
  step; ours starts with what an earlier process compiled. Our random policy
  spells no word, so its advantages, and gradients, are 0; peers' are not.

Not alike: our microbatch of `--microbatch` tokens was the best of four sizes
tried; peers take the batch whole, and no other size of theirs was tried. And
`padded` pads to the limit, not to the batch's longest as TRL does, so it says
more for packing than it would against that.

Measured once, `--repeats=3 --tails=1`, on two cores of a Xeon, quiet, without
Tunix (in an earlier run 0.7 of TRL): fixed 1.05 (1322 to TRL's 1260), 0.69 of
the ceiling, memory 0.63; long tail 2.4, packed to padded 4.3; a step 0.86 of
TRL's processor seconds (3.57 to 4.14), 1283 MB, first step after 13 seconds. So
the aim of a step is missed. Layers are unrolled, as the peers' are.

The last line is JSON: `ratio_fixed`, `ratio_longtail` (to the better peer, aims
1 and 1.5; null without one), `memory_fixed` (peak, to that peer's, aim 1 at
most), `packed_over_padded` (aim 1.3), `ratio_grpo_step` (processor seconds to
the better peer's, aim 0.8 at most), `step_peak_mb` (aim 1536), `first_step`
(seconds, aim 30), `ceiling_share`, `load` (of the machine, before and after),
and all that the tables say.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

from experiments.benchmarks import ceiling
from experiments.benchmarks.peers.process import ROOT, Process, command, find
from experiments.benchmarks.serving import MODEL as M12
from experiments.benchmarks.serving import long_tail, show
from rl_tpu.models import transformer

SCRIPTS = {"hf": "trl_grpo.py", "tunix": "tunix_grpo.py"}
OURS = [sys.executable, "-m", "experiments.benchmarks.learner_work"]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
  """The sizes."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--peers", default="auto", help="auto, none or NAME=DIR,")
  parser.add_argument("--model", default="m12", help="m12 or one of SIZES")
  for name, default, what in (
    ("threads", 1, "of XLA and of PyTorch"),
    ("rows", 32, "trajectories of a batch"),
    ("prompt", 32, "tokens of a prompt"),
    ("group", 4, "trajectories with the same prompt"),
    ("new", 64, "new tokens: all of them, or the mean of the long tail"),
    ("most", 512, "new tokens of the long tail at most"),
    ("microbatch", 768, "tokens of our microbatch, as whole rows"),
    ("repeats", 5, "fixed batches, and steps, of each"),
    ("tails", 3, "long-tailed batches of each"),
  ):
    parser.add_argument(f"--{name}", type=int, default=default, help=what)
  return parser.parse_args(arguments)


class Work:
  """Starts processes on one model, and asks them in turn."""

  def __init__(
    self,
    sizes: argparse.Namespace,
    model: transformer.Config,
    homes: dict[str, pathlib.Path],
    cache: str,
  ):
    self.sizes = sizes
    self.model = model
    self.homes = homes
    self._shape = {
      **dataclasses.asdict(model),
      **{n: getattr(sizes, n) for n in ("threads", "rows", "prompt", "new")},
      "group": sizes.group,
      "limits": sorted({sizes.new, sizes.most}),
      "cache": cache,
    }

  def ours(self, work: str, most: int, layout: str = "packed") -> Process:
    """rl_tpu, in rows that hold the longest trajectory."""
    length = self.sizes.prompt + most
    rows = max(1, min(self.sizes.microbatch // length, self.sizes.rows))
    return Process(
      OURS,
      self._shape
      | {
        "work": work,
        "layout": layout,
        "row_length": length,
        "microbatch_rows": rows,
      },
    )

  def peers(self, work: str) -> dict[str, Process]:
    """Those that have an environment."""
    shape = self._shape | {"work": work}
    return {
      name: Process(command(home, SCRIPTS[name]), shape)
      for name, home in self.homes.items()
    }

  def fixed(self) -> dict[str, dict[str, float]]:
    """Rates and memory by name, and the ceiling's rate."""
    sizes = self.sizes
    lengths = [sizes.new] * sizes.rows
    tokens = sizes.rows * (sizes.prompt + sizes.new)
    running = {"rl_tpu": self.ours("update", sizes.new), **self.peers("update")}
    answers: dict[str, list[dict]] = {name: [] for name in running}
    products = []
    for turn in range(2 + sizes.repeats):
      for name, process in running.items():
        answers[name].append(process.ask(lengths))
      if turn > 1:
        scored = sizes.rows * sizes.new
        products.append(ceiling.update_seconds(self.model, tokens, scored))
    for name, process in running.items():
      print(f"{name}: {process.version}")
      process.close()
    figures = {name: rates(given[2:]) for name, given in answers.items()}
    best = tokens / statistics.median(products)
    return figures | {"ceiling": {"tokens_per_cpu_second": best}}

  def longtail(self) -> dict[str, dict[str, float]]:
    """Rates and memory by name; `padded` is ours with a trajectory a row."""
    sizes = self.sizes
    lengths = long_tail(sizes)
    starts = range(0, len(lengths), sizes.rows)
    batches = [lengths[i : i + sizes.rows] for i in starts]
    ours = {
      "rl_tpu": self.ours("update", sizes.most),
      "padded": self.ours("update", sizes.most, "padded"),
    }
    running = {**ours, **self.peers("update")}
    answers: dict[str, list[dict]] = {name: [] for name in running}
    for name, process in running.items():
      # Ours may have as many programs as batches, TRL has none.
      for batch in batches if name == "rl_tpu" else batches[:1]:
        process.ask(batch)
    for batch in batches:
      for name, process in running.items():
        answers[name].append(process.ask(batch))
    for process in running.values():
      process.close()
    return {name: rates(given) for name, given in answers.items()}

  def step(self) -> dict[str, dict[str, float]]:
    """Seconds, processor seconds and memory of a whole step, by name."""
    sizes = self.sizes
    earlier = self.ours("step", sizes.new)
    earlier.ask(None)
    earlier.close()
    began = time.perf_counter()
    running = {"rl_tpu": self.ours("step", sizes.new)}
    running["rl_tpu"].ask(None)
    first = time.perf_counter() - began
    running |= self.peers("step")
    answers: dict[str, list[dict]] = {name: [] for name in running}
    for _ in range(2 + sizes.repeats):
      for name, process in running.items():
        answers[name].append(process.ask(None))
    for process in running.values():
      process.close()
    figures = {}
    for name, given in answers.items():
      figures[name] = {
        key: statistics.median(answer[key] for answer in given[2:])
        for key in ("cpu_seconds", "seconds")
      } | {"peak_mb": given[-1]["peak_mb"]}
    figures["rl_tpu"]["first"] = first
    return figures


def rates(answers: list[dict[str, float]]) -> dict[str, float]:
  """Tokens a processor second and a second over all, and peak memory.

  Over batches of one length it is the median that counts.
  """
  alike = len({answer["tokens"] for answer in answers}) == 1
  middle: Any = statistics.median if alike else np.sum
  tokens = middle([answer["tokens"] for answer in answers])
  return {
    "tokens_per_cpu_second": float(
      tokens / middle([answer["cpu_seconds"] for answer in answers])
    ),
    "tokens_per_second": float(
      tokens / middle([answer["seconds"] for answer in answers])
    ),
    "peak_mb": answers[-1]["peak_mb"],
  }


def best(results: dict[str, dict], key: str, choose: Any, names: Any) -> Any:
  """The name of the best peer by a figure; None without peers."""
  return choose(names, key=lambda name: results[name][key], default=None)


def over(results: dict[str, dict], key: str, name: str | None) -> float | None:
  """Our figure to that peer's."""
  if name is None:
    return None
  return round(results["rl_tpu"][key] / results[name][key], 3)


def measure(sizes: argparse.Namespace) -> dict[str, Any]:
  """Runs everything and shows it; returns the figures of the JSON line."""
  load = [os.getloadavg()[0]]
  homes, missing = find(sizes.peers)
  for name in missing:
    print(f"{name}: missing, no environment {ROOT / '.peers' / name}")
  model = M12 if sizes.model == "m12" else transformer.sized(sizes.model)
  with tempfile.TemporaryDirectory() as cache:
    work = Work(sizes, model, homes, cache)
    fixed = work.fixed()
    show("fixed", fixed)
    longtail = work.longtail()
    show("long tail", longtail)
    step = work.step()
    show("step", step)
  rate = "tokens_per_cpu_second"
  peer = best(fixed, rate, max, homes)
  load.append(os.getloadavg()[0])
  ours = longtail["rl_tpu"][rate]
  return {
    "ratio_fixed": over(fixed, rate, peer),
    "memory_fixed": over(fixed, "peak_mb", peer),
    "ratio_longtail": over(longtail, rate, best(longtail, rate, max, homes)),
    "packed_over_padded": round(ours / longtail["padded"][rate], 3),
    "ratio_grpo_step": over(
      step, "cpu_seconds", best(step, "cpu_seconds", min, homes)
    ),
    "step_peak_mb": round(step["rl_tpu"]["peak_mb"]),
    "first_step": round(step["rl_tpu"]["first"], 1),
    "ceiling_share": round(fixed["rl_tpu"][rate] / fixed["ceiling"][rate], 3),
    "missing": missing,
    "load": load,
    "fixed": fixed,
    "longtail": longtail,
    "step": step,
  }


def main(arguments: list[str] | None = None) -> None:
  """Prints the tables and the JSON line."""
  sizes = parse(arguments)
  os.environ["NPROC"] = str(sizes.threads)  # XLA's threads, here and there.
  os.environ["JAX_PLATFORMS"] = "cpu"
  jax.config.update("jax_platforms", "cpu")
  print(
    f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, "
    f"jax {jax.__version__}\n"
    + ", ".join(f"{name} {value}" for name, value in vars(sizes).items())
  )
  print(json.dumps(measure(sizes)))


if __name__ == "__main__":
  main()
