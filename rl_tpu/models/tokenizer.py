"""Text to token ids and back, without any file.

`ByteTokenizer` follows ByT5 (Xue et al. 2022, arXiv:2105.13626): the special
ids come first, then one id for each byte, so every text round-trips and none
can forge a special token. Sampled ids need not survive decode + encode: the
rest of the system keeps ids and decodes only to judge or to show them.

`encode_prompt` is the one way from a text to the ids a policy is conditioned
on (rollout, evaluation, warm-up data, a server's text input). It alone decides
about the beginning-of-sequence id, so that there is exactly one, also when a
chat template writes its own.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np


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
    data = (int(i) - self.first_byte_id for i in ids)
    text = bytes(byte for byte in data if 0 <= byte < 256)
    return text.decode("utf-8", errors="replace")


def encode_prompt(tokenizer: Tokenizer, text: str) -> np.ndarray:
  """Returns i32[P] with exactly one BOS, at place 0, if the model has one.

  A BOS that the text's template wrote, or that the tokenizer put there by
  itself, counts as that one. Raises ValueError when nothing is left to
  condition on.
  """
  ids = np.asarray(tokenizer.encode(text), np.int32)
  bos = tokenizer.bos_id
  if bos is not None:
    written = 0
    while written < len(ids) and ids[written] == bos:
      written += 1
    ids = np.concatenate([np.array([bos], np.int32), ids[written:]])
  if not len(ids):
    raise ValueError(
      f"The prompt {text!r} has no tokens; it must have at least one, "
      "as the first token of a trajectory is never sampled"
    )
  return ids
