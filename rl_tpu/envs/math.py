r"""Mathematical questions of one's own, with Math-Verify as judge.

Questions and answers come from a JSON-lines file or a folder that TFDS
prepared; what is stored and how it is ordered is `data.py`'s as for any task.
The policy's final answer (`rewards.answers`) is compared in processes with time
limits, beside generation.

An answer can be made on which the verifier hangs or dies. With `unsettled`
"wrong" it earns 0, as any other way not to be right, and is counted as
`env_verifier_failed`; with "drop" its group is dropped and counted as failed,
for those who would rather lose a prompt than call a right answer wrong.
"""

import dataclasses
import functools
import importlib.metadata
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from rl_tpu import records
from rl_tpu.envs import (
  Reply,
  Split,
  TextEnvironment,
  encode_action,
  encode_question,
  of_files,
)
from rl_tpu.models.tokenizer import Tokenizer
from rl_tpu.ops import check_choices, check_fields
from rl_tpu.rewards import answers
from rl_tpu.rewards.answers import Form
from rl_tpu.rewards.workers import Workers
from rl_tpu.types import EpisodeError, Prompt

TEMPLATE = (
  "{question}\nReason step by step, and put the final answer within "
  "\\boxed{{}}.\n"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Where the questions are, and how answers are judged."""

  path: str
  """A .jsonl file with an object a line, or a folder that TFDS prepared (it
  holds dataset_info.json)."""
  question_field: str = "question"
  """Of a row."""
  answer_field: str = "answer"
  """Of a row; in GSM8K's form, what follows `####` is the answer."""
  heldout_path: str | None = None
  """The same for evaluation; None: a share of `path` is held out."""
  heldout_fraction: float = 0.1
  """Of `path`, in (0, 1), where there is no heldout_path."""
  template: str = TEMPLATE
  """The prompt; names `question`. Braces of its own are doubled."""
  chat: bool = False
  """Put the prompt as a user's message, through the tokenizer's template."""
  form: Form = "boxed"
  """Where the final answer stands: `boxed`, `tags` or `whole`."""
  unsettled: Literal["wrong", "drop"] = "wrong"
  """What an answer is that the verifier fails on or takes too long over."""
  verify_seconds: float = 5.0
  """For one answer, > 0."""
  verify_processes: int = 2
  """Answers judged at once, >= 1."""

  def __post_init__(self):
    check_choices(self)
    check_fields(
      self,
      ("template", "{question}" in self.template, "a text with {question}"),
      ("heldout_fraction", 0 < self.heldout_fraction < 1, "in (0, 1)"),
      ("verify_seconds", self.verify_seconds > 0, "> 0"),
      ("verify_processes", self.verify_processes >= 1, ">= 1"),
    )


class Task:
  """The questions of a file; see `rl_tpu.envs.Task`."""

  name = "math"
  fields: Mapping[str, type] = {"question": str, "answer": str}

  def __init__(self, config: Config, tokenizer: Tokenizer):
    self.config = config
    self.tokenizer = tokenizer
    for path in filter(None, (config.path, config.heldout_path)):
      if not pathlib.Path(path).exists():
        raise ValueError(f"math.Config: {path} is not there")
    self._verify = Workers(
      "rl_tpu.rewards.answers:math_score",
      count=config.verify_processes,
      seconds=config.verify_seconds,
    )

  @functools.cached_property
  def fingerprint(self) -> str:
    """The config, the files' contents and Math-Verify's version."""
    config = dataclasses.asdict(self.config)
    config["version"] = importlib.metadata.version("math-verify")
    config |= records.contents(self.config.path, self.config.heldout_path)
    return json.dumps(config, sort_keys=True)

  def records(self, split: Split) -> Iterator[Mapping[str, Any]]:
    """Yields each question of the split once."""

    def asked(path: str):
      return ((row["question"], row) for row in self._rows(path))

    config = self.config
    return of_files(
      asked, config.path, config.heldout_path, split, config.heldout_fraction
    )

  def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
    """Renders a row's question."""
    text = self.config.template.format(question=row["question"])
    return Prompt(
      index=index,
      tokens=encode_question(self.tokenizer, text, self.config.chat),
      metadata={"answer": row["answer"]},
    )

  def environment(self, prompt: Prompt) -> "Environment":
    """Starts an attempt at a prompt which `prompt` made."""
    return Environment(self, prompt)

  async def score(self, text: str, answer: str) -> tuple[float, bool]:
    """Returns the reward of a text, and whether the verifier failed on it."""
    try:
      return await self._verify(text, answer, self.config.form), False
    except EpisodeError:
      if self.config.unsettled == "drop":
        raise
      return 0.0, True

  def demonstration(
    self, row: Mapping[str, Any], rng: np.random.Generator, wrong: float = 0.0
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompt and answer in the form asked for; never a wrong one.

    Raises:
      ValueError: wrong ones are asked for.
    """
    del rng
    if wrong:
      raise ValueError(
        "math has no wrong demonstrations; set warm_start.wrong_batches to 0"
      )
    answer = {
      "boxed": f"\\boxed{{{row['answer']}}}",
      "tags": f"<answer>{row['answer']}</answer>",
      "whole": row["answer"],
    }[self.config.form]
    return self.prompt(row, 0).tokens, encode_action(self.tokenizer, answer)

  def _rows(self, path: str) -> Iterator[dict[str, str]]:
    config = self.config
    for row in records.read(path):
      question = records.field(row, config.question_field, path)
      answer = records.field(row, config.answer_field, path)
      answer = answer.rsplit("####", 1)[-1].strip()
      yield {"question": question, "answer": answer}


class Environment(TextEnvironment):
  """One question, one answer; one that the budget cut is worth 0."""

  def __init__(self, task: Task, prompt: Prompt):
    super().__init__(task.tokenizer, prompt)
    self._task = task

  async def answer(self, text: str) -> Reply:
    """Has the answer verified."""
    score, failed = await self._task.score(text, self.prompt.metadata["answer"])
    return Reply(
      reward=score,
      end=True,
      metrics={"verifier_failed": float(failed)},
      answer=answers.voted(text, self._task.config.form),
    )
