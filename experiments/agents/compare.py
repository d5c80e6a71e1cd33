"""Which baseline teaches an agent fastest, at equal trajectories?

  python -m experiments.agents.compare [--methods=sao,grpo_dis] [--seeds=0,1]
  python -m experiments.agents.compare --seeds=  # only table and figure

Runs each method of `methods.py` with each seed in a process of its own, three
to four minutes each on two cores, and skips what results/curves.csv holds
already: stopped at any point, the same command goes on. Writes results/
curves.csv (a row for each batch and each evaluation of each run) and, from it,
results/curves.png; prints the table of README.md. The last line is JSON.
"""

import argparse
import csv
import json
import pathlib
import statistics
import subprocess
import sys

import matplotlib

from experiments.agents.methods import METHODS
from rl_tpu import metrics
from rl_tpu.figures import drawing

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = pathlib.Path("experiments/agents/results")
FIELDS = (
  *("reward", "heldout_accuracy", "heldout_greedy", "heldout_failed"),
  *("env_tool_calls", "env_tool_errors", "truncated", "action_tokens"),
  *("staleness_max", "clip_fraction", "explained_variance", "known_baseline"),
  *("failed_groups", "seconds"),
)
Run = tuple[str, int]


def main(arguments: list[str]) -> None:
  """Runs what is missing, then shows all there is."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--methods", default=",".join(METHODS))
  parser.add_argument("--seeds", default="0,1,2")
  parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
  asked = parser.parse_args(arguments)
  path = asked.results / "curves.csv"
  for seed in [int(seed) for seed in asked.seeds.split(",") if seed]:
    for method in asked.methods.split(","):
      if (method, seed) not in read(path):
        append(path, (method, seed), train(method, seed))
  runs = read(path)
  plot(runs, asked.results / "curves.png")
  print(json.dumps(table(runs)))


def train(method: str, seed: int) -> list[metrics.Row]:
  """Trains in another process, or goes on; returns the run's log.

  Raises:
    CalledProcessError: it failed.
  """
  config = RESULTS.with_name("methods.py")
  command = [sys.executable, "-m", "rl_tpu", "train"]
  command += [f"--config={config}:{method}", f"--config.seed={seed}"]
  done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
  summary = json.loads(done.stdout.splitlines()[-1])
  return metrics.read_csv(pathlib.Path(summary["directory"]) / "metrics.csv")


def append(path: pathlib.Path, run: Run, rows: list[metrics.Row]) -> None:
  """Adds a run's rows to the file."""
  new = not path.exists()
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(path, "a", newline="") as file:
    writer = csv.writer(file)
    if new:
      writer.writerow(("method", "seed", "batch", *FIELDS))
    for row in rows:
      figures = [f"{row[name]:.6g}" if name in row else "" for name in FIELDS]
      writer.writerow((*run, row["batch"], *figures))


def read(path: pathlib.Path) -> dict[Run, list[metrics.Row]]:
  """The rows of each run; none where there is no file."""
  runs: dict[Run, list[metrics.Row]] = {}
  if path.exists():
    with open(path, newline="") as file:
      for row in csv.DictReader(file):
        run = row.pop("method"), int(row.pop("seed"))
        values = {name: float(cell) for name, cell in row.items() if cell}
        runs.setdefault(run, []).append(values)
  return runs


def table(runs: dict[Run, list[metrics.Row]]) -> dict[str, dict[str, float]]:
  """Prints a line for each method; returns the same by name."""
  figures = {}
  print("| method | seeds | before | after | mean of evaluations | calls | bad")
  for method in METHODS:
    own = [describe(rows) for (name, _), rows in runs.items() if name == method]
    if not own:
      continue
    figures[method] = {"seeds": len(own)}
    for name in own[0]:
      mean, half = drawing.interval([run[name] for run in own])
      figures[method] |= {name: round(mean, 4), f"{name}_pm": round(half, 4)}
    cells = [
      f"{figures[method][name]:.3f} ± {figures[method][name + '_pm']:.3f}"
      for name in ("before", "after", "curve", "calls", "bad_calls")
    ]
    print(f"| {method} | {len(own)} | " + " | ".join(cells))
  return figures


def describe(rows: list[metrics.Row]) -> dict[str, float]:
  """A run's figures.

  Returns:
    before, after: held-out accuracy; curve: its mean over the evaluations
    after the first, which says how soon it rose; reward: of all training;
    calls, bad_calls: per episode of the last ten batches; seconds: of
    training.
  """
  heldout = [row["heldout_accuracy"] for row in rows if _evaluated(row)]
  trained = [row for row in rows if "reward" in row]
  last = trained[-10:]
  return {
    "before": heldout[0],
    "after": heldout[-1],
    "curve": statistics.fmean(heldout[1:]),
    "reward": statistics.fmean(row["reward"] for row in trained),
    "calls": statistics.fmean(row["env_tool_calls"] for row in last),
    "bad_calls": statistics.fmean(row["env_tool_errors"] for row in last),
    "seconds": trained[-1]["seconds"],
  }


def _evaluated(row: metrics.Row) -> bool:
  return "heldout_accuracy" in row


def plot(runs: dict[Run, list[metrics.Row]], path: pathlib.Path) -> None:
  """Draws each run's curves: accuracy, calls, and the share of bad ones."""
  figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
  colors = dict(zip(METHODS, plt.get_cmap("tab10").colors, strict=False))
  for (method, seed), rows in runs.items():
    trained = [row for row in rows if "reward" in row]
    batches = [row["batch"] for row in trained]
    calls = [row["env_tool_calls"] for row in trained]
    bad = [row["env_tool_errors"] for row in trained]
    label = method if seed == 0 else None
    style = {"color": colors[method], "alpha": 0.7, "label": label}
    evaluated = [row for row in rows if _evaluated(row)]
    axes[0].plot(
      [row["batch"] for row in evaluated],
      [row["heldout_accuracy"] for row in evaluated],
      marker="o",
      markersize=3,
      **style,
    )
    axes[1].plot(batches, calls, **style)
    share = [b / c if c else 0.0 for b, c in zip(bad, calls, strict=True)]
    axes[2].plot(batches, share, **style)
  for one, title in zip(
    axes,
    ("held-out accuracy", "calls per episode", "share of calls refused"),
    strict=True,
  ):
    one.set(xlabel="batch of 128 trajectories", title=title, ylim=(0, None))
  axes[0].legend(frameon=False)
  figure.savefig(path, dpi=110)
  plt.close(figure)


if __name__ == "__main__":
  main(sys.argv[1:])
