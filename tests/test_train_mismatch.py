"""Runs whose generator is not the learner's policy."""

import dataclasses

import numpy as np
import pytest
import tiny_run
from test_train import (
  Quiet,
  assert_each_prompt_once,
  batches_of,
  equal,
  odd_first,
  weights_of,
)

from rl_tpu import (
  algorithms,
  critic,
  evaluate,
  metrics,
  parts,
  serve,
  train,
)
from rl_tpu.config import Choice, ConfigError, build, to_config_dict
from rl_tpu.models import quantization

assert odd_first  # a fixture for every test here


def mismatched(directory, mismatch, **changes):
  config = tiny_run.get_config(directory, **changes)
  engine = dataclasses.replace(
    config.engine, mismatch=quantization.Config(**mismatch)
  )
  return dataclasses.replace(config, engine=engine)


def rows_of(config):
  return metrics.read_csv(config.run_directory / "metrics.csv")


def column(config, name):
  return [row[name] for row in rows_of(config) if name in row]


def test_a_run_logs_the_mismatch_it_was_given_and_none_otherwise(tmp_path):
  gaps = {}
  for name, mismatch in {
    "none": {},
    "int8": {"weights": "int8"},
    "kv int4": {"kv": "int4"},
  }.items():
    config = mismatched(tmp_path / name, mismatch, batches=2)
    whole = dataclasses.replace(config.learner, minibatches=1)
    config = dataclasses.replace(config, learner=whole)
    train.run(config, Quiet())
    gaps[name] = column(config, "engine_mismatch")
    assert len(gaps[name]) == 2
  assert max(gaps["none"]) < 1e-4
  assert min(min(gaps[name]) for name in gaps if name != "none") > 3e-4, gaps


def test_lockstep_takes_over_every_third_version_and_says_so(tmp_path):
  config = mismatched(
    tmp_path / "run", {"refresh_period": 3}, schedule="lockstep(1)", batches=8
  )
  figures = train.run(config, Quiet())
  stale = [
    [int(s) for s in row["staleness_tokens"]] for row in batches_of(config)
  ]
  dispatched = [max(version - 1, 0) for version in range(8)]
  assert stale == [
    [version - at // 3 * 3] for version, at in enumerate(dispatched)
  ]
  assert figures["max_staleness"] == figures["max_staleness_consumed"] == 3
  assert_each_prompt_once(config)


def test_async_with_a_refresh_period_keeps_its_limit_and_never_waits_for_ever(
  tmp_path,
):
  config = mismatched(
    tmp_path / "run",
    {"refresh_period": 3},
    schedule="async",
    batches=8,
    max_staleness=2,
  )
  figures = train.run(config, Quiet())
  assert figures["max_staleness_consumed"] <= 2
  assert max(column(config, "staleness_mean")) >= 1
  assert_each_prompt_once(config)


def test_a_limit_below_what_the_refresh_period_brings_is_refused(tmp_path):
  for limit in (2, None):
    mismatched(
      tmp_path, {"refresh_period": 3}, schedule="async", max_staleness=limit
    )
  with pytest.raises(
    ConfigError, match=r"max_staleness is 1.*refresh_period - 1 = 2"
  ):
    mismatched(
      tmp_path, {"refresh_period": 3}, schedule="async", max_staleness=1
    )


@pytest.mark.parametrize(
  "mismatch",
  [
    {"refresh_period": 3},
    {"weight_noise": 0.05, "weights": "int4", "refresh_period": 2},
  ],
  ids=str,
)
def test_a_resumed_run_has_the_noise_and_the_old_weights_of_the_unbroken_one(
  tmp_path, mismatch
):
  whole = mismatched(tmp_path / "whole", mismatch, batches=5)
  train.run(whole, Quiet())
  broken = mismatched(tmp_path / "broken", mismatch, batches=5)
  for crash_at in (2, 4):
    with pytest.raises(ZeroDivisionError):
      train.run(broken, Quiet(crash_at))
  train.run(broken, Quiet())
  assert batches_of(broken) == batches_of(whole)
  assert equal(weights_of(broken), weights_of(whole))


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_evaluations_sample_from_the_learners_policy_of_their_version(
  tmp_path, schedule, monkeypatch
):
  seen = []
  evaluation = evaluate.evaluate

  async def watched(generator, *arguments, **settings):
    row = await evaluation(generator, *arguments, **settings)
    engine = generator.engine
    seen.append((engine.config.mismatch, generator.version))
    return row

  monkeypatch.setattr(evaluate, "evaluate", watched)
  config = mismatched(
    tmp_path / schedule,
    {"weights": "int4", "weight_noise": 0.1, "refresh_period": 2},
    schedule=schedule,
    evaluation=evaluate.Config(every=1, problems=4),
  )
  train.run(config, Quiet())
  clean = quantization.Config()
  assert seen == [(clean, version) for version in range(5)]
  rows = [row["batch"] for row in rows_of(config) if "heldout_accuracy" in row]
  assert rows == list(range(5))
  assert_each_prompt_once(config)
  assert seen[-1] == (clean, 4)


def test_groups_that_do_not_divide_are_refused_before_anything_is_made(
  tmp_path,
):
  config = mismatched(tmp_path, {"weights": "int4", "group_size": 5})
  with pytest.raises(ConfigError, match="config.engine: group_size is 5"):
    train.run(config, Quiet())
  assert not config.run_directory.exists()


def test_the_mismatch_is_a_section_of_the_config(tmp_path):
  values = to_config_dict(mismatched(tmp_path, {"weights": "int8"}))
  assert build(parts.Config, values).engine.mismatch.weights == "int8"
  values.engine.mismatch.weights = "int1"
  with pytest.raises(ConfigError, match=r"config.engine.mismatch.weights is"):
    build(parts.Config, values)
  with pytest.raises(ConfigError, match=r"engine.mismatch.weight is not a"):
    build(
      parts.Config,
      to_config_dict(mismatched(tmp_path, {})).to_dict()
      | {"engine": {"mismatch": {"weight": "int8"}}},
    )


def test_noise_reaches_value_pretraining_and_the_service(tmp_path):
  loss = algorithms.get("sao").Config()
  config = mismatched(
    tmp_path / "run",
    {"weight_noise": 0.05, "refresh_period": 2},
    group_size=1,
    batches=1,
    algorithm=Choice(name="sao", config=loss),
    critic=critic.Config(pretraining_batches=1),
  )
  assert train.pretrain_value(config, Quiet())["batches"] == 1
  _, mesh = parts.meshes(config)

  def served():
    driver = parts.make_driver(config, mesh)
    return serve._weights(config, driver, Quiet())

  before = served()
  train.run(config, Quiet())
  after = served()
  assert (before.version, after.version) == (0, 1)
  clean = weights_of(config)["embedding"]
  gap = np.asarray(after.params["embedding"]) - clean
  started = np.asarray(before.params["embedding"])
  assert np.std(gap / started) == pytest.approx(0.05, rel=0.1)
