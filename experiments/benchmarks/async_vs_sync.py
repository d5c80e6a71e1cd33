"""Does the simulator predict a real run on this machine?

    python -m experiments.benchmarks.async_vs_sync [--latency-ms 50 500]

Trains the quickstart's task under `async` and under `sync`, one process and one
CPU device a side, then simulates both from what each run's log says that its
parts took, and compares tokens consumed a second. With `--latency-ms` every
answer of the environment takes a log-uniform time between the two, so that a
few are late. Pass: both predictions within 15%. Both devices share the
machine's cores: see the load that is printed before believing a ratio.

Found with `--batches 24 --imitation 0` (answers of random weights, nearly
all as long as allowed) on two cores under a load of 9, one run each: predicted
over measured is async 0.87 and sync 1.08, with latency async 0.97 and sync
1.06. Async over sync was 1.42, with latency 1.53.

The last line is JSON, by schedule: measured and predicted tokens a second,
their ratio, and idle shares of both; and the ratio of async over sync.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np

from experiments import quickstart
from rl_tpu import config as configs
from rl_tpu import envs, metrics, parts, simulate, train
from rl_tpu.view import View
from rl_tpu.virtual.config import Config, Distribution, Service

KEPT = ("tokens_per_second", "learner_idle_share", "generator_idle_share")
SEED = 0
HOST_SECONDS = 0.05
"""Between two dispatches, less is the host's time and more is idleness."""


class Measured:
  """An environment that may take its time, and notes what was asked of it."""

  def __init__(self, environment, rng, latency, lengths: list[int]):
    self._environment, self._rng = environment, rng
    self._latency, self._lengths = latency, lengths

  async def reset(self):
    """The prompt."""
    return await self._environment.reset()

  async def step(self, action, stop_reason):
    """The answer, late."""
    self._lengths.append(len(action))
    if self._latency is not None:
      low, high = np.log(self._latency)
      await asyncio.sleep(np.exp(self._rng.uniform(low, high)) / 1e3)
    return await self._environment.step(action, stop_reason)


def measure(config: parts.Config, latency) -> tuple[dict[str, Any], list[int]]:
  """Trains; returns the run's figures and the lengths of all actions."""
  task, lengths = envs.get(config.task.name).Task, []
  rng, environment = np.random.default_rng(SEED), task.environment
  task.environment = lambda self, prompt: Measured(
    environment(self, prompt), rng, latency, lengths
  )
  try:
    train.run(config, View(0))
  finally:
    task.environment = environment
  return read(config), lengths


def read(config: parts.Config) -> dict[str, Any]:
  """Figures of a run's log after its warm-up."""
  first = config.simulate.warm_up
  rows = [
    row
    for row in metrics.read_csv(config.run_directory / "metrics.csv")
    if "action_tokens" in row and row["batch"] >= first
  ]
  begin, end = rows[0]["seconds"], rows[-1]["seconds"]
  tokens = sum(row["action_tokens"] for row in rows[1:])
  spent: dict[str, list[float]] = {}
  turns: list[tuple[float, float]] = []
  for line in metrics.read_jsonl(config.run_directory / "events.jsonl"):
    for part, kind, start, stop in line["intervals"]:
      if begin <= start and stop <= end:
        spent.setdefault(f"{part} {kind}", []).append(stop - start)
      if part == "generator" and begin <= start and stop <= end:
        turns.append((start, stop))
  turns.sort()
  gaps = [b[0] - a[1] for a, b in itertools.pairwise(turns)]
  spent["host"] = [gap for gap in gaps if gap < HOST_SECONDS]
  busy = sum(stop - start for start, stop in turns) + sum(spent["host"])
  return {
    "tokens_per_second": tokens / (end - begin),
    "learner_idle_share": sum(spent.get("learner wait", [])) / (end - begin),
    "generator_idle_share": 1 - busy / (end - begin),
    "mean": {name: float(np.mean(s)) for name, s in spent.items()},
  }


def predict(
  config: parts.Config, found: dict[str, Any], lengths: list[int], latency
) -> dict[str, Any]:
  """Simulates the run from the times and lengths that it had."""
  mean = found["mean"]
  service = Service(
    decode_step=(mean["generator generate"] + mean["host"])
    / config.engine.steps_per_dispatch,
    prefill_call=mean["generator prefill"] + mean["host"],
    prefill_per_token=0.0,
    update_per_batch=mean["learner train"],
    update_per_token=0.0,
    swap=mean.get("generator weights", 0.0),
  )
  with tempfile.TemporaryDirectory() as directory:
    path = pathlib.Path(directory) / "batches.jsonl"
    path.write_text(json.dumps({"lengths": lengths}) + "\n")
    settings = dataclasses.replace(
      config.simulate,
      service=service,
      lengths=Distribution(kind="empirical", directory=directory),
      latency=between(latency),
    )
    # What the log calls weights has recomputing in it.
    config = dataclasses.replace(config, simulate=settings, interruption="keep")
    return simulate.simulate(config, service).figures()


def between(latency) -> Distribution:
  """A log-normal with the quartiles' spread of a log-uniform."""
  if latency is None:
    return Distribution()
  low, high = (n / 1e3 for n in latency)
  return Distribution(
    kind="lognormal",
    mean=float((high - low) / np.log(high / low)),
    sigma=float(np.log(high / low) / np.sqrt(12)),
    least=low,
    largest=high,
  )


def main() -> None:
  """Runs both schedules and compares."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--latency-ms", type=float, nargs=2)
  parser.add_argument("--batches", type=int, default=40)
  parser.add_argument("--imitation", type=int, default=325)
  parser.add_argument("--directory", default="runs/async_vs_sync")
  flags = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", 2)
  cache = pathlib.Path("runs/cache/compiled").absolute()
  cache.mkdir(parents=True, exist_ok=True)
  jax.config.update("jax_compilation_cache_dir", str(cache))
  result: dict[str, Any] = {"load": os.getloadavg()[0]}
  for schedule in ("async", "sync"):
    config = configs.build(parts.Config, quickstart.get_config(schedule))
    config = dataclasses.replace(
      config,
      directory=f"{flags.directory}/{schedule}",
      batches=flags.batches,
      warm_start=dataclasses.replace(
        config.warm_start,
        batches=flags.imitation,
        wrong_batches=min(config.warm_start.wrong_batches, flags.imitation),
      ),
      evaluation=dataclasses.replace(config.evaluation, every=0),
      checkpoint_every=flags.batches,
      simulate=Config(
        prompt_tokens=6, batches=flags.batches, warm_up=flags.batches // 4
      ),
    )
    found, lengths = measure(config, flags.latency_ms)
    predicted = predict(config, found, lengths, flags.latency_ms)
    ratio = predicted["tokens_per_second"] / found["tokens_per_second"]
    result[schedule] = {
      "measured": found,
      "predicted": {name: predicted[name] for name in KEPT},
      "ratio": ratio,
    }
    for name in KEPT:
      print(f"{schedule} {name}: {found[name]:.3g} ({predicted[name]:.3g})")
  for kind in ("measured", "predicted"):
    rates = [result[s][kind]["tokens_per_second"] for s in ("async", "sync")]
    result[f"{kind}_gain"] = rates[0] / rates[1]
  print(json.dumps(result))


if __name__ == "__main__":
  main()
