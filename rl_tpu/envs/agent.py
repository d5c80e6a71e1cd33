"""An agent of one's own, written against an OpenAI-compatible chat API.

    async def act(endpoint, row):
      client = openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key
      )
      answer = await client.chat.completions.create(
        model=endpoint.model,
        messages=[{"role": "user", "content": row["question"]}],
      )
      return float(answer.choices[0].message.content == row["answer"])

A row is an object of a JSON-lines file; what is returned is the reward, or an
`envs.Outcome`. Any framework, several turns, tools, branches and parallel calls
will do: all calls become trajectories (`rl_tpu.agents`). An agent that does not
await (a plain function) runs in a thread of its own.
"""

import dataclasses
import functools
import importlib
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from rl_tpu import records
from rl_tpu.envs import (
  Agent,
  Endpoint,
  Outcome,
  Split,
  answered,
  encode_question,
  of_split,
)
from rl_tpu.models.tokenizer import Tokenizer
from rl_tpu.ops import check_fields
from rl_tpu.types import Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Who acts, and on what."""

  function: str
  """`module:name` of the agent, importable where the run starts."""
  path: str
  """A .jsonl file with an object a line: what the agent is given."""
  question_field: str = "question"
  """Of a row: the text that stands for it in logs, and that running means tell
  prompts apart by. The policy sees only what the agent says."""
  heldout_fraction: float = 0.1
  """Share of the rows kept for evaluation, in (0, 1)."""

  def __post_init__(self):
    module, colon, name = self.function.partition(":")
    check_fields(
      self,
      ("function", bool(module and colon and name), "'module:name'"),
      ("heldout_fraction", 0 < self.heldout_fraction < 1, "in (0, 1)"),
    )


class Task:
  """The rows of a file; see `rl_tpu.envs.Task`."""

  name = "agent"
  fields: Mapping[str, type] = {"row": str}

  def __init__(self, config: Config, tokenizer: Tokenizer):
    """Imports the agent; raises ValueError where it or the file is missing."""
    self.config = config
    self.tokenizer = tokenizer
    if not pathlib.Path(config.path).is_file():
      raise ValueError(f"agent.Config: {config.path} is not there")
    module, name = config.function.split(":")
    try:
      self._act = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
      raise ValueError(
        f"agent.function {config.function!r}: {error}"
      ) from error

  @functools.cached_property
  def fingerprint(self) -> str:
    """The config and the file's contents; rows do not depend on the agent."""
    config = dataclasses.asdict(self.config)
    config["contents"] = records.digest(self.config.path)
    return json.dumps(config, sort_keys=True)

  def records(self, split: Split) -> Iterator[Mapping[str, Any]]:
    """Yields each row of the split once."""
    return of_split(self._rows(), split, self.config.heldout_fraction)

  def _rows(self) -> Iterator[tuple[str, dict[str, str]]]:
    config = self.config
    for row in records.read(config.path):
      records.field(row, config.question_field, config.path)
      text = json.dumps(row, sort_keys=True)
      yield text, {"row": text}

  def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
    """The row, and its question as tokens."""
    values = json.loads(row["row"])
    question = str(values[self.config.question_field])
    return Prompt(
      index=index,
      tokens=encode_question(self.tokenizer, question, chat=True),
      metadata={"row": row["row"]},
    )

  def environment(self, prompt: Prompt) -> "Actor":
    """Starts an attempt at a prompt which `prompt` made."""
    row = json.loads(prompt.metadata["row"])
    return Actor(self.tokenizer, self._act, row)

  def demonstration(
    self, row: Mapping[str, Any], rng: np.random.Generator, wrong: float = 0.0
  ) -> tuple[np.ndarray, np.ndarray]:
    """Refused: what the agent would say is not known here."""
    raise ValueError(
      "agent has no demonstrations; start from a pretrained policy, with "
      "warm_start.batches 0"
    )


class Actor(Agent):
  """The agent with one row."""

  def __init__(
    self, tokenizer: Tokenizer, act: Callable[..., Any], row: dict[str, Any]
  ):
    super().__init__(tokenizer)
    self._act, self._row = act, row

  async def run(self, endpoint: Endpoint) -> Outcome | float:
    """Lets it act."""
    return await answered(self._act, endpoint, self._row)
