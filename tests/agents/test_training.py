"""A few batches of an agent that uses the official client."""

import dataclasses
import json

import pytest
import tiny_run
from test_train import Quiet, batches_of

from rl_tpu import assess, attempts, buffer, envs, evaluate, metrics, train
from rl_tpu.config import Choice
from rl_tpu.envs import agent as agents
from rl_tpu.generation import engine
from rl_tpu.models.tokenizer import ByteTokenizer
from rl_tpu.types import Sampling

CONTEXT = 480


def config_of(below, function, **changes):
  below.mkdir(parents=True, exist_ok=True)
  path = below / "rows.jsonl"
  rows = [{"question": f"{i}?"} for i in range(60)]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  config = tiny_run.get_config(below / "runs")
  task = agents.Config(function=f"chat_agents:{function}", path=str(path))
  return dataclasses.replace(
    config,
    task=Choice(name="agent", config=task),
    max_turns=8,
    sampling=Sampling(max_tokens=6),
    groups_per_batch=2,
    group_size=2,
    learner=dataclasses.replace(
      config.learner, row_length=CONTEXT, minibatches=1
    ),
    engine=engine.Config(
      slots=8,
      context_length=CONTEXT,
      prefill_buckets=(CONTEXT,),
      prefill_batches=(4,),
      steps_per_dispatch=2,
    ),
    evaluation=evaluate.Config(every=0, problems=2),
    **changes,
  )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_an_agent_with_tools_and_parallel_calls_trains_a_few_batches(
  tmp_path, monkeypatch, schedule
):
  """The official client, two turns with tools, then two parallel calls."""
  config = config_of(tmp_path, "planner", batches=3, schedule=schedule)
  taken = []
  take = buffer.Buffer.take

  def taking(self, version, timeout=None):
    groups = take(self, version, timeout)
    taken.append((version, groups))
    return groups

  monkeypatch.setattr(buffer.Buffer, "take", taking)
  figures = train.run(config, Quiet())
  assert figures["batches"] == 3
  for version, groups in taken:
    for group in groups:
      # Two members, each with the main line and a parallel branch.
      members = [t.member for t in group.trajectories]
      assert members == [0, 0, 1, 1]
      for member in (0, 1):
        own = [t for t in group.trajectories if t.member == member]
        assert len({t.outcome for t in own}) == 1
      for trajectory in group.trajectories:
        mask = trajectory.action_mask
        assert (trajectory.token_version[mask] >= 0).all()
        assert (trajectory.behavior_logp[mask] < 0).all()
        assert trajectory.staleness(version) <= 2
  rows = [
    row
    for row in metrics.read_csv(config.run_directory / "metrics.csv")
    if "reward" in row
  ]
  assert all(row["env_agent_calls"] == 4 for row in rows)
  assert all(row["failed_groups"] == 0 for row in rows)
  assert len(batches_of(config)) == 3
  # Generator and learner agree where they have the same weights.
  gaps = [row["engine_mismatch"] for row in rows if row["staleness_max"] == 0]
  assert gaps and max(gaps) < 1e-4


@pytest.mark.slow
def test_a_run_goes_on_whatever_agents_do(tmp_path):
  """A third of them crash, a third never end; the rest is trained."""
  config = config_of(tmp_path, "moody", batches=4, schedule="async")
  config = dataclasses.replace(
    config, limits=envs.Limits(step_seconds=2.0), group_size=1
  )
  train.run(config, Quiet())
  rows = metrics.read_csv(config.run_directory / "metrics.csv")
  last = [row for row in rows if "reward" in row][-1]
  assert last["failed_raised"] >= 1 and last["failed_timeout"] >= 1
  assert last["env_agent_calls"] == 1


def test_an_agent_can_be_evaluated(tmp_path):
  config = config_of(tmp_path, "planner", batches=1)
  config = dataclasses.replace(config, groups_per_batch=1)
  train.run(config, Quiet())
  asked = attempts.Config(problems=2, attempts=2, ks=(1, 2))
  figures = assess.run(dataclasses.replace(config, evaluate=asked), Quiet())
  lines = metrics.read_jsonl(figures["results"])
  assert sorted((line["question"], line["attempt"]) for line in lines) == [
    *((0, 0), (0, 1), (1, 0), (1, 1))
  ]
  assert all(len(line["branches"]) == 1 for line in lines)
  assert figures["failed"] == 0 and "maj@2" in figures


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"function": "chat_agents"}, "agent|function"),
    ({"function": "chat_agents:nobody"}, "nobody"),
    ({"function": "no_such_module:act"}, "no_such_module"),
    ({"path": "nowhere.jsonl"}, "nowhere.jsonl is not there"),
  ],
)
def test_an_agent_that_is_not_there_is_refused(tmp_path, changes, message):
  path = tmp_path / "rows.jsonl"
  path.write_text('{"question": "1?"}\n')
  settings = {"function": "chat_agents:loner", "path": str(path)} | changes
  with pytest.raises(ValueError, match=message):
    agents.Task(agents.Config(**settings), ByteTokenizer())


def test_a_row_without_the_question_is_named(tmp_path):
  path = tmp_path / "rows.jsonl"
  path.write_text('{"question": "1?"}\n\n{"q": "2?"}\n')
  config = agents.Config(function="chat_agents:loner", path=str(path))
  task = agents.Task(config, ByteTokenizer())
  with pytest.raises(ValueError, match="no field 'question'"):
    list(task.records("train"))
