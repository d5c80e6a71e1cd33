"""The calculator task: calls, errors, answers, demonstrations."""

import asyncio

import numpy as np
import pytest
from attempt import (
  TOKENIZER,
  attempt,
  demonstrated,
  ids,
  rows,
)

from rl_tpu.envs.calculator import Config, Task, solution
from rl_tpu.episode import run_episode
from rl_tpu.types import Completion, Sampling

ROW = {"question": "37*48"}


@pytest.fixture(scope="module")
def task():
  return Task(Config(), TOKENIZER)


def test_a_call_is_answered_and_the_right_answer_earns_1(task):
  said, step, counted = attempt(task, ROW, "C37*48", "A1776")
  assert said == ["=1776;"]
  assert (step.reward, step.end) == (1.0, True)
  assert counted == {"tool_calls": 1.0, "tool_errors": 0.0}


@pytest.mark.parametrize("answer", ["A1775", "A", "A 1776", "A1776;", "A37*48"])
def test_any_other_answer_earns_nothing(task, answer):
  _, step, _ = attempt(task, ROW, answer)
  assert (step.reward, step.end) == (0.0, True)


@pytest.mark.parametrize(
  "call", ["C37**", "C", "hello", "", "C9^99", "C1*2*3", "C1/0", "c37*48"]
)
def test_H20_a_malformed_call_is_told_so_and_the_episode_goes_on(task, call):
  said, step, counted = attempt(task, ROW, call, "A1776")
  assert said == ["=!;"] and step.reward == 1.0
  assert counted == {"tool_calls": 1.0, "tool_errors": 1.0}


def test_a_chain_takes_a_call_for_each_operator():
  task = Task(Config(terms=3, operators="*-"), TOKENIZER)
  assert solution("12*3-40") == [
    ("C12*3", "=36;"),
    ("C36-40", "=-4;"),
    ("A-4", ""),
  ]
  for row in rows(task, count=30):
    turns = solution(row["question"])
    said, step, counted = attempt(task, row, *(action for action, _ in turns))
    assert said == [result for _, result in turns[:-1]]
    assert step.reward == 1.0 and counted["tool_calls"] == 2


def test_demonstrations_show_each_turn_after_what_came_before(task):
  seen = {demonstrated(task, ROW, seed) for seed in range(20)}
  assert seen == {("Q37*48?", "C37*48"), ("Q37*48?C37*48=1776;", "A1776")}


def test_wrong_demonstrations_guess_or_misread(task):
  right = {"C37*48", "A1776"}
  wrong = [demonstrated(task, ROW, seed, wrong=1.0) for seed in range(40)]
  assert not {answer for _, answer in wrong} & right
  guesses = [a for p, a in wrong if p == "Q37*48?" and a[0] == "A"]
  assert 20 < len(guesses) < 40


class Player:
  """Plays texts, each ended by the stop token."""

  def __init__(self, *texts):
    self.texts, self.requests = list(texts), []

  async def generate(self, request, progress=None):
    self.requests.append(request.tokens.tolist())
    tokens = ids(self.texts.pop(0))
    n = len(tokens)
    return Completion(
      tokens=tokens,
      logp=np.arange(1, n + 1, dtype=np.float32) * -0.1,
      version=np.full(n, len(self.requests), np.int32),
      stop_reason="stop",
    )


@pytest.mark.parametrize("turns", [1, 2, 3, 10])
def test_X12_every_turn_is_asked_with_exactly_the_stored_prefix(task, turns):
  # Answers of different lengths leave no gap: nothing is padded to a slot.
  calls = [f"C{7**n}*3" for n in range(turns - 1)]
  player = Player(*calls, "A1776")
  prompt = task.prompt(ROW, 5)
  t = asyncio.run(
    run_episode(
      player,
      task.environment(prompt),
      prompt,
      member=0,
      sampling=Sampling(max_tokens=30),
      seed=0,
      max_turns=turns,
      max_trajectory_tokens=1000,
    )
  )
  stored, starts = t.tokens.tolist(), []
  for request in player.requests:
    assert request == stored[: len(request)]
    starts.append(len(request))
  text = TOKENIZER.decode(t.tokens)
  said = "".join(f"{c}={3 * 7**n};" for n, c in enumerate(calls))
  assert text == f"Q37*48?{said}A1776"
  sampled = np.zeros(len(stored), bool)
  for start, played in zip(starts, [*calls, "A1776"], strict=True):
    sampled[start : start + len(ids(played))] = True
  np.testing.assert_array_equal(t.action_mask, sampled)
  assert (t.behavior_logp[~sampled] == 0).all()
  assert (t.behavior_logp[sampled] < 0).all()
  assert (t.token_version[~sampled] == -1).all()
  assert sorted(set(t.token_version[sampled])) == list(range(1, turns + 1))
  assert t.rewards.tolist() == [0.0] * (len(stored) - 1) + [1.0]
  assert t.metrics == {"tool_calls": turns - 1.0, "tool_errors": 0.0}


def test_H20_the_error_is_an_observation_and_the_sampled_ids_stay(task):
  player = Player("C37**", "A1776")
  prompt = task.prompt(ROW, 5)
  t = asyncio.run(
    run_episode(
      player,
      task.environment(prompt),
      prompt,
      member=0,
      sampling=Sampling(max_tokens=30),
      seed=0,
      max_turns=3,
      max_trajectory_tokens=100,
    )
  )
  said = [TOKENIZER.decode(t.tokens[t.action_mask]), TOKENIZER.decode(t.tokens)]
  assert said == ["C37**A1776", "Q37*48?C37**=!;A1776"]
  start = len(prompt.tokens) + len(ids("C37**"))
  error = slice(start, start + len("=!;"))
  assert TOKENIZER.decode(t.tokens[error]) == "=!;"
  assert not t.action_mask[error].any() and not t.rewards[error].any()
  assert t.outcome == 1.0


@pytest.mark.parametrize("field", ["terms", "digits", "call_operators", "size"])
def test_values_out_of_range_are_refused(field):
  with pytest.raises(ValueError, match=f"calculator.Config.{field} is 0"):
    Config(**{field: 0})
  with pytest.raises(ValueError, match="operators is '/'"):
    Config(operators="/")
