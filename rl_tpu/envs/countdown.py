"""Countdown: reach a target with some numbers, each used exactly once.

The task of Score Centering (arXiv:2609.20807): 4 numbers in 1..100, a target in
1..1000, the operations + - * /, 20,000 problems from seed 0; the reward is 1 if
the last <answer> holds an expression of exactly these numbers that is worth the
target, else 0. Problems are built from a random expression, so each has a
solution. An answer is parsed (`tools.calculator`), never evaluated.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from rl_tpu.envs import (
  Reply,
  Split,
  TextEnvironment,
  encode_action,
  encode_question,
  of_split,
)
from rl_tpu.models.tokenizer import Tokenizer
from rl_tpu.ops import check_choices, check_fields
from rl_tpu.rewards.answers import Form, extract
from rl_tpu.tools import calculator
from rl_tpu.types import Prompt

TEMPLATE = (
  "Using the numbers {numbers}, write an expression that equals {target}. Use "
  "each number exactly once and only + - * / and parentheses. Think between "
  "<think> and </think>, then give the expression between <answer> and "
  "</answer>, for example <answer>(1 + 2) / 3</answer>.\n"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Which problems, and how they are put."""

  numbers: int = 4
  """In a problem, in [2, 8]."""
  largest: int = 100
  """Of them, >= 2; the least is 1."""
  largest_target: int = 1000
  """>= 1; the least is 1."""
  operators: str = "+-*/"
  """Of the solutions, any of these."""
  size: int = 20_000
  """Problems generated, >= 2; repeated ones are then used once."""
  seed: int = 0
  """Of the generator, >= 0."""
  template: str = TEMPLATE
  """The prompt; names `numbers` and `target`."""
  chat: bool = False
  """Put the prompt as a user's message, through the tokenizer's template."""
  form: Form = "tags"
  """Where the answer stands: `tags`, `boxed`, or `whole`: all of the text."""
  heldout_fraction: float = 0.1
  """Share of the problems kept for evaluation, in (0, 1)."""

  def __post_init__(self):
    check_choices(self)
    check_fields(
      self,
      ("numbers", 2 <= self.numbers <= 8, "in [2, 8]"),
      ("largest", self.largest >= 2, ">= 2"),
      ("largest_target", self.largest_target >= 1, ">= 1"),
      (
        "operators",
        bool(self.operators) and set(self.operators) <= set("+-*/"),
        "some of + - * /",
      ),
      ("size", self.size >= 2, ">= 2"),
      ("seed", self.seed >= 0, ">= 0"),
      (
        "template",
        "{numbers}" in self.template and "{target}" in self.template,
        "a text with {numbers} and {target}",
      ),
      ("heldout_fraction", 0 < self.heldout_fraction < 1, "in (0, 1)"),
    )


class Task:
  """The problems; see `rl_tpu.envs.Task`."""

  name = "countdown"
  fields: Mapping[str, type] = {"numbers": str, "target": int, "solution": str}

  def __init__(self, config: Config, tokenizer: Tokenizer):
    self.config = config
    self.tokenizer = tokenizer

  @property
  def fingerprint(self) -> str:
    """The config."""
    return json.dumps(dataclasses.asdict(self.config), sort_keys=True)

  def records(self, split: Split) -> Iterator[Mapping[str, Any]]:
    """Yields each problem of the split once."""
    return of_split(self._rows(), split, self.config.heldout_fraction)

  def _rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
    rng = np.random.default_rng(self.config.seed)
    for _ in range(self.config.size):
      row = _problem(self.config, rng)
      numbers = sorted(map(int, row["numbers"].split()))
      yield f"{numbers} {row['target']}", row

  def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
    """Renders a row's problem."""
    text = self.config.template.format(
      numbers=row["numbers"], target=row["target"]
    )
    return Prompt(
      index=index,
      tokens=encode_question(self.tokenizer, text, self.config.chat),
      metadata={"numbers": row["numbers"], "target": int(row["target"])},
    )

  def environment(self, prompt: Prompt) -> "Environment":
    """Starts an attempt at a prompt which `prompt` made."""
    return Environment(self, prompt)

  def demonstration(
    self, row: Mapping[str, Any], rng: np.random.Generator, wrong: float = 0.0
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompt and answer; a wrong one has its numbers in disorder."""
    answer = row["solution"]
    if rng.random() < wrong:
      numbers = rng.permutation(row["numbers"].split())
      answer = "+".join(numbers)
      if score(answer, row["numbers"], row["target"]):
        answer = "-".join(numbers)
    if self.config.form == "tags":
      answer = f"<think></think><answer>{answer}</answer>"
    elif self.config.form == "boxed":
      answer = f"\\boxed{{{answer}}}"
    return self.prompt(row, 0).tokens, encode_action(self.tokenizer, answer)


class Environment(TextEnvironment):
  """One problem, one answer; one that the budget cut is worth 0."""

  def __init__(self, task: Task, prompt: Prompt):
    super().__init__(task.tokenizer, prompt)
    self._form: Form = task.config.form

  async def answer(self, text: str) -> Reply:
    """Judges the expression."""
    expression = extract(text, self._form)
    asked = self.prompt.metadata
    reward = 0.0
    if expression is not None:
      reward = score(expression, asked["numbers"], asked["target"])
    return Reply(
      reward=reward,
      end=True,
      metrics={"answered": float(expression is not None)},
      answer=expression,
    )


def score(expression: str, numbers: str, target: int) -> float:
  """Returns 1.0 if it uses exactly these numbers and is worth the target."""
  try:
    found = calculator.evaluate(expression)
  except calculator.CalculatorError:
    return 0.0
  used = sorted(found.numbers) == sorted(map(int, numbers.split()))
  power = "^" in expression or "**" in expression
  return float(used and found.value == target and not power)


def _problem(config: Config, rng: np.random.Generator) -> dict[str, Any]:
  """Joins numbers at random until they make a target that is allowed."""
  while True:
    numbers = rng.integers(1, config.largest + 1, config.numbers)
    parts = [(str(n), Fraction(int(n))) for n in numbers]
    while len(parts) > 1:
      first, second = rng.choice(len(parts), 2, replace=False)
      operator = config.operators[rng.integers(len(config.operators))]
      (left, a), (right, b) = parts[first], parts[second]
      if operator == "/" and not b:
        break
      value = {
        "+": a + b,
        "-": a - b,
        "*": a * b,
        "/": a / b if b else a,
      }[operator]
      rest = [p for i, p in enumerate(parts) if i not in (first, second)]
      parts = [*rest, (f"({left}{operator}{right})", value)]
    solution, value = parts[0]
    reached = value.denominator == 1 and 1 <= value <= config.largest_target
    if len(parts) == 1 and reached:
      return {
        "numbers": " ".join(map(str, numbers)),
        "target": int(value),
        "solution": solution[1:-1],
      }
