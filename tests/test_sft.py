import contextlib
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


def test_the_longest_demonstration_is_measured_over_what_is_shown(tmp_path):
  config = tiny_run.get_config(tmp_path / "runs")
  task, rows = parts.make_task(config)
  shown = sft.longest(SHORT, task, rows["train"], seed=0)
  assert shown is not None
  assert (len(shown.answer), shown.whole) == (5, 11)
  unshown = dataclasses.replace(SHORT, batches=0)
  shown = sft.longest(unshown, task, rows["train"], seed=0)
  assert shown is not None and len(shown.answer) == 5


@pytest.mark.parametrize(
  ("section", "changes", "message"),
  [
    ("sampling", {"max_tokens": 4}, "max_tokens is 4; .* takes 5 tokens"),
    ("learner", {"row_length": 12}, None),
    (
      "engine",
      {"context_length": 11, "prefill_buckets": (11,)},
      "context_length is 11; .* prompt of 6 tokens, .* make 12",
    ),
    (
      "engine",
      {"context_length": 11},
      r"prefill_buckets is \(12,\); .* <= .*, 11",
    ),
  ],
)
def test_answers_and_demonstrations_must_fit(
  tmp_path, section, changes, message
):
  config = tiny_run.get_config(tmp_path / "runs", warm_start=SHORT)
  part = dataclasses.replace(getattr(config, section), **changes)
  refused = contextlib.nullcontext()
  if message is not None:
    refused = pytest.raises(ConfigError, match=message)
  with refused:
    parts.make_task(dataclasses.replace(config, **{section: part}))


def test_a_demonstration_longer_than_the_context_is_refused(tmp_path):
  config = tiny_run.get_config(tmp_path / "runs", warm_start=SHORT, max_turns=2)
  short = dataclasses.replace(
    config.engine, context_length=10, prefill_buckets=(10,)
  )
  config = dataclasses.replace(config, engine=short)
  with pytest.raises(ConfigError, match="is 10; .* demonstration of 11 tokens"):
    parts.make_task(config)


def test_without_a_warm_start_a_known_answer_beyond_the_budget_is_a_doubt(
  tmp_path, monkeypatch
):
  config = tiny_run.get_config(tmp_path / "runs")
  task, rows = parts.make_task(config)
  assert parts.doubts(config, task, rows) == []
  fewer = dataclasses.replace(config.sampling, max_tokens=4)
  config = dataclasses.replace(config, sampling=fewer)
  (doubt,) = parts.doubts(config, *parts.make_task(config))
  assert "max_tokens is 4" in doubt and "answer of 5 tokens" in doubt

  def knows_none(*_):
    raise ValueError("no demonstrations")

  monkeypatch.setattr(task, "demonstration", knows_none)
  (doubt,) = parts.doubts(config, task, rows)
  assert "answer of 5 tokens" in doubt
