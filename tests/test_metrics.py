import json

from rl_tpu import metrics


def make(path, resume_at=None):
  return metrics.RunLog(path, resume_at=resume_at)


def test_rows_come_back_each_with_its_own_columns(tmp_path):
  log = make(tmp_path)
  log.write(0, {"heldout_accuracy": 0.25})
  log.write(1, {"reward": 0.5, "loss": -1.5})
  log.close()
  assert metrics.read_csv(tmp_path / "metrics.csv") == [
    {"batch": 0, "heldout_accuracy": 0.25},
    {"batch": 1, "reward": 0.5, "loss": -1.5},
  ]
  assert list(tmp_path.glob("tensorboard/events*"))


def test_H26_a_row_that_comes_late_keeps_its_own_batch(tmp_path):
  log = make(tmp_path)
  log.write(5, {"reward": 0.1})
  log.write(6, {"reward": 0.2})
  log.write(5, {"heldout_accuracy": 0.9})
  log.close()
  log = make(tmp_path, resume_at=5)
  log.write(6, {"reward": 0.3})
  log.close()
  assert metrics.read_csv(tmp_path / "metrics.csv") == [
    {"batch": 5, "reward": 0.1},
    {"batch": 5, "heldout_accuracy": 0.9},
    {"batch": 6, "reward": 0.3},
  ]


def test_resuming_forgets_batches_that_the_checkpoint_does_not_hold(tmp_path):
  log = make(tmp_path)
  for batch in (1, 2, 3):
    log.write(batch, {"reward": batch})
    log.record("batches", batch, {"prompts": [batch]})
  log.close()
  log = make(tmp_path, resume_at=2)
  log.close()
  assert [row["batch"] for row in log.rows] == [1, 2]
  assert log.dropped == [{"batch": 3, "reward": 3.0}]
  assert metrics.read_jsonl(tmp_path / "batches.jsonl") == [
    {"batch": 1, "prompts": [1]},
    {"batch": 2, "prompts": [2]},
  ]
  make(tmp_path).close()
  assert metrics.read_csv(tmp_path / "metrics.csv") == []
  assert metrics.read_jsonl(tmp_path / "batches.jsonl") == []


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
  log = make(tmp_path)
  log.write(1, {"reward": 0.5, "loss": 1.25})
  log.record("batches", 1, {"prompts": [1]})
  log.close()
  for name in ("metrics.csv", "batches.jsonl"):
    with open(tmp_path / name, "a") as file:
      file.write("2,0." if name == "metrics.csv" else '{"batch": 2, "pro')
  log = make(tmp_path, resume_at=2)
  log.close()
  assert [row["batch"] for row in log.rows] == [1]
  assert len(metrics.read_jsonl(tmp_path / "batches.jsonl")) == 1


def test_the_environment_says_what_made_a_run():
  there = json.loads(json.dumps(metrics.environment()))
  assert there["packages"]["jax"]
  assert there["command"]
  assert there["commit"] is None or len(there["commit"]) == 40


def test_an_image_without_git_says_its_commit_by_the_environment(monkeypatch):
  monkeypatch.setenv("PATH", "/nowhere")
  assert metrics.commit() is None
  monkeypatch.setenv("RL_TPU_COMMIT", "a" * 40)
  assert metrics.commit() == "a" * 40
