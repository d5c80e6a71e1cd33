"""The generator as a network service: gRPC, and JetStream's own beside it.

One `Generate` call carries all requests of a client, both ways, in the
messages of `wire`: at most one a dispatch and connection, however many of its
requests a dispatch concerns. (A call a request costs eight times as much
processor time.) The server adds no queue of requests to the driver's:

- a request beyond `max_requests` is refused, the connection goes on;
- answers that a client does not read wait here, up to `max_unsent_bytes`; then
  its requests are withdrawn and its call ends with RESOURCE_EXHAUSTED;
- a client that is gone frees its slots at the next dispatch.

`UpdateWeights` (from storage), `PullWeights` (from the trainer's devices, see
`transfer`), `Pause` and `Resume` change what others get: they need the
admin token if there is one, and beyond this machine there must be one, or
client certificates; so does `Probe`, which tries the way back to a trainer.
`Status`, `Identity`, gRPC's own health protocol and JetStream's `Decode` and
`HealthCheck` are for everyone who reaches the port.
"""

import asyncio
import dataclasses
import ipaddress
import math
import os
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Literal

import grpc
import grpc.aio

from rl_tpu import messages
from rl_tpu.generation import policies, probing, wire
from rl_tpu.generation.connection import (
  Admission,
  Connection,
  Refused,
  failure_of,
)
from rl_tpu.generation.driver import GenerationDriver
from rl_tpu.generation.jetstream import jetstream_pb2_grpc, orchestrator
from rl_tpu.generation.pulling import Intake

SERVICE = "rl_tpu.Generation"
HEALTH = "grpc.health.v1.Health"
TOKEN_VARIABLE = "RL_TPU_ADMIN_TOKEN"
KEY_VARIABLE = "RL_TPU_API_KEY"
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""gRPC's HealthCheckResponse: field 1, a status."""

BOTH_ENDS = (
  ("grpc.max_send_message_length", -1),
  ("grpc.keepalive_time_ms", 20_000),
  ("grpc.keepalive_timeout_ms", 10_000),
)
"""Options of the channel that server and clients share."""

OPTIONS = (
  *BOTH_ENDS,
  ("grpc.so_reuseport", 0),  # A taken port is an error, not a share.
  # Clients ping every 20 s; gRPC allows it every 5 minutes by default.
  ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)
"""Of the channel; gRPC passes over a name that it does not know."""

_SHORTEST_SECRET = 16
_LAST_WORDS_SECONDS = 5.0
"""For clients to read what is left when the server ends."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Where a generator is served, to whom, and how much at once."""

  host: str = "127.0.0.1"
  """Address to listen on. One that other machines reach needs an admin token
  or the three tls files; without the latter whoever reaches gRPC's port can
  generate, and everything, the token too, travels in clear."""
  port: int = 8470
  """Of gRPC, in [0, 65535]; 0 takes a free one, which the log names."""
  http_port: int | None = None
  """Of the OpenAI-compatible HTTP interface at the same host, in [0, 65535],
  with the same certificates and a limit of its own of max_requests; None:
  there is none."""
  token_file: str | None = None
  """File with the admin token, at least 16 characters; None: the environment
  variable RL_TPU_ADMIN_TOKEN, if it is set."""
  api_key_file: str | None = None
  """File with the key that HTTP clients must send, at least 16 characters;
  None: the environment variable RL_TPU_API_KEY, if it is set. Without either it
  is the admin token where other machines reach the address, else none."""
  tls_certificate: str | None = None
  """PEM file with the server's certificate; all three tls files or none."""
  tls_key: str | None = None
  """PEM file with its key."""
  tls_client_ca: str | None = None
  """PEM file with the authority that clients' certificates must be from."""
  max_requests: int = 4096
  """gRPC requests open at once, running or waiting, >= 1; more are refused.
  An actor opens max_running_groups * group_size."""
  max_message_bytes: int = wire.MAX_MESSAGE_BYTES
  """Largest message accepted, >= 1024; a larger one ends its call."""
  max_unsent_bytes: int | None = None
  """Answers that may wait for one client to read them; None: twice what all
  slots can hold, in chunks of one token."""
  weights: Literal["newest", "awaited"] = "newest"
  """What it serves first: `newest`, the run's newest checkpoint or else what
  training would start from; `awaited`, nothing until a trainer brings its
  weights, which is for the generators of a run (`config.remote`)."""
  grace_seconds: float = 30.0
  """For requests to end after SIGTERM, >= 0; the rest then fail."""

  def __post_init__(self):
    for name, good, allowed in (
      ("port", 0 <= self.port < 2**16, "in [0, 65535]"),
      ("http_port", 0 <= (self.http_port or 0) < 2**16, "in [0, 65535]"),
      (
        "weights",
        self.weights in ("newest", "awaited"),
        "'newest' or 'awaited'",
      ),
      ("max_requests", self.max_requests >= 1, ">= 1"),
      ("max_message_bytes", self.max_message_bytes >= 1024, ">= 1024"),
      ("grace_seconds", self.grace_seconds >= 0, ">= 0"),
    ):
      if not good:
        raise ValueError(
          f"{name} is {getattr(self, name)!r}; it must be {allowed}"
        )
    if len({file is None for file in self.tls_files}) == 2:
      raise ValueError(
        f"tls_certificate, tls_key and tls_client_ca are {self.tls_files}; "
        "they must be all set or all left out"
      )

  @property
  def tls_files(self) -> tuple[str | None, str | None, str | None]:
    """Certificate, key and the clients' authority."""
    return self.tls_certificate, self.tls_key, self.tls_client_ca

  @property
  def local(self) -> bool:
    """Whether only this machine reaches the address."""
    try:
      return ipaddress.ip_address(self.host).is_loopback
    except ValueError:
      return self.host == "localhost"


def admin_token(
  config: Config, environment: Mapping[str, str] = os.environ
) -> str | None:
  """The token that admin calls must carry; None where none is needed.

  Raises:
    ValueError: it is too short or not plain text; or other machines reach the
      address, and there is neither a token nor client certificates.
  """
  token = secret("token_file", config.token_file, TOKEN_VARIABLE, environment)
  if token is None and not (config.local or config.tls_client_ca):
    raise ValueError(
      f"host is {config.host!r}, which other machines reach; set token_file or "
      f"{TOKEN_VARIABLE}, or the three tls files, or keep to 127.0.0.1"
    )
  return token


def api_key(
  config: Config,
  token: str | None,
  environment: Mapping[str, str] = os.environ,
) -> str | None:
  """The bearer token that HTTP clients must send; None where none is needed.

  Args:
    config: where it may be, and who reaches the address.
    token: that of admin calls, from `admin_token`.
    environment: where else it may be.

  Raises:
    ValueError: it is too short or not plain text.
  """
  key = secret("api_key_file", config.api_key_file, KEY_VARIABLE, environment)
  if key is None and not config.local:
    return token
  return key


def secret(
  field: str,
  file: str | None,
  variable: str,
  environment: Mapping[str, str] = os.environ,
) -> str | None:
  """What the file that a config's field names holds, or else a variable.

  Raises:
    ValueError: it cannot be read, is too short or not plain text.
  """
  found, source = environment.get(variable), variable
  if file is not None:
    source = f"{field} {file}"
    try:
      found = pathlib.Path(file).read_text().strip()
    except OSError as error:
      raise ValueError(f"{source} cannot be read: {error}") from error
  if found is None:
    return None
  if len(found) < _SHORTEST_SECRET or not (
    found.isascii() and found.isprintable()
  ):
    raise ValueError(
      f"{source} must hold at least {_SHORTEST_SECRET} printable ASCII "
      "characters"
    )
  return found


class GenerationServer:
  """Serves one driver, in one asyncio loop.

  The driver's life is its owner's: it may be started before or after.
  """

  def __init__(
    self,
    driver: GenerationDriver,
    config: Config,
    token: str | None,
    identity: Mapping[str, Any] | None = None,
  ):
    """Registers the services; nothing listens yet.

    Args:
      driver: what generates.
      config: where to listen, and the limits.
      token: of admin calls, from `admin_token`.
      identity: what this process says of itself; see `rl_tpu.identity`.
    """
    self.driver = driver
    self._described = dict(identity or {})
    self.config = config
    self.port = config.port
    self.admission = Admission(config.max_requests)
    self._token = token
    self._paused = False
    self._began = time.monotonic()
    self._loading = asyncio.Lock()
    self._intake = Intake(driver, token)
    self._connections: set[Connection] = set()
    most = ("grpc.max_receive_message_length", config.max_message_bytes)
    self._server = grpc.aio.server(options=[*OPTIONS, most])
    unary = grpc.unary_unary_rpc_method_handler
    ours = {
      "Generate": grpc.stream_stream_rpc_method_handler(self._generate),
      "UpdateWeights": unary(self._admin(self._update_weights)),
      "PullWeights": unary(self._admin(self._pull_weights)),
      "Pause": unary(self._admin(self._pause)),
      "Resume": unary(self._admin(self._resume)),
      "Probe": unary(self._admin(self._probe)),
      "Status": unary(self._status),
      "Identity": unary(self._identity),
    }
    self._server.add_generic_rpc_handlers(
      (
        grpc.method_handlers_generic_handler(SERVICE, ours),
        grpc.method_handlers_generic_handler(
          HEALTH, {"Check": unary(self._health)}
        ),
      )
    )
    jetstream_pb2_grpc.add_OrchestratorServicer_to_server(
      _Orchestrator(self), self._server
    )

  async def start(self) -> None:
    """Listens; `port` is then the one that was taken.

    Raises:
      RuntimeError: the address cannot be bound.
    """
    host = self.config.host
    address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
    if self.config.tls_client_ca is None:
      self.port = self._server.add_insecure_port(address)
    else:
      certificate, key, authority = (
        pathlib.Path(file).read_bytes()
        for file in self.config.tls_files
        if file is not None
      )
      credentials = grpc.ssl_server_credentials(
        [(key, certificate)], authority, require_client_auth=True
      )
      self.port = self._server.add_secure_port(address, credentials)
    await self._server.start()

  async def drain(self) -> None:
    """Refuses new requests and waits for the open ones to end."""
    await self.admission.drain()

  async def stop(self) -> None:
    """Ends every call once its answers so far are read, and stops listening.

    Requests that are open are withdrawn.
    """
    self.admission.ended = True
    for connection in self._connections:
      connection.hang_up()
    await self._server.stop(_LAST_WORDS_SECONDS)

  def pulled(self) -> dict[str, float]:
    """Pulls from a trainer, their bytes and seconds, since the start."""
    return self._intake.counters()

  @property
  def max_unsent_bytes(self) -> int:
    """The limit in force."""
    if self.config.max_unsent_bytes is not None:
      return self.config.max_unsent_bytes
    engine = self.driver.engine.config
    # Streams may come a token at a time.
    token = wire.CHUNK_BYTES + 8 * (1 + engine.behavior_top_k)
    token += 2 * math.prod(self.driver.engine.routed)
    return 2 * engine.slots * engine.context_length * token

  # Calls.

  async def _generate(
    self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
  ) -> None:
    connection = Connection(self.driver, self.admission, self.max_unsent_bytes)
    self._connections.add(connection)
    try:
      # Headers that leave with the first message would be sent twice if the
      # call ended with a status meanwhile; then neither arrives.
      await context.send_initial_metadata(())
      failure = await connection.run(messages, context)
      if failure is not None:
        await _abort(context, failure)
    finally:
      self._connections.remove(connection)
      connection.withdraw_all()

  def _admin(self, call: Callable[[bytes], Awaitable[bytes]]):
    """A call that needs the token, if there is one."""

    async def checked(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
      try:
        self._check_token(context)
        return await call(data)
      except wire.WireError as error:
        refused = Refused("INVALID_ARGUMENT", str(error))
      except Refused as error:
        refused = error
      return await _abort(context, refused.failure)

    return checked

  def _check_token(self, context: grpc.aio.ServicerContext) -> None:
    metadata = context.invocation_metadata() or ()
    if not messages.authorized(metadata, self._token):
      raise Refused(
        "UNAUTHENTICATED",
        "admin calls need the metadata 'authorization: Bearer TOKEN'",
      )

  async def _update_weights(self, data: bytes) -> bytes:
    """Weights are loaded and checked before the driver hears of them."""
    fields = wire.unpack_map(data, path=str, version=int, life=str)
    wire.check_integers("version", [fields["version"]], 0, 2**31)
    async with self._loading:
      try:
        weights = await asyncio.to_thread(
          policies.load, self.driver.engine, fields["path"], fields["version"]
        )
        self.driver.update(weights, fields["life"])
      except (OSError, ValueError) as error:
        raise Refused("INVALID_ARGUMENT", str(error)) from error
      except RuntimeError as error:
        raise Refused("INTERNAL", str(error)) from error
    return wire.pack_map()

  async def _pull_weights(self, data: bytes) -> bytes:
    kinds = {"version": int, "addresses": list, "life": str}
    fields = wire.unpack_map(data, **kinds, timeout_seconds=float)
    wire.check_integers("version", [fields["version"]], 0, 2**31)
    addresses = fields["addresses"]
    if not addresses or any(type(one) is not str for one in addresses):
      raise wire.WireError(
        f"addresses is {addresses!r} in a message; it must hold host:port"
      )
    async with self._loading:
      return wire.pack_map(
        **await self._intake.pull(
          addresses,
          fields["version"],
          fields["life"],
          fields["timeout_seconds"],
        )
      )

  async def _pause(self, data: bytes) -> bytes:
    wire.unpack_map(data)
    self._paused = True
    await asyncio.to_thread(self.driver.pause)
    return wire.pack_map()

  async def _resume(self, data: bytes) -> bytes:
    wire.unpack_map(data)
    self._paused = False
    self.driver.resume()
    return wire.pack_map()

  async def _status(
    self, data: bytes, context: grpc.aio.ServicerContext
  ) -> bytes:
    driver, engine = self.driver, self.driver.engine
    life, accepted = driver.accepted
    return wire.pack_map(
      version=driver.version,
      accepted_version=accepted,
      life=life,
      slots=engine.config.slots,
      free_slots=driver.free_slots,
      waiting=driver.waiting,
      open_requests=self.admission.open,
      max_requests=self.config.max_requests,
      max_prompt_length=engine.config.max_prompt_length,
      context_length=engine.config.context_length,
      behavior_top_k=engine.config.behavior_top_k,
      record_experts=engine.config.record_experts,
      healthy=self.healthy,
      paused=self._paused,
      draining=self.admission.ended,
      pulled=self.pulled(),
      uptime_seconds=time.monotonic() - self._began,
      counters=dataclasses.asdict(driver.counters()),
    )

  async def _identity(
    self, data: bytes, context: grpc.aio.ServicerContext
  ) -> bytes:
    """Who this is, on what, and what time it is here."""
    devices = self.driver.engine.mesh.devices
    return wire.pack_map(
      identity=self._described,
      device_kind=devices.flat[0].device_kind,
      devices=devices.size,
      unix_time=time.time(),
    )

  async def _probe(self, data: bytes) -> bytes:
    fields = wire.unpack_map(
      data, address=str, path=str, word=str, timeout_seconds=float
    )
    return wire.pack_map(
      address=await probing.reach(
        fields["address"], fields["word"], fields["timeout_seconds"]
      ),
      path=await asyncio.to_thread(
        probing.read, fields["path"], fields["word"]
      ),
    )

  async def _health(
    self, data: bytes, context: grpc.aio.ServicerContext
  ) -> bytes:
    return SERVING if self.healthy else NOT_SERVING

  @property
  def healthy(self) -> bool:
    """Whether a request would be served."""
    return self.driver.live and not self.admission.ended


async def _abort(context: grpc.aio.ServicerContext, failure: wire.Failure):
  """Ends a call with a status; raises what ends its handler."""
  await context.abort(grpc.StatusCode[failure.code], failure.message)


class _Orchestrator(orchestrator.LLMOrchestrator):
  """JetStream's own service, under the same limits."""

  def __init__(self, server: GenerationServer):
    super().__init__(server.driver)
    self._admission = server.admission

  def _release(self, _: Any) -> None:
    self._admission.release()

  async def Decode(self, request: Any, context: Any = None):
    """Streams the token ids of one prompt, given as token ids."""
    assert context is not None
    try:
      self._admission.admit()
    except Refused as refused:
      await _abort(context, refused.failure)
    context.add_done_callback(self._release)
    try:
      async for response in super().Decode(request, context):
        yield response
    except NotImplementedError as error:
      await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
    except (ValueError, RuntimeError) as error:
      await _abort(context, failure_of(error))
