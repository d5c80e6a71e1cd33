"""The guessing game."""

import pytest
from attempt import TOKENIZER, attempt, demonstrated

from rl_tpu.envs.guess_number import Config, Task, _halving

ROW = {"largest": 50, "number": 31}


@pytest.fixture(scope="module")
def task():
  return Task(Config(), TOKENIZER)


def test_the_answers_lead_to_the_number(task):
  said, step, counted = attempt(task, ROW, "25", "37", "31")
  assert said == ["+;", "-;"]
  assert (step.reward, step.end) == (1.0, True)
  assert counted == {"guesses": 3.0, "invalid_guesses": 0.0}


@pytest.mark.parametrize(
  "text", ["0", "51", "-3", "x", "", "٣", "9" * 99, "1.5"]
)
def test_what_is_no_number_of_the_range_is_told_so(task, text):
  said, _, counted = attempt(task, ROW, text)
  assert said == ["!;"] and counted["invalid_guesses"] == 1.0


def test_out_of_guesses_is_worth_nothing(task):
  said, step, _ = attempt(task, ROW, *["1"] * 6)
  assert said == ["+;"] * 5
  assert (step.reward, step.end) == (0.0, True)


@pytest.mark.parametrize("largest", [20, 31, 32, 63, 64, 99])
def test_halving_needs_no_more_guesses_than_there_are(largest):
  for number in range(1, largest + 1):
    assert len(_halving(largest, number)) <= largest.bit_length()


def test_a_demonstration_is_a_turn_of_halving(task):
  seen = {demonstrated(task, ROW, seed) for seed in range(60)}
  assert ("1..50?", "25") in seen and ("1..50?25+;", "38") in seen
  for prompt, answer in seen:
    assert int(answer) in _halving(50, 31) and prompt.startswith("1..50?")


def test_values_out_of_range_are_refused():
  with pytest.raises(
    ValueError, match="largest is 3; it must be >= least = 20"
  ):
    Config(largest=3)
  with pytest.raises(ValueError, match="guesses is 0"):
    Config(guesses=0)
