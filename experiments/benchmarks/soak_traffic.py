"""Every way through the network, for the errands of the soak.

Each request of an errand ends with one reason, and every way looks for a second
end of what ended already. What must not happen is an AssertionError.
"""

import asyncio
import collections
import contextlib
import dataclasses
import gc
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import grpc
import grpc.aio

from experiments.benchmarks.soak_plan import (
  CONTEXT,
  FULL,
  INVALID,
  LONG,
  MAY_END,
  Errand,
)
from experiments.benchmarks.soak_samples import Sample
from rl_tpu.generation import client as clients
from rl_tpu.generation import server, wire
from rl_tpu.generation.jetstream import jetstream_pb2, jetstream_pb2_grpc
from rl_tpu.types import Chunk, Completion, Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """How one request ended."""

  reason: str
  sample: Sample | None = None


Ask = Callable[..., Awaitable[dict[str, Any]]]


class Traffic:
  """Connections to one service, and the ways that lead through them."""

  def __init__(self, address: str, http: str, token: str, ask: Ask):
    """Connects when it is entered.

    Args:
      address: of gRPC.
      http: where the paths of OpenAI's begin.
      token: of admin calls.
      ask: lets the process itself answer a request.
    """
    self._address = address
    self._http_address = http
    self._ask = ask
    self.client = clients.GenerationClient(address, token=token)

  async def __aenter__(self) -> "Traffic":
    self._channel = grpc.aio.insecure_channel(self._address)
    self._session = aiohttp.ClientSession(
      self._http_address, connector=aiohttp.TCPConnector(limit=0)
    )
    return self

  async def __aexit__(self, *_: Any) -> None:
    await self._session.close()
    await self._channel.close()
    await self.client.close()
    gc.collect()  # Calls that were left halfway hold grpc's connections.

  async def run(self, errand: Errand) -> list[Outcome]:
    """How each request of the errand ended."""
    if errand.fate == "flood":
      part = dataclasses.replace(errand, fate="end", count=1)
      parts = [self._go(part, member) for member in range(errand.count)]
      outcomes = [one for some in await asyncio.gather(*parts) for one in some]
    else:
      outcomes = await self._go(errand)
    assert len(outcomes) == errand.count, (errand, outcomes)
    for outcome in outcomes:
      assert outcome.reason in MAY_END[errand.fate], (errand, outcome)
    return outcomes

  async def _go(self, errand: Errand, member: int = 0) -> list[Outcome]:
    try:
      if errand.way in ("generate", "stream"):
        return [await getattr(self, f"_{errand.way}")(errand, member)]
      if errand.way in ("http", "http_stream", "chat"):
        return await self._http(errand)
      return await getattr(self, f"_{errand.way}")(errand)
    except clients.OverloadedError:
      return [Outcome(reason=FULL)]
    except ValueError as error:
      return [Outcome(reason=_refused(str(error)))]

  # gRPC.

  @contextlib.asynccontextmanager
  async def _own_client(self, errand: Errand):
    """The shared client, or one that may break its connection."""
    if errand.fate != "vanish":
      yield self.client
      return
    async with clients.GenerationClient(self._address) as own:
      yield own

  async def _generate(self, errand: Errand, member: int) -> Outcome:
    async with self._own_client(errand) as client:
      request = errand.request(member)
      task = asyncio.ensure_future(client.generate(request))
      if errand.fate in ("cancel", "vanish"):
        await asyncio.wait([task], timeout=errand.after / 100)
        if not task.done():
          return await _leave(errand, client, task)
      return _completed(errand, request, await task)

  async def _stream(self, errand: Errand, member: int) -> Outcome:
    chunks: list[Chunk] = []
    async with self._own_client(errand) as client:
      request = errand.request(member)
      async with contextlib.aclosing(client.stream(request)) as arriving:
        async for chunk in arriving:
          chunks.append(chunk)
          if chunk.stop_reason is None and len(chunks) == errand.after:
            if errand.fate == "cancel":
              return Outcome(reason="cancelled")
            if errand.fate == "vanish":
              await client.close()
              return Outcome(reason="hung up")
    return _completed(errand, request, wire.join(chunks))

  async def _wire(self, errand: Errand) -> list[Outcome]:
    """Messages by hand: nothing that arrives is passed over."""
    call = self._channel.stream_stream(f"/{server.SERVICE}/Generate")()
    requests = [errand.request(member) for member in range(errand.count)]
    await call.write(
      wire.pack_requests(
        [wire.pack_opening(i, one, True) for i, one in enumerate(requests)]
      )
    )
    if errand.fate == "invalid":
      await call.write(b"\x00garbage")
    leaves = errand.fate in ("cancel", "vanish")
    if not leaves:
      await call.done_writing()
    reader = _WireReader(errand, requests)
    messages = 0
    try:
      async for data in call:
        reader.read(data)
        messages += 1
        over = len(reader.ended) == errand.count
        if leaves and (over or messages >= errand.after):
          leaves = False
          if errand.fate == "vanish" and not over:
            call.cancel()
            return reader.outcomes("hung up")
          if not over:
            reader.cancel(0)
            await call.write(wire.pack_requests(cancelled=[0]))
          await call.done_writing()
    except grpc.aio.AioRpcError as error:
      assert errand.fate == "invalid", error
      assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
      return reader.outcomes(INVALID)
    return reader.outcomes(None)

  async def _decode(self, errand: Errand) -> list[Outcome]:
    """JetStream's own service."""
    request, count = errand.request(), 0
    message = jetstream_pb2.DecodeRequest(
      token_content=jetstream_pb2.DecodeRequest.TokenContent(
        token_ids=request.tokens.tolist()
      ),
      max_tokens=errand.sampling.max_tokens,
    )
    call = jetstream_pb2_grpc.OrchestratorStub(self._channel).Decode(message)
    responses = 0
    try:
      async for response in call:
        count += len(response.stream_content.samples[0].token_ids)
        responses += 1
        leaves = errand.fate in ("cancel", "vanish")
        if leaves and responses == errand.after:
          call.cancel()
          gone = "cancelled" if errand.fate == "cancel" else "hung up"
          return [Outcome(reason=gone)]
    except grpc.aio.AioRpcError as error:
      if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return [Outcome(reason=FULL)]
      assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
      return [Outcome(reason=_refused(error.details() or ""))]
    room = CONTEXT - len(request.tokens)
    assert count == min(errand.sampling.max_tokens, room), (errand, count)
    return [Outcome(reason="length")]

  # HTTP.

  async def _http(self, errand: Errand) -> list[Outcome]:
    """Completions whole or streamed, or a streamed chat."""
    chat, streamed = errand.way == "chat", errand.way != "http"
    path = "/v1/chat/completions" if chat else "/v1/completions"
    told: dict[str, Any] = {"prompt": errand.prompt, "logprobs": 0}
    if chat:
      message = {"role": "user", "content": errand.prompt}
      told = {"messages": [message], "logprobs": True}
    body = {
      "model": "policy",
      "seed": errand.index,
      "n": errand.count,
      "max_tokens": errand.sampling.max_tokens,
      "temperature": errand.sampling.temperature,
      "stop": errand.stop,
      "stream": streamed,
      "return_token_ids": True,
      **told,
    }
    if errand.fate == "invalid":
      body |= [{"stop": [""]}, {"top_p": 0}, {"best_of": 2}, {"model": "x"}][
        errand.after % 4
      ]
    leaves = errand.fate in ("cancel", "vanish")
    reader = _ChoicesReader(errand)
    try:
      async with asyncio.timeout(errand.after / 100 if leaves else None):
        async with self._session.post(path, json=body) as response:
          if response.status != 200:
            refusal = await response.json()
            outcome = _http_refusal(errand, response.status, refusal)
            return [outcome] * errand.count
          if not streamed:
            reader.read(await response.json())
            return reader.outcomes(None)
          await reader.follow(response)
          return reader.outcomes(None)
    except TimeoutError:
      gone = "cancelled" if errand.fate == "cancel" else "hung up"
      return reader.outcomes(gone)

  # The driver itself.

  async def _local(self, errand: Errand) -> list[Outcome]:
    """Without a network between."""
    request = errand.request()
    leaves = errand.fate in ("cancel", "vanish")
    answer = await self._ask(
      do="ask",
      service=errand.service,
      index=errand.index,
      prompt=request.tokens.tolist(),
      sampling=dataclasses.asdict(errand.sampling),
      stop=errand.stop,
      hang_up_after=errand.after if leaves else -1,
    )
    if "refused" in answer:
      return [Outcome(reason=_refused(answer["refused"]))]
    if answer["reason"] == "cancelled":
      gone = "cancelled" if errand.fate == "cancel" else "hung up"
      return [Outcome(reason=gone)]
    sample = Sample(
      service=errand.service,
      prompt=request.tokens.tolist(),
      temperature=errand.sampling.temperature,
      stop=errand.stop,
      **{name: answer[name] for name in ("tokens", "logp", "versions", "text")},
    )
    return [Outcome(reason=answer["reason"], sample=sample)]


async def _leave(
  errand: Errand, client: clients.GenerationClient, task: asyncio.Task
) -> Outcome:
  """Cancels a call, or closes the connection below it."""
  if errand.fate == "cancel":
    task.cancel()
    await asyncio.wait([task])
    return Outcome(reason="cancelled")
  await client.close()
  await asyncio.wait([task])
  error = task.exception()
  assert error is None or isinstance(error, ConnectionError), error
  return Outcome(reason="hung up")


def _refused(message: str) -> str:
  """What a refusal was about, if it says so."""
  if "tokens" in message and ("bucket" in message or "context" in message):
    return LONG
  assert "must" in message, message
  return INVALID


def _http_refusal(errand: Errand, status: int, body: Any) -> Outcome:
  """What an error of the API means."""
  error = body["error"]
  assert error["message"] and error["type"], error
  if status == 429:
    return Outcome(reason=FULL)
  if error["code"] == "context_length_exceeded":
    return Outcome(reason=LONG)
  assert status in (400, 404), (errand, status, error)
  return Outcome(reason=INVALID)


def _completed(errand: Errand, request: Request, done: Completion) -> Outcome:
  sample = Sample(
    service=errand.service,
    prompt=request.tokens.tolist(),
    tokens=done.tokens.tolist(),
    logp=done.logp.tolist(),
    versions=done.version.tolist(),
    temperature=errand.sampling.temperature,
  )
  return Outcome(reason=done.stop_reason, sample=sample)


class _WireReader:
  """Reads every answer on a call, and knows who ended."""

  def __init__(self, errand: Errand, requests: list[Request]):
    self.ended: dict[int, Outcome] = {}
    self._errand = errand
    self._requests = requests
    self._chunks: dict[int, list[Chunk]] = collections.defaultdict(list)
    self._cancelled: set[int] = set()

  def cancel(self, request_id: int) -> None:
    """Is withdrawn: answers that are on the way are good, and none."""
    if request_id not in self.ended:
      self._cancelled.add(request_id)

  def read(self, data: bytes) -> None:
    """One message."""
    for request_id, answer in wire.unpack_answers(data):
      assert request_id not in self.ended, f"{request_id} ended twice"
      if isinstance(answer, wire.Failure):
        full = answer.code == "RESOURCE_EXHAUSTED"
        reason = FULL if full else _refused(answer.message)
        self.ended[request_id] = Outcome(reason=reason)
        continue
      self._chunks[request_id].append(answer)
      if answer.stop_reason is not None:
        done = wire.join(self._chunks[request_id])
        self.ended[request_id] = _completed(
          self._errand, self._requests[request_id], done
        )

  def outcomes(self, otherwise: str | None) -> list[Outcome]:
    """Of all requests; those that did not end did `otherwise`."""
    found = []
    for request_id in range(len(self._requests)):
      reason = "cancelled" if request_id in self._cancelled else otherwise
      outcome = self.ended.get(request_id)
      if outcome is None:
        assert reason is not None, f"{request_id} of {self._errand} has no end"
        outcome = Outcome(reason=reason)
      found.append(outcome)
    return found


class _ChoicesReader:
  """Reads the choices of one HTTP answer."""

  def __init__(self, errand: Errand):
    self._errand = errand
    self._prompt: list[int] = []
    self._tokens: dict[int, list[int]] = collections.defaultdict(list)
    self._logp: dict[int, list[float]] = collections.defaultdict(list)
    self._versions: dict[int, list[int]] = collections.defaultdict(list)
    self._text: dict[int, str] = collections.defaultdict(str)
    self._reasons: dict[int, str] = {}

  async def follow(self, response: aiohttp.ClientResponse) -> None:
    """Reads server-sent events to the last."""
    done = False
    async for line in response.content:
      if not line.strip():
        continue
      assert not done, f"{line} comes after [DONE]"
      event = line.decode().removeprefix("data: ").strip()
      if event == "[DONE]":
        done = True
      else:
        self.read(json.loads(event))
    assert done, f"no [DONE] for {self._errand}"

  def read(self, body: dict[str, Any]) -> None:
    """The whole answer, or one event."""
    assert "error" not in body, (self._errand, body)
    for choice in body["choices"]:
      index, logprobs = choice["index"], choice["logprobs"]
      assert index not in self._reasons, f"choice {index} ended twice"
      self._prompt = choice.get("prompt_token_ids", self._prompt)
      self._tokens[index] += choice["token_ids"]
      self._versions[index] += choice["token_versions"]
      self._logp[index] += (
        [entry["logprob"] for entry in logprobs["content"]]
        if self._errand.way == "chat"
        else logprobs["token_logprobs"]
      )
      text = choice["delta"]["content"] if "delta" in choice else choice["text"]
      self._text[index] += text
      if choice["finish_reason"] is not None:
        self._reasons[index] = choice["finish_reason"]

  def outcomes(self, otherwise: str | None) -> list[Outcome]:
    """Of all choices; those that did not end did `otherwise`."""
    found = []
    for index in range(self._errand.count):
      reason = self._reasons.get(index)
      if reason is None:
        assert otherwise is not None, f"{index} of {self._errand} has no end"
        found.append(Outcome(reason=otherwise))
        continue
      sample = Sample(
        service=self._errand.service,
        prompt=self._prompt,
        tokens=self._tokens[index],
        logp=self._logp[index],
        versions=self._versions[index],
        temperature=self._errand.sampling.temperature,
        stop=self._errand.stop,
        text=self._text[index],
      )
      found.append(Outcome(reason=reason, sample=sample))
    return found
