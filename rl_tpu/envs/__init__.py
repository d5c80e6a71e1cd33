"""Tasks and their environments, one file each, found by name.

A task knows its questions: it yields rows for `data.py` to store, turns a row
into a Prompt, a Prompt into an environment, and a row into a demonstration for
the supervised warm start. An environment is one attempt at one prompt: it gives
the first tokens, then answers every action with the tokens it writes next, a
reward, and whether the episode is over. Both sides speak token ids, so that
what was sampled is stored as it was sampled and never re-encoded.

A file of this package offers `Config` (a frozen dataclass) and
`Task(config, tokenizer)`. A new task is one file and its test.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np

from rl_tpu.models.tokenizer import Tokenizer
from rl_tpu.types import Prompt, StopReason

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """What the environment answers to one action."""

  observation: np.ndarray
  """i32[m], the tokens it writes next; empty when `end`."""
  reward: float
  """For this action; it lies on the action's last token."""
  end: bool
  """Whether the episode is over."""


class Environment(Protocol):
  """One attempt at one prompt, used once."""

  async def reset(self) -> np.ndarray:
    """Returns the prompt, i32[P], P >= 1."""
    ...

  async def step(self, action: np.ndarray, stop_reason: StopReason) -> Step:
    """Takes one turn.

    `action` is i32[n] as sampled, the stop token included when `stop_reason` is
    "stop"; on "length" the budget cut it, and it has no stop token.
    """
    ...


class Task(Protocol):
  """A set of questions with a way to judge answers."""

  @property
  def name(self) -> str:
    """Of the folder that keeps its rows: lower case, digits, underscores."""
    ...

  @property
  def tokenizer(self) -> Tokenizer:
    """Turns its texts into ids; its `eos_ids` end an answer."""
    ...

  @property
  def fingerprint(self) -> str:
    """Everything its rows depend on, as text; equal rows, equal text."""
    ...

  @property
  def fields(self) -> Mapping[str, type]:
    """The fields of a row; each is `str`, `int` or `float`."""
    ...

  def records(self, split: Split) -> Iterable[Mapping[str, Any]]:
    """Yields the rows of one split; the splits share no question."""
    ...

  def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
    """Renders a row as the prompt at `index` of a stream."""
    ...

  def environment(self, prompt: Prompt) -> Environment:
    """Starts an attempt at a prompt which this task made."""
    ...

  def demonstration(
    self, row: Mapping[str, Any], rng: np.random.Generator, wrong: float = 0.0
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompt i32[P] and answer i32[n], its stop token included.

    The answer is wrong with probability `wrong`: a policy warmed up on these
    knows the task, yet leaves room that reinforcement learning can close.
    """
    ...


def names() -> tuple[str, ...]:
  """Lists the tasks: the files of this package."""
  return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__)))


def get(name: str) -> ModuleType:
  """Imports the task `name`; raises ValueError that lists all of them."""
  if name not in names():
    raise ValueError(f"No task {name!r}; it must be one of {list(names())}")
  return importlib.import_module(f"{__name__}.{name}")
