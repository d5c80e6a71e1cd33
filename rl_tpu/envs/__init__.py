"""Tasks and their environments, one file each, found by name.

A task knows its questions: it yields rows for `data.py` to store, turns a row
into a Prompt, a Prompt into an environment, and a row into a demonstration for
the supervised warm start. An environment is one attempt at one prompt: it gives
the first tokens, then answers every action with the tokens it writes next, a
reward, and whether the episode is over. Both sides speak token ids, so that
what was sampled is stored as it was sampled and never re-encoded.

A file of this package offers `Config` (a frozen dataclass) and
`Task(config, tokenizer)`. A new task is one file and its test.

What an environment raises, or does beyond `Limits`, is an error and never a
reward: the group is dropped and counted by the kind of its `EpisodeError`.
Environments that speak text derive from `TextEnvironment`: it decodes an action
once, to judge it, and encodes an observation once; ids that were sampled are
never made from text.
"""

import abc
import asyncio
import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import pkgutil
import threading
from collections.abc import (
  Callable,
  Collection,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np

from rl_tpu.models.tokenizer import Tokenizer, encode_chat, encode_prompt
from rl_tpu.types import EpisodeError, Prompt, StopReason

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
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  """What to count, summed over the turns; the log has the mean over a batch's
  trajectories as env_NAME."""
  answer: str | None = None
  """What the episode came to, for majority votes: equal answers, equal text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What is taken from an environment; beyond it, the episode has failed."""

  step_seconds: float = 600.0
  """Longest wait for one answer of an environment, > 0; infinite is no limit.
  A coroutine must not block: other episodes live on its thread too. What may
  block belongs in a plain function, which has a thread of its own."""
  observation_tokens: int = 32_768
  """Most tokens of one observation, the prompt included, >= 1."""
  empty_observations: bool = False
  """Whether an environment may say nothing and let the policy go on."""

  def __post_init__(self):
    for name in ("step_seconds", "observation_tokens"):
      value = getattr(self, name)
      if not value > 0:  # NaN is not
        raise ValueError(f"limits.{name} is {value!r}; it must be > 0")


class Environment(Protocol):
  """One attempt at one prompt, used once.

  Its methods may be plain functions too; see `answered`. One that holds
  something open has a method `close` too, called however the episode ends.
  """

  async def reset(self) -> np.ndarray:
    """Returns the prompt, i32[P], P >= 1."""
    ...

  async def step(self, action: np.ndarray, stop_reason: StopReason) -> Step:
    """Takes one turn.

    `action` is i32[n] as sampled, the stop token included when `stop_reason` is
    "stop"; on "length" the budget cut it, and it has no stop token.
    """
    ...


async def answered(function: Callable[..., Any], *arguments: Any) -> Any:
  """What a function of an environment returns, a coroutine function or not.

  A plain function may block: it is called in a thread of its own, so that one
  that never returns costs its own episode and a thread, and nobody else waits.
  """
  if inspect.iscoroutinefunction(function):
    return await function(*arguments)
  loop = asyncio.get_running_loop()
  future: asyncio.Future[Any] = loop.create_future()

  def settle(result: Any, error: BaseException | None) -> None:
    if future.done():  # Nobody waits any more.
      return
    if error is None:
      future.set_result(result)
    else:
      future.set_exception(error)

  def call() -> None:
    result, error = None, None
    try:
      result = function(*arguments)
    except StopIteration as raised:  # No future can hold it.
      error = RuntimeError(f"it raised {raised!r}")
    except BaseException as raised:
      error = raised
    with contextlib.suppress(RuntimeError):  # The loop may be closed by now.
      loop.call_soon_threadsafe(settle, result, error)

  threading.Thread(target=call, name="environment", daemon=True).start()
  result = await future
  return await result if inspect.isawaitable(result) else result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
  """Where an agent reaches the policy: an OpenAI-compatible chat API."""

  base_url: str
  """For `openai.AsyncOpenAI(base_url=..., api_key=...)`, or any other client.
  It is this episode's alone."""
  api_key: str
  """Any key will do; this one is as secret as the address."""
  model: str
  """What the policy is called there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """What an agent's episode came to."""

  reward: float
  """Of every trajectory of it."""
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  """What to count; see `Step`."""
  answer: str | None = None
  """For majority votes; see `Step`."""


class Agent(abc.ABC):
  """An episode that is played by code of its own, in place of an Environment.

  The code calls the policy as any chat API, as often and in as many branches as
  it likes; its calls become the trajectories (`rl_tpu.agents`).
  """

  def __init__(self, tokenizer: Tokenizer):
    self.tokenizer = tokenizer

  @abc.abstractmethod
  async def run(self, endpoint: Endpoint) -> Outcome | float:
    """Acts; returns what it came to, or only the reward."""


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

  def environment(self, prompt: Prompt) -> Environment | Agent:
    """Starts an attempt at a prompt which this task made.

    A task whose members need each other defines `group(prompt, size)` too; see
    `group`.
    """
    ...

  def demonstration(
    self, row: Mapping[str, Any], rng: np.random.Generator, wrong: float = 0.0
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompt i32[P] and answer i32[n], its stop token included.

    The answer is wrong with probability `wrong`: a policy warmed up on these
    knows the task, yet leaves room that reinforcement learning can close.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
  """What a text environment answers to one action."""

  text: str = ""
  """What it says next; empty when `end`."""
  reward: float = 0.0
  """For this action."""
  end: bool = False
  """Whether the episode is over."""
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  """What to count; see `Step`."""
  answer: str | None = None
  """What the episode came to; see `Step`."""


class TextEnvironment(abc.ABC):
  """One attempt at one prompt by an environment that reads and writes text.

  A turn that the budget cut ends the episode: it may be half a call or half an
  answer. What it is worth is `cut`.
  """

  def __init__(self, tokenizer: Tokenizer, prompt: Prompt):
    self.prompt = prompt
    self._tokenizer = tokenizer
    self._over = False

  @abc.abstractmethod
  async def answer(self, text: str) -> Reply:
    """Answers the text of one action, which the policy ended itself."""

  def cut(self) -> Reply:
    """Answers an action that the budget cut."""
    return Reply(end=True)

  async def reset(self) -> np.ndarray:
    """Returns the prompt, i32[P]."""
    return self.prompt.tokens

  async def step(self, action: np.ndarray, stop_reason: StopReason) -> Step:
    """Decodes the action, answers, encodes the observation."""
    if self._over:
      raise RuntimeError(
        f"The episode of prompt {self.prompt.index} is over; an environment "
        "serves one attempt"
      )
    if stop_reason == "stop":
      text = self._tokenizer.decode(action[:-1])
      reply = await answered(self.answer, text)
    else:
      reply = self.cut()
    self._over = reply.end
    observation = np.zeros(0, np.int32)
    if not reply.end:
      observation = encode_observation(self._tokenizer, reply.text)
    return Step(
      observation=observation,
      reward=reply.reward,
      end=reply.end,
      metrics=reply.metrics,
      answer=reply.answer,
    )


def encode_observation(tokenizer: Tokenizer, text: str) -> np.ndarray:
  """Returns i32[m]; raises EpisodeError for what is no Unicode text."""
  try:
    text.encode("utf-8")
  except UnicodeEncodeError as error:
    raise EpisodeError(
      "observation_not_text", f"an observation has no UTF-8: {error}"
    ) from error
  return tokenizer.encode(text)


def encode_action(tokenizer: Tokenizer, text: str) -> np.ndarray:
  """Returns i32[n]: a demonstrated action, the end of the turn included."""
  ids = np.append(tokenizer.encode(text), tokenizer.eos_id)
  return ids.astype(np.int32)


def encode_question(tokenizer: Tokenizer, text: str, chat: bool) -> np.ndarray:
  """Returns i32[P]: the text itself, or as a user's message in a chat."""
  if chat:
    return encode_chat(tokenizer, [{"role": "user", "content": text}])
  return encode_prompt(tokenizer, text)


def held_out(text: str, fraction: float) -> bool:
  """Whether a question is held out: by its hash, the same in every process."""
  digest = hashlib.sha256(text.encode("utf-8")).digest()
  return int.from_bytes(digest[:6], "big") / 2**48 < fraction


def of_split(
  rows: Iterable[tuple[str, Mapping[str, Any]]],
  split: Split,
  fraction: float,
  kept: Collection[str] | None = None,
) -> Iterator[Mapping[str, Any]]:
  """Yields the rows of a split, each once.

  Args:
    rows: a row's identity, the text that decides its split, and the row.
    split: which.
    fraction: of the rows that are held out.
    kept: the identities that are held out, where a file of their own says so.

  Raises:
    ValueError: there is no such split.
  """
  if split not in SPLITS:
    raise ValueError(f"No split {split!r}; it must be one of {SPLITS}")
  seen = set()
  for identity, row in rows:
    heldout = held_out(identity, fraction) if kept is None else identity in kept
    if identity not in seen and heldout == (split == "heldout"):
      seen.add(identity)
      yield row


def of_files(
  rows_of: Callable[[str], Iterable[tuple[str, Mapping[str, Any]]]],
  path: str,
  heldout_path: str | None,
  split: Split,
  fraction: float,
) -> Iterator[Mapping[str, Any]]:
  """`of_split` for rows of a file, or of two: the second is what is held out.

  A row that is in both is held out.

  Args:
    rows_of: gives the rows of a file, with the identity of each.
    path: the file.
    heldout_path: the second; None: a share of the first is held out.
    split: which.
    fraction: that share.

  Raises:
    ValueError: there is no such split.
  """
  kept = None
  if heldout_path:
    kept = {identity for identity, _ in rows_of(heldout_path)}
    path = heldout_path if split == "heldout" else path
  return of_split(rows_of(path), split, fraction, kept)


def group(
  task: Task, prompt: Prompt, size: int
) -> Sequence[Environment | Agent]:
  """Returns the environments of a group's `size` attempts at one prompt.

  They know nothing of each other, unless the task has a method
  `group(prompt, size)` that builds them together: to compare their answers, or
  to share what is costly to set up.

  Raises:
    ValueError: the task builds another number of them.
  """
  build = getattr(task, "group", None)
  if build is None:
    return [task.environment(prompt) for _ in range(size)]
  members = build(prompt, size)
  if len(members) != size:
    raise ValueError(
      f"{task.name}.group built {len(members)} environments; it must build "
      f"{size}"
    )
  return members


def names() -> tuple[str, ...]:
  """Lists the tasks: the files of this package."""
  return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__)))


def get(name: str) -> ModuleType:
  """Imports the task `name`; raises ValueError that lists all of them."""
  if name not in names():
    raise ValueError(f"No task {name!r}; it must be one of {list(names())}")
  return importlib.import_module(f"{__name__}.{name}")
