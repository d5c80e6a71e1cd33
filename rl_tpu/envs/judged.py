"""Questions without a rule for right: a language model judges the answers.

One question, one answer, and a score from a judge (`rewards.judge`), which is
asked beside the generation. A judge that cannot be reached or understood is an
error of the episode, by its kind, and never a reward.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rl_tpu import records
from rl_tpu.envs import (
  Reply,
  Split,
  TextEnvironment,
  encode_action,
  encode_question,
  of_split,
)
from rl_tpu.models.tokenizer import Tokenizer
from rl_tpu.ops import check_fields
from rl_tpu.rewards import judge as judges
from rl_tpu.types import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Where the questions are, and who judges."""

  path: str
  """A .jsonl file with an object a line, or a folder that TFDS prepared."""
  judge: judges.Config
  """Whom to ask, and for what."""
  question_field: str = "question"
  """Of a row."""
  example_field: str | None = None
  """Of a row: an answer to imitate in the warm start; None: there is none."""
  template: str = "{question}\n"
  """The prompt; names `question`. Other braces are doubled."""
  chat: bool = False
  """Put the prompt as a user's message, through the tokenizer's template."""
  heldout_fraction: float = 0.1
  """Share of the questions kept for evaluation, in (0, 1)."""

  def __post_init__(self):
    check_fields(
      self,
      ("template", "{question}" in self.template, "a text with {question}"),
      ("heldout_fraction", 0 < self.heldout_fraction < 1, "in (0, 1)"),
    )


class Task:
  """The questions of a file; see `rl_tpu.envs.Task`."""

  name = "judged"
  fields: Mapping[str, type] = {"question": str, "example": str}

  def __init__(self, config: Config, tokenizer: Tokenizer):
    self.config = config
    self.tokenizer = tokenizer
    if not pathlib.Path(config.path).exists():
      raise ValueError(f"judged.Config: {config.path} is not there")

  @functools.cached_property
  def fingerprint(self) -> str:
    """All but the judge, on whom no row depends, and the file's contents."""
    config = dataclasses.asdict(self.config)
    del config["judge"]
    config["contents"] = records.digest(self.config.path)
    return json.dumps(config, sort_keys=True)

  def records(self, split: Split) -> Iterator[Mapping[str, Any]]:
    """Yields each question of the split once."""
    return of_split(self._rows(), split, self.config.heldout_fraction)

  def _rows(self) -> Iterator[tuple[str, dict[str, str]]]:
    config = self.config
    for row in records.read(config.path):
      question = records.field(row, config.question_field, config.path)
      example = ""
      if config.example_field is not None:
        example = records.field(row, config.example_field, config.path)
      yield question, {"question": question, "example": example}

  def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
    """Renders a row's question."""
    text = self.config.template.format(question=row["question"])
    return Prompt(
      index=index,
      tokens=encode_question(self.tokenizer, text, self.config.chat),
      metadata={"question": row["question"]},
    )

  def environment(self, prompt: Prompt) -> "Environment":
    """Starts an attempt at a prompt which `prompt` made."""
    return Environment(self, prompt)

  def demonstration(
    self, row: Mapping[str, Any], rng: np.random.Generator, wrong: float = 0.0
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompt and example; a wrong one has its words in disorder.

    Raises:
      ValueError: rows have no example.
    """
    words = row["example"].split(" ")
    if not row["example"]:
      raise ValueError(
        "judged.example_field is None, so there is nothing to imitate; set it, "
        "or warm_start.batches to 0"
      )
    if rng.random() < wrong:
      words = [str(word) for word in rng.permutation(words)]
    answer = encode_action(self.tokenizer, " ".join(words))
    return self.prompt(row, 0).tokens, answer


class Environment(TextEnvironment):
  """One question, one answer; one that the budget cut is worth the least."""

  def __init__(self, task: Task, prompt: Prompt):
    super().__init__(task.tokenizer, prompt)
    self._judge = task.config.judge

  async def answer(self, text: str) -> Reply:
    """Has it judged."""
    question = self.prompt.metadata["question"]
    score = await judges.ask(self._judge, question, text)
    return Reply(reward=score, end=True)

  def cut(self) -> Reply:
    """Nobody is asked about half an answer."""
    return Reply(reward=self._judge.low, end=True)
