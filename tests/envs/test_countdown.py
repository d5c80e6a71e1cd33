"""Countdown: solutions are right, answers are judged exactly."""

import pytest
from attempt import TOKENIZER, attempt, demonstrated, rows

from rl_tpu.envs.countdown import Config, Task, score


@pytest.fixture(scope="module")
def task():
  return Task(Config(size=300), TOKENIZER)


def test_every_problem_has_its_solution_and_is_within_the_papers_ranges(task):
  for row in rows(task, count=200):
    numbers = list(map(int, row["numbers"].split()))
    assert len(numbers) == 4 and all(1 <= n <= 100 for n in numbers)
    assert 1 <= row["target"] <= 1000
    assert score(row["solution"], row["numbers"], row["target"]) == 1.0


@pytest.mark.parametrize(
  ("expression", "right"),
  [
    ("(1+2)/3", 1.0),
    ("3/(2+1)", 1.0),
    ("1*3-2", 1.0),
    ("1+2+3", 0.0),
    ("3-2", 0.0),
    ("(1+2)/3*3/3", 0.0),
    ("1", 0.0),
    ("1**23", 0.0),
    ("2-1^3", 0.0),
    ("(1+2)/3=1", 0.0),
    ("12-3-8", 0.0),
    ("1/0", 0.0),
  ],
)
def test_each_number_is_used_exactly_once_and_the_target_reached(
  expression, right
):
  assert score(expression, "1 2 3", 1) == right


def test_the_last_answer_in_tags_counts(task):
  row = {"numbers": "1 2 3", "target": 1, "solution": "1*3-2"}
  good = "<think>3</think><answer>1+2</answer><answer>(1+2)/3</answer>"
  _, step, counted = attempt(task, row, good)
  assert (step.reward, counted) == (1.0, {"answered": 1.0})
  _, step, counted = attempt(task, row, "(1+2)/3")
  assert (step.reward, counted) == (0.0, {"answered": 0.0})


def test_a_demonstration_is_right_and_a_wrong_one_wrong(task):
  for seed, row in enumerate(rows(task, count=20)):
    _, answer = demonstrated(task, row, seed)
    assert attempt(task, row, answer)[1].reward == 1.0
    _, answer = demonstrated(task, row, seed, wrong=1.0)
    assert attempt(task, row, answer)[1].reward == 0.0


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"numbers": 1}, "numbers is 1"),
    ({"operators": "%"}, "operators is '%'"),
    ({"template": "{numbers}"}, r"a text with \{numbers\} and \{target\}"),
    ({"form": "latex"}, "form is 'latex'"),
  ],
)
def test_values_out_of_range_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    Config(**fields)
