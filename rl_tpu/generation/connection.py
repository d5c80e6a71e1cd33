"""One client's requests on one call, and the limits of all calls.

At most one message leaves for each dispatch and connection: the driver hands
over all outcomes of a dispatch in one turn of the loop, and the writer sends
what has gathered when it gets its own. While a client is slow to read, what
gathers goes into one message too, so a slow client costs memory, not time;
the memory has a limit.
"""

import asyncio
import functools
from collections.abc import AsyncIterator

import grpc.aio

from rl_tpu.generation import wire
from rl_tpu.generation.driver import GenerationDriver
from rl_tpu.generation.requests import Client, OpenRequest
from rl_tpu.types import Chunk, Completion


class Refused(Exception):
  """Ends a call with a status."""

  def __init__(self, code: str, message: str):
    super().__init__(message)
    self.failure = wire.Failure(code=code, message=message)


class Admission:
  """How many requests are open, over all services, and whether more may be."""

  def __init__(self, most: int):
    self.most = most
    self.open = 0
    self.ended = False
    """Whether the server is about to end."""
    self._idle = asyncio.Event()
    self._idle.set()

  def admit(self) -> None:
    """Counts a request in; `release` counts it out.

    Raises:
      Refused: there are too many, or the server is about to end.
    """
    if self.ended:
      raise Refused("UNAVAILABLE", "the server is about to end")
    if self.open >= self.most:
      raise Refused(
        "RESOURCE_EXHAUSTED",
        f"{self.open} requests are open, the most that are allowed "
        "(max_requests); try again when some have ended",
      )
    self.open += 1
    self._idle.clear()

  def release(self, requests: int = 1) -> None:
    """Counts requests out that have ended or were withdrawn."""
    self.open -= requests
    if not self.open:
      self._idle.set()

  async def drain(self) -> None:
    """Admits no more, and waits until none is open."""
    self.ended = True
    await self._idle.wait()


class Connection:
  """One Generate call: a client's open requests, and its unread answers."""

  def __init__(
    self,
    driver: GenerationDriver,
    admission: Admission,
    max_unsent_bytes: int,
  ):
    """Belongs to the running asyncio loop."""
    self._driver = driver
    self._admission = admission
    self._max_unsent_bytes = max_unsent_bytes
    self._loop = asyncio.get_running_loop()
    self._open: dict[int, OpenRequest] = {}
    self._answers: list[tuple[int, Chunk | wire.Failure]] = []
    self._unsent_bytes = 0
    self._changed = asyncio.Event()
    self._all_read = self._closing = False
    self._end: asyncio.Future[wire.Failure | None] = self._loop.create_future()

  async def run(
    self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
  ) -> wire.Failure | None:
    """Serves until the client or the server ends the call.

    Returns:
      What is wrong with the client, if that is the reason.
    """
    tasks = [
      asyncio.create_task(self._read(messages)),
      asyncio.create_task(self._write(context)),
    ]
    for task in tasks:
      task.add_done_callback(self._hand_on)
    try:
      return await self._end
    finally:
      for task in tasks:
        task.cancel()

  def hang_up(self) -> None:
    """Ends the call when the answers so far are sent."""
    self._closing = True
    self._changed.set()

  def withdraw_all(self) -> None:
    """Withdraws what is open, and forgets the answers to it."""
    for opened in self._open.values():
      self._driver.cancel(opened)
    self._admission.release(len(self._open))
    self._open.clear()
    self._answers.clear()

  def _hand_on(self, task: asyncio.Task) -> None:
    """A reader or writer that broke ends the call."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not self._end.done():
      self._end.set_exception(error)

  def _finish(self, failure: wire.Failure | None) -> None:
    if not self._end.done():
      self._end.set_result(failure)

  async def _read(self, messages: AsyncIterator[bytes]) -> None:
    try:
      async for data in messages:
        openings, withdrawn = wire.unpack_requests(data)
        for opening in openings:
          self._admit(opening)
        for request_id in withdrawn:
          self._withdraw(request_id)
    except wire.WireError as error:
      self._finish(wire.Failure(code="INVALID_ARGUMENT", message=str(error)))
    self._all_read = True
    self._changed.set()

  def _admit(self, opening: wire.Opening) -> None:
    """Opens a request, or answers why not."""
    if opening.id in self._open:
      raise wire.WireError(f"request {opening.id} is open already")
    client = Client(
      loop=self._loop,
      receive=functools.partial(self._receive, opening.id),
      streams=opening.streams,
    )
    try:
      self._admission.admit()
    except Refused as refused:
      self._answer(opening.id, refused.failure)
      return
    try:
      request = opening.request()
      self._open[opening.id] = self._driver.open(request, client)
    except (ValueError, RuntimeError) as error:
      self._admission.release()
      self._answer(opening.id, failure_of(error))

  def _withdraw(self, request_id: int) -> None:
    opened = self._open.pop(request_id, None)
    if opened is not None:
      self._driver.cancel(opened)
      self._admission.release()

  def _receive(
    self, request_id: int, outcome: Completion | Chunk | Exception
  ) -> None:
    """Takes what the driver has for a request; many in a row a dispatch."""
    if request_id not in self._open:
      return  # It was withdrawn while this was on the way.
    if isinstance(outcome, Chunk):
      answers, ended = (outcome,), outcome.stop_reason is not None
    elif isinstance(outcome, Completion):
      answers, ended = wire.split(outcome), True
    else:
      answers, ended = (failure_of(outcome),), True
    if ended:
      del self._open[request_id]
      self._admission.release()
    for answer in answers:
      self._answer(request_id, answer)

  def _answer(self, request_id: int, answer: Chunk | wire.Failure) -> None:
    if self._end.done():
      return
    self._answers.append((request_id, answer))
    self._unsent_bytes += _size(answer)
    if self._unsent_bytes > self._max_unsent_bytes:
      self._finish(
        wire.Failure(
          code="RESOURCE_EXHAUSTED",
          message=f"{self._unsent_bytes} bytes of answers were not read; at "
          f"most {self._max_unsent_bytes} may wait (max_unsent_bytes)",
        )
      )
      self.withdraw_all()
    self._changed.set()

  async def _write(self, context: grpc.aio.ServicerContext) -> None:
    """Sends what there is, while there may be more."""
    while True:
      await self._changed.wait()
      self._changed.clear()
      while self._answers:
        await context.write(wire.pack_answers(self._take()))
      served = self._all_read and not self._open
      if served or self._closing:
        self._finish(None)
        return

  def _take(self) -> list[tuple[int, Chunk | wire.Failure]]:
    """The oldest answers, about a message full."""
    taken = total = 0
    for _, answer in self._answers:
      if taken and total + _size(answer) > wire.MAX_MESSAGE_BYTES:
        break
      taken, total = taken + 1, total + _size(answer)
    message, self._answers = self._answers[:taken], self._answers[taken:]
    self._unsent_bytes -= total
    return message


def _size(answer: Chunk | wire.Failure) -> int:
  if isinstance(answer, Chunk):
    return wire.size(answer)
  return 32 + len(answer.message)


def failure_of(error: Exception) -> wire.Failure:
  """What a client is told of an error, with its cause."""
  cause = f": {error.__cause__!r}" if error.__cause__ else ""
  code = "INVALID_ARGUMENT" if isinstance(error, ValueError) else "UNAVAILABLE"
  return wire.Failure(code=code, message=f"{error}{cause}")
