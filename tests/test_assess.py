"""The command `evaluate` on checkpoints of a tiny run."""

import dataclasses
import json

import numpy as np
import pytest
import tiny_run
from test_train import Quiet

from rl_tpu import assess, attempts, export, metrics, train
from rl_tpu.config import Choice, ConfigError
from rl_tpu.envs import calculator
from rl_tpu.models.huggingface import Export


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  """Of a run of three batches, which is trained."""
  below = tmp_path_factory.mktemp("runs") / "run"
  config = tiny_run.get_config(below, batches=3)
  train.run(config, Quiet())
  return config


def asked(config, **fields):
  return dataclasses.replace(config, evaluate=attempts.Config(**fields))


def test_every_question_of_the_split_is_in_the_results_once(config):
  names = ("metrics.csv", "batches.jsonl", "config.json")
  before = [(config.run_directory / name).read_bytes() for name in names]
  figures = assess.run(
    asked(config, attempts=2, ks=(1, 2), problems=6), Quiet()
  )
  lines = metrics.read_jsonl(figures["results"])
  made = sorted((line["question"], line["attempt"]) for line in lines)
  assert made == [(q, a) for q in range(6) for a in range(2)]
  assert len({line["prompt"] for line in lines}) == 6
  assert figures["mean"] == np.mean([line["reward"] for line in lines])
  assert (figures["batch"], figures["questions"]) == (3, 6)
  assert figures["mean_low"] <= figures["mean"] <= figures["mean_high"]
  assert {"pass@1", "pass@2"} <= figures.keys()
  assert all(line["turns"][0][0] == "policy" for line in lines)
  after = [(config.run_directory / name).read_bytes() for name in names]
  assert before == after


def test_all_of_a_split_is_asked_unless_said_otherwise(config):
  figures = assess.run(asked(config), Quiet())
  _, rows = train.parts.make_task(config)
  assert figures["questions"] == len(rows["heldout"])


def test_a_version_can_be_named_and_greedy_answers_repeat(config):
  version = config.run_directory / "checkpoints" / "2"
  settings = {
    "checkpoint": str(version),
    "problems": 5,
    "temperature": 0.0,
    "attempts": 2,
  }
  figures = assess.run(asked(config, **settings), Quiet())
  assert figures["batch"] == 2
  lines = metrics.read_jsonl(figures["results"])
  for question in range(5):
    said = [line["turns"] for line in lines if line["question"] == question]
    assert said[0] == said[1]


def test_an_exported_folder_answers_as_the_run_it_is_of(config, tmp_path):
  folder = tmp_path / "folder"
  export.run(
    dataclasses.replace(config, export=Export(folder=str(folder))), Quiet()
  )
  other = dataclasses.replace(  # The folder brings its own sizes.
    config, model=dataclasses.replace(config.model, num_layers=2)
  )
  results = [str(tmp_path / name) for name in ("run.jsonl", "folder.jsonl")]
  ours = assess.run(asked(config, problems=8, results=results[0]), Quiet())
  theirs = assess.run(
    asked(other, problems=8, checkpoint=str(folder), results=results[1]),
    Quiet(),
  )
  assert theirs["batch"] is None
  said = [
    {line["question"]: line["turns"] for line in metrics.read_jsonl(path)}
    for path in results
  ]
  assert said[0] == said[1]
  assert ours["mean"] == theirs["mean"]


def test_a_policy_can_be_asked_another_task(config):
  other = dataclasses.replace(
    asked(config, problems=3),
    task=Choice(name="calculator", config=calculator.Config(digits=1)),
    max_turns=2,
  )
  figures = assess.run(other, Quiet())
  assert figures["questions"] == 3
  assert "env_tool_calls" in figures
  assert "calculator" in figures["results"]


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"checkpoint": "nowhere"}, "nothing to evaluate"),
    ({"problems": 10_000}, "config.evaluate.problems is 10000"),
  ],
)
def test_what_is_not_there_is_refused(config, fields, message):
  with pytest.raises(ConfigError, match=message):
    assess.run(asked(config, **fields), Quiet())


def test_a_run_without_a_checkpoint_is_refused(config, tmp_path):
  (tmp_path / "checkpoints").mkdir()
  with pytest.raises(ConfigError, match="holds no checkpoint"):
    assess.run(asked(config, checkpoint=str(tmp_path)), Quiet())


def test_weights_of_another_model_are_refused(config):
  wider = dataclasses.replace(config.model, d_ff=64)
  other = dataclasses.replace(
    config,
    model=wider,
    evaluate=attempts.Config(checkpoint=str(config.run_directory)),
  )
  with pytest.raises(ConfigError, match="evaluate.checkpoint.*weight"):
    assess.run(other, Quiet())
  assert json.loads((config.run_directory / "config.json").read_text())
