"""The judges of the studies of AReaL, fed with rows that must and must not
pass; and no artefact of the two papers without a study."""

import pathlib

import matplotlib.pyplot as plt
import numpy as np
import pytest

from experiments import stated
from experiments.areal import (
  elsewhere,
  interruption,
  packing,
  proposition,
  settings,
  simulated,
  tables,
  timelines,
)
from experiments.sao import streaming
from rl_tpu import figures

ROOT = pathlib.Path(__file__).parents[2] / "experiments"
LISTED = {
  "areal": (
    *("Fig. 1", "Fig. 2", "Fig. 3", "Fig. 4", "Fig. 5a", "Fig. 5b", "Fig. 5c"),
    *("Fig. 6a", "Fig. 6b", "Table 1: scores", "Table 1: hours", "Table 2"),
    *("Table 3", "Table 4", "Table 5", "Table 6", "Table 7: scores"),
    *("Table 7: throughput", "Table 8", "Proposition 1"),
  ),
  "sao": (
    *("Fig. 1", "Fig. 2", "Fig. 3", "Fig. 4a", "Fig. 4b", "Fig. 4c"),
    *("Fig. 5a", "Fig. 5b", "Fig. 6", "Table 1", "Table 2", "Table 3"),
    *("Table 4", "Table 5", "ablation: observations", "ablation: clips"),
  ),
  "beyond": (
    *("matrix: corrections", "matrix: compositions"),
    *("cost: time", "cost: memory"),
  ),
}


@pytest.mark.parametrize("paper", LISTED)
def test_no_artefact_of_a_paper_is_without_a_study(paper):
  found = [n for s in figures.find(ROOT, [paper]) for n in s.claims]
  assert sorted(found) == sorted(LISTED[paper])
  text = (ROOT / "README.md").read_text()
  for name in LISTED[paper]:
    assert f"\n| {name} | [{paper}/" in text


def judged(module, name, rows):
  return module.ARTEFACTS[name].judge(rows)


def drawn(module, rows):
  figure = plt.figure()
  module.draw(rows, figure)
  figure.canvas.draw()
  plt.close(figure)


# Simulated pods.


def pods(*, rising=True, step=2.0, hours=2.0, ends=(1.1, 2.0)):
  """Rows of `simulated`: gains by limit, and async over sync."""
  rows = []
  for cell in simulated.cells("cpu"):
    limit, item = cell["limit"], cell["item"]
    rate, seconds = 1000.0, 100.0
    if item in ("Fig. 5c", "Table 7") and limit > 0:
      place = simulated.LIMITS.index(limit)
      rate *= step * (1 + 0.01 * place * (1 if rising else -1))
    if cell["schedule"] == "async" and item == "Table 1":
      seconds /= hours
    if cell["schedule"] == "async" and item == "Fig. 4":
      counts = sorted(simulated.FIGURE_4[cell["model"], cell["longest"]])
      rate *= ends[0] if cell["gpus"] == counts[0] else ends[1]
    rows.append(cell | {"tokens_per_second": rate, "batch_seconds": seconds})
  return rows


@pytest.mark.parametrize(
  ("name", "changes", "outcome"),
  [
    ("Fig. 5c", {}, "passed"),
    ("Fig. 5c", {"step": 1.4}, "weaker"),
    ("Fig. 5c", {"step": 0.9}, "not_seen"),
    ("Table 7: throughput", {}, "passed"),
    ("Table 7: throughput", {"step": 1.4}, "weaker"),
    ("Table 1: hours", {}, "passed"),
    ("Table 1: hours", {"hours": 1.2}, "weaker"),
    ("Table 1: hours", {"hours": 0.9}, "not_seen"),
    ("Fig. 4", {}, "passed"),
    ("Fig. 4", {"ends": (2.0, 1.5)}, "weaker"),
    ("Fig. 4", {"ends": (0.9, 0.95)}, "not_seen"),
  ],
)
def test_simulated_pods_are_judged_by_gain_and_plateau(name, changes, outcome):
  rows = pods(**changes)
  assert judged(simulated, name, rows).outcome == outcome
  drawn(simulated, rows)


@pytest.mark.parametrize("name", ["Fig. 5c", "Table 7: throughput"])
def test_throughput_that_falls_with_the_limit_is_no_pass(name):
  rows = pods()
  for row in rows:
    if row["item"] in ("Fig. 5c", "Table 7") and row["limit"] == 8:
      row["tokens_per_second"] *= 0.95
  assert judged(simulated, name, rows).outcome == "weaker"


def test_hours_are_those_of_sync_over_async():
  assert simulated._hours(pods(hours=3.0))["32b"] == pytest.approx(3.0)


# Packing and interruption.


def packed(gains):
  return [
    cell
    | {
      "tokens": 30_000,
      "tokens_per_cpu_second_fixed": 1000.0,
      "tokens_per_cpu_second_dynamic": 1000.0 * gains[cell["model"]],
      "microbatches_fixed": 32,
      "microbatches_dynamic": 20,
      "length_fixed": 2000,
      "length_dynamic": 2000,
    }
    for cell in packing.cells("cpu")
  ]


@pytest.mark.parametrize(
  ("gains", "outcome"),
  [((1.4, 1.3), "passed"), ((1.2, 1.2), "weaker"), ((0.9, 0.95), "not_seen")],
)
def test_packing_is_judged_by_tokens_a_processor_second(gains, outcome):
  names = packing._models(packed(dict.fromkeys(packing.MODELS, 1.0)))
  each = np.interp(range(len(names)), [0, max(len(names) - 1, 1)], gains)
  rows = packed(dict(zip(names, each.tolist(), strict=True)))
  assert judged(packing, "Fig. 6a", rows).outcome == outcome
  drawn(packing, rows)


def test_packing_that_slows_one_model_is_no_pass():
  gains = dict.fromkeys(packing.MODELS, 2.0)
  gains[next(iter(gains))] = 0.98
  assert judged(packing, "Fig. 6a", packed(gains)).outcome == "weaker"


@pytest.mark.parametrize(
  ("gain", "outcome"), [(1.2, "passed"), (1.05, "weaker"), (0.9, "not_seen")]
)
def test_interruption_is_judged_by_its_least_gain(gain, outcome):
  rows = [
    cell
    | {
      "updates": 4,
      "tokens_per_cpu_second_recompute": 1000.0 * gain,
      "tokens_per_cpu_second_drain": 1000.0,
    }
    for cell in interruption.cells("cpu")
  ]
  assert judged(interruption, "Fig. 6b", rows).outcome == outcome
  drawn(interruption, rows)


def test_one_slow_interval_is_no_pass():
  rows = [
    cell
    | {
      "tokens_per_cpu_second_recompute": 1300.0 if index else 1050.0,
      "tokens_per_cpu_second_drain": 1000.0,
    }
    for index, cell in enumerate(interruption.cells("cpu"))
  ]
  assert judged(interruption, "Fig. 6b", rows).outcome == "weaker"


# Tables of settings.


def fields(**changed):
  rows = []
  for cell in tables.cells("cpu"):
    rows += [
      cell | row | changed.get(cell["field"], {})
      for row in tables.measure(cell, "cpu")
    ]
  return rows


def test_the_papers_settings_are_read_from_configs_that_build():
  rows = fields()
  assert judged(tables, "Table 3", rows).outcome == "passed"
  assert judged(tables, "Fig. 2", rows).outcome == "passed"
  drawn(tables, rows)


def test_a_setting_that_is_not_the_papers_is_named():
  rows = fields(seed={"here": 2})
  verdict = judged(tables, "Table 3", rows)
  assert verdict.outcome == "weaker"
  assert "seed (2; the paper 1)" in verdict.seen


def test_a_field_or_part_that_is_not_there_is_no_row():
  with pytest.raises(AttributeError, match="beta3"):
    stated.read(settings.get_config("7b"), "learner.beta3")
  with pytest.raises(AttributeError, match="Trainer"):
    tables._found("rl_tpu.learner:Trainer")


# Proposition 1.


def test_recorded_logps_are_those_of_one_policy():
  row = proposition.toy(7)
  assert row["mass_error"] < 1e-12 and row["recorded_error"] < 1e-12
  assert row["rescored_error"] > 1e-3


def test_the_engines_answers_are_samples_of_the_constructed_policy():
  cells = proposition.cells("smoke")
  rows = [c | r for c in cells for r in proposition.measure(c, "smoke")]
  assert judged(proposition, "Proposition 1", rows).outcome == "passed"
  for column in ("constructed_gap", "recorded_error", "mass_error"):
    broken = [row | {column: 0.01} if column in row else row for row in rows]
    assert judged(proposition, "Proposition 1", broken).outcome == "not_seen"


# Timelines.


def lanes(**changed):
  shares = {
    "slots_unused": {"synchronous": 0.4, "one step ahead": 0.5},
    "learner_waits": {"synchronous": 0.6, "one step ahead": 0.4},
    "interrupted": {"synchronous": 0.0, "one step ahead": 0.0},
    "generator_idle": {"synchronous": 0.1, "one step ahead": 0.1},
    "staleness_max": {"synchronous": 0, "one step ahead": 1},
  }
  last = {
    "slots_unused": 0.1,
    "learner_waits": 0.1,
    "interrupted": 9.0,
    "generator_idle": 0.0,
    "staleness_max": 3,
  } | changed
  return [
    cell
    | {"lane": "generator 0", "kind": kind, "slots": 1.0}
    | {"start": 0.1 * place, "end": 0.1 * place + 0.1}
    | {
      name: by.get(cell["schedule"], last[name]) for name, by in shares.items()
    }
    for cell in timelines.cells("cpu")
    for place, kind in enumerate(("generate", "weights", "recompute"))
  ]


@pytest.mark.parametrize(
  ("name", "changed", "outcome"),
  [
    ("Fig. 1", {}, "passed"),
    ("Fig. 1", {"slots_unused": 0.3}, "weaker"),
    ("Fig. 1", {"learner_waits": 0.7}, "weaker"),
    ("Fig. 1", {"slots_unused": 0.45}, "not_seen"),
    ("Fig. 3", {}, "passed"),
    ("Fig. 3", {"interrupted": 0.0}, "not_seen"),
    ("Fig. 3", {"generator_idle": 0.1}, "not_seen"),
    ("Fig. 3", {"staleness_max": 9}, "not_seen"),
  ],
)
def test_timelines_are_judged_by_who_waits(name, changed, outcome):
  rows = lanes(**changed)
  assert judged(timelines, name, rows).outcome == outcome
  drawn(timelines, rows)


def test_bars_are_cut_to_the_picture_and_neighbours_joined():
  bars = [
    ("learner", "train", 0.0, 2.0, 1.0),
    ("learner", "train", 2.001, 3.0, 1.0),
    ("learner", "wait", 3.0, 9.0, 1.0),
  ]
  found = timelines._shown(bars, 1.0, 5.0)
  assert found == [
    ("learner", "train", 0.0, 0.5, 1.0),
    ("learner", "wait", 0.5, 1.0, 1.0),
  ]


# Tables of scores, and streaming.


def scores(after, before=0.4):
  rows = []
  for cell in elsewhere.cells("cpu"):
    noise = 0.001 * cell["seed"]
    value = after.get(cell["eta"], 0.9) + noise
    rows.append(cell | {"batch": 4, "reward": before + noise})
    rows.append(cell | {"batch": 40, "heldout_accuracy": value, "reward": 0.9})
  return rows


@pytest.mark.parametrize(
  ("name", "after", "outcome"),
  [
    ("Table 5", {}, "passed"),
    ("Table 5", {4: 0.8}, "weaker"),
    ("Table 5", {4: 0.4}, "not_seen"),
    ("Table 6", {}, "passed"),
    ("Table 6", {8: 0.8}, "weaker"),
    ("Table 8", {}, "passed"),
    ("Table 8", {16: 0.8}, "weaker"),
    ("Table 8", {8: 0.8}, "not_seen"),
  ],
)
def test_scores_elsewhere_are_judged_against_sync_and_before(
  name, after, outcome
):
  assert judged(elsewhere, name, scores(after)).outcome == outcome


def streamed(lag, tail, unused):
  """Rows in which throughput grows with the limit, and lag with it."""
  rows = []
  for cell in streaming.cells("cpu"):
    single = cell["group"] == 1
    place = streaming.LIMITS.index(cell["flying"])
    rows.append(
      cell
      | {
        # At an equal limit G = 1 has twice the throughput.
        "tokens_per_second": 1000.0 * 2**place * (2 if single else 1),
        "lag_mean": 2.0**place * (2 * lag if single else 1),
        "lag_95": 2.0**place * (2 * tail if single else 1),
        "slots_unused": unused if single else 0.3,
      }
    )
  return rows


def test_streaming_is_judged_by_lag_at_equal_throughput():
  def outcome(*values):
    return judged(streaming, "Fig. 2", streamed(*values)).outcome

  assert outcome(0.9, 1.0, 0.2) == "passed"
  assert outcome(0.9, 1.1, 0.2) == outcome(0.9, 1.0, 0.4) == "weaker"
  assert outcome(1.1, 0.9, 0.2) == "not_seen"
  own, other = streaming.lags(streamed(0.5, 1.0, 0.2), "lag_mean", 1.0)
  assert own.tolist() == [1.0, 2.0, 4.0] and other.tolist() == [2.0, 4.0, 8.0]
  drawn(streaming, streamed(0.9, 1.0, 0.2))


def test_a_quantile_counts_tokens():
  assert streaming._quantile({0: 90, 1: 5, 7: 5}, 0.95) == 1
  assert streaming._quantile({0: 90, 1: 4, 7: 6}, 0.95) == 7
