import asyncio
import dataclasses
import io
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import rich.console
import tiny_run

from rl_tpu import __main__ as command_line
from rl_tpu import (
  algorithms,
  buffer,
  checkpoint,
  envs,
  evaluate,
  metrics,
  ownership,
  parts,
  processes,
  schedules,
  sft,
  train,
)
from rl_tpu.config import ConfigError
from rl_tpu.envs import Step
from rl_tpu.generation import driver
from rl_tpu.view import View

ROOT = pathlib.Path(__file__).parent.parent


class Quiet(View):
  """A view that writes nowhere, and may break the run at a batch."""

  def __init__(self, crash_at=None):
    super().__init__(0, rich.console.Console(file=io.StringIO()))
    self.crash_at = crash_at

  def batch(self, batch, metrics, seconds_left):
    if batch == self.crash_at:
      raise ZeroDivisionError("a crash that the test asked for")


@pytest.fixture(scope="module", autouse=True)
def odd_first():
  """Rewards that a random policy earns at times, so that it learns."""
  module = envs.get("reasoning_gym")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(
      module.Task, "environment", lambda task, p: tiny_run.OddFirst(p)
    )
    yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
  return tmp_path_factory.mktemp("runs")


NUMBERS = itertools.count()


def fresh(base):
  return base / f"run{next(NUMBERS)}"


def weights_of(config):
  """Parameters of a run's last checkpoint."""
  mesh, _ = parts.meshes(config)
  learner = parts.make_learner(config, mesh)
  saver = checkpoint.Checkpointer(config.run_directory / "checkpoints")
  try:
    restored = saver.restore_latest(learner.abstract_state())
  finally:
    saver.close()
  assert restored is not None and restored.version == config.batches
  return jax.device_get(restored.state.params)


def equal(one, other):
  return all(
    np.array_equal(x, y)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  )


def batches_of(config):
  return metrics.read_jsonl(config.run_directory / "batches.jsonl")


def assert_each_prompt_once(config):
  rows = batches_of(config)
  assert [row["batch"] for row in rows] == list(range(1, config.batches + 1))
  trained = [index for row in rows for index in row["prompts"]]
  assert sorted(trained) == list(range(config.batches * tiny_run.GROUPS))


@pytest.fixture(scope="module")
def synchronous(base):
  config = tiny_run.get_config(fresh(base))
  figures = train.run(config, Quiet())
  return config, figures, weights_of(config)


def test_a_run_ends_with_the_rules_of_health_that_it_broke(base):
  told = io.StringIO()
  view = View(0, rich.console.Console(file=told, width=1000))
  config = tiny_run.get_config(
    fresh(base), schedule="async", max_staleness=9, batches=1
  )
  train.run(config, view)
  assert "warning: max_staleness 9 at worst: is beyond" in told.getvalue()


def test_sync_trains_each_prompt_once_at_staleness_zero(synchronous):
  config, figures, _ = synchronous
  assert_each_prompt_once(config)
  assert figures["max_staleness_consumed"] == 0
  assert figures["mixed_version_trajectories"] == 0
  assert 0 < figures["learner_wait_share"] < 1
  saved = json.loads((config.run_directory / "summary.json").read_text())
  assert saved == figures


def test_sync_and_lockstep_0_and_itself_again_are_equal_to_the_bit(
  base, synchronous
):
  for schedule in ("sync", "lockstep(0)"):
    config = tiny_run.get_config(fresh(base), schedule=schedule)
    train.run(config, Quiet())
    assert equal(weights_of(config), synchronous[2]), schedule
  other = tiny_run.get_config(fresh(base), seed=1)
  train.run(other, Quiet())
  assert not equal(weights_of(other), synchronous[2])


def test_a_run_that_crashed_ends_where_the_unbroken_one_does(base):
  whole = tiny_run.get_config(fresh(base), schedule="lockstep(1)")
  train.run(whole, Quiet())
  broken = tiny_run.get_config(
    fresh(base), schedule="lockstep(1)", checkpoint_every=2
  )
  for crash_at in (2, 4, 4):  # after no checkpoint, then twice after the first
    with pytest.raises(ZeroDivisionError):
      train.run(broken, Quiet(crash_at))
  train.run(broken, Quiet())
  assert equal(weights_of(broken), weights_of(whole))
  assert_each_prompt_once(broken)
  assert batches_of(broken) == batches_of(whole)


@pytest.mark.parametrize("scope", ["prompt", "global"])
def test_running_means_go_on_where_a_killed_run_left_them(base, scope):
  config = with_running_means(tiny_run.get_config(fresh(base)), scope)
  train.run(config, Quiet())
  directory = str(fresh(base))
  broken = dataclasses.replace(config, directory=directory, checkpoint_every=3)
  with pytest.raises(ZeroDivisionError):
    train.run(broken, Quiet(crash_at=5))
  train.run(broken, Quiet())
  assert equal(weights_of(broken), weights_of(config))
  rows = metrics.read_csv(broken.run_directory / "metrics.csv")
  known = [row["known_baseline"] for row in rows if "known_baseline" in row]
  assert known[0] == 0 and known[-1] == 1


def with_running_means(config, scope):
  """Nine words in all, so that six batches of four ask each of them twice."""
  loss = algorithms.get("running_mean").Config(scope=scope, window=3)
  return dataclasses.replace(
    config,
    schedule="lockstep(1)",
    batches=6,
    task=dataclasses.replace(
      config.task,
      config=dataclasses.replace(config.task.config, size=10),
    ),
    algorithm=dataclasses.replace(
      config.algorithm, name="running_mean", config=loss
    ),
    evaluation=evaluate.Config(every=0, problems=1),
  )


def test_lockstep_imposes_its_lag_exactly(base):
  config = tiny_run.get_config(fresh(base), schedule="lockstep(2)", batches=5)
  train.run(config, Quiet())
  stale = [set(row["staleness_tokens"]) for row in batches_of(config)]
  assert stale == [{"0"}, {"1"}, {"2"}, {"2"}, {"2"}]


def test_X06_publishing_hangs_on_no_cadence(base, synchronous):
  config = tiny_run.get_config(
    fresh(base),
    evaluation=evaluate.Config(every=1, problems=4),
    checkpoint_every=7,
  )
  train.run(config, Quiet())
  assert equal(weights_of(config), synchronous[2])
  assert batches_of(config) == batches_of(synchronous[0])
  rows = metrics.read_csv(config.run_directory / "metrics.csv")
  evaluated = [r["batch"] for r in rows if "heldout_accuracy" in r]
  assert evaluated == [0, 1, 2, 3, 4]


def test_X17_the_last_batch_has_a_checkpoint_off_the_interval(
  base, synchronous
):
  config = tiny_run.get_config(fresh(base), checkpoint_every=3)
  train.run(config, Quiet())
  assert equal(weights_of(config), synchronous[2])  # Of batch 4, and whole.


def test_async_keeps_its_staleness_limit_and_loses_no_prompt(base):
  config = tiny_run.get_config(
    fresh(base), schedule="async", batches=8, max_staleness=1
  )
  figures = train.run(config, Quiet())
  assert figures["max_staleness_consumed"] <= 1
  rows = metrics.read_csv(config.run_directory / "metrics.csv")
  trained = [row for row in rows if "staleness_max" in row]
  assert len(trained) == 8
  assert max(row["staleness_max"] for row in trained) <= 1
  assert_each_prompt_once(config)


def test_a_finished_run_is_not_trained_again(synchronous):
  config, figures, _ = synchronous
  assert train.run(config, Quiet(crash_at=1)) == figures


def test_H21_the_run_keeps_the_config_that_it_used(synchronous):
  config, _, _ = synchronous
  saved = json.loads((config.run_directory / "config.json").read_text())
  assert saved["learner"]["minibatches"] == 2
  assert saved["algorithm"]["name"] == "decoupled_ppo"
  assert saved["algorithm"]["clip_low"] == 0.2
  assert (config.run_directory / "environment.json").exists()


def test_a_directory_of_another_config_is_refused_by_field(synchronous):
  config, _, _ = synchronous
  other = dataclasses.replace(config, group_size=2)
  with pytest.raises(ConfigError, match="config.group_size: the run has 4"):
    train.run(other, Quiet())


def test_a_directory_where_nothing_was_logged_takes_the_mended_config(
  base, monkeypatch
):
  async def step(self, action, stop_reason):
    raise OSError("the judge is out")

  config = tiny_run.get_config(fresh(base), batches=1)
  with monkeypatch.context() as broken:
    broken.setattr(tiny_run.OddFirst, "step", step)
    with pytest.raises(Exception, match="the judge is out"):
      train.run(config, Quiet())
  mended = dataclasses.replace(config, group_size=2)
  assert train.run(mended, Quiet())["batches"] == 1
  saved = metrics.read_json(config.run_directory / "config.json")
  assert saved["group_size"] == 2


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_H27_an_environment_that_always_fails_ends_the_run(
  base, schedule, monkeypatch
):
  async def step(self, action, stop_reason):
    raise OSError("the judge is out")

  monkeypatch.setattr(tiny_run.OddFirst, "step", step)
  config = tiny_run.get_config(fresh(base), schedule=schedule, batches=8)
  with pytest.raises(Exception, match="the judge is out"):
    train.run(config, Quiet())


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"schedule": "fast"}, "schedule is 'fast'"),
    ({"batches": 0}, "config.batches is 0"),
    ({"max_staleness": -1}, "max_staleness is -1"),
    ({"directory": "runs/{nme}"}, "'nme' is not a field"),
  ],
)
def test_an_impossible_config_is_refused(base, changes, message):
  with pytest.raises(ValueError, match=message):
    tiny_run.get_config(fresh(base), **changes)


@pytest.mark.parametrize(
  "field", [{"top_p": 0.8}, {"top_k": 2}, {"min_p": 0.1}, {"temperature": 0.0}]
)
def test_H01_a_filter_that_the_learner_does_not_apply_is_refused(base, field):
  config = tiny_run.get_config(fresh(base))
  sampling = dataclasses.replace(config.sampling, **field)
  with pytest.raises(ConfigError, match="training needs temperature > 0"):
    dataclasses.replace(config, sampling=sampling)


def test_too_few_devices_are_refused(base):
  config = tiny_run.get_config(
    fresh(base),
    schedule="async",
    devices=parts.Devices(trainer=parts.sharding.MeshShape(fsdp=8)),
  )
  with pytest.raises(ConfigError, match="need 9 devices; there are 8"):
    train.run(config, Quiet())


def evaluated(config):
  rows = metrics.read_csv(config.run_directory / "metrics.csv")
  return [row["batch"] for row in rows if "heldout_accuracy" in row]


@pytest.mark.parametrize("moment", ["in the learner", "while generating"])
@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_signal_stops_at_any_moment_and_nothing_is_lost(
  base, schedule, moment, monkeypatch
):
  once = itertools.count()

  def interrupt(at_version):
    if at_version == 1 and next(once) == 0:
      signal.raise_signal(signal.SIGINT)

  release, take = buffer.Buffer._release, schedules.Concurrent.take
  step = driver.GenerationDriver.step

  def releasing(self, group, version):
    interrupt(version)  # Some groups of the batch have left the buffer.
    return release(self, group, version)

  def stepping(self):
    interrupt(self.version)
    return step(self)

  def taking(self, version, stopping):
    interrupt(version)
    return take(self, version, stopping)

  if moment == "in the learner":
    monkeypatch.setattr(buffer.Buffer, "_release", releasing)
  else:
    monkeypatch.setattr(driver.GenerationDriver, "step", stepping)
    monkeypatch.setattr(schedules.Concurrent, "take", taking)
  config = tiny_run.get_config(fresh(base), schedule=schedule)
  last = 2 if moment == "in the learner" else 1
  with pytest.raises(train.Stopped, match=f"stopped after batch {last} of 4"):
    train.run(config, Quiet())
  train.run(config, Quiet())
  assert_each_prompt_once(config)


@pytest.mark.parametrize("checkpoint_every", [10, 1])
def test_a_resumed_run_goes_on_from_the_tokens_of_unfinished_episodes(
  base, monkeypatch, checkpoint_every
):
  """Sync, so that the run can be compared with one that was never cut.

  It is cut while the batch is sampled whose version may have been saved.
  """
  whole = tiny_run.get_config(fresh(base))
  train.run(whole, Quiet())

  generate = driver.GenerationDriver.generate
  step = driver.GenerationDriver.step
  turns, had = itertools.count(), []

  def stepping(self):
    if self.version == 1 and next(turns) == 3:
      signal.raise_signal(signal.SIGINT)
    return step(self)

  def generating(self, request, progress=None):
    had.append(sum(len(chunk.tokens) for chunk in progress or ()))
    return generate(self, request, progress)

  monkeypatch.setattr(driver.GenerationDriver, "step", stepping)
  monkeypatch.setattr(driver.GenerationDriver, "generate", generating)
  cut = tiny_run.get_config(fresh(base), checkpoint_every=checkpoint_every)
  with pytest.raises(train.Stopped, match="stopped after batch 1 of 4"):
    train.run(cut, Quiet())
  assert sum(had) == 0
  train.run(cut, Quiet())
  assert sum(had) > 0
  assert_each_prompt_once(cut)
  # Keys and values of recorded tokens come from a prefill: other roundings.
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5),
    weights_of(cut),
    weights_of(whole),
  )


def test_a_run_cut_in_its_last_evaluation_trains_no_batch_again(
  base, monkeypatch
):
  config = tiny_run.get_config(fresh(base), checkpoint_every=10)
  evaluation = evaluate.evaluate
  calls = itertools.count()

  async def cut(*arguments, **settings):
    if next(calls) == 1:
      raise ZeroDivisionError
    return await evaluation(*arguments, **settings)

  monkeypatch.setattr(evaluate, "evaluate", cut)
  with pytest.raises(ZeroDivisionError):
    train.run(config, Quiet())
  figures = train.run(config, Quiet(crash_at=4))
  assert evaluated(config) == [0, 4]
  (config.run_directory / "summary.json").unlink()
  assert train.run(config, Quiet(crash_at=4)) == figures
  assert evaluated(config) == [0, 4]


def test_an_evaluation_under_way_at_a_kill_is_made_up_for(base, monkeypatch):
  config = tiny_run.get_config(
    fresh(base), evaluation=evaluate.Config(every=2, problems=4), batches=5
  )
  with monkeypatch.context() as patch:
    patch.setattr(train._Run, "start_evaluation", lambda self: None)
    with pytest.raises(ZeroDivisionError):
      train.run(config, Quiet(crash_at=3))
  train.run(config, Quiet())
  assert evaluated(config) == [0, 2, 4, 5]


def test_an_evaluation_that_the_generator_failed_leaves_no_row(
  base, monkeypatch
):
  config = tiny_run.get_config(
    fresh(base),
    schedule="async",
    batches=2,
    evaluation=evaluate.Config(every=1, problems=4),
  )
  evaluation = evaluate.evaluate
  calls = itertools.count()

  async def failing(generator, *arguments, **settings):
    if next(calls) == 0:
      return await evaluation(generator, *arguments, **settings)
    while generator.version < 2:
      await asyncio.sleep(0)
    generator.failure = OSError("device lost")
    return {"heldout_accuracy": 0.0, "heldout_greedy": 0.0, "heldout_failed": 8}

  monkeypatch.setattr(evaluate, "evaluate", failing)
  with pytest.raises(OSError, match="device lost"):
    train.run(config, Quiet())
  assert evaluated(config) == [0]


def test_X17_the_last_batch_is_saved_though_it_is_off_the_interval(base):
  config = tiny_run.get_config(base / "off", batches=3, checkpoint_every=2)
  train.run(config, Quiet())
  saved = config.run_directory / "checkpoints"
  assert sorted(path.name for path in saved.iterdir()) == ["2", "3"]
  for part in checkpoint.PARTS:
    assert (saved / "3" / part).is_dir()
  rows = metrics.read_csv(config.run_directory / "metrics.csv")
  assert rows[-1]["batch"] == 3


@pytest.mark.slow
def test_a_frozen_evaluation_keeps_its_version_while_training_goes_on(
  base, monkeypatch
):
  """It waits for two more batches, then asks; all answers are as old as it."""
  asked, trained = [], []
  evaluation = evaluate.evaluate

  async def late(generator, *arguments, **settings):
    (_, version), old = generator.accepted, len(trained)
    while 0 < version and len(trained) < min(old + 2, 6):
      await asyncio.sleep(0.001)
    made = []
    generate = generator.generate

    async def watched(request, progress=None):
      completion = await generate(request, progress)
      made.append(completion.version)
      return completion

    watching = SimpleNamespace(generate=watched)
    row = await evaluation(watching, *arguments, **settings)
    asked.append((version, set(np.concatenate(made).tolist()), len(trained)))
    return row

  class Counting(Quiet):
    def batch(self, batch, metrics, seconds_left):
      trained.append(batch)

  monkeypatch.setattr(evaluate, "evaluate", late)
  config = tiny_run.get_config(
    fresh(base),
    schedule="async",
    batches=6,
    evaluation=evaluate.Config(every=2, problems=4, frozen=True),
  )
  train.run(config, Counting())
  assert [version for version, _, _ in asked] == [0, 2, 4, 6]
  for version, answered, _ in asked:
    assert answered == {version}
  assert asked[1][2] >= 3  # Training had gone on.
  assert evaluated(config) == [0, 2, 4, 6]


def test_rates_leave_out_what_came_before_the_loop(synchronous):
  config, figures, _ = synchronous
  rows = metrics.read_csv(config.run_directory / "metrics.csv")
  rows = [row for row in rows if "reward" in row]
  for row in rows:  # Synchronous: what is generated is trained.
    assert row["generated_tokens_per_second"] == pytest.approx(
      row["trained_tokens_per_second"]
    )
  assert figures["train_seconds"] == pytest.approx(rows[-1]["seconds"], abs=0.1)
  shares = [row["learner_wait_share"] for row in rows]
  assert min(shares) <= figures["learner_wait_share"] <= max(shares)


def test_evaluations_in_between_are_in_the_seconds(base, monkeypatch):
  now = itertools.count()
  monkeypatch.setattr(train.time, "monotonic", lambda: float(next(now)))
  config = tiny_run.get_config(
    fresh(base), evaluation=evaluate.Config(every=1, problems=4)
  )
  figures = train.run(config, Quiet())
  events = metrics.read_jsonl(config.run_directory / "events.jsonl")
  learner = [
    bar for row in events for bar in row["intervals"] if bar[0] == "learner"
  ]
  assert figures["train_seconds"] == learner[-1][3]


def test_a_first_evaluation_without_any_episode_ends_the_run(
  base, monkeypatch, capsys, caplog
):
  def broken(task, prompt):
    raise KeyError("plurall")

  monkeypatch.setattr("rl_tpu.envs.reasoning_gym.Task.environment", broken)
  config = tiny_run.get_config(fresh(base), batches=1)
  monkeypatch.setattr(command_line, "_read_config", lambda arguments: config)
  monkeypatch.setattr(command_line, "_prepare_jax", lambda config: None)
  assert command_line.main(["rl_tpu", "train"]) == 1
  error = capsys.readouterr().err.splitlines()[-1]
  assert error.startswith("rl_tpu: all 8 episodes of the first evaluation")
  assert "KeyError('plurall')" in error
  assert caplog.text.count("question 0 failed") == 1
  assert "the same 7 more times" in caplog.text


def test_a_copied_run_goes_on_where_it_lies(synchronous, base):
  config, figures, _ = synchronous
  directory = fresh(base)
  shutil.copytree(config.run_directory, directory)
  (directory / "summary.json").unlink()
  config = dataclasses.replace(config, directory=str(directory))
  copied = train.run(config, Quiet(crash_at=4))
  assert copied == figures | {"directory": str(directory)}


@pytest.mark.parametrize(
  ("section", "changes", "message"),
  [
    (
      "engine",
      {"context_length": 5, "prefill_buckets": (5,)},
      "config.engine: context_length 5",
    ),
    ("engine", {"prefill_buckets": (8,)}, "config.engine: prefill_buckets"),
    ("engine", {"slots": 7}, "config.engine: slots is 7"),
    ("learner", {"microbatch_rows": 3}, "microbatch_rows is 3"),
    ("model", {"vocab_size": 128}, "config.model.vocab_size is 128"),
    ("evaluation", {"problems": 400}, "config.evaluation.problems is 400"),
    ("sampling", {"stop_ids": (1,) * 5}, "config.engine.max_stop_ids is 4"),
    ("task", {"generator": "spell"}, "config.task: Config.generator"),
  ],
)
def test_what_does_not_fit_is_refused_before_the_warm_start(
  base, section, changes, message, monkeypatch
):
  monkeypatch.setattr(sft, "warm_start", None)
  config = tiny_run.get_config(
    fresh(base),
    devices=parts.Devices(
      trainer=parts.sharding.MeshShape(fsdp=2),
      generator=parts.sharding.MeshShape(data=2),
    ),
  )
  part = getattr(config, section)
  if section == "task":
    part = dataclasses.replace(
      part, config=dataclasses.replace(part.config, **changes)
    )
  else:
    part = dataclasses.replace(part, **changes)
  config = dataclasses.replace(config, **{section: part})
  with pytest.raises(ConfigError, match=message):
    train.run(config, Quiet())
  assert not config.run_directory.exists()


def test_an_environment_that_blocks_its_thread_cannot_hold_up_an_error(
  base, monkeypatch
):
  blocked, released = threading.Event(), threading.Event()

  async def block(self, action, stop_reason):
    blocked.set()
    released.wait()

  def take(self, version, timeout=None):
    blocked.wait()
    raise ZeroDivisionError

  async def nothing(*arguments, **settings):
    return {"heldout_accuracy": 0.0, "heldout_greedy": 0.0, "heldout_failed": 0}

  monkeypatch.setattr(tiny_run.OddFirst, "step", block)
  monkeypatch.setattr(buffer.Buffer, "take", take)
  monkeypatch.setattr(evaluate, "evaluate", nothing)
  monkeypatch.setattr(schedules, "_LEAVE_SECONDS", 0.1)
  config = tiny_run.get_config(fresh(base), schedule="async")
  try:
    with pytest.raises(ZeroDivisionError):
      train.run(config, Quiet())
  finally:
    released.set()


def test_failed_groups_are_in_the_log_by_kind(base, monkeypatch):
  async def step(self, action, stop_reason):
    if self.prompt.index == 1:
      raise OSError("no judge for this one")
    return Step(
      observation=np.zeros(0, np.int32),
      reward=float("nan") if self.prompt.index == 2 else 1.0,
      end=True,
      metrics={"calls": 3.0},
    )

  monkeypatch.setattr(tiny_run.OddFirst, "step", step)
  config = tiny_run.get_config(fresh(base), batches=2)
  train.run(config, Quiet())
  row = metrics.read_csv(config.run_directory / "metrics.csv")[-2]
  assert row["failed_groups"] == 2
  assert (row["failed_raised"], row["failed_reward_not_finite"]) == (1, 1)
  assert row["env_calls"] == 3


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_no_thread_outlives_a_run(base, schedule):
  before = set(threading.enumerate())
  config = tiny_run.get_config(fresh(base), schedule=schedule)
  with pytest.raises(ZeroDivisionError):
    train.run(config, Quiet(crash_at=2))
  left = set(threading.enumerate()) - before
  assert not {thread.name for thread in left} & {"actor", "generation"}


@pytest.mark.parametrize(
  ("error", "code", "said"),
  [
    (KeyboardInterrupt(), 130, "stopped at once"),
    (ConfigError("seed is -1"), 2, "seed is -1"),
    (ownership.Held("trains in it"), 1, "trains in it"),
  ],
)
def test_a_command_says_by_its_exit_code_how_it_ended(
  error, code, said, monkeypatch, capsys
):
  def ends(config):
    raise error

  alone = SimpleNamespace(distributed=processes.Config())
  monkeypatch.setattr(command_line, "_read_config", lambda arguments: alone)
  monkeypatch.setattr(command_line, "_prepare_jax", lambda config: None)
  monkeypatch.setitem(command_line.COMMANDS, "train", ends)
  assert command_line.main(["rl_tpu", "train"]) == code
  assert said in capsys.readouterr().err


# Whole processes, as a person starts them.

CONFIG = """
import pathlib, sys
sys.path.insert(0, {tests!r})
import tiny_run
from rl_tpu.config import to_config_dict

def get_config(schedule="async"):
  return to_config_dict(
    tiny_run.get_config(pathlib.Path({directory!r}), schedule=schedule)
  )
"""


def start(directory, *flags, schedule="async", command="train"):
  directory.mkdir(parents=True, exist_ok=True)
  path = directory / "config.py"
  tests = str(pathlib.Path(__file__).parent)
  path.write_text(CONFIG.format(tests=tests, directory=str(directory)))
  return subprocess.Popen(
    [
      *(sys.executable, "-m", "rl_tpu", command),
      *(f"--config={path}:{schedule}", *flags),
    ],
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def is_batch(line):
  return line.split()[:1] and "/" in line.split()[0] and "." in line


def test_H21_a_wrong_flag_ends_the_command_before_any_work(base):
  for flag, message in (
    ("--config.learning_rte=1", "learning_rte"),
    ("--config.learner.learning_rate=fast", "config.learner.learning_rate"),
    ("--config.batches=-3", "config.batches is -3; it must be >= 1"),
  ):
    directory = fresh(base)
    process = start(directory, flag)
    out, err = process.communicate()
    assert process.returncode == 2, err
    assert message in err
    assert out == ""
    assert sorted(p.name for p in directory.iterdir()) in (
      ["config.py"],
      ["__pycache__", "config.py"],
    )


@pytest.mark.slow
def test_ctrl_c_stops_with_a_checkpoint_that_can_be_evaluated(base):
  directory = fresh(base)
  process = start(directory, "--config.batches=200")
  seen = (line for line in process.stdout if is_batch(line))
  next(seen), next(seen)
  process.send_signal(signal.SIGINT)
  _, err = process.communicate()
  assert process.returncode == 130, err
  assert "stopped after batch" in err
  assert "Traceback" not in err
  evaluation = start(directory, "--config.batches=200", command="evaluate")
  out, err = evaluation.communicate()
  assert evaluation.returncode == 0, err
  figures = json.loads(out.splitlines()[-1])
  assert figures["batch"] >= 2
  assert 0 <= figures["mean"] <= 1


@pytest.mark.slow
def test_X05_five_kills_lose_and_repeat_no_prompt(base):
  directory = fresh(base)
  batches = 20
  flags = (f"--config.batches={batches}", "--config.max_staleness=2")
  rng = random.Random(0)
  for _ in range(5):
    process = start(directory, *flags)
    wanted = rng.randint(1, 3)
    for line in process.stdout:
      wanted -= bool(is_batch(line))
      if wanted == 0:
        break
    time.sleep(rng.uniform(0, 0.2))  # some moment of the next batch
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
  process = start(directory, *flags)
  out, err = process.communicate()
  assert process.returncode == 0, err
  assert "resuming" in out
  figures = json.loads(out.splitlines()[-1])
  assert figures["max_staleness_consumed"] <= 2
  config = tiny_run.get_config(directory, schedule="async", batches=batches)
  assert_each_prompt_once(config)
  assert (config.run_directory / "run.png").stat().st_size > 10_000
