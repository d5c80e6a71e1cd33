"""Requests from arrival to end, what each slot holds, and the answers.

`SlotTable` is one table of arrays, a slot a row, so that the results of a
dispatch are recorded for all slots at once; Python visits only the sequences
that end. `Outbox` wakes each client's asyncio loop once per dispatch, however
many of its requests ended.

Axes: S slots, C context, K the sampler's head.
"""

import asyncio
import dataclasses

import numpy as np

from rl_tpu.generation import decoding
from rl_tpu.generation.jetstream import ReturnSample, orchestrator
from rl_tpu.types import Completion, Request, StopReason

_REASONS: dict[int, StopReason] = {
  decoding.STOPPED: "stop",
  decoding.EXHAUSTED: "length",
}


@dataclasses.dataclass(eq=False, kw_only=True)
class OpenRequest(orchestrator.ActiveRequest):
  """A request that was accepted.

  Ours await `future`; clients of JetStream's own service read
  `return_channel`. `max_tokens` is what the context leaves of it.
  """

  request: Request
  future: asyncio.Future[Completion] | None = None
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
    return self.future is None and self.return_channel.cancelled()


class SlotTable:
  """What the running sequences sampled, token by token, and whose they are."""

  def __init__(self, slots: int, context_length: int, head_size: int):
    self._owners: list[OpenRequest | None] = [None] * slots
    self._occupied = np.zeros(slots, bool)
    self._prompt_length = np.zeros(slots, np.int64)
    self._length = np.zeros(slots, np.int64)
    self._tokens = np.zeros((slots, context_length), np.int32)
    self._logp = np.zeros((slots, context_length), np.float32)
    self._version = np.zeros((slots, context_length), np.int32)
    # Pages of the heads are real memory only once they are written to.
    heads = (slots, context_length, head_size)
    self._topk_ids = np.zeros(heads, np.int32)
    self._topk_logp = np.zeros(heads, np.float32)

  @property
  def running(self) -> list[OpenRequest]:
    """Requests that hold a slot."""
    return [owner for owner in self._owners if owner is not None]

  @property
  def empty(self) -> bool:
    """Whether no slot is held."""
    return not self._occupied.any()

  def place(self, opened: OpenRequest, slot: int) -> None:
    """Gives a free slot to a request."""
    assert self._owners[slot] is None, f"slot {slot} is taken"
    prompt = opened.request.tokens
    opened.slot = slot
    self._owners[slot] = opened
    self._occupied[slot] = True
    self._tokens[slot, : len(prompt)] = prompt
    self._prompt_length[slot] = self._length[slot] = len(prompt)

  def holds(self, opened: OpenRequest) -> bool:
    """Whether the request has a slot."""
    return opened.slot >= 0 and self._owners[opened.slot] is opened

  def free(self, opened: OpenRequest) -> int:
    """Takes the request's slot back and returns it."""
    assert self.holds(opened), f"{opened} has no slot"
    self._owners[opened.slot] = None
    self._occupied[opened.slot] = False
    return opened.slot

  def admission(self, opened: OpenRequest) -> decoding.Admission:
    """What the engine needs to begin, or to go on, with a request."""
    slot = opened.slot
    sampled = self._length[slot] - self._prompt_length[slot]
    return decoding.Admission(
      slot=slot,
      tokens=self._tokens[slot, : self._length[slot]],
      budget=opened.max_tokens - int(sampled),
      request=opened.request,
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
    self._topk_ids[rows, at] = result.topk_ids[rows, step]
    self._topk_logp[rows, at] = result.topk_logp[rows, step]
    self._length += counts
    return len(rows)

  def ended(
    self, result: decoding.Result
  ) -> list[tuple[OpenRequest, Completion]]:
    """The requests that a recorded dispatch ended; they keep their slots."""
    slots = np.flatnonzero(result.standing != decoding.RUNNING)
    return [
      (opened, self._completion(slot, _REASONS[int(result.standing[slot])]))
      for slot in slots.tolist()
      if (opened := self._owners[slot]) is not None
    ]

  def stream(self, result: decoding.Result) -> None:
    """Sends recorded tokens to clients of JetStream's own service."""
    for opened in self.running:
      if opened.future is None:
        end = int(self._length[opened.slot])
        start = end - int(result.counts[opened.slot])
        tokens = self._tokens[opened.slot, start:end].tolist()
        opened.enqueue_samples([ReturnSample(text=[], token_ids=tokens)])

  def _completion(self, slot: int, reason: StopReason) -> Completion:
    sampled = slice(int(self._prompt_length[slot]), int(self._length[slot]))
    ids, logp = self._topk_ids[slot, sampled], self._topk_logp[slot, sampled]
    has_head = ids.shape[1] > 0
    return Completion(
      tokens=self._tokens[slot, sampled].copy(),
      logp=self._logp[slot, sampled].copy(),
      version=self._version[slot, sampled].copy(),
      stop_reason=reason,
      topk_ids=ids.copy() if has_head else None,
      topk_logp=logp.copy() if has_head else None,
    )


class Outbox:
  """Outcomes on their way to those who wait for them."""

  def __init__(self):
    self._batches: dict[asyncio.AbstractEventLoop, list] = {}

  def post(self, opened: OpenRequest, outcome: Completion | Exception) -> None:
    """Marks a request as ended and notes its outcome for `deliver`."""
    opened.ended = True
    if opened.future is not None:
      batch = self._batches.setdefault(opened.future.get_loop(), [])
      batch.append((opened.future, outcome))
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
  for future, outcome in batch:
    if future.done():
      continue
    if isinstance(outcome, Exception):
      future.set_exception(outcome)
    else:
      future.set_result(outcome)
