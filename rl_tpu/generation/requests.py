"""Requests from arrival to end, what each slot holds, and the answers.

`SlotTable` is one table of arrays, a slot a row, so that the results of a
dispatch are recorded for all slots at once; Python visits only the sequences
that end, and those whose client wants every token at once. The table also
knows whose cache a new sequence can share: the rows of freed slots stay until
they are overwritten. `Outbox` wakes each client's asyncio loop once per
dispatch, however many of its requests it concerns.

Axes: S slots, C context, K the sampler's head, L layers and k experts of each.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Int

from rl_tpu.generation import decoding
from rl_tpu.generation.jetstream import ReturnSample, orchestrator
from rl_tpu.types import Chunk, Completion, Request, StopReason

_REASONS: dict[int, StopReason] = {
  decoding.STOPPED: "stop",
  decoding.EXHAUSTED: "length",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Client:
  """Who waits for a request: a callback in an asyncio loop.

  It gets one Completion, or every Chunk as it is sampled where `streams`; or
  an exception. After that it is not called again.
  """

  loop: asyncio.AbstractEventLoop
  receive: Callable[[Completion | Chunk | Exception], None]
  streams: bool = False


@dataclasses.dataclass(eq=False, kw_only=True)
class OpenRequest(orchestrator.ActiveRequest):
  """A request that was accepted.

  Clients of JetStream's own service read `return_channel`; all others have a
  `client`. `max_tokens` is what the context leaves of it.
  """

  request: Request
  client: Client | None = None
  arrived: float = 0.0
  """When it came, in seconds of the driver's clock."""
  slot: int = -1
  """Where it runs; -1 while it waits."""
  ended: bool = False

  def __eq__(self, other: object) -> bool:
    return self is other

  def __hash__(self) -> int:
    return id(self)

  @property
  def client_gone(self) -> bool:
    """Whether a client of JetStream's own service hung up."""
    return self.client is None and self.return_channel.cancelled()


class SlotTable:
  """What the running sequences sampled, token by token, and whose they are."""

  def __init__(
    self,
    slots: int,
    context_length: int,
    head_size: int,
    routed: tuple[int, int] = (0, 0),
    min_shared_prefix: int = 0,
  ):
    self._min_shared = min_shared_prefix
    self._free = dict.fromkeys(range(slots))  # Longest free first.
    # Entries of each slot's cache that another sequence may take over: those
    # that the weights in service computed, in the rows marked as current.
    self._current = np.zeros(slots, bool)
    self._shareable = np.zeros(slots, np.int64)
    self._owners: list[OpenRequest | None] = [None] * slots
    self._tenants = np.zeros(slots, np.int64)
    self._placed = 0
    self._prompt_length = np.zeros(slots, np.int64)
    self._length = np.zeros(slots, np.int64)
    self._limit = np.zeros(slots, np.int64)
    self._tokens = np.zeros((slots, context_length), np.int32)
    self._logp = np.zeros((slots, context_length), np.float32)
    self._version = np.zeros((slots, context_length), np.int32)
    # Pages of these are real memory only once they are written to.
    context = slots, context_length
    extras = {
      "topk_ids": np.zeros((*context, head_size), np.int32),
      "topk_logp": np.zeros((*context, head_size), np.float32),
      "experts": np.zeros((*context, *routed), np.int16),
    }
    self._extras = {name: x for name, x in extras.items() if x.size}

  @property
  def running(self) -> list[OpenRequest]:
    """Requests that hold a slot."""
    return [owner for owner in self._owners if owner is not None]

  @property
  def empty(self) -> bool:
    """Whether no slot is held."""
    return not self._occupied.any()

  @property
  def tenants(self) -> Int[np.ndarray, " S"]:
    """A number for each request that holds a slot, never used again; else 0."""
    return self._tenants.copy()

  @property
  def _occupied(self) -> Bool[np.ndarray, " S"]:
    return self._tenants > 0

  def ending(self, steps: int) -> int:
    """How many held sequences `steps` more tokens end for certain."""
    return int(np.sum(self._occupied & (self._limit - self._length <= steps)))

  def kept(
    self, result: decoding.Result, tenants: Int[np.ndarray, " S"]
  ) -> decoding.Result:
    """A dispatch's result without what it sampled for those who left.

    `tenants` are those that it began with.
    """
    same = self._tenants == tenants
    if same.all():
      return result
    data = np.where(same[:, None], np.asarray(result.data), 0)
    return dataclasses.replace(result, data=data)

  @property
  def free_slots(self) -> int:
    """Slots that no request holds."""
    return len(self._free)

  def admit(self, sequences: Sequence[OpenRequest]) -> list[decoding.Admission]:
    """What the engine needs to begin, or to go on with, these sequences.

    One without a slot gets one; there must be enough. A sequence shares the
    cache of the slot that begins with the most of its tokens, itself free or
    not, if those are enough. It takes that very slot if it is free, so no
    cache is overwritten that another sequence of this call still has to copy.
    """
    admissions: list[decoding.Admission] = []
    for opened in sequences:
      tokens = self.tokens_so_far(opened)
      source, shared = self._longest_prefix(tokens)
      if opened.slot < 0:
        there = shared > 0 and source in self._free
        self._place(opened, source if there else next(iter(self._free)))
      slot = opened.slot
      # Those who come next may be admitted before this one's missing tokens.
      kept = shared if slot == source else 0
      self._current[slot] = True
      self._shareable[slot] = kept if shared else len(tokens) - 1
      admissions.append(self._admission(opened, source, shared))
    return admissions

  def forget_caches(self) -> None:
    """Shares nothing that was computed so far: the weights are new."""
    self._current[:] = False
    self._shareable[:] = 0

  def _longest_prefix(self, tokens: np.ndarray) -> tuple[int, int]:
    """The slot whose shareable entries begin with most of these tokens.

    Free slots come first among equals. The last token is not looked for: the
    decode step computes it anyway. Linear in slots times tokens.
    """
    least, most = self._min_shared, len(tokens) - 1
    if not 0 < least <= most:
      return 0, 0
    slots = np.flatnonzero(self._shareable >= least)
    begin = (self._tokens[slots, :least] == tokens[:least]).all(axis=1)
    slots = slots[begin]
    if not len(slots):
      return 0, 0
    differs = self._tokens[slots, :most] != tokens[:most]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), most)
    common = np.minimum(common, self._shareable[slots])
    best = int(np.argmax(2 * common + ~self._occupied[slots]))
    return int(slots[best]), int(common[best])

  def tokens_so_far(self, opened: OpenRequest) -> np.ndarray:
    """The request's prompt and what was sampled for it."""
    if opened.slot < 0:
      return np.asarray(opened.request.tokens)
    return self._tokens[opened.slot, : self._length[opened.slot]]

  def _place(self, opened: OpenRequest, slot: int) -> None:
    """Gives a free slot to a request."""
    del self._free[slot]
    prompt = opened.request.tokens
    opened.slot = slot
    self._owners[slot] = opened
    self._placed += 1
    self._tenants[slot] = self._placed
    self._tokens[slot, : len(prompt)] = prompt
    self._prompt_length[slot] = self._length[slot] = len(prompt)
    self._limit[slot] = len(prompt) + opened.max_tokens

  def holds(self, opened: OpenRequest) -> bool:
    """Whether the request has a slot."""
    return opened.slot >= 0 and self._owners[opened.slot] is opened

  def free(self, opened: OpenRequest) -> int:
    """Takes the request's slot back and returns it."""
    assert self.holds(opened), f"{opened} has no slot"
    self._owners[opened.slot] = None
    self._tenants[opened.slot] = 0
    self._free[opened.slot] = None
    return opened.slot

  def _admission(
    self, opened: OpenRequest, source: int, shared: int
  ) -> decoding.Admission:
    slot = opened.slot
    return decoding.Admission(
      slot=slot,
      tokens=self._tokens[slot, : self._length[slot]],
      budget=int(self._limit[slot] - self._length[slot]),
      request=opened.request,
      source=source,
      shared=shared,
    )

  def record(self, result: decoding.Result) -> int:
    """Appends what a dispatch sampled for held slots; returns how much.

    Linear in slots times steps, without a loop.
    """
    counts = np.where(self._occupied, result.counts, 0)
    tokens = result.tokens
    rows, step = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
    at = self._length[rows] + step
    self._tokens[rows, at] = tokens[rows, step]
    self._logp[rows, at] = result.logp[rows, step]
    self._version[rows, at] = result.version
    for name, held in self._extras.items():
      held[rows, at] = getattr(result, name)[rows, step]
    self._length += counts
    self._shareable = np.where(self._current, self._length - 1, 0)
    return len(rows)

  def ended(self, result: decoding.Result) -> list[OpenRequest]:
    """The requests that a recorded dispatch ended; they keep their slots."""
    slots = np.flatnonzero(result.standing != decoding.RUNNING).tolist()
    owners = [self._owners[slot] for slot in slots]
    return [owner for owner in owners if owner is not None]

  def stream(self, result: decoding.Result, outbox: "Outbox") -> None:
    """Hands recorded tokens to those who want every dispatch's."""
    wanting = [
      opened
      for opened in self.running
      if not opened.ended and (opened.client is None or opened.client.streams)
    ]
    if not wanting:
      return
    tokens, logp = result.tokens, result.logp
    extras = {name: getattr(result, name) for name in self._extras}
    counts, standing = result.counts.tolist(), result.standing.tolist()
    for opened in wanting:
      slot = opened.slot
      count = counts[slot]
      if not count:
        continue
      if opened.client is None:
        sampled = tokens[slot, :count].tolist()
        opened.enqueue_samples([ReturnSample(text=[], token_ids=sampled)])
      else:
        # Copies: a view would keep what the dispatch sampled for all slots.
        chunk = Chunk(
          tokens=tokens[slot, :count].copy(),
          logp=logp[slot, :count].copy(),
          version=result.version,
          stop_reason=_REASONS.get(standing[slot]),
          **{name: x[slot, :count].copy() for name, x in extras.items()},
        )
        outbox.post(opened, chunk)

  def completion(
    self, opened: OpenRequest, result: decoding.Result
  ) -> Completion:
    """All of a request that the dispatch ended."""
    slot = opened.slot
    sampled = slice(int(self._prompt_length[slot]), int(self._length[slot]))
    return Completion(
      tokens=self._tokens[slot, sampled].copy(),
      logp=self._logp[slot, sampled].copy(),
      version=self._version[slot, sampled].copy(),
      stop_reason=_REASONS[int(result.standing[slot])],
      **{name: x[slot, sampled].copy() for name, x in self._extras.items()},
    )


class Outbox:
  """Outcomes on their way to those who wait for them."""

  def __init__(self):
    self._batches: dict[asyncio.AbstractEventLoop, list] = {}

  def post(
    self, opened: OpenRequest, outcome: Completion | Chunk | Exception
  ) -> None:
    """Notes an outcome for `deliver`; the last one ends the request."""
    opened.ended = not isinstance(outcome, Chunk) or bool(outcome.stop_reason)
    if opened.client is not None:
      batch = self._batches.setdefault(opened.client.loop, [])
      batch.append((opened.client.receive, outcome))
    elif isinstance(outcome, Exception):
      opened.return_channel.set_exception(outcome)
    else:
      opened.return_channel.close()

  def deliver(self) -> None:
    """Sends what was posted: one wake-up for each asyncio loop."""
    batches, self._batches = self._batches, {}
    for loop, batch in batches.items():
      try:
        loop.call_soon_threadsafe(_resolve, batch)
      except RuntimeError:
        if not loop.is_closed():
          raise  # Else its clients are gone.


def _resolve(batch: list) -> None:
  """Runs in the clients' loop."""
  for receive, outcome in batch:
    receive(outcome)
