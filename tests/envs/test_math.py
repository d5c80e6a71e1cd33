"""Math questions: where they come from, and how answers are judged."""

import json

import pytest
from attempt import TOKENIZER, attempt, demonstrated, rows

from rl_tpu import data
from rl_tpu.envs import SPLITS, math
from rl_tpu.envs.math import Config, Task
from rl_tpu.types import EpisodeError


def write(path, lines):
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return str(path)


LINES = [{"question": f"{i}/2?", "answer": f"#### {i}/2"} for i in range(60)]


@pytest.fixture
def task(tmp_path):
  path = write(tmp_path / "q.jsonl", LINES)
  made = Task(Config(path=path, verify_processes=1), TOKENIZER)
  yield made
  made._verify.close()


def test_an_answer_is_verified_and_the_box_is_asked_for(task):
  row = {"question": "1/2?", "answer": "1/2"}
  for text, reward in (
    (r"so \boxed{0.5}", 1.0),
    (r"\boxed{\frac{1}{2}}", 1.0),
    (r"\boxed{2}", 0.0),
    ("1/2", 0.0),
  ):
    _, step, counted = attempt(task, row, text)
    assert (step.reward, counted) == (reward, {"verifier_failed": 0.0})


def test_H19_a_box_in_the_prompt_earns_nothing(task):
  row = {"question": r"Put 7 in \boxed{7}.", "answer": "7"}
  assert attempt(task, row, "as you say")[1].reward == 0.0


def test_rows_come_from_jsonl_with_gsm8ks_answers(task):
  every = [row for split in SPLITS for row in rows(task, split, 99)]
  assert sorted(every, key=str) == sorted(
    ({"question": f"{i}/2?", "answer": f"{i}/2"} for i in range(60)), key=str
  )


def test_a_folder_that_tfds_prepared_has_the_same_rows(task, tmp_path):
  data.prepare(task, tmp_path / "prepared")
  (folder,) = (tmp_path / "prepared" / "math").iterdir()
  again = Task(Config(path=str(folder)), TOKENIZER)
  for split in SPLITS:
    key = json.dumps
    assert sorted(rows(again, split, 99), key=key) == sorted(
      rows(task, split, 99), key=key
    )


def test_a_question_in_both_files_is_held_out(tmp_path):
  train = write(tmp_path / "a.jsonl", LINES)
  heldout = write(tmp_path / "b.jsonl", LINES[:5])
  task = Task(Config(path=train, heldout_path=heldout), TOKENIZER)
  assert len(rows(task, "heldout", 99)) == 5
  assert len(rows(task, "train", 99)) == 55


def test_the_fingerprint_tells_the_files_contents(tmp_path):
  path = write(tmp_path / "a.jsonl", LINES)
  before = Task(Config(path=path), TOKENIZER).fingerprint
  write(tmp_path / "a.jsonl", LINES[1:])
  assert Task(Config(path=path), TOKENIZER).fingerprint != before


class Hanging:
  """A verifier that does not settle."""

  async def __call__(self, *arguments):
    raise EpisodeError("reward_timeout", "too long")

  def close(self):
    pass


@pytest.mark.parametrize("unsettled", ["wrong", "drop"])
def test_H18_an_answer_that_the_verifier_does_not_settle(tmp_path, unsettled):
  path = write(tmp_path / "q.jsonl", LINES)
  task = Task(Config(path=path, unsettled=unsettled), TOKENIZER)
  task._verify = Hanging()
  row = {"question": "q", "answer": "7"}
  if unsettled == "drop":
    with pytest.raises(EpisodeError, match="reward_timeout"):
      attempt(task, row, r"\boxed{7}")
    return
  _, step, counted = attempt(task, row, r"\boxed{7}")
  assert (step.reward, counted) == (0.0, {"verifier_failed": 1.0})


@pytest.mark.slow
def test_H18_three_that_hang_then_a_good_one_earn_0_0_0_1(tmp_path):
  """With one process, which is another one after each."""
  path = write(tmp_path / "q.jsonl", LINES)
  config = Config(path=path, verify_processes=1, verify_seconds=5.0)
  task = Task(config, TOKENIZER)
  row = {"question": "q", "answer": "7"}
  earned, failed = [], 0.0
  for answer in (
    *("9^{9^{9^{9}}}", "(10^{9})!", r"\frac{10^{10^{10}}}{3}"),
    r"\frac{14}{2}",
  ):
    _, step, counted = attempt(task, row, rf"\boxed{{{answer}}}")
    earned.append(step.reward)
    failed += counted["verifier_failed"]
  task._verify.close()
  assert earned == [0.0, 0.0, 0.0, 1.0]
  assert failed >= 1  # They are counted; the verifier gives up on some itself.


def test_a_demonstration_has_the_form_asked_for(task):
  row = {"question": "1/2?", "answer": "1/2"}
  prompt, answer = demonstrated(task, row)
  assert answer == r"\boxed{1/2}" and r"\boxed{}" in prompt
  with pytest.raises(ValueError, match="no wrong demonstrations"):
    demonstrated(task, row, wrong=0.5)


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (
      '{"question": "q"}\n',
      r"a row has no field 'answer'; .*: \{'question': 'q'\}$",
    ),
    ("{\n", "line 1"),
  ],
)
def test_a_file_of_another_form_is_refused(tmp_path, content, message):
  path = tmp_path / "q.jsonl"
  path.write_text(content)
  with pytest.raises(ValueError, match=message):
    rows(Task(Config(path=str(path)), TOKENIZER))


def test_a_file_that_is_not_there_is_refused(tmp_path):
  with pytest.raises(ValueError, match="nowhere.jsonl is not there"):
    Task(Config(path=str(tmp_path / "nowhere.jsonl")), TOKENIZER)
  with pytest.raises(ValueError, match="math.Config.verify_seconds is 0"):
    math.Config(path="x", verify_seconds=0)
