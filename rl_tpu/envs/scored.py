"""Questions of one's own, scored by a function of one's own.

    def score(answer, row):
      return float(answer.strip() == row["answer"])

One question, one answer. Questions are the objects of a JSON-lines file; the
function gets the text that the policy wrote and the object, and returns the
reward: a number, or a dict whose `reward` is one and whose other numbers are
counted, each as `env_NAME` in metrics.csv. It runs in processes of its own,
with limits of time and memory (`rewards.workers`), beside generation. Where it
raises, dies or takes too long, the group is dropped and counted as failed; that
is never a reward of 0.
"""

import dataclasses
import functools
import json
import pathlib
import string
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
  of_files,
)
from rl_tpu.models.tokenizer import Tokenizer
from rl_tpu.ops import check_fields
from rl_tpu.rewards.workers import Workers
from rl_tpu.types import EpisodeError, Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Where the questions are, how they are put, and what scores answers."""

  path: str
  """A .jsonl file with an object a line."""
  reward: str
  """The function, as `file.py:name` or `module:name`."""
  template: str = "{question}\n"
  """The prompt; names in braces are fields of a row. Other braces are doubled.
  Rows that give the same prompt are one question: the first of them counts."""
  chat: bool = False
  """Put the prompt as a user's message, through the tokenizer's template."""
  example_field: str | None = None
  """Of a row: an answer to imitate in the warm start; None: there is none."""
  heldout_path: str | None = None
  """The same for evaluation; None: a share of `path` is held out."""
  heldout_fraction: float = 0.1
  """Of `path`, in (0, 1), where there is no heldout_path."""
  cut_reward: float = 0.0
  """Of an answer that sampling.max_tokens cut; it is not scored."""
  seconds: float = 5.0
  """For one answer, > 0."""
  processes: int = 2
  """Answers scored at once, >= 1."""
  memory_gib: float = 4.0
  """Of address space for each process, > 0."""

  def __post_init__(self):
    where, _, name = self.reward.rpartition(":")
    check_fields(
      self,
      ("reward", bool(where) and name.isidentifier(), "'file.py:name'"),
      ("template", bool(_fields(self.template)), "a text with a {field}"),
      ("heldout_fraction", 0 < self.heldout_fraction < 1, "in (0, 1)"),
      ("cut_reward", abs(self.cut_reward) < float("inf"), "finite"),
      ("seconds", self.seconds > 0, "> 0"),
      ("processes", self.processes >= 1, ">= 1"),
      ("memory_gib", self.memory_gib > 0, "> 0"),
    )


def _fields(template: str) -> list[str]:
  """The names in braces; empty where braces do not pair."""
  try:
    return [
      name for _, name, _, _ in string.Formatter().parse(template) if name
    ]
  except ValueError:
    return []


class Task:
  """The questions of a file; see `rl_tpu.envs.Task`."""

  name = "scored"
  fields: Mapping[str, type] = {"row": str}

  def __init__(self, config: Config, tokenizer: Tokenizer):
    """Loads the function in a process of its own.

    Raises:
      ValueError: a file is not there, or the function cannot be loaded.
    """
    self.config = config
    self.tokenizer = tokenizer
    where = config.reward.rpartition(":")[0]
    code = where if where.endswith(".py") else None
    for path in filter(None, (config.path, config.heldout_path, code)):
      if not pathlib.Path(path).is_file():
        raise ValueError(f"scored.Config: {path} is not there")
    self._score = Workers(
      config.reward,
      count=config.processes,
      seconds=config.seconds,
      memory_bytes=int(config.memory_gib * 2**30),
    )
    self._score.check()

  @functools.cached_property
  def fingerprint(self) -> str:
    """All but the function, on which no row depends, and the contents."""
    config = dataclasses.asdict(self.config)
    del config["reward"]
    config |= records.contents(self.config.path, self.config.heldout_path)
    return json.dumps(config, sort_keys=True)

  def records(self, split: Split) -> Iterator[Mapping[str, Any]]:
    """Yields each question of the split once."""
    config = self.config
    return of_files(
      self._rows,
      config.path,
      config.heldout_path,
      split,
      config.heldout_fraction,
    )

  def _rows(self, path: str) -> Iterator[tuple[str, dict[str, str]]]:
    for row in records.read(path):
      for name in _fields(self.config.template):
        records.field(row, name, path)
      if self.config.example_field is not None:
        records.field(row, self.config.example_field, path)
      yield self._render(row), {"row": json.dumps(row, sort_keys=True)}

  def _render(self, row: Mapping[str, Any]) -> str:
    return self.config.template.format(**row)

  def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
    """Renders a row's question."""
    text = self._render(json.loads(row["row"]))
    return Prompt(
      index=index,
      tokens=encode_question(self.tokenizer, text, self.config.chat),
      metadata={"row": row["row"]},
    )

  def environment(self, prompt: Prompt) -> "Environment":
    """Starts an attempt at a prompt which `prompt` made."""
    return Environment(self, prompt)

  async def score(
    self, answer: str, row: Mapping[str, Any]
  ) -> tuple[float, dict[str, float]]:
    """Returns the reward, and what else the function counted.

    Raises:
      EpisodeError: it failed, or what it returned is no reward.
    """
    try:
      value = await self._score(answer, row)
    except EpisodeError as error:
      raise EpisodeError(
        error.kind,
        f"{error.message}; {_asked(answer, row)}",
        same=error.same or error.message,
        detail=error.detail,
      ) from error
    counted = value if isinstance(value, dict) else {"reward": value}
    numbers = (int, float)  # bool is an int
    if "reward" not in counted or not all(
      isinstance(number, numbers) for number in counted.values()
    ):
      raise EpisodeError(
        "reward_no_number",
        f"{self.config.reward} returned {value!r}; it must be a number, or a "
        f"dict of numbers with 'reward'; {_asked(answer, row)}",
        same=f"{type(value)}",
      )
    metrics = {name: float(number) for name, number in counted.items()}
    return metrics.pop("reward"), metrics

  def demonstration(
    self, row: Mapping[str, Any], rng: np.random.Generator, wrong: float = 0.0
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompt and example; never a wrong one.

    Raises:
      ValueError: rows have no example, or wrong ones are asked for.
    """
    del rng
    if self.config.example_field is None:
      raise ValueError(
        "scored.example_field is None, so there is nothing to imitate; set it, "
        "or warm_start.batches and wrong_batches to 0"
      )
    if wrong:
      raise ValueError(
        "scored has no wrong demonstrations; set warm_start.wrong_batches to 0"
      )
    example = str(json.loads(row["row"])[self.config.example_field])
    return self.prompt(row, 0).tokens, encode_action(self.tokenizer, example)


def _asked(answer: str, row: Mapping[str, Any]) -> str:
  """What the function was called with, as far as a line holds it."""
  return f"the answer was {answer[:200]!r}, of {json.dumps(row)[:300]}"


class Environment(TextEnvironment):
  """One question, one answer."""

  def __init__(self, task: Task, prompt: Prompt):
    super().__init__(task.tokenizer, prompt)
    self._task = task

  async def answer(self, text: str) -> Reply:
    """Has the answer scored."""
    row = json.loads(self.prompt.metadata["row"])
    reward, metrics = await self._task.score(text, row)
    answer = text.strip() or None
    return Reply(reward=reward, end=True, metrics=metrics, answer=answer)

  def cut(self) -> Reply:
    """Nobody is asked about half an answer."""
    return Reply(reward=self._task.config.cut_reward, end=True)
