"""Arithmetic with a calculator: the policy calls, the environment answers.

    Q37*48?   C37*48 <stop>   =1776;   A1776 <stop>
    prompt    call            result   answer

A question is a chain such as `37*48+9`; a call may hold `call_operators`
operators, so a longer chain takes several calls. What begins with `A` is the
answer and ends the episode, with reward 1 if it is the chain's value; what
begins with `C` is computed; anything else, and a call that is no arithmetic, is
told so (`=!;`) and the episode goes on. Without the tool a small model does not
multiply: what it has to learn is to call, to read and to repeat.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rl_tpu.envs import (
  Reply,
  Split,
  TextEnvironment,
  encode_action,
  encode_observation,
  of_split,
)
from rl_tpu.models.tokenizer import Tokenizer, encode_prompt
from rl_tpu.ops import check_fields
from rl_tpu.tools import calculator
from rl_tpu.types import Prompt

_ERROR = "=!;"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Which questions, and how the policy is warmed up to them."""

  terms: int = 2
  """Numbers in a question, >= 2; an episode needs up to `terms` turns."""
  digits: int = 2
  """Of each number, in [1, 6]."""
  operators: str = "*"
  """Between them: any of + - *."""
  call_operators: int = 1
  """Most operators in one call, >= 1."""
  size: int = 8_000
  """Questions generated, >= 2; repeated ones are then used once."""
  seed: int = 0
  """Of the generator, >= 0."""
  guesses: float = 0.75
  """Share of the wrong demonstrations that answer at random without a call, in
  [0, 1]; the others call for something else or misread the result."""
  heldout_fraction: float = 0.1
  """Share of the questions kept for evaluation, in (0, 1)."""

  def __post_init__(self):
    check_fields(
      self,
      ("terms", self.terms >= 2, ">= 2"),
      ("digits", 1 <= self.digits <= 6, "in [1, 6]"),
      (
        "operators",
        bool(self.operators) and set(self.operators) <= set("+-*"),
        "some of + - *",
      ),
      ("call_operators", self.call_operators >= 1, ">= 1"),
      ("size", self.size >= 2, ">= 2"),
      ("seed", self.seed >= 0, ">= 0"),
      ("guesses", 0 <= self.guesses <= 1, "in [0, 1]"),
      ("heldout_fraction", 0 < self.heldout_fraction < 1, "in (0, 1)"),
    )


class Task:
  """The questions; see `rl_tpu.envs.Task`."""

  name = "calculator"
  fields: Mapping[str, type] = {"question": str}

  def __init__(self, config: Config, tokenizer: Tokenizer):
    self.config = config
    self.tokenizer = tokenizer

  @property
  def fingerprint(self) -> str:
    """The config."""
    return json.dumps(dataclasses.asdict(self.config), sort_keys=True)

  def records(self, split: Split) -> Iterator[Mapping[str, Any]]:
    """Yields each question of the split once."""
    return of_split(self._rows(), split, self.config.heldout_fraction)

  def _rows(self) -> Iterator[tuple[str, dict[str, str]]]:
    config = self.config
    rng = np.random.default_rng(config.seed)
    for _ in range(config.size):
      # Multiplications first, so that a call always starts a chain.
      signs = rng.choice(list(config.operators), config.terms - 1)
      signs = sorted(signs, key=lambda sign: sign != "*")
      numbers = rng.integers(0, 10**config.digits, config.terms)
      question = str(numbers[0]) + "".join(
        f"{sign}{number}"
        for sign, number in zip(signs, numbers[1:], strict=True)
      )
      yield question, {"question": question}

  def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
    """Renders a row's question."""
    return Prompt(
      index=index,
      tokens=encode_prompt(self.tokenizer, f"Q{row['question']}?"),
      metadata={"question": row["question"]},
    )

  def environment(self, prompt: Prompt) -> "Environment":
    """Starts an attempt at a prompt which `prompt` made."""
    return Environment(self, prompt)

  def demonstration(
    self, row: Mapping[str, Any], rng: np.random.Generator, wrong: float = 0.0
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns one turn of a solution, and all that comes before it.

    Which turn is drawn; over the rows a policy sees each of them.
    """
    turns = solution(row["question"])
    at = int(rng.integers(len(turns)))
    action = turns[at][0]
    if rng.random() < wrong:
      if rng.random() < self.config.guesses:
        at, action = 0, f"A{rng.integers(10 ** (2 * self.config.digits))}"
      else:
        action = _misread(action, rng)
    pieces = [self.prompt(row, 0).tokens]
    for call, result in turns[:at]:
      pieces += [
        encode_action(self.tokenizer, call),
        encode_observation(self.tokenizer, result),
      ]
    action_ids = encode_action(self.tokenizer, action)
    return np.concatenate(pieces).astype(np.int32), action_ids


class Environment(TextEnvironment):
  """Calls and their results, until an answer."""

  def __init__(self, task: Task, prompt: Prompt):
    super().__init__(task.tokenizer, prompt)
    self._config = task.config
    question = prompt.metadata["question"]
    self._value = calculator.evaluate(question).value

  async def answer(self, text: str) -> Reply:
    """Computes a call, judges an answer, refuses anything else."""
    if text.startswith("A"):
      right = text[1:] == str(self._value)
      return Reply(
        reward=float(right), end=True, metrics=_counted(), answer=text[1:]
      )
    try:
      if not text.startswith("C"):
        raise calculator.CalculatorError("neither a call nor an answer")
      found = calculator.evaluate(text[1:])
      if found.operators > self._config.call_operators:
        raise calculator.CalculatorError("too many operators")
    except calculator.CalculatorError:
      return Reply(text=_ERROR, metrics=_counted(calls=1, errors=1))
    return Reply(text=f"={found.value};", metrics=_counted(calls=1))

  def cut(self) -> Reply:
    """An action without an end is worth nothing."""
    return Reply(end=True, metrics=_counted())


def _counted(calls: int = 0, errors: int = 0) -> dict[str, float]:
  return {"tool_calls": float(calls), "tool_errors": float(errors)}


def solution(question: str) -> list[tuple[str, str]]:
  """Returns each turn's action and result, from left to right.

  Multiplications come first in a question, so its value is that of the chain
  computed in order.
  """
  first, *rest = re.findall(r"[+*-]?\d+", question)
  turns, value = [], int(first)
  for part in rest:
    call = f"{value}{part}"
    value = int(calculator.evaluate(call).value)
    turns.append((f"C{call}", f"={value};"))
  return [*turns, (f"A{value}", "")]


def _misread(action: str, rng: np.random.Generator) -> str:
  """The action with one digit changed."""
  places = [i for i, character in enumerate(action) if character.isdigit()]
  place = places[rng.integers(len(places))]
  digit = (int(action[place]) + int(rng.integers(1, 10))) % 10
  return f"{action[:place]}{digit}{action[place + 1 :]}"
