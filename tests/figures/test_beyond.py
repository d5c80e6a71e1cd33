"""The studies that no paper has: their batch, and their judges' rows."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from experiments.beyond import cost, matrix, methods
from rl_tpu import algorithms


def accuracies(**changed):
  """Rows of the matrix; `changed` by METHOD_CONDITION, spaces left out."""
  rows = []
  for cell in matrix.cells("cpu"):
    name = f"{cell['method']}_{cell['condition']}".replace(" ", "")
    value = 0.6 if cell["method"] == "GRPO" else 0.9
    value = changed.get(name, value) + 0.001 * cell["seed"] ** 2
    rows += [
      cell | {"batch": batch, "heldout_accuracy": value} for batch in (4, 8)
    ]
  return rows


@pytest.mark.parametrize(
  ("name", "changed", "outcome"),
  [
    ("matrix: corrections", {}, "passed"),
    ("matrix: corrections", {"SAO_both": 0.6}, "not_seen"),
    ("matrix: corrections", {"SC_stale": 0.5}, "not_seen"),
    ("matrix: corrections", {"SC_quantized": 0.5}, "passed"),
    ("matrix: compositions", {}, "weaker"),
    ("matrix: compositions", {"AReaL+SC_both": 0.95}, "passed"),
    (
      "matrix: compositions",
      {"AReaL+SC_both": 0.95, "SAO+SC_stale": 0.85},
      "not_seen",
    ),
  ],
)
def test_the_matrix_is_judged_by_differences_paired_by_seed(
  name, changed, outcome
):
  rows = accuracies(**changed)
  assert matrix.ARTEFACTS[name].judge(rows).outcome == outcome


def test_a_gain_within_its_interval_is_weaker():
  rows = accuracies()
  for row in rows:
    if row["method"] == "SAO" and row["condition"] == "both":
      row["heldout_accuracy"] = 0.61 + 0.05 * row["seed"]
  found = matrix.ARTEFACTS["matrix: corrections"].judge(rows)
  assert found.outcome == "weaker"


def costs(**changed):
  time = {"AReaL": 1.3, "SAO": 2.5, "SC": 1.05}
  time |= {"AReaL + SC": 1.4, "SAO + SC": 2.6, "GRPO": 1.0} | changed
  return [
    {
      "method": name,
      "cpu_seconds": time[name],
      "cpu_seconds_over_grpo": time[name],
      "largest_program_bytes": 1000 * time.get(f"{name} bytes", 1.0),
      "kept_bytes": 1900 if "SAO" in name else 1000,
    }
    for name in methods.METHODS
  ]


@pytest.mark.parametrize(
  ("name", "changed", "outcome"),
  [
    ("cost: time", {}, "passed"),
    ("cost: time", {"AReaL": 1.6}, "weaker"),
    ("cost: time", {"SC": 1.3}, "weaker"),
    ("cost: time", {"SAO": 4.5}, "weaker"),
    ("cost: time", {"SAO + SC": 4.0}, "not_seen"),
    ("cost: memory", {}, "passed"),
    ("cost: memory", {"SC bytes": 1.5}, "weaker"),
    ("cost: memory", {"SC bytes": 3.0}, "not_seen"),
  ],
)
def test_costs_are_judged_over_grpo_and_over_what_is_centered(
  name, changed, outcome
):
  rows = costs(**changed)
  assert cost.ARTEFACTS[name].judge(rows).outcome == outcome
  figure = plt.figure()
  cost.draw(rows, figure)
  figure.canvas.draw()
  plt.close(figure)


def test_every_method_is_measured_on_the_same_tokens():
  made = [cost.made(name, "smoke") for name in methods.METHODS]
  for name, (learner, batch) in zip(methods.METHODS, made, strict=True):
    np.testing.assert_array_equal(batch.tokens, made[0][1].tokens)
    head = batch.behavior_topk_ids is not None
    assert head == methods.centered(name)
    assert head == ("target_topk_logp" in learner.requires)
    assert (learner.critic is not None) == name.startswith("SAO")


def test_the_head_holds_the_token_that_was_taken():
  _, batch = cost.made("SC", "smoke")
  at = batch.action_mask
  assert (batch.behavior_topk_ids[at][:, 0] == batch.tokens[at]).all()
  taken = batch.behavior_topk_logp[at][:, 0]
  np.testing.assert_allclose(taken, batch.behavior_logp[at])


def test_methods_are_those_of_their_algorithms():
  for name, (algorithm, _) in methods.METHODS.items():
    choice = methods.choice(name)
    assert isinstance(choice.config, algorithms.get(algorithm).Config)
    assert getattr(choice.config, "centering", False) == methods.centered(name)
