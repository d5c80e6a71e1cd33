r"""Text to token ids and back, without any file.

`ByteTokenizer` follows ByT5 (Xue et al. 2022, arXiv:2105.13626): the special
ids come first, then one id for each byte, so every text round-trips and none
can forge a special token. Sampled ids need not survive decode + encode: the
rest of the system keeps ids and decodes only to judge or to show them.

`encode_prompt` is the one way from a text to the ids a policy is conditioned
on (rollout, evaluation, warm-up data, a server's text input). It alone decides
about the beginning-of-sequence id, so that there is exactly one, also when a
chat template writes its own. `encode_chat` is the same for messages. Without a
template of its own a tokenizer gets this one, in which every message, a sampled
answer too, ends with the end-of-sequence id:

    BOS role "\n" content EOS ... role "\n" content EOS "assistant\n"

With bytes no text can write EOS, so no content can pose as another message; and
a conversation's next prompt begins with the last one and the answer to it.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

CHAT_ROLES = ("system", "user", "assistant")
"""Whose messages the template of `encode_chat` knows."""

_PROBE = "It costs 1,234.50 dollars:\n\n\tnaïve  数字 🙂 </s>"
"""A text that tokenizers with the same ids still split differently."""


class Tokenizer(Protocol):
  """What the system needs of a tokenizer."""

  @property
  def pad_id(self) -> int:
    """Fills unused places; masks decide what is real, never this id."""
    ...

  @property
  def bos_id(self) -> int | None:
    """Begins every prompt; None for models that have no such token."""
    ...

  @property
  def eos_id(self) -> int:
    """Ends an answer in supervised data."""
    ...

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """Any of these ends an answer while sampling; `eos_id` is among them."""
    ...

  @property
  def vocab_size(self) -> int:
    """Every id is below it; a model may pad its own vocabulary further."""
    ...

  def encode(self, text: str) -> np.ndarray:
    """Returns i32[n]; what the text itself holds, nothing added."""
    ...

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text; special ids are left out, bad bytes become U+FFFD."""
    ...


@runtime_checkable
class BytesPerToken(Protocol):
  """What some tokenizers have: the bytes that each id adds to the text."""

  def token_bytes(self, token: int) -> bytes:
    """Returns them; `decode` is their UTF-8. Special ids have none."""
    ...


@runtime_checkable
class ChatTemplate(Protocol):
  """What tokenizers of chat models have."""

  def apply_chat_template(
    self, messages: Sequence[Mapping[str, str]]
  ) -> Iterable[int]:
    """Returns ids that ask for the answer to messages (`role`, `content`)."""
    ...


class ByteTokenizer:
  """One id for each byte of UTF-8: pad 0, eos 1, bos 2, byte b is b + 3."""

  pad_id = 0
  eos_id = 1
  bos_id = 2
  eos_ids = (eos_id,)
  first_byte_id = 3
  vocab_size = first_byte_id + 256

  def encode(self, text: str) -> np.ndarray:
    """Returns i32[n], one id for each byte, no special ids."""
    data = np.frombuffer(text.encode("utf-8"), np.uint8)
    return data.astype(np.int32) + self.first_byte_id

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text; ids that stand for no byte are left out."""
    data = b"".join(self.token_bytes(int(i)) for i in ids)
    return data.decode("utf-8", errors="replace")

  def token_bytes(self, token: int) -> bytes:
    """Returns its one byte, or none."""
    byte = token - self.first_byte_id
    return bytes((byte,)) if 0 <= byte < 256 else b""


def encode_prompt(tokenizer: Tokenizer, text: str) -> np.ndarray:
  """Returns i32[P] with exactly one BOS, at place 0, if the model has one.

  A BOS that the text's template wrote, or that the tokenizer put there by
  itself, counts as that one. Raises ValueError when nothing is left to
  condition on.
  """
  ids = _one_bos(tokenizer, tokenizer.encode(text))
  if not len(ids):
    raise ValueError(
      f"The prompt {text!r} has no tokens; it must have at least one, "
      "as the first token of a trajectory is never sampled"
    )
  return ids


def encode_chat(
  tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]
) -> np.ndarray:
  """Returns i32[P], after which the policy writes the assistant's next message.

  Uses the tokenizer's `apply_chat_template`, or else the template above.

  Raises:
    ValueError: there are no messages, or the template knows no such role.
  """
  if not messages:
    raise ValueError("messages is []; it must hold at least one message")
  if isinstance(tokenizer, ChatTemplate):
    ids = np.fromiter(tokenizer.apply_chat_template(messages), np.int32)
    return _one_bos(tokenizer, ids)
  pieces: list[np.ndarray] = []
  for message in messages:
    role, content = message["role"], message["content"]
    if role not in CHAT_ROLES:
      raise ValueError(f"a role is {role!r}; it must be one of {CHAT_ROLES}")
    pieces.append(
      _without_bos(tokenizer, tokenizer.encode(f"{role}\n{content}"))
    )
    pieces.append(np.array([tokenizer.eos_id], np.int32))
  pieces.append(_without_bos(tokenizer, tokenizer.encode("assistant\n")))
  return _one_bos(tokenizer, np.concatenate(pieces))


def fingerprint(tokenizer: Tokenizer) -> str:
  """A digest of what ids mean: equal for tokenizers that say the same."""
  special = (tokenizer.pad_id, tokenizer.bos_id, *tokenizer.eos_ids)
  digest = hashlib.sha256(f"{special} {tokenizer.vocab_size}\0".encode())
  for token in range(tokenizer.vocab_size):
    digest.update(tokenizer.decode([token]).encode("utf-8") + b"\0")
  digest.update(tokenizer.encode(_PROBE).tobytes())
  return digest.hexdigest()[:16]


def _one_bos(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
  """The ids with exactly one BOS in front, if the model has one."""
  rest = _without_bos(tokenizer, ids)
  if tokenizer.bos_id is None:
    return rest
  return np.concatenate([np.array([tokenizer.bos_id], np.int32), rest])


def _without_bos(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
  """The ids from the first one on that is no BOS."""
  ids = np.asarray(ids, np.int32)
  if tokenizer.bos_id is None:
    return ids
  others = np.flatnonzero(ids != tokenizer.bos_id)
  return ids[others[0] :] if len(others) else ids[:0]
