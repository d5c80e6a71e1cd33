import tiny_run
from test_train import Quiet

from rl_tpu import algorithms, metrics, train
from rl_tpu.config import Choice


def test_an_algorithm_that_keeps_only_some_groups_trains_no_other(
  tmp_path, monkeypatch
):
  """Dynamic sampling: what dapo refuses gives its place to another prompt."""
  monkeypatch.setattr(
    "rl_tpu.envs.reasoning_gym.Task.environment",
    lambda task, prompt: tiny_run.OddFirst(prompt),
  )
  dapo = algorithms.get("dapo")
  seen = []

  def keep(group):
    seen.append((group.prompt.index, dapo_keep(group)))
    return seen[-1][1]

  dapo_keep = dapo.keep
  monkeypatch.setattr(dapo, "keep", keep)
  config = tiny_run.get_config(
    tmp_path / "run",
    batches=3,
    group_size=2,
    algorithm=Choice(name="dapo", config=dapo.Config()),
  )
  train.run(config, Quiet())
  rows = metrics.read_jsonl(config.run_directory / "batches.jsonl")
  trained = sorted(index for row in rows for index in row["prompts"])
  assert trained == sorted(index for index, good in seen if good)
  assert len(trained) == 3 * tiny_run.GROUPS
  refused = [index for index, good in seen if not good]
  assert refused  # of two members, half agree
  assert sorted(trained + refused) == list(range(len(seen)))
