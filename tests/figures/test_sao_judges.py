"""Judges of SAO's studies: rows that pass their rule, and rows that fail."""

import math

import pytest

from experiments.sao import (
  arms,
  clips,
  coding,
  critic,
  levels,
  observations,
  styles,
)

BATCHES = (20, 40, 60)


def rows_of(study, column, named, default, by_arm):
  """A row for each cell and batch.

  Args:
    study: whose cells.
    column: that tells arms apart.
    named: the measured column that differs between arms.
    default: its value, and every other's.
    by_arm: values, or functions of (batch, seed), for some arms.
  """
  rows = []
  for cell in study.cells("cpu"):
    for batch in BATCHES:
      value = by_arm.get(cell[column], default)
      value = value(batch, cell["seed"]) if callable(value) else value
      rows.append(
        cell
        | {"batch": batch}
        | {name: default for name in study.COLUMNS}
        | {named: value + 0.001 * cell["seed"]}
      )
  return rows


def noisy(batch, seed):
  """0.5 in the mean over seeds, far apart."""
  return (0.3, 0.5, 0.7)[seed]


@pytest.mark.parametrize(
  ("study", "column", "artefact", "named", "by_arm", "outcome"),
  [
    (arms, "method", "Table 1", "heldout_accuracy", a, outcome)
    for a, outcome in (
      ({"GRPO": 0.3}, "passed"),
      ({"GRPO": 0.3, "SAO": 0.4}, "not_seen"),
      ({"GRPO": noisy, "SAO": 0.6, "GRPO+DIS": 0.6}, "weaker"),
      ({"GRPO": 0.6}, "not_seen"),
    )
  ]
  + [
    (arms, "method", "Fig. 3", "reward", a, outcome)
    for a, outcome in (
      ({"GRPO": lambda b, s: 0.5 if b < 60 else 0.1}, "passed"),
      ({"GRPO": lambda b, s: 0.5 if b < 60 else 0.4}, "weaker"),
      ({}, "not_seen"),
      (
        {
          "GRPO": lambda b, s: 0.5 if b < 60 else 0.1,
          "SAO": lambda b, s: 0.5 if b < 60 or s else 0.3,
        },
        "not_seen",
      ),
    )
  ]
  + [
    (critic, "arm", "Table 3", "heldout_accuracy", a, outcome)
    for a, outcome in (
      ({"SAO": 0.6}, "passed"),
      ({"SAO": 0.6, "K = 1": 0.6}, "not_seen"),
      ({"SAO": 0.6, "K = 1": noisy}, "weaker"),
    )
  ]
  + [
    (critic, "arm", "Table 4", "heldout_accuracy", a, outcome)
    for a, outcome in (
      ({"SAO": 0.6}, "passed"),
      ({"SAO": 0.6, "VAPO": 0.7}, "not_seen"),
    )
  ]
  + [
    (critic, "arm", "Fig. 4a", "explained_variance", a, outcome)
    for a, outcome in (
      ({"slow": 0.6}, "passed"),
      ({"SAO": 0.6}, "not_seen"),
      ({"slow": lambda b, s: 0.9 if b < 40 else 0.4}, "not_seen"),
    )
  ]
  + [
    (critic, "arm", "Fig. 4b", "critic_grad_norm", a, outcome)
    for a, outcome in (
      ({"all trained": 1.0}, "passed"),
      ({"SAO": 1.0}, "not_seen"),
    )
  ]
  + [
    (critic, "arm", "Fig. 4c", "clip_fraction", a, outcome)
    for a, outcome in (
      ({"SAO": 0.01}, "passed"),
      ({"SAO": 0.03}, "not_seen"),
      ({"SAO": lambda b, s: -0.001 * s}, "not_seen"),
    )
  ]
  + [
    (levels, "level", "Table 5", "heldout_accuracy", a, outcome)
    for a, outcome in (
      ({"token": 0.6}, "passed"),
      ({"token": 0.6, "step_last": noisy}, "weaker"),
      ({"token": 0.4}, "not_seen"),
    )
  ]
  + [
    (levels, "level", "Fig. 6", "reward", a, outcome)
    for a, outcome in (({"token": 0.6}, "passed"), ({}, "not_seen"))
  ]
  + [
    (clips, "clip", "ablation: clips", "heldout_accuracy", a, outcome)
    for a, outcome in (
      ({"mask": 0.6}, "passed"),
      ({"mask": 0.6, "none": 0.6}, "weaker"),
      ({"mask": 0.6, "none": 0.7}, "not_seen"),
    )
  ]
  + [
    (coding, "method", "Table 2", "heldout_accuracy", a, outcome)
    for a, outcome in (
      ({"SAO": 0.8, "GRPO+DIS": 0.7}, "passed"),
      ({"SAO": 0.7, "GRPO+DIS": 0.8}, "not_seen"),
      ({"SAO": 0.4, "GRPO+DIS": 0.3}, "not_seen"),
    )
  ],
)
def test_judged_by_differences_paired_by_seed(
  study, column, artefact, named, by_arm, outcome
):
  rows = rows_of(study, column, named, 0.5, by_arm)
  found = study.ARTEFACTS[artefact].judge(rows)
  assert found.outcome == outcome, found.seen


@pytest.mark.parametrize(("gap", "outcome"), [(0, "passed"), (1, "not_seen")])
def test_what_observations_count_must_not_matter_at_lambda_1(gap, outcome):
  rows = rows_of(observations, "length", "reward", 0.5, {})
  for row in rows:
    if row["alpha"] < math.inf or row["length"] == "action":
      row["reward"] += 0.001 * (gap or row["alpha"] < math.inf)
  claim = observations.ARTEFACTS["ablation: observations"]
  assert claim.judge(rows).outcome == outcome


def styled(ends, late):
  """Rows of three phases of 32 batches.

  Args:
    ends: SAO's share of the preferred style at the end of each.
    late: SAO's reward less the running mean's, in each.
  """
  preferred = ("cute", "chuunibyou", "classical")
  rows = []
  for cell in styles.cells("cpu"):
    for batch in range(4, 97, 4):
      phase = (batch - 1) // 32
      row = {name: 0.0 for name in styles.COLUMNS}
      row[f"env_style_{preferred[phase]}"] = ends[phase]
      row["reward"] = 0.5 + 0.001 * cell["seed"]
      row["reward"] += late[phase] * (cell["method"] == "SAO")
      rows.append(cell | {"batch": batch} | row)
  return rows


@pytest.mark.parametrize(
  ("ends", "late", "a", "b"),
  [
    ((0.7, 0.6, 0.6), (0.0, 0.1, 0.1), "passed", "passed"),
    ((0.7, 0.4, 0.6), (0.0, 0.1, -0.1), "weaker", "not_seen"),
    ((0.7, 0.6, 0.1), (0.1, 0.0, 0.1), "not_seen", "not_seen"),
  ],
)
def test_styles_follow_each_switch(ends, late, a, b):
  rows = styled(ends, late)
  assert styles.ARTEFACTS["Fig. 5a"].judge(rows).outcome == a
  assert styles.ARTEFACTS["Fig. 5b"].judge(rows).outcome == b
