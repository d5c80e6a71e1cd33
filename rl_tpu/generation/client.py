"""A generator somewhere else, with the driver's contract.

`generate` and `stream` take and give what `GenerationDriver`'s do, so an actor
cannot tell which it has. All requests of a client share one `Generate` call;
those of one turn of the asyncio loop share a message. Where the call breaks,
every open request fails with ConnectionError, and the next one makes a new
call. Nothing is sent twice: whoever retries knows that it is safe, since a
sample depends on weights and identity only.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from rl_tpu.generation import server, wire
from rl_tpu.generation.wire import OverloadedError
from rl_tpu.types import Chunk, Completion, Request

OPTIONS = (
  *server.BOTH_ENDS,
  ("grpc.max_receive_message_length", -1),
  # Else a new client waits out the backoff of an earlier one's connection.
  ("grpc.use_local_subchannel_pool", 1),
)
"""Of the channel; gRPC passes over a name that it does not know."""


_ERRORS: dict[str, type[Exception]] = {
  "INVALID_ARGUMENT": ValueError,
  "RESOURCE_EXHAUSTED": OverloadedError,
  "UNAUTHENTICATED": PermissionError,
  "DEADLINE_EXCEEDED": TimeoutError,
}
"""What a status becomes; the others are RuntimeError."""

_ANSWER_SECONDS = 10.0
"""For a server to say that a pull took too long."""

_Receive = Callable[[Chunk | Exception], None]


class GenerationClient:
  """Speaks to one server, from one asyncio loop: that of its first call."""

  def __init__(
    self,
    address: str,
    *,
    token: str | None = None,
    credentials: grpc.ChannelCredentials | None = None,
    max_message_bytes: int = wire.MAX_MESSAGE_BYTES,
  ):
    """Connects at the first call.

    Args:
      address: host:port.
      token: for admin calls.
      credentials: of grpc.ssl_channel_credentials, for a server with TLS.
      max_message_bytes: the server's; what is larger is refused here.
    """
    self.address = address
    self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
    self._credentials = credentials
    self._max_message_bytes = max_message_bytes
    self._channel: grpc.aio.Channel | None = None
    self._session: _Session | None = None

  async def __aenter__(self) -> "GenerationClient":
    return self

  async def __aexit__(self, *_) -> None:
    await self.close()

  async def close(self) -> None:
    """Ends the connection; open requests fail with ConnectionError."""
    if self._session is not None:
      await self._session.close()
    if self._channel is not None:
      await self._channel.close()
    self._session = self._channel = None

  # Requests.

  async def generate(self, request: Request) -> Completion:
    """Completes a request; cancelling the caller withdraws it.

    Raises:
      ValueError: the request cannot be served; says why.
      OverloadedError: the server has too many requests.
      RuntimeError: the driver failed or was stopped, or is about to be.
      ConnectionError: the connection broke, or there is none.
    """
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    chunks: list[Chunk] = []

    def receive(outcome: Chunk | Exception) -> None:
      if isinstance(outcome, Chunk):
        chunks.append(outcome)
      if done.done():
        return
      if isinstance(outcome, Exception):
        done.set_exception(outcome)
      elif outcome.stop_reason is not None:
        done.set_result(None)

    session, opened = self._open(request, receive, streams=False)
    try:
      await done
    finally:
      session.withdraw(opened)
    return wire.join(chunks)

  async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
    """Completes a request, handing over every dispatch's tokens.

    As `generate`; closing the generator withdraws the request. What is not
    taken waits here, up to the whole answer.
    """
    arrived: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
    session, opened = self._open(request, arrived.put_nowait, streams=True)
    try:
      ended = False
      while not ended:
        outcome = await arrived.get()
        if isinstance(outcome, Exception):
          raise outcome
        yield outcome
        ended = outcome.stop_reason is not None
    finally:
      session.withdraw(opened)

  def _open(
    self, request: Request, receive: _Receive, *, streams: bool
  ) -> tuple["_Session", int]:
    if self._session is None or self._session.broken:
      self._session = _Session(
        self.address, self._method("stream_stream", server.SERVICE, "Generate")
      )
    opened = self._session.reserve()
    packed = wire.pack_opening(opened, request, streams)
    if len(packed) > self._max_message_bytes - 64:
      raise ValueError(
        f"a request of {len(packed)} bytes ({len(request.tokens)} tokens) does "
        f"not fit a message of {self._max_message_bytes}"
      )
    self._session.open(opened, packed, receive)
    return self._session, opened

  # Admin.

  async def update(self, path: str, version: int, life: str = "") -> None:
    """Serves the weights in a directory that the server can read.

    They come into service at the next dispatch; what was served before stays
    in service if anything is wrong with them. Versions rise within a life (see
    `GenerationDriver.update`).

    Raises:
      ValueError: there are none, they do not fit, or are not newer.
      PermissionError: the token is missing or wrong.
    """
    await self._call(
      "UpdateWeights", path=str(path), version=int(version), life=life
    )

  async def pull(
    self,
    version: int,
    addresses: Sequence[str],
    life: str = "",
    timeout_seconds: float = 300.0,
  ) -> dict[str, Any]:
    """Serves weights that the server pulls from a trainer's processes.

    As `update`. A server that this life gave the version or a newer one pulls
    nothing; one that comes too late for it takes the trainer's newest.

    Args:
      version: the least wanted.
      addresses: of all processes of the trainer, as `Publisher.address`.
      life: whose versions these are.
      timeout_seconds: for the pull.

    Returns:
      `version` that is served from now on, `bytes` and `seconds` of the pull.

    Raises:
      ValueError: the weights do not fit, are corrupted, or are not finite.
      TimeoutError: a trainer process, a tensor or the server did not come in
        time.
      PermissionError: the token is missing or wrong.
      RuntimeError: a trainer process is gone.
    """
    return await self._call(
      "PullWeights",
      timeout_seconds + _ANSWER_SECONDS,
      version=int(version),
      addresses=list(addresses),
      life=life,
      timeout_seconds=float(timeout_seconds),
    )

  async def pause(self) -> None:
    """Stops generating after the dispatch that is running."""
    await self._call("Pause")

  async def resume(self) -> None:
    """Goes on after `pause`."""
    await self._call("Resume")

  async def status(self) -> dict[str, Any]:
    """Version, slots, requests, limits, uptime and counters by name."""
    return await self._call("Status")

  async def identity(self) -> dict[str, Any]:
    """What the server is (see `rl_tpu.identity`), its devices, its clock."""
    return await self._call("Identity")

  async def probe(
    self, *, address: str, path: str, word: str, timeout_seconds: float
  ) -> dict[str, str]:
    """Whether the server reaches an address, and a file, that say a word.

    Returns:
      `address` and `path`: what is wrong with each, "" for nothing.
    """
    answer = await self._call(
      "Probe",
      timeout_seconds + _ANSWER_SECONDS,
      address=address,
      path=path,
      word=word,
      timeout_seconds=timeout_seconds,
    )
    return {name: str(answer[name]) for name in ("address", "path")}

  async def health(self) -> bool:
    """Whether the server would serve a request; False if it is not there."""
    check = self._method("unary_unary", server.HEALTH, "Check")
    try:
      return await check(b"") == server.SERVING
    except grpc.aio.AioRpcError as error:
      if error.code() is grpc.StatusCode.UNAVAILABLE:
        return False
      raise _translated(error, self.address) from error

  async def _call(
    self, name: str, timeout_seconds: float | None = None, /, **fields: Any
  ) -> dict[str, Any]:
    call = self._method("unary_unary", server.SERVICE, name)
    try:
      data = await call(
        wire.pack_map(**fields),
        metadata=self._metadata,
        timeout=timeout_seconds,
      )
    except grpc.aio.AioRpcError as error:
      raise _translated(error, self.address) from error
    answer = wire.unpack_map(data)
    del answer["v"]
    return answer

  def _method(self, kind: str, service: str, name: str):
    if self._channel is None:
      if self._credentials is None:
        self._channel = grpc.aio.insecure_channel(self.address, OPTIONS)
      else:
        self._channel = grpc.aio.secure_channel(
          self.address, self._credentials, OPTIONS
        )
    return getattr(self._channel, kind)(f"/{service}/{name}")


def _translated(error: grpc.aio.AioRpcError, address: str) -> Exception:
  """The Python exception of a status."""
  name, text = error.code().name, error.details() or ""
  if name in ("UNAVAILABLE", "CANCELLED"):
    return ConnectionError(f"{address}: {name}: {text}")
  return _ERRORS.get(name, RuntimeError)(f"{address}: {text}")


class _Session:
  """One Generate call and the requests on it."""

  def __init__(self, address: str, method: grpc.aio.StreamStreamMultiCallable):
    self._address = address
    self._call = method()
    self._ids = itertools.count()
    self._receivers: dict[int, _Receive] = {}
    self._openings: list[bytes] = []
    self._withdrawn: list[int] = []
    self._changed = asyncio.Event()
    self.broken = False
    self._reader = asyncio.create_task(self._read())
    self._writer = asyncio.create_task(self._write())

  def reserve(self) -> int:
    """An id that no other request of the call has."""
    return next(self._ids)

  def open(self, request_id: int, packed: bytes, receive: _Receive) -> None:
    """Sends a request; `receive` gets its chunks, or an exception."""
    self._receivers[request_id] = receive
    self._openings.append(packed)
    self._changed.set()

  def withdraw(self, request_id: int) -> None:
    """Cancels a request, unless it ended."""
    if self._receivers.pop(request_id, None) is not None:
      self._withdrawn.append(request_id)
      self._changed.set()

  async def close(self) -> None:
    """Ends the call."""
    self._call.cancel()
    await asyncio.wait([self._reader, self._writer])

  async def _read(self) -> None:
    """Hands answers out until the call ends, then says why it did."""
    reason: object = "the server ended the call"
    try:
      async for data in self._call:
        for request_id, answer in wire.unpack_answers(data):
          self._deliver(request_id, answer)
    except wire.WireError as error:
      reason = error
      self._call.cancel()
    except grpc.aio.AioRpcError as error:
      reason = f"{error.code().name}: {error.details()}"
    except asyncio.CancelledError:
      reason = "it was closed here"
    finally:
      self.broken = True
      self._writer.cancel()  # It may wait for a call that never began.
      for receive in self._receivers.values():
        receive(
          ConnectionError(f"the connection to {self._address} broke: {reason}")
        )
      self._receivers.clear()

  def _deliver(self, request_id: int, answer: Chunk | wire.Failure) -> None:
    receive = self._receivers.get(request_id)
    if receive is None:
      return  # Withdrawn while this was on the way.
    if isinstance(answer, wire.Failure):
      del self._receivers[request_id]
      error = _ERRORS.get(answer.code, RuntimeError)
      receive(error(answer.message))
      return
    if answer.stop_reason is not None:
      del self._receivers[request_id]
    receive(answer)

  async def _write(self) -> None:
    while True:
      await self._changed.wait()
      self._changed.clear()
      openings, self._openings = self._openings, []
      withdrawn, self._withdrawn = self._withdrawn, []
      try:
        for message in _messages(openings, withdrawn):
          await self._call.write(message)
      except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return  # The reader learns it too, and tells who waits.


def _messages(openings: list[bytes], withdrawn: list[int]) -> list[bytes]:
  """As few messages as their size allows; what is withdrawn was opened."""
  messages, batch, size = [], [], 0
  for opening in openings:
    if batch and size + len(opening) > wire.MAX_MESSAGE_BYTES // 2:
      messages.append(wire.pack_requests(batch))
      batch, size = [], 0
    batch.append(opening)
    size += len(opening)
  if batch:
    messages.append(wire.pack_requests(batch))
  if withdrawn:
    messages.append(wire.pack_requests(cancelled=withdrawn))
  return messages
