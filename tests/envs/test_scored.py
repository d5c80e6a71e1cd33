"""Questions and a reward function of one's own."""

import json

import pytest
from attempt import TOKENIZER, attempt, demonstrated, rows

from rl_tpu.envs.scored import Config, Task
from rl_tpu.types import EpisodeError

REWARDS = """
import numpy as np
from beside import HALF

def score(answer, row):
  if answer == "half":
    return HALF
  if answer == "numpy":
    return np.float32(0.25)
  if answer == "counted":
    return {"reward": 2.0, "letters": len(answer)}
  if answer == "text":
    return "1.0"
  if answer == "nothing":
    return {"letters": 1}
  if answer == "raise":
    raise KeyError("answer")
  return answer == row["answer"]
"""
LINES = [{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(60)]


def write(path, lines):
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return str(path)


@pytest.fixture
def make(tmp_path):
  (tmp_path / "rewards.py").write_text(REWARDS)
  (tmp_path / "beside.py").write_text("HALF = 0.5\n")
  path = write(tmp_path / "q.jsonl", LINES)
  made = []

  def task(**changes):
    settings = {"path": path, "reward": f"{tmp_path}/rewards.py:score"}
    config = Config(**{**settings, "processes": 1} | changes)
    made.append(Task(config, TOKENIZER))
    return made[-1]

  yield task
  for one in made:
    one._score.close()


def stored(line):
  return {"row": json.dumps(line)}


def test_an_answer_is_worth_what_the_function_says(make):
  task = make()
  for text, reward in (("3", 1.0), ("4", 0.0), ("half", 0.5), ("numpy", 0.25)):
    _, step, counted = attempt(task, stored(LINES[2]), text)
    assert (step.reward, counted, step.answer) == (reward, {}, text)
  _, step, counted = attempt(task, stored(LINES[2]), "counted")
  assert (step.reward, counted) == (2.0, {"letters": 7.0})


@pytest.mark.parametrize(
  ("text", "kind"),
  [
    ("raise", "reward_raised"),
    ("text", "reward_no_number"),
    ("nothing", "reward_no_number"),
  ],
)
def test_what_is_no_reward_fails_the_episode_by_name(make, text, kind):
  with pytest.raises(EpisodeError, match="rewards.py:score") as caught:
    attempt(make(), stored(LINES[2]), text)
  assert caught.value.kind == kind
  assert f"the answer was {text!r}, of" in str(caught.value)
  assert '"question": "2+1?"' in str(caught.value)


def test_what_a_function_raises_says_where_and_shows_its_lines(make):
  with pytest.raises(
    EpisodeError, match=r"rewards.py:17; the answer"
  ) as caught:
    attempt(make(), stored(LINES[2]), "raise")
  assert 'raise KeyError("answer")' in caught.value.detail
  assert "worker.py" not in caught.value.detail
  assert caught.value.same.endswith("rewards.py:17 KeyError")


def test_an_answer_that_the_budget_cut_has_the_reward_of_the_config(make):
  task = make(cut_reward=-1.0)
  _, step, _ = attempt(task, stored(LINES[2]), "3", stop_reason="length")
  assert step.reward == -1.0 and step.end


def test_the_prompt_names_fields_of_a_row(make):
  task = make(template="Q: {question} ({answer}) {{}}")
  prompt = task.prompt(stored(LINES[2]), 0)
  assert TOKENIZER.decode(prompt.tokens) == "Q: 2+1? (3) {}"


def test_rows_that_give_one_prompt_are_one_question(make, tmp_path):
  twice = write(tmp_path / "twice.jsonl", [*LINES, *LINES])
  task = make(path=twice)
  counts = [len(rows(task, split, 999)) for split in ("train", "heldout")]
  assert sum(counts) == 60 and min(counts) > 0


def test_a_question_in_both_files_is_held_out(make, tmp_path):
  heldout = write(tmp_path / "b.jsonl", LINES[:5])
  task = make(heldout_path=heldout)
  assert len(rows(task, "heldout", 99)) == 5
  assert len(rows(task, "train", 99)) == 55
  before = task.fingerprint
  write(tmp_path / "b.jsonl", LINES[:6])
  assert make(heldout_path=heldout).fingerprint != before


def test_rows_stay_prepared_when_the_function_changes(make, tmp_path):
  other = tmp_path / "other.py"
  other.write_text("def score(answer, row):\n  return 1\n")
  assert make(reward=f"{other}:score").fingerprint == make().fingerprint


def test_a_demonstration_is_the_rows_example(make):
  task = make(example_field="answer")
  assert demonstrated(task, stored(LINES[2])) == ("2+1?\n", "3")
  with pytest.raises(ValueError, match="no wrong demonstrations"):
    demonstrated(task, stored(LINES[2]), wrong=0.5)
  with pytest.raises(ValueError, match="nothing to imitate"):
    demonstrated(make(), stored(LINES[2]))


@pytest.mark.parametrize(
  ("reward", "message"),
  [
    ("{folder}/none.py:score", "none.py is not there"),
    ("{folder}/rewards.py:scores", "no attribute 'scores'"),
    ("{folder}/broken.py:score", "NameError"),
    ("no_such_module:score", "No module named 'no_such_module'"),
  ],
)
def test_a_function_that_does_not_load_is_refused(
  make, tmp_path, reward, message
):
  (tmp_path / "broken.py").write_text("x = y\n")
  with pytest.raises(ValueError, match=message):
    make(reward=reward.format(folder=tmp_path))


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("reward", "rewards.py"),
    ("template", "no field"),
    ("template", "{question"),
    ("seconds", 0.0),
    ("heldout_fraction", 1.0),
  ],
)
def test_a_config_out_of_range_is_refused(field, value):
  settings = {"path": "q.jsonl", "reward": "rewards.py:score"}
  with pytest.raises(ValueError, match=f"scored.Config.{field} is"):
    Config(**settings | {field: value})


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"template": "{text}"}, "a row has no field 'text'"),
    ({"example_field": "gold"}, "a row has no field 'gold'"),
  ],
)
def test_a_row_without_a_field_is_refused(make, changes, message):
  with pytest.raises(ValueError, match=message):
    rows(make(**changes))
