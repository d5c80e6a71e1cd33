import pytest

from rl_tpu import metrics
from rl_tpu.report import figure


def test_a_run_becomes_a_picture(tmp_path):
  log = metrics.RunLog(tmp_path, resume_at=None)
  log.write(0, {"heldout_accuracy": 0.1})
  for batch in (1, 2, 3):
    log.write(batch, {"reward": batch / 4})
    log.record("batches", batch, {"prompts": [], "staleness_tokens": {"1": 5}})
    bars = [
      ("learner", "train", batch, batch + 0.5),
      ("generator", "generate", batch + 0.2, batch + 0.9),
    ]
    log.record("events", batch, {"intervals": bars})
  log.close()
  picture = figure.plot(tmp_path)
  assert picture.read_bytes()[:4] == b"\x89PNG"
  assert picture.stat().st_size > 10_000


def test_one_batch_and_rewards_of_any_size_are_shown(tmp_path, monkeypatch):
  log = metrics.RunLog(tmp_path, resume_at=None)
  log.write(0, {"heldout_accuracy": -2.0})
  log.write(1, {"reward": 3.0})
  log.record("batches", 1, {"prompts": [], "staleness_tokens": {"0": 5}})
  log.record("events", 1, {"intervals": [("learner", "train", 1.0, 1.5)]})
  log.close()
  limits = []
  close = figure.plt.close

  def closed(drawn):
    limits.extend(axes.get_ylim() for axes in drawn.axes[:1])
    close(drawn)

  monkeypatch.setattr(figure.plt, "close", closed)
  figure.plot(tmp_path)
  assert limits == [(-2.0, 3.0)]


def test_nothing_trained_is_nothing_drawn(tmp_path):
  with pytest.raises(FileNotFoundError, match="no trained batch"):
    figure.plot(tmp_path)
