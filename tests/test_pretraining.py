import dataclasses

import numpy as np
import pytest
import tiny_run
from test_train import (
  Quiet,
  assert_each_prompt_once,
  equal,
  odd_first,
  weights_of,
)

from rl_tpu import algorithms, checkpoint, critic, metrics, parts, train
from rl_tpu.config import Choice, ConfigError

assert odd_first  # a fixture for every test here


def sao(directory, **changes):
  loss = algorithms.get("sao").Config(critic_updates=2)
  return tiny_run.get_config(
    directory,
    **{
      "groups_per_batch": 16,
      "group_size": 1,
      "batches": 3,
      "algorithm": Choice(name="sao", config=loss),
      "critic": critic.Config(learning_rate=1e-2, pretraining_batches=3),
      **changes,
    },
  )


def critic_of(config):
  """The critic's parameters in a run's last checkpoint."""
  learner = parts.make_learner(config, parts.meshes(config)[0])
  saver = checkpoint.Checkpointer(config.run_directory / "checkpoints")
  try:
    restored = saver.restore_latest(learner.abstract_state())
  finally:
    saver.close()
  return restored.state.critic


def test_sao_trains_both_resumes_both_and_pretrains_once(tmp_path, monkeypatch):
  monkeypatch.setattr(tiny_run, "GROUPS", 16)
  whole = sao(tmp_path / "whole")
  reached = train.pretrain_value(whole, Quiet())
  assert reached["batches"] == 3
  assert np.isfinite(reached["explained_variance"])
  assert not (whole.run_directory / "metrics.csv").exists()
  assert train.pretrain_value(whole, Quiet()) == {"batches": 3}  # cached

  train.run(whole, Quiet())
  assert_each_prompt_once(whole)
  rows = metrics.read_csv(whole.run_directory / "metrics.csv")
  trained = [row for row in rows if "critic_loss" in row]
  assert len(trained) == 3
  assert all("explained_variance" in row for row in trained)

  broken = sao(tmp_path / "broken")
  with pytest.raises(ZeroDivisionError):
    train.run(broken, Quiet(crash_at=2))
  train.run(broken, Quiet())
  assert equal(weights_of(broken), weights_of(whole))
  assert equal(critic_of(broken).params, critic_of(whole).params)


def test_a_histogram_critic_is_pretrained_kept_and_restored(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(tiny_run, "GROUPS", 16)
  loss = algorithms.get("sao").Config(value_loss="hl_gauss", value_bins=7)
  config = sao(
    tmp_path / "run",
    batches=1,
    algorithm=Choice(name="sao", config=loss),
    critic=critic.Config(learning_rate=1e-2, pretraining_batches=1),
  )
  assert "explained_variance" in train.pretrain_value(config, Quiet())
  assert train.pretrain_value(config, Quiet()) == {"batches": 1}  # cached
  train.run(config, Quiet())
  head = critic_of(config).params["head"]
  assert head["weight"].shape == (16, 7)
  assert np.asarray(head["bias"]).any()
  rows = metrics.read_csv(config.run_directory / "metrics.csv")
  (row,) = [row for row in rows if "critic_loss" in row]
  assert 1 < row["critic_loss"] < np.log(7) + 0.2


def test_pretraining_without_a_critic_is_refused(tmp_path):
  config = tiny_run.get_config(tmp_path / "run")
  with pytest.raises(ConfigError, match="value pretraining needs"):
    train.pretrain_value(config, Quiet())


def test_a_head_that_the_loss_does_not_use_or_lacks_is_refused(tmp_path):
  config = tiny_run.get_config(tmp_path / "run")
  kept = dataclasses.replace(config.engine, behavior_top_k=8)
  with pytest.raises(ConfigError, match="behavior_top_k is 8.*needs 0"):
    dataclasses.replace(config, engine=kept)
  loss = algorithms.get("score_centering").Config(top_k=4)
  with pytest.raises(ConfigError, match="behavior_top_k is 0.*needs 4"):
    dataclasses.replace(
      config, algorithm=Choice(name="score_centering", config=loss)
    )
