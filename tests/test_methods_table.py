"""The table of methods: every algorithm, and what its figures must say."""

import importlib.util
import json
import math
import pathlib

import pytest

from rl_tpu import algorithms

PATH = pathlib.Path(__file__).parent.parent / "experiments/methods_table.py"


@pytest.fixture(scope="module")
def table():
  spec = importlib.util.spec_from_file_location("methods_table", PATH)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def test_the_last_line_has_four_finite_figures_of_every_algorithm(
  table, capsys
):
  table.main()
  rows = json.loads(capsys.readouterr().out.splitlines()[-1])["algorithms"]
  assert tuple(rows) == algorithms.names()
  for name, row in rows.items():
    assert set(row) == {
      "loss",
      "gradient_norm",
      "masked_fraction",
      "effective_sample_size",
    }
    assert all(math.isfinite(figure) for figure in row.values()), name
    assert row["gradient_norm"] > 0
    assert 0 < row["effective_sample_size"] <= 1 + 1e-6
  for name in ("reinforce", "rloo"):
    assert rows[name]["masked_fraction"] == 0.0
    assert rows[name]["effective_sample_size"] == pytest.approx(1.0)
  for name in ("sao", "ppo", "dapo", "gspo", "m2po"):
    assert 0 < rows[name]["masked_fraction"] < 1, name
