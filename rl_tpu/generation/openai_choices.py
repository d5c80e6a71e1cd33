"""How the OpenAI API writes choices: text, tokens, logprobs.

A token whose own text is no text (half of a character, a special id) is written
as "token_id:" and its id, so that entries stay apart.
"""

import abc
import math
from typing import Any

import numpy as np

from rl_tpu.generation.openai_fields import Ask
from rl_tpu.generation.text import TextChunk, TextCompletion
from rl_tpu.models.tokenizer import BytesPerToken, Tokenizer
from rl_tpu.types import Chunk, Completion

_NEVER = -9999.0
"""What the API's clients expect where JSON cannot write minus infinity."""


class Format(abc.ABC):
  """How one of the two ways to ask writes its choices."""

  kind: str
  streamed_kind: str
  prefix: str

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer

  def choice(
    self,
    ask: Ask,
    index: int,
    done: TextChunk | TextCompletion,
    sampled: Chunk | Completion,
  ) -> dict[str, Any]:
    """What whole choices and pieces of one have in common."""
    choice: dict[str, Any] = {
      "index": index,
      "finish_reason": sampled.stop_reason,
      "logprobs": None,
    }
    if ask.top is not None:
      choice["logprobs"] = self.logprobs(sampled, done.offsets, ask.top)
    if ask.return_token_ids:
      versions = np.broadcast_to(sampled.version, sampled.tokens.shape)
      choice["prompt_token_ids"] = ask.requests[index].tokens.tolist()
      choice["token_ids"] = sampled.tokens.tolist()
      choice["token_versions"] = versions.tolist()
    if ask.return_token_experts and sampled.experts is not None:
      choice["token_experts"] = sampled.experts.tolist()
    return choice

  @abc.abstractmethod
  def message(self, done: TextCompletion) -> dict[str, Any]:
    """Where the whole text stands."""
    ...

  @abc.abstractmethod
  def delta(self, added: TextChunk, first: bool) -> dict[str, Any]:
    """Where text stands in a stream."""
    ...

  @abc.abstractmethod
  def logprobs(
    self, sampled: Chunk | Completion, offsets: np.ndarray, top: int
  ) -> dict[str, Any]:
    """What is told of tokens."""
    ...

  def _token(self, token: int) -> str:
    """A token's own text, or its id where it has none by itself."""
    own = self._tokenizer.decode((token,))
    return own if own and "\ufffd" not in own else f"token_id:{token}"


class CompletionFormat(Format):
  """The choices of /v1/completions."""

  kind = streamed_kind = "text_completion"
  prefix = "cmpl"

  def message(self, done: TextCompletion) -> dict[str, Any]:
    """The field `text`."""
    return {"text": done.text}

  def delta(self, added: TextChunk, first: bool) -> dict[str, Any]:
    """The field `text`."""
    return {"text": added.text}

  def logprobs(
    self, sampled: Chunk | Completion, offsets: np.ndarray, top: int
  ) -> dict[str, Any]:
    """Four lists of equal length."""
    heads = _heads(sampled, top)
    return {
      "tokens": [self._token(token) for token in sampled.tokens.tolist()],
      "token_logprobs": [_number(logp) for logp in sampled.logp.tolist()],
      "top_logprobs": [self._named(head) for head in heads] if top else None,
      "text_offset": offsets.tolist(),
    }

  def _named(self, head: list[tuple[int, float]]) -> dict[str, float | None]:
    """Logprobs by text; by id where another token has the same text."""
    named: dict[str, float | None] = {}
    for token, logp in head:
      name = self._token(token)
      named[f"token_id:{token}" if name in named else name] = _number(logp)
    return named


class ChatFormat(Format):
  """The choices of /v1/chat/completions."""

  kind = "chat.completion"
  streamed_kind = "chat.completion.chunk"
  prefix = "chatcmpl"

  def message(self, done: TextCompletion) -> dict[str, Any]:
    """The field `message`."""
    message = {"role": "assistant", "content": done.text, "refusal": None}
    return {"message": message}

  def delta(self, added: TextChunk, first: bool) -> dict[str, Any]:
    """The field `delta`."""
    role = {"role": "assistant"} if first else {}
    return {"delta": {**role, "content": added.text}}

  def logprobs(
    self, sampled: Chunk | Completion, offsets: np.ndarray, top: int
  ) -> dict[str, Any]:
    """One object for each token."""
    tokens = zip(sampled.tokens.tolist(), sampled.logp.tolist(), strict=True)
    content = [
      {
        **self._entry(token, logp),
        "top_logprobs": [self._entry(*other) for other in head],
      }
      for (token, logp), head in zip(tokens, _heads(sampled, top), strict=True)
    ]
    return {"content": content, "refusal": None}

  def _entry(self, token: int, logp: float) -> dict[str, Any]:
    data = None
    if isinstance(self._tokenizer, BytesPerToken):
      data = list(self._tokenizer.token_bytes(token))
    return {
      "token": self._token(token),
      "logprob": _number(logp),
      "bytes": data,
    }


def _heads(
  sampled: Chunk | Completion, top: int
) -> list[list[tuple[int, float]]]:
  """At each token the most likely ones, as far as there are so many."""
  if not top or sampled.topk_ids is None or sampled.topk_logp is None:
    return [[] for _ in sampled.tokens]
  return [
    [
      (token, logp)
      for token, logp in zip(ids[:top], head[:top], strict=True)
      if token >= 0
    ]
    for ids, head in zip(
      sampled.topk_ids.tolist(), sampled.topk_logp.tolist(), strict=True
    )
  ]


def _number(logp: float) -> float | None:
  """A logp as JSON can write it; null where it is not a number."""
  if math.isnan(logp):
    return None
  return max(logp, _NEVER)
