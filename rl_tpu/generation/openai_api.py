"""The OpenAI API over HTTP: completions and chat, whole or streamed.

    GET  /health                 200 while the generator lives, else 503
    GET  /metrics                figures for Prometheus, where there are any
    GET  /v1/models              the one model
    POST /v1/completions         prompt: text, token ids, or a list of either
    POST /v1/chat/completions    messages

Any OpenAI client can speak to the policy, with `base_url` set to this server's
/v1; `openai_fields` says what it may ask for. Logprobs are those of the
distribution really sampled from, as in training. A choice's identity is (seed,
place of its prompt, place in `n`): the same seed gives the same answers under
the same weights; without one every request gets a seed of its own.

A client that hangs up frees the slots of its request, if the server tells
handlers of it: `start` does.
"""

import asyncio
import collections
import contextlib
import functools
import hmac
import json
import ssl
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, NamedTuple

import prometheus_client
from aiohttp import web

from rl_tpu.generation import text
from rl_tpu.generation.openai_choices import (
  ChatFormat,
  CompletionFormat,
  Format,
)
from rl_tpu.generation.openai_fields import (
  ApiError,
  Ask,
  Config,
  Fields,
  Reader,
)
from rl_tpu.generation.text import TextChunk
from rl_tpu.generation.wire import OverloadedError
from rl_tpu.models.tokenizer import Tokenizer

__all__ = ["Config", "make_app", "start"]


def make_app(
  generator: text.Streams,
  tokenizer: Tokenizer,
  *,
  model_name: str,
  config: Config,
  exposition: Callable[[], bytes] | None = None,
) -> web.Application:
  """Serves a generator; to be run with `start`, or handler_cancellation.

  Args:
    generator: the driver, or whatever streams as it does. If it says that it
      is `live` or not, /health repeats it.
    tokenizer: the model's; any of its `eos_ids` ends an answer.
    model_name: what clients must ask for.
    config: limits.
    exposition: gives the text of /metrics, which needs no API key, as /health;
      None: there is none.
  """
  api = _Api(generator, tokenizer, model_name, config)
  app = web.Application(
    client_max_size=config.max_body_bytes, middlewares=[api.guard]
  )
  app.add_routes(
    [
      web.get("/health", api.health),
      web.get("/v1/models", api.models),
      web.post("/v1/completions", api.completions),
      web.post("/v1/chat/completions", api.chat_completions),
    ]
  )
  if exposition is not None:
    app.router.add_get("/metrics", functools.partial(_expose, exposition))
  return app


async def _expose(
  exposition: Callable[[], bytes], request: web.Request
) -> web.Response:
  """Answers a scrape."""
  body = await asyncio.to_thread(exposition)
  headers = {"Content-Type": prometheus_client.CONTENT_TYPE_LATEST}
  return web.Response(body=body, headers=headers)


async def start(
  app: web.Application,
  host: str,
  port: int,
  *,
  ssl_context: ssl.SSLContext | None = None,
  shutdown_timeout: float = 60.0,
) -> web.AppRunner:
  """Listens; `runner.addresses` has the port chosen for 0.

  Handlers are cancelled when their client hangs up. `await runner.cleanup()`
  ends the server: open requests have `shutdown_timeout` seconds.
  """
  runner = web.AppRunner(
    app, handler_cancellation=True, shutdown_timeout=shutdown_timeout
  )
  await runner.setup()
  await web.TCPSite(runner, host, port, ssl_context=ssl_context).start()
  return runner


class _Piece(NamedTuple):
  """What one dispatch added to one choice."""

  choice: int
  added: TextChunk


class _Api:
  """The handlers of one application, and how much they have open."""

  def __init__(
    self,
    generator: text.Streams,
    tokenizer: Tokenizer,
    model_name: str,
    config: Config,
  ):
    self._generator = generator
    self._tokenizer = tokenizer
    self._model_name = model_name
    self._config = config
    self._reader = Reader(tokenizer, model_name, config)
    self._completion = CompletionFormat(tokenizer)
    self._chat = ChatFormat(tokenizer)
    self._created = int(time.time())
    self._open = 0

  @web.middleware
  async def guard(self, request: web.Request, handler) -> web.StreamResponse:
    """Asks for the bearer token; answers errors as the API's clients expect."""
    try:
      if request.path.startswith("/v1/"):
        self._check_token(request)
      return await handler(request)
    except ApiError as error:
      return _error_response(error)
    except web.HTTPError as error:
      message = f"{request.method} {request.path}: {error.reason}"
      if isinstance(error, web.HTTPRequestEntityTooLarge):
        most = self._config.max_body_bytes
        message = f"the body is too large; it must have at most {most} bytes"
      return _error_response(ApiError(message, status=error.status))

  async def health(self, request: web.Request) -> web.Response:
    """Whether the generator lives."""
    live = getattr(self._generator, "live", True)
    status = "ok" if live else "the generator is not alive"
    return web.json_response({"status": status}, status=200 if live else 503)

  async def models(self, request: web.Request) -> web.Response:
    """Lists the one model."""
    model = {
      "id": self._model_name,
      "object": "model",
      "created": self._created,
      "owned_by": "rl_tpu",
    }
    return web.json_response({"object": "list", "data": [model]})

  async def completions(self, request: web.Request) -> web.StreamResponse:
    """Continues prompts."""
    return await self._answer(
      request, self._reader.completion, self._completion
    )

  async def chat_completions(self, request: web.Request) -> web.StreamResponse:
    """Answers messages."""
    return await self._answer(request, self._reader.chat, self._chat)

  async def _answer(
    self,
    request: web.Request,
    understand: Callable[[Fields], Ask],
    how: Format,
  ) -> web.StreamResponse:
    ask = understand(Fields(await request.read()))
    with self._admitted(len(ask.requests)):
      async with contextlib.aclosing(self._pieces(ask)) as pieces:
        if ask.stream:
          return await self._stream(request, ask, how, pieces)
        return await self._whole(ask, how, pieces)

  @contextlib.contextmanager
  def _admitted(self, count: int) -> Iterator[None]:
    """Counts sequences as open, if there may be as many."""
    most = self._config.max_open_requests
    if self._open + count > most:
      raise _overloaded(
        f"{self._open} sequences are open; with {count} more there would be "
        f"over {most}; try again later"
      )
    self._open += count
    try:
      yield
    finally:
      self._open -= count

  async def _pieces(self, ask: Ask) -> AsyncGenerator[_Piece]:
    """What is sampled for any of the choices; closing it frees their slots."""
    arrived: asyncio.Queue[_Piece | asyncio.Task[None]] = asyncio.Queue()

    async def sample(index: int) -> None:
      pieces = text.stream_text(
        self._generator, ask.requests[index], self._tokenizer, ask.stop
      )
      async with contextlib.aclosing(pieces):
        async for piece in pieces:
          arrived.put_nowait(_Piece(index, piece))

    tasks = [asyncio.create_task(sample(i)) for i in range(len(ask.requests))]
    for task in tasks:
      task.add_done_callback(arrived.put_nowait)
    try:
      running = len(tasks)
      while running:
        piece = await arrived.get()
        if isinstance(piece, _Piece):
          yield piece
        else:
          running -= 1
          _raise_failure(piece)
    finally:
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)

  async def _whole(
    self, ask: Ask, how: Format, pieces: AsyncGenerator[_Piece]
  ) -> web.Response:
    """Answers with all choices at once."""
    chunks: dict[int, list[TextChunk]] = collections.defaultdict(list)
    async for index, added in pieces:
      chunks[index].append(added)
    choices, sampled = [], 0
    for index in range(len(ask.requests)):
      done = text.join(chunks[index])
      sampled += len(done.completion.tokens)
      choice = how.choice(ask, index, done, done.completion)
      choices.append({**choice, **how.message(done)})
    body = self._body(how.kind, how.prefix, choices)
    return web.json_response({**body, "usage": _usage(ask, sampled)})

  async def _stream(
    self,
    request: web.Request,
    ask: Ask,
    how: Format,
    pieces: AsyncGenerator[_Piece],
  ) -> web.StreamResponse:
    """Answers with server-sent events, one or none for each dispatch."""
    response = web.StreamResponse(
      headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    body = self._body(how.streamed_kind, how.prefix, [])
    if ask.include_usage:
      body["usage"] = None
    begun: set[int] = set()
    sampled = 0
    try:
      async for index, added in pieces:
        if not response.prepared:  # Until now an error had its own status.
          await response.prepare(request)
        sampled += len(added.chunk.tokens)
        if _says_something(ask, added):
          choice = how.choice(ask, index, added, added.chunk)
          choice |= how.delta(added, first=index not in begun)
          if index in begun:
            choice.pop("prompt_token_ids", None)
          begun.add(index)
          await _send(response, {**body, "choices": [choice]})
    except ApiError as error:
      if not response.prepared:
        raise
      await _send(response, error.body())
      return response
    if ask.include_usage:
      await _send(response, {**body, "usage": _usage(ask, sampled)})
    await response.write(b"data: [DONE]\n\n")
    return response

  def _body(self, kind: str, prefix: str, choices: list) -> dict[str, Any]:
    return {
      "id": f"{prefix}-{uuid.uuid4().hex}",
      "object": kind,
      "created": int(time.time()),
      "model": self._model_name,
      "choices": choices,
    }

  def _check_token(self, request: web.Request) -> None:
    token = self._config.bearer_token
    if token is None:
      return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    right = hmac.compare_digest(
      given.encode("utf-8", "surrogateescape"), token.encode()
    )
    if scheme.lower() != "bearer" or not right:
      raise ApiError(
        "the API key is missing or wrong; send the header Authorization: "
        "Bearer <key>",
        code="invalid_api_key",
        status=401,
      )


def _says_something(ask: Ask, added: TextChunk) -> bool:
  """Whether a piece has anything that the client wants to know."""
  told = ask.return_token_ids or ask.return_token_experts
  told = told or ask.top is not None
  return bool(added.text) or added.chunk.stop_reason is not None or told


def _usage(ask: Ask, sampled: int) -> dict[str, int]:
  return {
    "prompt_tokens": ask.prompt_tokens,
    "completion_tokens": sampled,
    "total_tokens": ask.prompt_tokens + sampled,
  }


def _overloaded(message: str) -> ApiError:
  """What clients understand as a wish to come back later."""
  return ApiError(
    message, code="rate_limit_exceeded", status=429, kind="rate_limit_error"
  )


def _raise_failure(task: asyncio.Task[None]) -> None:
  """Raises what ended a choice too early."""
  try:
    task.result()
  except ValueError as error:
    raise ApiError(str(error)) from error
  except OverloadedError as error:
    raise _overloaded(str(error)) from error
  except (RuntimeError, OSError) as error:
    raise ApiError(
      str(error) or "the generator failed", status=503, kind="server_error"
    ) from error


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
  await response.write(f"data: {json.dumps(event)}\n\n".encode())


def _error_response(error: ApiError) -> web.Response:
  headers = {"Retry-After": "1"} if error.status == 429 else None
  return web.json_response(error.body(), status=error.status, headers=headers)
