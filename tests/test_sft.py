import dataclasses

import jax
import numpy as np
import pytest
import tiny_run

from rl_tpu import parts, sft
from rl_tpu.config import ConfigError
from rl_tpu.models import transformer


def imitate(tmp_path, settings, seed=0, row_length=64):
  """Warm-starts the tiny model; returns weights and what was noted."""
  config = tiny_run.get_config(tmp_path / "runs")
  task, rows = parts.make_task(config)
  mesh, _ = parts.meshes(config)
  notes = []
  params = sft.warm_start(
    settings,
    policy=transformer.Policy(config.model),
    task=task,
    rows=rows["train"],
    row_length=row_length,
    mesh=mesh,
    seed=seed,
    cache=tmp_path / "warm",
    note=notes.append,
  )
  return jax.device_get(params), notes


SHORT = sft.Config(batches=30, wrong_batches=0, trajectories_per_batch=32)


def losses(notes):
  return [float(note.rsplit(" ", 1)[1]) for note in notes]


def test_imitation_lowers_the_loss_and_is_cached_by_what_it_depends_on(
  tmp_path,
):
  params, notes = imitate(tmp_path, SHORT)
  first, last = losses(notes)
  assert last < 0.8 * first
  again, notes = imitate(tmp_path, SHORT)
  assert notes == [
    f"warm start: taken from {next((tmp_path / 'warm').iterdir())}"
  ]
  jax.tree.map(np.testing.assert_array_equal, params, again)
  other, notes = imitate(tmp_path, dataclasses.replace(SHORT, batches=0))
  assert notes == []
  assert not np.array_equal(other["embedding"], params["embedding"])
  _, notes = imitate(tmp_path, dataclasses.replace(SHORT, batches=1), seed=1)
  assert len(losses(notes)) == 1
  assert len(list((tmp_path / "warm").iterdir())) == 3


def test_the_last_batches_show_wrong_answers():
  shown = []

  class Stream:
    def batch(self, step, wrong):
      shown.append(wrong)
      return [(np.array([2, 5], np.int32), np.array([7, 1], np.int32))]

  class Trainer:
    config = dataclasses.make_dataclass(
      "Settings", [("row_length", int), ("rows_multiple", int)]
    )(8, 1)

    def init(self, params):
      return dataclasses.make_dataclass("State", ["params"])(params)

    def train(self, state, batch):
      np.testing.assert_array_equal(batch.action_mask[0, :4], [0, 0, 1, 1])
      np.testing.assert_array_equal(batch.rewards[0, :4], [0, 0, 0, 1])
      return state, {"loss": 0.0}

  config = dataclasses.replace(
    SHORT, batches=5, wrong_batches=2, wrong_fraction=0.4
  )
  sft._imitate(config, Trainer(), None, Stream(), lambda text: None)
  assert shown == [0, 0, 0, 0.4, 0.4]


def test_more_wrong_batches_than_batches_are_refused():
  with pytest.raises(ValueError, match=r"wrong_batches is 7.*in \[0, 5\]"):
    sft.Config(batches=5, wrong_batches=7)


def test_a_demonstration_longer_than_a_row_is_refused_before_training(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(sft, "_imitate", None)
  with pytest.raises(ConfigError, match="config.learner.row_length is 9"):
    imitate(tmp_path, SHORT, row_length=9)
