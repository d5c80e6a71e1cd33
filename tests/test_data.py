"""Rows on disk once, and streams that are functions of an index."""

import collections
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_tpu import data
from rl_tpu.types import Prompt


class Numbers:
  """A task of numbered questions; counts how often its rows are made."""

  name = "numbers"
  fields = {"question": str, "source_index": int, "weight": float}  # noqa: RUF012

  def __init__(self, train=5, heldout=2):
    self.sizes = {"train": train, "heldout": heldout}
    self.generated = 0

  @property
  def fingerprint(self):
    return json.dumps(self.sizes)

  def records(self, split):
    self.generated += 1
    for i in range(self.sizes[split]):
      yield {"question": f"é{split}{i}", "source_index": i, "weight": i / 2}


def make_prompt(row, index):
  return Prompt(index=index, tokens=np.array([row["source_index"]], np.int32))


def stream_of(size, seed=0):
  rows = [{"source_index": i} for i in range(size)]
  return data.PromptStream(rows, seed=seed, make_prompt=make_prompt)


def drawn(stream, first, last):
  prompts = [stream[i] for i in range(first, last)]
  assert [p.index for p in prompts] == list(range(first, last))
  return [int(p.tokens[0]) for p in prompts]


def demonstrate(row, rng, wrong):
  answer = [int(rng.random() < wrong), int(rng.integers(1000))]
  return np.array([row["source_index"]], np.int32), np.array(answer, np.int32)


def demonstrations(batch_size, size=200, **kwargs):
  rows = [{"source_index": i} for i in range(size)]
  return data.DemonstrationStream(
    rows, seed=3, batch_size=batch_size, demonstrate=demonstrate, **kwargs
  )


def test_prepare_writes_the_rows_once_and_reads_them_with_their_types(tmp_path):
  task = Numbers()
  rows = data.prepare(task, tmp_path)
  assert {split: len(r) for split, r in rows.items()} == task.sizes
  found = sorted(
    (rows["heldout"][i] for i in range(2)), key=lambda r: r["source_index"]
  )
  written = list(Numbers().records("heldout"))
  assert found == written
  for name, value in written[1].items():
    assert type(found[1][name]) is type(value)
  assert task.generated == 2
  again = data.prepare(task, tmp_path)
  assert task.generated == 2
  assert [again["train"][i] for i in range(5)] == [
    rows["train"][i] for i in range(5)
  ]


def test_another_fingerprint_is_another_dataset_and_nothing_is_left_over(
  tmp_path,
):
  data.prepare(Numbers(train=5), tmp_path)
  assert len(data.prepare(Numbers(train=6), tmp_path)["train"]) == 6
  left = sorted(p.name for p in (tmp_path / "numbers").iterdir())
  assert len(left) == 2
  assert not any(name.startswith("building") for name in left)


def test_preparing_that_fails_leaves_no_data(tmp_path):
  class Failing(Numbers):
    def records(self, split):
      yield {"question": "a", "source_index": "not a number", "weight": 0.0}

  with pytest.raises((TypeError, ValueError)):
    data.prepare(Failing(), tmp_path)
  assert not list((tmp_path / "numbers").iterdir())
  assert len(data.prepare(Numbers(), tmp_path)["train"]) == 5


def test_losing_the_race_to_prepare_takes_the_winners_rows(
  tmp_path, monkeypatch
):
  rename = os.rename

  def win_first(source, target):
    if not os.path.exists(target) and "numbers" in str(target):
      monkeypatch.setattr(os, "rename", rename)
      data.prepare(Numbers(), tmp_path)
    rename(source, target)

  task = Numbers()
  data.prepare(Numbers(train=1), tmp_path)  # TFDS's own first-time set-up.
  monkeypatch.setattr(data.os, "rename", win_first)
  assert len(data.prepare(task, tmp_path)["train"]) == 5
  assert len(list((tmp_path / "numbers").iterdir())) == 2


@pytest.mark.parametrize("sizes", [{"heldout": 0}, {"train": 0}])
def test_an_empty_split_is_refused_by_name(tmp_path, sizes):
  (split,) = sizes
  with pytest.raises(ValueError, match=f"'{split}' of numbers is empty"):
    data.prepare(Numbers(**sizes), tmp_path)


def test_another_process_draws_the_same_prompts_without_tensorflow(tmp_path):
  code = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_data
from rl_tpu import data
rows = data.prepare(test_data.Numbers(), {str(tmp_path)!r})
stream = data.PromptStream(
  rows["train"], seed=0, make_prompt=test_data.make_prompt
)
print(test_data.drawn(stream, 0, 12))
print("tensorflow" in sys.modules)
"""
  output = subprocess.run(
    [sys.executable, "-c", code],
    check=True,
    capture_output=True,
    text=True,
    env={**os.environ, "PYTHONHASHSEED": "1"},
  ).stdout
  rows = data.prepare(Numbers(), tmp_path)["train"]
  stream = data.PromptStream(rows, seed=0, make_prompt=make_prompt)
  # The library's banners are not in the way either.
  assert output == f"{drawn(stream, 0, 12)}\nFalse\n"


def test_every_row_once_an_epoch_and_each_epoch_in_its_own_order():
  stream = stream_of(40)
  epochs = [drawn(stream, 40 * e, 40 * (e + 1)) for e in range(3)]
  for epoch in epochs:
    assert sorted(epoch) == list(range(40))
  assert len({tuple(epoch) for epoch in [*epochs, list(range(40))]}) == 4


def test_the_seed_decides_the_order():
  assert drawn(stream_of(40, seed=1), 0, 80) == drawn(
    stream_of(40, seed=1), 0, 80
  )
  assert drawn(stream_of(40, seed=1), 0, 40) != drawn(
    stream_of(40, seed=2), 0, 40
  )


@pytest.mark.parametrize("size", [6, 7])
@pytest.mark.parametrize("batch_size", [2, 4])
def test_H08_resuming_at_an_epochs_end_trains_every_prompt_exactly_twice(
  size, batch_size
):
  total = 2 * size
  cut = min(total, batch_size * (-(-size // batch_size)))
  used = drawn(stream_of(size), 0, cut)
  # A new process knows nothing but the index to go on at.
  resumed = drawn(stream_of(size), cut, total)
  assert len(resumed) == total - cut > 0
  counts = collections.Counter(used + resumed)
  assert counts == {row: 2 for row in range(size)}


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 9), st.integers(0, 20), st.integers(0, 5))
def test_a_stream_resumed_anywhere_is_the_unbroken_stream(size, cut, seed):
  unbroken = drawn(stream_of(size, seed), 0, 21)
  assert (
    drawn(stream_of(size, seed), 0, cut) + drawn(stream_of(size, seed), cut, 21)
    == unbroken
  )


def test_heldout_prompts_are_the_first_rows_under_indices_of_their_own():
  rows = [{"source_index": 7 + i} for i in range(4)]
  prompts = data.heldout(rows, 3, make_prompt)
  assert [int(p.tokens[0]) for p in prompts] == [7, 8, 9]
  assert [p.index for p in prompts] == [2**30, 2**30 + 1, 2**30 + 2]
  with pytest.raises(IndexError, match=str(2**30)):
    stream_of(4)[data.HELDOUT_INDEX]
  with pytest.raises(IndexError, match="-1"):
    stream_of(4)[-1]


@pytest.mark.parametrize("count", [0, 5])
def test_more_heldout_prompts_than_rows_are_refused(count):
  with pytest.raises(ValueError, match=f"{count} held-out.*\\[1, 4\\]"):
    data.heldout([{"source_index": 0}] * 4, count, make_prompt)


def test_a_stream_of_nothing_is_refused():
  with pytest.raises(ValueError, match="empty"):
    stream_of(0)


def test_demonstrations_depend_on_the_step_alone():
  def flat(batch):
    return [(p.tolist(), a.tolist()) for p, a in batch]

  stream = demonstrations(4, size=10)
  steps = [flat(stream.batch(step)) for step in range(5)]
  assert flat(demonstrations(4, size=10).batch(3)) == steps[3]
  asked = [prompt[0] for step in steps for prompt, _ in step]
  assert sorted(asked) == sorted(list(range(10)) * 2)
  randoms = [answer[1] for step in steps for _, answer in step]
  assert len(set(randoms)) > 15


def test_the_wrong_share_reaches_the_task():
  wrong = [a[0] for _, a in demonstrations(100).batch(0, wrong=0.4)]
  assert 20 < sum(wrong) < 60
  assert not any(a[0] for _, a in demonstrations(100).batch(0))


def test_H28_hosts_share_each_batch_disjointly_and_make_equal_steps():
  def asked(step, **host):
    return [p[0] for p, _ in demonstrations(9, **host).batch(step)]

  for step in range(3):
    shares = [asked(step, host_index=h, host_count=3) for h in range(3)]
    whole = asked(step)
    assert shares == [whole[0::3], whole[1::3], whole[2::3]]


def test_H28_a_batch_that_hosts_cannot_share_equally_is_refused():
  with pytest.raises(ValueError, match=r"batch_size is 10.*3 hosts"):
    demonstrations(10, host_index=0, host_count=3)
  with pytest.raises(ValueError, match="host_index is 3"):
    demonstrations(9, host_index=3, host_count=3)
