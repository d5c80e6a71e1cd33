"""The study of an agent's baselines."""

import matplotlib.pyplot as plt
import pytest

from experiments.agents import baselines, methods
from rl_tpu import parts
from rl_tpu.config import build

NAMES = [f"{c['method']}_{c['seed']}" for c in baselines.cells("cpu")]


def rows(**after):
  """Rows that end at 0.95, or where `after` says by METHOD_SEED."""
  found = []
  for cell in baselines.cells("cpu"):
    end = after.get(f"{cell['method']}_{cell['seed']}", 0.95)
    found.append(cell | {"batch": 0, "heldout_accuracy": 0.05})
    for batch in range(1, 21):
      calls = {"env_tool_calls": batch / 20, "env_tool_errors": 0.1}
      row = cell | {"batch": batch, "reward": 0.5} | calls
      if batch % 10 == 0:
        row["heldout_accuracy"] = end
      found.append(row)
  return found


@pytest.mark.parametrize(
  ("after", "outcome"),
  [
    ({}, "passed"),
    ({"sao_2": 0.89}, "weaker"),
    (
      {f"{m}_{s}": 0.5 for m in baselines.METHODS for s in range(3)},
      "not_seen",
    ),
  ],
)
def test_every_run_must_have_learned(after, outcome):
  claim = baselines.ARTEFACTS["baselines of an agent"]
  assert claim.judge(rows(**after)).outcome == outcome


def test_a_run_is_described_by_its_evaluations_and_its_last_ten_batches():
  own = [r for r in rows(sao_0=0.9) if (r["method"], r["seed"]) == ("sao", 0)]
  own[10]["heldout_accuracy"] = 0.5
  found = baselines.describe(own)
  assert found == pytest.approx(
    {"before": 0.05, "after": 0.9, "curve": 0.7, "calls": 0.775, "refused": 0.1}
  )


def test_figure_has_every_panel():
  figure = plt.figure()
  baselines.draw(rows(), figure)
  figure.canvas.draw()
  assert all(axes.lines for axes in figure.axes)
  plt.close(figure)


@pytest.mark.parametrize("method", methods.METHODS)
def test_every_method_builds_with_as_many_trajectories(method):
  config = build(parts.Config, methods.get_config(method))
  assert config.groups_per_batch * config.group_size == 128
