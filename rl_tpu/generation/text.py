"""Text on top of a generator that speaks token ids: deltas and stop strings.

    token ids -> Detokenizer -> StopStrings -> text that can be shown

Both hold back what the next token could still change: bytes that are not a
whole character yet, and the beginning of a stop string. What they let go is
never taken back, and at the end it adds up to one decode of all ids, cut at the
first stop string.

The ids stay as they were sampled. A stop string ends its request with the token
that completed it: this token is the last one, with logp and version, whatever
part of the text it wrote; those sampled after it in the same dispatch are
dropped; the stream is closed, which frees the slot. So a turn that ends with
"</tool_call>" is trained up to and including that tag.
"""

import codecs
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Literal, Protocol

import numpy as np

from rl_tpu.generation import wire
from rl_tpu.models.tokenizer import BytesPerToken, Tokenizer
from rl_tpu.types import Chunk, Completion, Request, extras

FinishReason = Literal["stop", "length"]

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 8
"""Ids decoded again with those that are new: enough for every character that
could be incomplete (4 bytes) and for what a decoder does to the first id."""


class Streams(Protocol):
  """Whatever continues token streams chunk by chunk, such as the driver."""

  def stream(self, request: Request) -> AsyncGenerator[Chunk]:
    """Samples; closing the generator cancels the request.

    Raises:
      ValueError: the request cannot be served; says why.
      RuntimeError, OSError: the generator failed, stopped, or is out of reach.
    """
    ...


class Detokenizer:
  """Decodes ids as they come; the joined texts equal one decode of them all.

  A character is let go when its last byte is there; bytes that are no UTF-8
  become U+FFFD. Linear in the number of ids, however many come at once.

  With `token_bytes` this is exact for all ids. Other tokenizers decode the last
  ids together. It is exact for theirs while later ids change no whole character
  (cleaning up spaces, for one, must be off) and the bytes are UTF-8.
  """

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._token_bytes = (
      tokenizer.token_bytes if isinstance(tokenizer, BytesPerToken) else None
    )
    self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    # Without bytes: the last ids, their text, and how much of it was let go.
    self._window: list[int] = []
    self._text = ""
    self._sent = 0
    self._waited = 0

  def push(self, ids: Iterable[int]) -> str:
    """The text that these ids complete."""
    if self._token_bytes is not None:
      return self._utf8.decode(b"".join(map(self._token_bytes, ids)))
    return "".join(map(self._read, ids))

  def flush(self) -> str:
    """What was held back: no more ids will come."""
    if self._token_bytes is not None:
      return self._utf8.decode(b"", final=True)
    return self._release(len(self._text))

  def _read(self, token: int) -> str:
    self._window.append(token)
    self._text = self._tokenizer.decode(self._window)
    unknown = len(self._text) - len(self._text.rstrip(_UNKNOWN))
    self._waited = self._waited + 1 if unknown else 0
    if 0 < self._waited < 4:
      return ""
    # After 4 ids these bytes are no character; only the last 3 can become one.
    released = self._release(len(self._text) - min(unknown, 3))
    if len(self._window) > 2 * _CONTEXT:
      self._forget()
    return released

  def _release(self, end: int) -> str:
    released = self._text[self._sent : end]
    self._sent = max(self._sent, end)
    return released

  def _forget(self) -> None:
    """Leaves ids out of the window that later text does not depend on."""
    held = max(len(self._text) - self._sent, 0)
    # Those without text, such as padding, cannot stand for what was before.
    for kept in (self._window[-_CONTEXT:], self._window[:-_CONTEXT]):
      text = self._tokenizer.decode(kept)
      if text[-held - 1 :] == self._text[-held - 1 :]:
        self._window, self._text = kept, text
        self._sent = len(text) - held
        return


class StopStrings:
  """Cuts text where the first of some strings is complete.

  Which one is first does not depend on the pieces that the text comes in: it
  is the one that ends first, and of those that end together the longest.
  Linear in the text (Knuth, Morris and Pratt 1977).
  """

  def __init__(self, stops: Sequence[str], include: bool = False):
    """Looks for `stops`; `include` keeps the one that was found in the text.

    Raises:
      ValueError: one of them is empty.
    """
    if isinstance(stops, str) or not all(stops):
      raise ValueError(
        f"stop strings are {stops!r}; they must be a sequence of strings, none "
        "of them empty"
      )
    self.found: str | None = None
    self._include = include
    self._stops = tuple(stops)
    self._borders = [_borders(stop) for stop in stops]
    self._matched = [0] * len(stops)
    self._held = ""

  def push(self, text: str, barred: bool = False) -> str:
    """The text that can be shown; all of it once a string was `found`.

    Args:
      text: what comes next; nothing may come after a string was found.
      barred: strings that end in this text do not count.
    """
    assert self.found is None, f"text {text!r} comes after a stop string"
    if not self._stops:
      return text
    begun = self._held + text
    for end, character in enumerate(text, len(self._held) + 1):
      complete = self._advance(character)
      if complete and not barred:
        self.found = max(complete, key=len)
        self._held = ""
        return begun[: end if self._include else end - len(self.found)]
    shown = len(begun) - max(self._matched)
    self._held = begun[shown:]
    return begun[:shown]

  def flush(self) -> str:
    """What was held back: no more text will come."""
    held, self._held = self._held, ""
    return held

  def _advance(self, character: str) -> list[str]:
    """Reads one character; the strings that end with it."""
    for i, (stop, borders) in enumerate(
      zip(self._stops, self._borders, strict=True)
    ):
      n = self._matched[i]
      while n and (n == len(stop) or stop[n] != character):
        n = borders[n - 1]
      self._matched[i] = n + (stop[n] == character)
    return [
      stop
      for stop, n in zip(self._stops, self._matched, strict=True)
      if n == len(stop)
    ]


def _borders(stop: str) -> list[int]:
  """For each beginning of `stop`, its longest proper suffix that begins it."""
  borders = [0]
  for character in stop[1:]:
    n = borders[-1]
    while n and stop[n] != character:
      n = borders[n - 1]
    borders.append(n + (stop[n] == character))
  return borders


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextChunk:
  """What one dispatch added to a completion (n tokens)."""

  text: str
  """Ready to be shown; may be empty, and may be that of earlier tokens."""
  chunk: Chunk
  """The tokens; none after the one that completed a stop string."""
  offsets: np.ndarray
  """i32[n], characters of the whole text that were complete before each."""
  stop: str | None = None
  """The stop string that ended the request, in its last chunk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextCompletion:
  """A completion and its text (n tokens)."""

  text: str
  """Cut at the stop string, while the tokens go on to its end."""
  completion: Completion
  offsets: np.ndarray
  """i32[n], characters of the uncut text that were complete before each token:
  where in the text its own begins."""
  stop: str | None = None
  """The stop string that ended it; None where a stop id or the budget did."""

  @property
  def finish_reason(self) -> FinishReason:
    """Whether it was stopped or ran out of tokens."""
    return "stop" if self.completion.stop_reason == "stop" else "length"


class _Writer:
  """Turns the chunks of one request into text."""

  def __init__(self, tokenizer: Tokenizer, stops: StopStrings, min_tokens: int):
    self._detokenizer = Detokenizer(tokenizer)
    self._stops = stops
    self._barred = min_tokens
    self._characters = 0

  def write(self, chunk: Chunk) -> TextChunk:
    """Reads one chunk up to the token that completes a stop string."""
    shown: list[str] = []
    offsets: list[int] = []
    for token in chunk.tokens.tolist():
      offsets.append(self._characters)
      shown.append(self._read(self._detokenizer.push((token,))))
      self._barred -= 1
      if self._stops.found is not None:
        break
    if chunk.stop_reason is not None and self._stops.found is None:
      shown.append(self._read(self._detokenizer.flush()))
      shown.append(self._stops.flush())
    if self._stops.found is not None:
      chunk = _cut(chunk, len(offsets))
    return TextChunk(
      text="".join(shown),
      chunk=chunk,
      offsets=np.asarray(offsets, np.int32),
      stop=self._stops.found,
    )

  def _read(self, text: str) -> str:
    self._characters += len(text)
    return self._stops.push(text, barred=self._barred > 0)


def _cut(chunk: Chunk, length: int) -> Chunk:
  """The first tokens of a chunk, which a stop string ended."""
  return Chunk(
    tokens=chunk.tokens[:length],
    logp=chunk.logp[:length],
    version=chunk.version,
    stop_reason="stop",
    **{name: array[:length] for name, array in extras(chunk).items()},
  )


async def stream_text(
  generator: Streams,
  request: Request,
  tokenizer: Tokenizer,
  stop: Sequence[str] = (),
  include_stop: bool = False,
) -> AsyncGenerator[TextChunk]:
  """Completes a request as text, handing over every dispatch's.

  Closing it frees the slot, as a stop string does. Like stop ids, stop strings
  do not count in the request's first `min_tokens` tokens.

  Raises:
    ValueError: a stop string is empty, or the request cannot be served.
    RuntimeError, OSError: as the generator's `stream`.
  """
  stops = StopStrings(stop, include_stop)
  writer = _Writer(tokenizer, stops, request.sampling.min_tokens)
  async with contextlib.aclosing(generator.stream(request)) as chunks:
    async for chunk in chunks:
      piece = writer.write(chunk)
      yield piece
      if piece.chunk.stop_reason is not None:
        return


async def complete(
  generator: Streams,
  request: Request,
  tokenizer: Tokenizer,
  stop: Sequence[str] = (),
  include_stop: bool = False,
) -> TextCompletion:
  """Completes a request as text; cancelling the caller frees the slot.

  As `stream_text`.
  """
  pieces = stream_text(generator, request, tokenizer, stop, include_stop)
  async with contextlib.aclosing(pieces):
    return join([piece async for piece in pieces])


def join(pieces: Sequence[TextChunk]) -> TextCompletion:
  """One completion of all chunks of a request, in their order."""
  chunks = [piece.chunk for piece in pieces]
  reason = chunks[-1].stop_reason if chunks else None
  if reason is None:
    raise RuntimeError("the stream of a request ended without a stop reason")
  return TextCompletion(
    text="".join(piece.text for piece in pieces),
    completion=wire.join(chunks),
    offsets=np.concatenate([piece.offsets for piece in pieces]),
    stop=pieces[-1].stop,
  )
