"""One episode: the policy and an environment take turns on one token stream.

Token in, token out: what was sampled is stored as it was sampled, and every
request starts with exactly the tokens stored so far. Nothing is decoded and
encoded again, because that does not always give the same ids back.
"""

import asyncio
import collections
import dataclasses
import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import numpy as np
from jaxtyping import Int

from rl_tpu.envs import Environment, Limits, Step, answered
from rl_tpu.types import (
  Chunk,
  Completion,
  EpisodeError,
  Prompt,
  Request,
  Sampling,
  StopReason,
  Trajectory,
  Turn,
)

_T = TypeVar("_T")


class Generator(Protocol):
  """Whatever continues token streams."""

  async def generate(
    self, request: Request, progress: list[Chunk] | None = None
  ) -> Completion:
    """Samples one turn; cancelling the awaiting task cancels the request.

    Args:
      request: what to continue.
      progress: what was sampled for it before, which is not sampled again and
        counts against its budget; what is sampled is appended as it comes.
    """
    ...


async def run_episode(
  generator: Generator,
  environment: Environment,
  prompt: Prompt,
  member: int,
  sampling: Sampling,
  seed: int,
  max_turns: int,
  max_trajectory_tokens: int,
  progress: list[Turn] | None = None,
  limits: Limits | None = None,
) -> Trajectory:
  """Plays one episode; token in, token out.

  The trajectory ends with its last action; an observation that no action
  follows is left out. Its stop reason is "stop" when the environment ended the
  episode after a turn that the policy had ended itself, and "length" when a
  budget ended it: that of the last turn, of turns, or of tokens. A step's
  reward is the environment's word in both cases.

  An episode with a progress goes on from it: the environment, a new one, is
  given the recorded actions again. Where it answers another observation than
  it did, what was recorded after that does not count.

  Args:
    generator: samples the actions.
    environment: of this episode alone.
    prompt: the task.
    member: of its group, >= 0.
    sampling: how; `max_tokens` is the budget of one turn.
    seed: of the sampling keys.
    max_turns: >= 1.
    max_trajectory_tokens: prompt, actions and observations together.
    progress: turns so far; kept up to date while the episode goes on.
    limits: what is taken from the environment; the defaults if None.

  Raises:
    ValueError: the prompt leaves no room for an action, or the generator broke
      its contract.
    EpisodeError: the environment raised, took too long or broke its contract.
  """
  stream = Stream()
  limits = limits or Limits()
  progress = [] if progress is None else progress
  counted: collections.Counter[str] = collections.Counter()
  observation = await _answer(limits, environment.reset)
  _check_observation(observation, limits)
  stop_reason: StopReason = "length"
  for number in range(max_turns):
    room = max_trajectory_tokens - len(stream) - len(observation)
    if room < 1:
      break
    stream.observe(observation)
    request = Request(
      prompt_index=prompt.index,
      member=member,
      tokens=stream.tokens(),
      sampling=dataclasses.replace(
        sampling, max_tokens=min(sampling.max_tokens, room)
      ),
      seed=seed,
    )
    turn = _turn(progress, number, observation)
    completion = await generator.generate(request, turn.chunks)
    check_completion(completion, request)
    step = await _answer(
      limits, environment.step, completion.tokens, completion.stop_reason
    )
    _check_step(step, limits)
    stream.act(completion, step.reward)
    counted.update(step.metrics)
    if step.end:
      stop_reason = completion.stop_reason
      break
    observation = step.observation
  if not len(stream):
    raise ValueError(
      f"prompt {prompt.index} has {len(observation)} tokens; with "
      f"max_trajectory_tokens {max_trajectory_tokens} it must have at most "
      f"{max_trajectory_tokens - 1}"
    )
  return Trajectory(
    **stream.fields(),
    prompt_id=prompt.index,
    group_id=prompt.index,
    member=member,
    temperature=sampling.temperature,
    stop_reason=stop_reason,
    metrics=dict(counted),
  )


def _turn(progress: list[Turn], number: int, observation: np.ndarray) -> Turn:
  """The recorded turn, if the environment said the same before it."""
  recorded = progress[number : number + 1]
  if recorded and np.array_equal(recorded[0].observation, observation):
    return recorded[0]
  progress[number:] = [Turn(observation=np.asarray(observation))]
  return progress[number]


async def _answer(
  limits: Limits, ask: Callable[..., Awaitable[_T]], *arguments: Any
) -> _T:
  """What an environment answers in time; whatever it raises has a name."""
  timeout = asyncio.timeout(limits.step_seconds)
  try:
    async with timeout:
      return await answered(ask, *arguments)
  except EpisodeError:
    raise
  except SystemExit as error:
    # On an event loop it would end the loop, and all who wait for it hang.
    raise EpisodeError(
      "exit", f"the environment called exit: {error!r}"
    ) from error
  except Exception as error:
    if timeout.expired():
      raise EpisodeError(
        "timeout",
        f"the environment did not answer within {limits.step_seconds} s",
      ) from error
    raise EpisodeError("raised", f"the environment raised {error!r}") from error


def _check_step(step: Step, limits: Limits) -> None:
  """Raises EpisodeError where an environment's answer is not to be used."""
  if not math.isfinite(step.reward):
    raise EpisodeError(
      "reward_not_finite", f"the environment's reward is {step.reward!r}"
    )
  if not step.end:
    _check_observation(step.observation, limits)


def _check_observation(observation: np.ndarray, limits: Limits) -> None:
  ids = np.asarray(observation)
  if ids.ndim != 1 or not (
    np.issubdtype(ids.dtype, np.integer) or not ids.size
  ):
    raise EpisodeError(
      "observation_not_ids",
      f"an observation is {ids.dtype}{list(ids.shape)}; it must be i32[n]",
    )
  if len(ids) > limits.observation_tokens:
    raise EpisodeError(
      "observation_too_long",
      f"an observation has {len(ids)} tokens; it must have at most "
      f"{limits.observation_tokens}",
    )
  if not len(ids) and not limits.empty_observations:
    raise EpisodeError(
      "observation_empty",
      "an observation has no tokens, yet the episode goes on",
    )
  if len(ids) and ids.min() < 0:
    raise EpisodeError(
      "observation_not_ids", f"an observation holds the id {ids.min()}"
    )


class Stream:
  """A trajectory under construction, piece by piece."""

  def __init__(self):
    self._length = 0
    self._pieces: list[tuple[np.ndarray, ...]] = []
    self._completions: list[Completion] = []

  def __len__(self) -> int:
    """Tokens so far."""
    return self._length

  def copy(self) -> "Stream":
    """The same, to go on another way."""
    copy = Stream()
    copy._length = self._length
    copy._pieces = [*self._pieces]
    copy._completions = [*self._completions]
    return copy

  def observe(self, tokens: np.ndarray) -> None:
    """Appends what the policy reads."""
    n = len(tokens)
    self._append(
      tokens, np.zeros(n, bool), np.zeros(n), np.full(n, -1), np.zeros(n)
    )

  def act(self, completion: Completion, reward: float) -> None:
    """Appends what it said; the reward lies on the last token."""
    n = len(completion.tokens)
    rewards = np.zeros(n)
    rewards[-1] = reward
    self._completions.append(completion)
    self._append(
      completion.tokens,
      np.ones(n, bool),
      completion.logp,
      completion.version,
      rewards,
    )

  def tokens(self) -> Int[np.ndarray, " T"]:
    """All of them so far."""
    return np.concatenate([piece[0] for piece in self._pieces])

  def fields(self) -> dict[str, Any]:
    """The trajectory's arrays by name."""
    names = (
      *("tokens", "action_mask", "behavior_logp", "token_version"),
      "rewards",
    )
    columns = zip(*self._pieces, strict=True)
    fields = dict(zip(names, map(np.concatenate, columns), strict=True))
    mask = fields["action_mask"]
    return fields | self._head(mask) | self._experts(mask)

  def _head(self, action_mask: np.ndarray) -> dict[str, np.ndarray]:
    """The turns' heads at their action tokens; nothing where none is kept."""
    heads = [
      (c.topk_ids, c.topk_logp)
      for c in self._completions
      if c.topk_ids is not None
    ]
    if not heads:
      return {}
    sizes = {ids.shape[1] for ids, _ in heads}
    if len(sizes) > 1 or len(heads) < len(self._completions):
      raise ValueError(
        f"the generator returned heads of K = {sorted(sizes)} tokens with "
        f"{len(heads)} of an episode's {len(self._completions)} turns; every "
        "turn must have one, and all of one size"
      )
    shape = (self._length, *sizes)
    ids, logp = np.full(shape, -1, np.int32), np.full(shape, -np.inf, "f4")
    ids[action_mask], logp[action_mask] = map(
      np.concatenate, zip(*heads, strict=True)
    )
    return {"behavior_topk_ids": ids, "behavior_topk_logp": logp}

  def _experts(self, action_mask: np.ndarray) -> dict[str, np.ndarray]:
    """The turns' experts at their action tokens; nothing without them."""
    turns = [c.experts for c in self._completions if c.experts is not None]
    if not turns:
      return {}
    shapes = {turn.shape[1:] for turn in turns}
    if len(shapes) > 1 or len(turns) < len(self._completions):
      raise ValueError(
        f"the generator returned experts of shapes {sorted(shapes)} with "
        f"{len(turns)} of an episode's {len(self._completions)} turns; every "
        "turn must have them, and all of one shape"
      )
    experts = np.full((self._length, *shapes.pop()), -1, np.int16)
    experts[action_mask] = np.concatenate(turns)
    return {"behavior_experts": experts}

  def _append(self, *columns: np.ndarray) -> None:
    types = (np.int32, bool, np.float32, np.int32, np.float32)
    self._pieces.append(
      tuple(np.asarray(c, t) for c, t in zip(columns, types, strict=True))
    )
    self._length += len(columns[0])


def check_completion(completion: Completion, request: Request) -> None:
  """Raises ValueError where a generator broke its contract."""
  n = len(completion.tokens)
  if not 1 <= n <= request.sampling.max_tokens:
    raise ValueError(
      f"the generator returned {n} tokens; it must be 1 to "
      f"{request.sampling.max_tokens}"
    )
  if len(completion.logp) != n or len(completion.version) != n:
    raise ValueError(
      f"the generator returned {n} tokens with {len(completion.logp)} logp "
      f"and {len(completion.version)} versions"
    )
  heads = (completion.topk_ids, completion.topk_logp)
  ids, logp = (None if head is None else head.shape for head in heads)
  if ids != logp or (ids and (len(ids) != 2 or ids[0] != n)):
    raise ValueError(
      f"the generator returned {n} tokens with topk_ids of shape {ids} and "
      f"topk_logp of shape {logp}; they must be ({n}, K) alike, or both None"
    )
  experts = completion.experts
  if experts is not None and (experts.ndim, len(experts)) != (3, n):
    raise ValueError(
      f"the generator returned {n} tokens with experts of shape "
      f"{experts.shape}; they must be ({n}, layers, experts of each), or None"
    )
  if completion.stop_reason not in ("stop", "length"):
    raise ValueError(
      f"the generator's stop reason is {completion.stop_reason!r}; it must be "
      "'stop' or 'length'"
    )
