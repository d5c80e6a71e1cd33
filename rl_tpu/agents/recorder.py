"""The calls of one agent's episode, as trajectories.

Every call goes on from the longest conversation on record that begins it, with
exactly the tokens that it has. A call that goes on from the same place as an
earlier one, or from none, begins another trajectory: parallel sub-calls, a
context that the agent rewrote. What was sampled is trained once: in the
trajectory that it was sampled for; where another one begins with it, it is
context there. All trajectories of an episode share its reward.

Sampling is the run's. What an agent asks of it is not followed, for what is
trained must be drawn as the learner computes it; it is counted as
`agent_overridden`.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from rl_tpu.agents import conversation
from rl_tpu.agents.conversation import Message
from rl_tpu.episode import Generator, Stream, check_completion
from rl_tpu.generation.text import Detokenizer, StopStrings
from rl_tpu.models.tokenizer import Tokenizer
from rl_tpu.types import (
  Completion,
  EpisodeError,
  Prompt,
  Request,
  Sampling,
  Trajectory,
)


class OverBudgetError(ValueError):
  """A call that the episode's budgets have no room for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
  """What one episode may use."""

  sampling: Sampling
  """Of the run; `max_tokens` is that of one call."""
  calls: int
  """In all its branches."""
  trajectory_tokens: int
  """Of each branch: what was read and what was said."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  """What came of one call."""

  content: str
  calls: Sequence[conversation.Call]
  finish_reason: str
  prompt_tokens: int
  completion_tokens: int


@dataclasses.dataclass(kw_only=True)
class _Node:
  """A conversation right after the policy spoke."""

  messages: tuple[Message, ...]
  stream: Stream
  cut: bool
  """Whether a budget ended what it said."""
  goes_on: bool = False
  """Whether a later call went on from here."""


class Recorder:
  """Records one episode; its calls may overlap."""

  def __init__(
    self,
    generator: Generator,
    tokenizer: Tokenizer,
    prompt: Prompt,
    member: int,
    seed: int,
    budget: Budget,
  ):
    """Begins with nothing on record."""
    self._generator, self._tokenizer = generator, tokenizer
    self._prompt, self._member, self._seed = prompt, member, seed
    self._budget = budget
    self._nodes: list[_Node] = []
    self._asked: dict[int, int] = {}
    self._begun = 0
    self.exhausted = False
    """Whether a call was refused because a budget was used up."""
    self.counted = {"agent_calls": 0.0, "agent_overridden": 0.0}

  async def call(
    self,
    messages: tuple[Message, ...],
    *,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    with_tools: bool = False,
  ) -> Answer:
    """Samples the next message of a conversation.

    Args:
      messages: all of it.
      max_tokens: most tokens that the agent wants, >= 1.
      stop: strings that end it.
      with_tools: whether calls are told from text.

    Raises:
      OverBudgetError: no budget is left for it.
      MalformedError: the messages cannot be put to the policy.
    """
    before = self._longest(messages)
    tokens = self._tokens(messages, before)
    stream = Stream()
    if before is not None and not before.goes_on:
      stream = before.stream.copy()
    stream.observe(tokens[len(stream) :])
    request = self._request(tokens, max_tokens)
    # From here on the place is taken: another call from it is a branch.
    taken = before is not None and not before.goes_on
    if before is not None:
      before.goes_on = True
    self._begun += 1
    try:
      completion = await self._generator.generate(request)
    except BaseException:
      if before is not None and taken:
        before.goes_on = False
      raise
    check_completion(completion, request)
    completion, text, stopped = _cut(self._tokenizer, completion, stop)
    stream.act(completion, reward=0.0)
    content, calls = conversation.parse(text) if with_tools else (text, [])
    said = ("assistant", conversation.written(content, calls))
    cut = completion.stop_reason == "length" and not stopped
    self._nodes.append(
      _Node(messages=(*messages, said), stream=stream, cut=cut)
    )
    self.counted["agent_calls"] += 1
    return Answer(
      content=content,
      calls=calls,
      finish_reason="length" if cut else "tool_calls" if calls else "stop",
      prompt_tokens=len(tokens),
      completion_tokens=len(completion.tokens),
    )

  def trajectories(
    self, reward: float, metrics: Mapping[str, float]
  ) -> tuple[Trajectory, ...]:
    """What is trained: one trajectory for each conversation's end.

    The metrics are the episode's, and lie on the first of them.

    Raises:
      EpisodeError: the agent asked for nothing.
    """
    ends = [node for node in self._nodes if not node.goes_on]
    if not ends:
      raise EpisodeError("agent_silent", "the agent called for nothing")
    made = []
    for node in ends:
      fields = node.stream.fields()
      fields["rewards"][-1] = reward
      made.append(
        Trajectory(
          **fields,
          prompt_id=self._prompt.index,
          group_id=self._prompt.index,
          member=self._member,
          temperature=self._budget.sampling.temperature,
          stop_reason="length" if node.cut or self.exhausted else "stop",
          metrics={} if made else {**self.counted, **metrics},
        )
      )
    return tuple(made)

  def _longest(self, messages: tuple[Message, ...]) -> _Node | None:
    """The longest conversation that begins this one; rather a free one."""
    begins = [
      node
      for node in self._nodes
      if messages[: len(node.messages)] == node.messages
      and len(messages) > len(node.messages)
    ]
    return max(
      begins,
      key=lambda node: (len(node.messages), not node.goes_on),
      default=None,
    )

  def _tokens(
    self, messages: tuple[Message, ...], before: _Node | None
  ) -> np.ndarray:
    if before is None:
      return conversation.encode(self._tokenizer, messages)
    had = before.stream.tokens()
    added = conversation.continuation(
      self._tokenizer, messages, len(before.messages), int(had[-1])
    )
    return np.concatenate([had, added])

  def _request(self, tokens: np.ndarray, max_tokens: int | None) -> Request:
    """Asks for as much as all agree on, with a key of its own.

    The key depends on what is asked and how often it was asked before, not on
    the order in which parallel calls arrive.
    """
    most, budget = self._budget.trajectory_tokens, self._budget
    if self._begun >= budget.calls:
      self.exhausted = True
      raise OverBudgetError(f"the episode's {budget.calls} calls are used up")
    if len(tokens) >= most:
      self.exhausted = True
      raise OverBudgetError(
        f"the conversation has {len(tokens)} tokens; with an answer it must "
        f"have at most {most}"
      )
    wanted = min(budget.sampling.max_tokens, most - len(tokens))
    if max_tokens is not None:
      wanted = min(wanted, max_tokens)
    digest = zlib.crc32(tokens.astype(np.int32).tobytes())
    again = self._asked[digest] = self._asked.get(digest, -1) + 1
    return Request(
      prompt_index=self._prompt.index,
      member=self._member,
      tokens=tokens,
      sampling=dataclasses.replace(budget.sampling, max_tokens=wanted),
      seed=(self._seed + digest + again * 0x9E3779B1) % 2**32,
    )


def _cut(
  tokenizer: Tokenizer, completion: Completion, stop: Sequence[str]
) -> tuple[Completion, str, bool]:
  """The completion up to a stop string, its text, and whether one was found."""
  detokenizer, stops = Detokenizer(tokenizer), StopStrings(stop)
  shown: list[str] = []
  ids = completion.tokens.tolist()
  if completion.stop_reason == "stop":
    ids.pop()
  for number, token in enumerate(ids, 1):
    shown.append(stops.push(detokenizer.push((token,))))
    if stops.found is not None:
      return _first(completion, number), "".join(shown), True
  shown.append(stops.push(detokenizer.flush()))
  if stops.found is None:
    shown.append(stops.flush())
  return completion, "".join(shown), stops.found is not None


def _first(completion: Completion, number: int) -> Completion:
  heads = (completion.topk_ids, completion.topk_logp)
  ids, logp = (None if head is None else head[:number] for head in heads)
  return Completion(
    tokens=completion.tokens[:number],
    logp=completion.logp[:number],
    version=completion.version[:number],
    stop_reason="stop",
    topk_ids=ids,
    topk_logp=logp,
  )
