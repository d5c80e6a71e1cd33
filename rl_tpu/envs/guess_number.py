"""A text game of several turns: find a number by `higher` and `lower`.

    1..50?    25 <stop>    +;    37 <stop>    -;    31 <stop>

The policy guesses, the environment says whether the number is larger (`+;`) or
smaller (`-;`), anything that is no number in the range is told so (`!;`). The
reward is 1 for the number within `guesses` attempts, else 0; halving the range
needs ceil(log2(largest + 1)) of them, which is the default. A small model can
learn it, and has to carry a state over turns that no single turn shows.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rl_tpu.envs import (
  Reply,
  Split,
  TextEnvironment,
  encode_action,
  encode_observation,
  held_out,
)
from rl_tpu.models.tokenizer import Tokenizer, encode_prompt
from rl_tpu.ops import check_fields
from rl_tpu.types import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The ranges."""

  least: int = 20
  """Smallest upper end of a range, >= 2."""
  largest: int = 99
  """Largest upper end of a range, >= least. Ranges begin with 1."""
  guesses: int | None = None
  """Attempts, >= 1; None: what halving needs. `max_turns` must allow them."""
  heldout_fraction: float = 0.1
  """Share of the games kept for evaluation, in (0, 1)."""

  def __post_init__(self):
    check_fields(
      self,
      ("least", self.least >= 2, ">= 2"),
      ("largest", self.largest >= self.least, f">= least = {self.least}"),
      (
        "guesses",
        self.guesses is None or self.guesses >= 1,
        ">= 1, or None",
      ),
      ("heldout_fraction", 0 < self.heldout_fraction < 1, "in (0, 1)"),
    )


class Task:
  """Every range with every number; see `rl_tpu.envs.Task`."""

  name = "guess_number"
  fields: Mapping[str, type] = {"largest": int, "number": int}

  def __init__(self, config: Config, tokenizer: Tokenizer):
    self.config = config
    self.tokenizer = tokenizer

  @property
  def fingerprint(self) -> str:
    """The config."""
    return json.dumps(dataclasses.asdict(self.config), sort_keys=True)

  def records(self, split: Split) -> Iterator[Mapping[str, Any]]:
    """Yields each game of the split once."""
    for largest in range(self.config.least, self.config.largest + 1):
      for number in range(1, largest + 1):
        heldout = held_out(f"{largest} {number}", self.config.heldout_fraction)
        if heldout == (split == "heldout"):
          yield {"largest": largest, "number": number}

  def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
    """Renders a game's range."""
    text = f"1..{row['largest']}?"
    return Prompt(
      index=index,
      tokens=encode_prompt(self.tokenizer, text),
      metadata={"largest": int(row["largest"]), "number": int(row["number"])},
    )

  def environment(self, prompt: Prompt) -> "Environment":
    """Starts an attempt at a prompt which `prompt` made."""
    return Environment(self, prompt)

  def demonstration(
    self, row: Mapping[str, Any], rng: np.random.Generator, wrong: float = 0.0
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns one turn of halving, and all that comes before it.

    A wrong one is any number of the range.
    """
    turns = _halving(int(row["largest"]), int(row["number"]))
    at = int(rng.integers(len(turns)))
    pieces = [self.prompt(row, 0).tokens]
    for guess in turns[:at]:
      said = _compare(guess, int(row["number"]))
      pieces += [self._action(guess), encode_observation(self.tokenizer, said)]
    guess = turns[at]
    if rng.random() < wrong:
      guess = int(rng.integers(1, int(row["largest"]) + 1))
    return np.concatenate(pieces).astype(np.int32), self._action(guess)

  def _action(self, guess: int) -> np.ndarray:
    return encode_action(self.tokenizer, str(guess))


class Environment(TextEnvironment):
  """One game."""

  def __init__(self, task: Task, prompt: Prompt):
    super().__init__(task.tokenizer, prompt)
    asked = prompt.metadata
    self._number, self._largest = asked["number"], asked["largest"]
    self._left = task.config.guesses or self._largest.bit_length()

  async def answer(self, text: str) -> Reply:
    """Says higher or lower, or ends the game."""
    valid = text.isascii() and text.isdigit() and len(text) <= 9
    valid = valid and 1 <= int(text) <= self._largest
    metrics = {"guesses": 1.0, "invalid_guesses": float(not valid)}
    self._left -= 1
    if valid and int(text) == self._number:
      return Reply(reward=1.0, end=True, metrics=metrics)
    if not self._left:
      return Reply(end=True, metrics=metrics)
    said = _compare(int(text), self._number) if valid else "!;"
    return Reply(text=said, metrics=metrics)


def _compare(guess: int, number: int) -> str:
  return "+;" if number > guess else "-;"


def _halving(largest: int, number: int) -> list[int]:
  """The guesses that find a number by halving."""
  low, high, guesses = 1, largest, []
  while not guesses or guesses[-1] != number:
    guesses.append((low + high) // 2)
    if number > guesses[-1]:
      low = guesses[-1] + 1
    else:
      high = guesses[-1] - 1
  return guesses
