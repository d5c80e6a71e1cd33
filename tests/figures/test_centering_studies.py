"""Score Centering's studies: their problem, their judges, the paper's runs."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

from experiments.score_centering import (
  coin,
  corrections,
  grids,
  methods,
  online_offline,
  top_k,
  vocabulary,
)
from rl_tpu import algorithms, parts
from rl_tpu.config import build
from rl_tpu.models import quantization


def curve(method, steps, **mismatch):
  name, fields = methods.loss(method, top_k=0)
  module = algorithms.get(name)
  return coin.run(
    module,
    module.Config(**fields),
    quantization.Config(**mismatch),
    jnp.asarray(1),
    steps,
  )


def test_centering_changes_nothing_where_the_sampler_is_the_policy():
  plain, centered = curve("PG", 6), curve("SC", 6)
  assert not plain.engine_mismatch.any()
  np.testing.assert_allclose(plain.entropy, centered.entropy, rtol=1e-5)
  assert plain.entropy[0] != plain.entropy[-1]


def test_an_old_sampler_differs_until_it_takes_the_weights_over():
  gaps = curve("SC", 7, refresh_period=3).engine_mismatch
  assert [bool(gap > 0) for gap in gaps] == [0, 1, 1, 0, 1, 1, 0]


def test_a_larger_vocabulary_has_as_large_a_share_of_right_tokens():
  for size in (16, 128):
    params, right = coin.init(jax.random.key(0), size)
    assert params["head"].shape == (coin.WIDTH, size)
    assert (right.sum(1) == size // 4).all()


def test_a_rounded_or_noisy_sampler_differs_from_the_first_step_on():
  for mismatch in ({"weights": "int4"}, {"kv": "int4"}, {"weight_noise": 0.1}):
    assert curve("SC", 1, **mismatch).engine_mismatch[0] > 0.01


def grid_rows(final):
  """Rows that rise to 0.9 and end where `final(setting, method)` says."""
  return [
    cell
    | {"seed": seed, "batch": batch, "entropy": 1.0, "engine_mismatch": 0.1}
    | {"reward": reward}
    for cell in grids.cells("cpu")
    for seed in range(3)
    for batch, reward in (
      (1, 0.9),
      (2, final(cell["setting"], cell["method"]) + 0.001 * seed),
    )
  ]


@pytest.mark.parametrize(
  ("large", "outcome"), [(0.5, "passed"), (0.84, "weaker"), (0.9, "not_seen")]
)
def test_centering_must_lead_by_more_with_more_tokens(large, outcome):
  """TIS, next to the leader, ends `large` with 128 tokens and 0.8 with 16."""
  rows = []
  for cell in vocabulary.cells("cpu"):
    best = {16: 0.8, 128: large}[cell["vocabulary"]]
    end = {"SC": 0.85, "TIS": best}.get(cell["method"], 0.3)
    spread = 0.05 if (cell["method"], large) == ("TIS", 0.84) else 0.001
    if cell["vocabulary"] == 16 and cell["method"] == "SC":
      end = 0.805
    rows += [
      cell | {"seed": seed, "batch": 640, "reward": end + spread * (seed - 1)}
      for seed in range(3)
    ]
  claim = vocabulary.ARTEFACTS["Fig. 1, 3: vocabulary"]
  assert claim.judge(rows).outcome == outcome


@pytest.mark.parametrize("study", [grids, online_offline, top_k, vocabulary])
def test_what_is_measured_at_scale_smoke_is_judged_and_drawn(study):
  rows = [
    cell
    | {"seed": 0, "batch": 2, "reward": 0.5, "head_mass": 0.99}
    | {"heldout_accuracy": 0.5}
    for cell in study.cells("smoke")
  ]
  for claim in study.ARTEFACTS.values():
    assert claim.judge(rows).seen
  figure = plt.figure()
  study.draw(rows, figure)
  figure.canvas.draw()
  plt.close(figure)


def as_in_the_paper(setting, method):
  if setting == "fp8, fp8 cache":
    return 0.88
  if setting == "64 steps old":
    return {"SC": 0.86, "TIS+SC": 0.88, "MIS+SC": 0.88}.get(method, 0.5)
  if method in grids.CENTERED:
    return 0.88
  return {"noise 0.25": 0.7, "noise 0.5": 0.5}.get(setting, 0.3)


@pytest.mark.parametrize("figure", ["Fig. 1", "Fig. 3", "Fig. 4"])
def test_what_the_paper_shows_passes(figure):
  verdict = grids.ARTEFACTS[figure].judge(grid_rows(as_in_the_paper))
  assert verdict.outcome == "passed", verdict.seen


@pytest.mark.parametrize(
  ("figure", "setting", "method", "end", "outcome"),
  [
    ("Fig. 1", "fp8, fp8 cache", "PG", 0.7, "weaker"),
    ("Fig. 1", "fp8, int2 cache", "PG", 0.88, "weaker"),
    ("Fig. 1", "int2, int3 cache", "PG", 0.89, "not_seen"),
    ("Fig. 1", "int2, int3 cache", "TIS", 0.88, "weaker"),
    ("Fig. 3", "noise 1", "DPPO", 0.88, "weaker"),
    ("Fig. 3", "noise 0.5", "PG", 0.75, "not_seen"),
    ("Fig. 4", "int3, int2 cache", "IS", 0.9, "not_seen"),
    ("Fig. 4", "int3, int2 cache", "PPO", 0.88, "weaker"),
    ("Fig. 4", "64 steps old", "MIS+SC", 0.5, "weaker"),
    ("Fig. 4", "64 steps old", "SC", 0.5, "not_seen"),
  ],
)
def test_one_method_that_ends_elsewhere_changes_the_verdict(
  figure, setting, method, end, outcome
):
  def final(in_setting, of_method):
    if (in_setting, of_method) == (setting, method):
      return end
    return as_in_the_paper(in_setting, of_method)

  verdict = grids.ARTEFACTS[figure].judge(grid_rows(final))
  assert verdict.outcome == outcome, verdict.seen


@pytest.mark.parametrize(
  ("best", "worst", "outcome"),
  [
    ("+1/0", "+1/-1", "passed"),
    ("group mean", "+1/0", "not_seen"),
  ],
)
def test_the_order_of_reward_forms_offline(best, worst, outcome):
  rows = [
    cell
    | {
      "batch": 60,
      column: {best: 0.9, worst: 0.1}.get(cell["form"], 0.5),
    }
    for cell in online_offline.cells("cpu")
    for column in ("heldout_accuracy", "reward")
  ]
  claims = online_offline.ARTEFACTS
  assert claims["Fig. 2: offline"].judge(rows).outcome == outcome
  reverse = "passed" if outcome == "not_seen" else "not_seen"
  if reverse == "passed":
    assert claims["Fig. 2: online"].judge(rows).outcome == "passed"
  else:
    assert claims["Fig. 2: online"].judge(rows).outcome == "not_seen"


@pytest.mark.parametrize(
  ("off", "outcome"), [(0.0, "passed"), (0.04, "weaker"), (0.5, "not_seen")]
)
def test_heads_must_give_the_reward_of_all_tokens(off, outcome):
  rows = [
    cell
    | {"batch": 5, "head_mass": 0.99}
    | {"reward": 0.5 - off * (cell["head"] == 8)}
    for cell in top_k.cells("cpu")
  ]
  assert top_k.ARTEFACTS["Fig. 5"].judge(rows).outcome == outcome


def test_measured_weights_of_sequences_and_signs_are_the_tables():
  cells = [{"method": name} for name in ("GSPO", "TOPR", "PPO")]
  rows = [c | r for c in cells for r in corrections.measure(c, "cpu")]
  assert corrections.ARTEFACTS["Table 1"].judge(rows).outcome == "passed"
  wrong = [rows[0] | {"weight": rows[0]["weight"] + 0.01}, *rows[1:]]
  assert corrections.ARTEFACTS["Table 1"].judge(wrong).outcome == "not_seen"


@pytest.mark.parametrize("scale", ["smoke", "cpu"])
def test_runs_online_and_offline_build(scale, monkeypatch):
  built = set()

  def rows_of(config, columns, every):
    build(parts.Config, config)
    built.add(config.to_json())
    assert config.batches % every == 0
    return []

  monkeypatch.setattr(online_offline.training, "rows_of", rows_of)
  cells = [
    dict(cell)
    for cell in online_offline.cells(scale)
    if cell["sampler"] != online_offline.COIN
  ]
  for cell in cells:
    online_offline.measure(cell, scale)
  assert len(built) == len(cells)


def test_on_coin_each_form_of_the_reward_trains_another_policy():
  short = {"sampler": online_offline.COIN, "seed": 0}
  entropy = {
    form: online_offline.measure(short | {"form": form}, "smoke")[-1]["entropy"]
    for form in online_offline.FORMS
  }
  assert len(set(entropy.values())) == 3


@pytest.mark.parametrize("study", [grids, online_offline, top_k])
def test_the_papers_runs_build(study, monkeypatch):
  built = []

  def rows_of(config, columns, every):
    built.append(build(parts.Config, config))
    assert config.batches % every == 0
    return [{"batch": every}]

  monkeypatch.setattr(study.training, "rows_of", rows_of)
  for cell in study.cells("paper"):
    study.measure(dict(cell), "paper")
  assert {config.learner.kind for config in built} == {"sgd"}
  assert len(built) == len(study.cells("paper"))
