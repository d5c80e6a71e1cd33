"""Where a loop's time goes, and which batches a profiler sees."""

import itertools
import re
import threading
import urllib.request

import jax
import jax.numpy as jnp
import pytest
import tiny_run
from test_train import Quiet

from rl_tpu import metrics, monitoring, tracing, train
from rl_tpu.report import goodput, page


@pytest.fixture
def clock(monkeypatch):
  """Each look at it takes a second."""
  now = itertools.count()
  monkeypatch.setattr(tracing.time, "monotonic", lambda: float(next(now)))


def test_intervals_follow_each_other(clock):
  loop = tracing.Loop()
  with loop.during("wait"):
    pass
  with loop.during("train"):
    pass
  assert loop.take() == [(0.0, 1.0, "wait"), (2.0, 3.0, "train")]
  assert loop.take() == []


def test_compiling_is_taken_out_of_what_it_interrupts(clock):
  loop = tracing.Loop()
  with loop.during("train"):  # From 0 to 3.
    tracing._heard(tracing._COMPILED, 0.5)  # Ends at 1.
    tracing._heard("another event", 0.5)
    tracing._heard(tracing._COMPILED, 9.0)  # Ends at 2; began in the first.
  assert loop.take() == [
    (0.0, 0.5, "train"),
    (0.5, 1.0, "compile"),
    (1.0, 2.0, "compile"),
    (2.0, 3.0, "train"),
  ]


def test_another_threads_compiling_is_not_ours():
  loop = tracing.Loop()

  def elsewhere():
    tracing._heard(tracing._COMPILED, 0.5)

  with loop.during("train"):
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
  tracing._heard(tracing._COMPILED, 0.5)  # Nobody asked.
  assert [kind for _, _, kind in loop.take()] == ["train"]


def test_what_jax_compiles_is_heard():
  loop = tracing.Loop()
  with loop.during("train"):
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(3)).block_until_ready()
  kinds = [kind for _, _, kind in loop.take()]
  assert "compile" in kinds and kinds[-1] == "train"


def traced(directory):
  """Batches that left a trace."""
  found = directory.glob("traces/*/plugins/profile/*/*.xplane.pb")
  return sorted(int(path.parents[3].name) for path in found)


def test_chosen_batches_are_traced_and_those_asked_for_meanwhile(tmp_path):
  said = []
  profiles = tracing.Profiles(
    tracing.Config(batches=(2, 3)), tmp_path, said.append
  )
  for batch in range(1, 7):
    if batch == 5:
      (tmp_path / tracing.REQUEST).touch()
    with profiles.of(batch):
      jnp.ones(3).block_until_ready()
  assert traced(tmp_path) == [2, 3, 5]
  assert len(said) == 3
  assert not (tmp_path / tracing.REQUEST).exists()


def test_a_trace_ends_with_its_batch_also_where_that_fails(tmp_path):
  profiles = tracing.Profiles(
    tracing.Config(batches=(1, 2)), tmp_path, lambda text: None
  )
  with pytest.raises(ZeroDivisionError), profiles.of(1):
    raise ZeroDivisionError
  with profiles.of(2):
    pass
  assert traced(tmp_path) == [1, 2]


def test_batches_start_at_1():
  with pytest.raises(ValueError, match=r"batches is \(0,\)"):
    tracing.Config(batches=(0,))


class Scraping(Quiet):
  """A view that looks at the port after each batch."""

  def __init__(self):
    super().__init__()
    self.url, self.seen = "", []

  def note(self, text):
    if found := re.search(r"http://\S+/metrics", text):
      self.url = found[0]

  def batch(self, batch, metrics, seconds_left):
    with urllib.request.urlopen(self.url) as answer:
      self.seen.append(answer.read().decode())


@pytest.mark.slow
def test_a_run_accounts_for_its_time_and_traces_what_was_asked(tmp_path):
  config = tiny_run.get_config(
    tmp_path / "runs",
    logging=monitoring.Config(prometheus_port=0),
    trace=tracing.Config(batches=(3,)),
  )
  view = Scraping()
  train.run(config, view)
  directory = config.run_directory
  assert traced(directory) == [3]
  assert [re.search(r"\nrl_tpu_batch (\S+)", s)[1] for s in view.seen] == (
    ["1.0", "2.0", "3.0", "4.0"]
  )
  for name in ("reward", "staleness_max", "trained_tokens_per_second"):
    assert f"\nrl_tpu_{name} " in view.seen[0]

  rows = [row for row in page.rows(directory) if "reward" in row]
  kinds = [f"learner_{kind}_share" for kind in tracing.KINDS]
  for row in rows:
    assert 0 < sum(row[kind] for kind in kinds) <= 1 + 1e-9
  assert rows[0]["learner_compile_share"] > 0
  assert rows[1]["learner_checkpoint_share"] > 0  # That of batch 1.
  starts = metrics.read_jsonl(directory / "starts.jsonl")
  shares = goodput.account(rows, page.bars(directory), starts)["shares"]
  assert sum(shares.values()) == pytest.approx(1)
  assert {"train", "wait", "weights", "checkpoint", "compile"} < set(shares)
