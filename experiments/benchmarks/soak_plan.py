"""Errands of the soak: what is asked of a service, how, and how it may end.

An errand goes one way and meets one fate. What is drawn depends on the seed
alone; when it happens does not.
"""

import dataclasses
import random

import numpy as np

from rl_tpu.generation.driver import INTERRUPTIONS
from rl_tpu.models.tokenizer import ByteTokenizer
from rl_tpu.types import Request, Sampling

WAYS = (
  "generate",
  "stream",
  "wire",
  "decode",
  "http",
  "http_stream",
  "chat",
  "local",
)
"""How a request reaches a service."""
TOKENIZER = ByteTokenizer()
CONTEXT = 128
FLOOD = 20
"""Requests at once: more than a service may have open."""

FULL, LONG, INVALID = "refused: full", "refused: too long", "refused: invalid"
ENDS = ("stop", "length", FULL)
MAY_END: dict[str, tuple[str, ...]] = {
  "end": ENDS,
  "cancel": ("cancelled", *ENDS),
  "vanish": ("hung up", *ENDS),
  "too long": (LONG, FULL),
  "invalid": (INVALID, FULL),
  "flood": ENDS,
}
"""Reasons by fate."""

_WEIGHTS = {
  "end": 10,
  "cancel": 5,
  "vanish": 4,
  "too long": 2,
  "invalid": 2,
  "flood": 0.3,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Errand:
  """What one worker does next."""

  index: int
  service: str
  way: str
  fate: str
  prompt: str
  sampling: Sampling
  stop: tuple[str, ...]
  """Strings; sent where there are texts."""
  count: int
  """Requests that it makes."""
  after: int
  """Chunks or messages, or hundredths of a second, before it leaves."""

  def request(self, member: int = 0) -> Request:
    """One of its requests, in ids."""
    tokens = np.array([TOKENIZER.bos_id, *TOKENIZER.encode(self.prompt)])
    if self.fate == "invalid":
      tokens[-1] = 10**6
    return Request(
      prompt_index=self.index,
      member=member,
      tokens=tokens.astype(np.int32),
      sampling=self.sampling,
    )


def plan(requests: int, seed: int) -> list[Errand]:
  """Errands that make at least so many requests."""
  chance = random.Random(seed)
  errands: list[Errand] = []
  while requests > 0:
    errand = _draw(chance, len(errands))
    errands.append(errand)
    requests -= errand.count
  return errands


def _draw(chance: random.Random, index: int) -> Errand:
  (fate,) = chance.choices([*_WEIGHTS], [*_WEIGHTS.values()])
  way = chance.choice(["generate", "http"] if fate == "flood" else [*WAYS])
  letters = "abcdefghij"
  prompt = "shared " * (chance.random() < 0.5) + "".join(
    chance.choices(letters, k=chance.randint(1, 20))
  )
  if fate == "too long":
    prompt = "x" * chance.randint(CONTEXT, 2 * CONTEXT)
  ids = TOKENIZER.encode("".join(chance.sample(letters, 3))).tolist()
  several = way in ("wire", "http", "http_stream", "chat")
  return Errand(
    index=index,
    service=chance.choice(INTERRUPTIONS),
    way=way,
    fate=fate,
    prompt=prompt,
    sampling=Sampling(
      temperature=chance.choice([0.0, 0.7, 1.0]),
      max_tokens=chance.randint(1, 64),
      stop_ids=tuple(ids) if chance.random() < 0.5 else (),
    ),
    stop=tuple(chance.sample(letters, 8)) if chance.random() < 0.5 else (),
    count=FLOOD if fate == "flood" else chance.randint(1, 3) if several else 1,
    after=chance.randint(0, 12),
  )
