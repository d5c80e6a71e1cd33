"""AReaL's Fig. 5c and Table 1 in simulated time, beside the paper's figures.

    python -m experiments.areal.simulated_study

writes `results/simulated_pod.csv`, in about three minutes on one core; what is
assumed stands in `simulated_pod.py`. A row is one pod: its study, what was set,
simulated action tokens a second (of an eighth of the paper's pod) and seconds a
batch, idle shares, and the gain over the study's synchronous pod beside the
paper's (Fig. 5c: throughput over that of limit 0; Table 1: hours of sync over
hours of async).
"""

import csv
import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from experiments.areal import simulated_pod
from rl_tpu import config as configs
from rl_tpu import parts, simulate

RESULTS = (
  pathlib.Path(simulated_pod.__file__).parent / "results" / "simulated_pod.csv"
)
FIGURE_5C = {0: 1.0, 1: 2.09, 2: 2.77, 4: 2.77, 8: 2.89, 16: 2.97, None: 3.08}
"""Throughput by staleness limit, over that of limit 0."""
TABLE_1 = {"1.5b": 2.77, "7b": 2.27, "14b": 2.23, "32b": 1.64}
"""Hours of synchronous AReaL over those of asynchronous, for as many steps."""
FIGURES = (
  "tokens_per_second",
  "batch_seconds",
  "learner_idle_share",
  "generator_idle_share",
  "staleness_mean",
)


def pod(arg: str, **simulated: Any) -> parts.Config:
  """The config of a pod; `simulated` changes how much of it is simulated."""
  config = configs.build(parts.Config, simulated_pod.get_config(arg))
  return dataclasses.replace(
    config, simulate=dataclasses.replace(config.simulate, **simulated)
  )


def figures(config: parts.Config) -> dict[str, float]:
  """What one pod does."""
  found = simulate.simulate(config, simulate.service_times(config)).figures()
  return {name: found[name] for name in FIGURES}


def by_staleness(**simulated: Any) -> Iterator[dict[str, Any]]:
  """Fig. 5c."""
  base, none = pod("staleness", **simulated), 0.0
  for limit, paper in FIGURE_5C.items():
    found = figures(dataclasses.replace(base, max_staleness=limit))
    none = none or found["tokens_per_second"]
    gain = found["tokens_per_second"] / none
    setting = "none" if limit is None else str(limit)
    yield row("figure_5c", setting, found, gain, paper)


def by_model(**simulated: Any) -> Iterator[dict[str, Any]]:
  """Table 1, two rows a model."""
  for name, paper in TABLE_1.items():
    sync = figures(pod(f"sync-{name}", **simulated))
    yield row("table_1", f"sync-{name}", sync, 1.0, 1.0)
    found = figures(pod(f"async-{name}", **simulated))
    gain = found["tokens_per_second"] / sync["tokens_per_second"]
    yield row("table_1", f"async-{name}", found, gain, paper)


def row(
  study: str, setting: str, found: dict[str, float], gain: float, paper: float
) -> dict[str, Any]:
  """One line of the results."""
  return {
    "study": study,
    "setting": setting,
    **{name: f"{value:.5g}" for name, value in found.items()},
    "gain": f"{gain:.2f}",
    "paper_gain": paper,
  }


def main() -> None:
  """Simulates all and writes the results."""
  RESULTS.parent.mkdir(exist_ok=True)
  with RESULTS.open("w") as file:
    writer: csv.DictWriter | None = None
    for rows in (by_staleness(), by_model()):
      for line in rows:
        if writer is None:
          writer = csv.DictWriter(file, list(line), lineterminator="\n")
          writer.writeheader()
        writer.writerow(line)
        csv.DictWriter(sys.stdout, list(line)).writerow(line)


if __name__ == "__main__":
  main()
