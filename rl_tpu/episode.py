"""One episode: the policy and an environment take turns on one token stream.

Token in, token out: what was sampled is stored as it was sampled, and every
request starts with exactly the tokens stored so far. Nothing is decoded and
encoded again, because that does not always give the same ids back.
"""

import dataclasses
import math
from typing import Protocol

import numpy as np
from jaxtyping import Int

from rl_tpu.envs import Environment
from rl_tpu.types import (
  Completion,
  Prompt,
  Request,
  Sampling,
  StopReason,
  Trajectory,
)


class Generator(Protocol):
  """Whatever continues token streams."""

  async def generate(self, request: Request) -> Completion:
    """Samples one turn; cancelling the awaiting task cancels the request."""
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
) -> Trajectory:
  """Plays one episode; token in, token out.

  The trajectory ends with its last action; an observation that no action
  follows is left out. Its stop reason is "stop" when the environment ended the
  episode after a turn that the policy had ended itself, and "length" when a
  budget ended it: that of the last turn, of turns, or of tokens. A step's
  reward is the environment's word in both cases.

  Raises:
    ValueError: the prompt leaves no room for an action, or generator or
      environment broke their contract.
  """
  stream = _Stream()
  observation = await environment.reset()
  stop_reason: StopReason = "length"
  for _ in range(max_turns):
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
    completion = await generator.generate(request)
    _check_completion(completion, request)
    step = await environment.step(completion.tokens, completion.stop_reason)
    stream.act(completion, step.reward)
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
  tokens, action_mask, behavior_logp, token_version, rewards = stream.arrays()
  return Trajectory(
    prompt_id=prompt.index,
    group_id=prompt.index,
    member=member,
    tokens=tokens,
    action_mask=action_mask,
    behavior_logp=behavior_logp,
    token_version=token_version,
    rewards=rewards,
    temperature=sampling.temperature,
    stop_reason=stop_reason,
  )


class _Stream:
  """A trajectory under construction, piece by piece."""

  def __init__(self):
    self._length = 0
    self._pieces: list[tuple[np.ndarray, ...]] = []

  def __len__(self) -> int:
    return self._length

  def observe(self, tokens: np.ndarray) -> None:
    n = len(tokens)
    self._append(
      tokens, np.zeros(n, bool), np.zeros(n), np.full(n, -1), np.zeros(n)
    )

  def act(self, completion: Completion, reward: float) -> None:
    if not math.isfinite(reward):
      raise ValueError(f"the environment's reward is {reward!r}")
    n = len(completion.tokens)
    rewards = np.zeros(n)
    rewards[-1] = reward
    self._append(
      completion.tokens,
      np.ones(n, bool),
      completion.logp,
      completion.version,
      rewards,
    )

  def tokens(self) -> Int[np.ndarray, " T"]:
    return np.concatenate([piece[0] for piece in self._pieces])

  def arrays(self) -> list[np.ndarray]:
    """Tokens, action mask, logp, version and rewards, each [T]."""
    return [
      np.concatenate(column) for column in zip(*self._pieces, strict=True)
    ]

  def _append(self, *columns: np.ndarray) -> None:
    types = (np.int32, bool, np.float32, np.int32, np.float32)
    self._pieces.append(
      tuple(np.asarray(c, t) for c, t in zip(columns, types, strict=True))
    )
    self._length += len(columns[0])


def _check_completion(completion: Completion, request: Request) -> None:
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
  if completion.stop_reason not in ("stop", "length"):
    raise ValueError(
      f"the generator's stop reason is {completion.stop_reason!r}; it must be "
      "'stop' or 'length'"
    )
