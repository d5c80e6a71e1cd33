"""Single-turn questions of reasoning-gym, with its own scorers.

reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760) generates questions
from (seed, index) and scores answers, so a row keeps the index and the prompt's
text, and the entry is generated again when an answer has to be judged. The
reward is 1 only if the policy ended its answer itself and the scorer says
exactly 1: its partial credit for malformed answers would reward noise.

A question is held out by a hash of its text, so the splits are disjoint and
stay so in every process and for every size.
"""

import dataclasses
import functools
import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rl_tpu.envs import (
  SPLITS,
  Reply,
  Split,
  TextEnvironment,
  encode_action,
  of_split,
)
from rl_tpu.models.tokenizer import Tokenizer, encode_prompt
from rl_tpu.types import Prompt

_RUNS_CODE = (
  "its scorer runs the answer as Python code, so a sampled answer could do "
  "anything to this process"
)
REFUSED = {
  "binary_matrix": _RUNS_CODE,
  "countdown": _RUNS_CODE,
  "intermediate_integration": _RUNS_CODE,
  "n_queens": _RUNS_CODE,
  "polynomial_multiplication": _RUNS_CODE,
  "puzzle24": _RUNS_CODE,
  "simple_integration": _RUNS_CODE,
  "spiral_matrix": _RUNS_CODE,
  "string_insertion": _RUNS_CODE,
  "game_of_life_halting": "its scorer takes any text for the answer True",
  "composite": "name one generator of it",
}
"""Generators that are not offered, and why (read in reasoning-gym 0.1.25)."""

_MALFORMED = (
  ValueError,
  TypeError,
  AttributeError,
  ArithmeticError,
  LookupError,
  SyntaxError,
  RecursionError,
)
"""What scorers raise on text of the wrong form; such an answer is wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Which questions are asked, and how they are put to the policy."""

  generator: str = "chain_sum"
  """A name that reasoning-gym registers."""
  generator_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Settings of the generator, of JSON types; its own defaults elsewhere."""
  template: str = "{question}\n"
  """The prompt; names `question` or any field of the entry's metadata."""
  remove_spaces: bool = False
  """Remove spaces from the prompt, which shortens it for small models."""
  size: int = 10_000
  """Questions generated, >= 1; repeated ones are then used once."""
  seed: int = 0
  """Of the generator, >= 0."""
  heldout_fraction: float = 0.1
  """Share of the questions kept for evaluation, in (0, 1)."""

  def __post_init__(self):
    for name, good, allowed in (
      ("size", self.size >= 1, ">= 1"),
      ("seed", self.seed >= 0, ">= 0"),
      ("heldout_fraction", 0 < self.heldout_fraction < 1, "in (0, 1)"),
    ):
      if not good:
        raise ValueError(
          f"Config.{name} is {getattr(self, name)!r}; it must be {allowed}"
        )
    if self.generator in REFUSED:
      raise ValueError(
        f"Config.generator {self.generator!r} is refused: "
        f"{REFUSED[self.generator]}"
      )
    for name in ("size", "seed"):
      if name in self.generator_config:
        raise ValueError(
          f"Config.generator_config holds {name!r}; set Config.{name} instead"
        )
    try:
      json.dumps(dict(self.generator_config))
    except TypeError as error:
      raise ValueError(
        f"Config.generator_config is {dict(self.generator_config)!r}; "
        f"it must be of JSON types: {error}"
      ) from error


class Task:
  """One generator's questions; see `rl_tpu.envs.Task`."""

  fields: Mapping[str, type] = {
    "source_index": int,
    "question": str,
    "answer": str,
  }

  def __init__(self, config: Config, tokenizer: Tokenizer):
    self.config = config
    self.tokenizer = tokenizer
    self.name = f"reasoning_gym_{config.generator}"
    self._dataset = _create(config)
    # Members of a group are judged close together; some generators are slow.
    self._entry = functools.lru_cache(maxsize=4096)(self._dataset.__getitem__)
    self._render(self._entry(0))

  @property
  def fingerprint(self) -> str:
    """The config and reasoning-gym's version."""
    config = dataclasses.asdict(self.config)
    config["version"] = importlib.metadata.version("reasoning-gym")
    return json.dumps(config, sort_keys=True)

  def records(self, split: Split) -> Iterator[Mapping[str, Any]]:
    """Yields each question of the split once."""
    if split not in SPLITS:
      raise ValueError(f"No split {split!r}; it must be one of {SPLITS}")
    yield from of_split(self._rows(), split, self.config.heldout_fraction)

  def _rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
    for index in range(self.config.size):
      entry = self._dataset[index]
      text, answer = self._render(entry), entry["answer"]
      yield (
        text,
        {
          "source_index": index,
          "question": text,
          "answer": "" if answer is None else str(answer),
        },
      )

  def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
    """Tokenizes a row's question."""
    return Prompt(
      index=index,
      tokens=encode_prompt(self.tokenizer, row["question"]),
      metadata={
        "source_index": row["source_index"],
        "question": row["question"],
      },
    )

  def environment(self, prompt: Prompt) -> "SingleTurn":
    """Starts an attempt at a prompt which `prompt` made."""
    return SingleTurn(self, prompt)

  def score(self, row: Mapping[str, Any], answer: str) -> float:
    """Returns 1.0 if reasoning-gym's scorer gives full marks, else 0.0.

    An answer on which the scorer fails is wrong. Raises RuntimeError if the
    generator no longer makes the row's question.
    """
    entry = self._entry(row["source_index"])
    if self._render(entry) != row["question"]:
      raise RuntimeError(
        f"{self.config.generator} makes {self._render(entry)!r} at index "
        f"{row['source_index']}, the row says {row['question']!r}; the rows "
        "come from another config or version: prepare them again"
      )
    try:
      return float(self._dataset.score_answer(answer, entry) == 1.0)
    except _MALFORMED:
      return 0.0

  def demonstration(
    self, row: Mapping[str, Any], rng: np.random.Generator, wrong: float = 0.0
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompt and answer; see `rl_tpu.envs.Task`.

    A wrong answer has the right one's characters in another order.
    """
    answer = row["answer"]
    if not answer:
      raise ValueError(
        f"{self.config.generator} gives no reference answers to learn from; "
        "start from a policy that needs no supervised warm start"
      )
    if rng.random() < wrong:
      answer = self._wrong_answer(row, rng)
    question = encode_prompt(self.tokenizer, row["question"])
    return question, encode_action(self.tokenizer, answer)

  def _wrong_answer(self, row, rng: np.random.Generator) -> str:
    for _ in range(100):
      answer = _scramble(row["answer"], rng)
      if not self.score(row, answer):
        return answer
    raise ValueError(
      f"Found no wrong answer near {row['answer']!r} to "
      f"{row['question']!r}; use demonstrations without wrong ones"
    )

  def _render(self, entry: Mapping[str, Any]) -> str:
    values = {**entry["metadata"], "question": entry["question"]}
    try:
      text = self.config.template.format(**values)
    except (LookupError, ValueError) as error:
      raise ValueError(
        f"Config.template {self.config.template!r} does not fit "
        f"{self.config.generator}: {error!r}; it can name {sorted(values)}"
      ) from error
    return text.replace(" ", "") if self.config.remove_spaces else text


class SingleTurn(TextEnvironment):
  """One question, one answer; one that the budget cut is worth 0."""

  def __init__(self, task: Task, prompt: Prompt):
    super().__init__(task.tokenizer, prompt)
    self._task = task

  async def answer(self, text: str) -> Reply:
    """Judges the answer."""
    reward = self._task.score(self.prompt.metadata, text)
    return Reply(reward=reward, end=True, answer=text.strip())


def _create(config: Config):
  """Builds reasoning-gym's dataset; raises ValueError for wrong settings."""
  # Its import takes seconds, mostly for matplotlib.
  import reasoning_gym
  from reasoning_gym.factory import DATASETS

  if config.generator not in DATASETS:
    offered = sorted(set(DATASETS) - set(REFUSED))
    raise ValueError(
      f"Config.generator is {config.generator!r}; it must be one of {offered}"
    )
  try:
    return reasoning_gym.create_dataset(
      config.generator,
      size=config.size,
      seed=config.seed,
      **config.generator_config,
    )
  except (TypeError, AssertionError) as error:
    raise ValueError(
      f"Config.generator_config {dict(config.generator_config)!r} does not "
      f"fit {config.generator}: {error}"
    ) from error


def _scramble(answer: str, rng: np.random.Generator) -> str:
  """Another order of the characters, or another character if all are equal."""
  if len(set(answer)) > 1:
    order = rng.permutation(len(answer))
    return "".join(answer[i] for i in order)
  alphabet = "0123456789" if answer.isdigit() else "abcdefghijklmnopqrstuvwxyz"
  return str(rng.choice(list(alphabet))) + answer[1:]
