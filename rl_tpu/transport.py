"""How versions travel from a trainer to generators with their own processes.

A transport is built in every process of the trainer, at the same moment, and
`publish` is called in every one, with the same version; it returns when a copy
is made, and what follows overlaps with training. Process 0, which knows the
generators, tells each with `offer` to take the newest version.

- `TransferTransport`: generators pull shards from the trainer's devices.
- `OrbaxTransport`: through storage that trainer and generators share. A
  version gets its name when all of it is written; the two newest stay, and
  what a generator is reading.

Generators that share the trainer's process need neither: see `weights`.

A process sends weights while its devices wait for other processes in a
collective. CPU devices wait in the same threads that send, as many as there are
cores: with no more cores than devices nothing is sent until the wait ends, so
give such a process more threads (PJRT_NPROC=8 in its environment).
"""

import asyncio
import collections
import contextlib
import dataclasses
import ipaddress
import os
import pathlib
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from rl_tpu.transfer.control import Moved
from rl_tpu.transfer.publisher import Publisher, owned_copy

_KEPT = 2
_POLL_SECONDS = 0.02
_LONGEST_ADDRESS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How weights reach generators that have processes of their own."""

  kind: Literal["transfer", "orbax"] = "transfer"
  """`transfer`: from the trainer's devices; `orbax`: through the directory of
  the run, which the generators must see under the same path."""
  host: str = "127.0.0.1"
  """Of `transfer`: the address of a trainer process as generators reach it;
  'auto': of the interface that this machine reaches others through, for a
  trainer on several machines. Other than 127.0.0.1 it needs the admin token,
  and a network to trust: weights and token travel in clear."""
  port: int = 0
  """Of `transfer`: of process 0, in [0, 65535]; each process of the trainer has
  the next one. 0 takes free ones. The weights have free ones in any case."""
  timeout_seconds: float = 300.0
  """For one generator to take a version, > 0; then the generator goes on with
  what it has."""
  dtype: Literal["float32", "bfloat16"] | None = None
  """Of floating-point weights as they travel; None leaves them as they are.
  'bfloat16' halves the bytes; generators see the weights rounded, which is part
  of their mismatch unless they compute in bfloat16 all the same."""

  def __post_init__(self):
    for name, good, allowed in (
      (
        "kind",
        self.kind in ("transfer", "orbax"),
        "'transfer' or 'orbax'",
      ),
      (
        "host",
        self.host not in ("", "0.0.0.0", "::"),
        "one address, or 'auto'",
      ),
      ("port", 0 <= self.port < 2**16, "in [0, 65535]"),
      ("timeout_seconds", self.timeout_seconds > 0, "> 0"),
      (
        "dtype",
        self.dtype in (None, "float32", "bfloat16"),
        "'float32', 'bfloat16' or None",
      ),
    ):
      if not good:
        raise ValueError(
          f"{name} is {getattr(self, name)!r}; it must be {allowed}"
        )


class Generator(Protocol):
  """What a transport says to a generator; `GenerationClient` is one."""

  address: str

  async def status(self) -> dict[str, Any]:
    """Its `life` and `accepted_version`, among others."""
    ...

  async def update(self, path: str, version: int, life: str) -> None:
    """Serves weights from storage."""
    ...

  async def pull(
    self,
    version: int,
    addresses: Sequence[str],
    life: str,
    timeout_seconds: float,
  ) -> dict[str, Any]:
    """Serves weights from the trainer's devices."""
    ...


class Transport(Protocol):
  """Brings versions to generators."""

  def publish(self, params: Any, version: int) -> Moved:
    """Copies weights, in every process; `params` may then be donated.

    Raises:
      ValueError: the version is not newer than the newest so far.
    """
    ...

  async def offer(self, client: Generator) -> None:
    """Has a generator serve the newest version; in process 0.

    Returns at once if it does. Concurrent calls are for different generators.

    Raises:
      TimeoutError: it took too long; names who or what did not come.
      ConnectionError: the generator is gone.
      ValueError: it refused the weights.
      RuntimeError: a trainer process is gone.
    """
    ...

  def metrics(self) -> dict[str, float]:
    """Bytes, seconds and bandwidth since the last call.

    `publish_*` of what this process published, `pull_*` of the pulls that
    ended, `pulls` of them; names without a value are left out.
    """
    ...

  def close(self) -> None:
    """Ends what runs in the background; raises what failed there."""
    ...


def make_transport(
  config: Config,
  directory: str | os.PathLike,
  token: str | None,
  life: str = "",
) -> Transport:
  """The transport of a config; in every process of the trainer at once.

  Args:
    config: which one.
    directory: where versions may be stored; what is in it is deleted.
    token: of the generators' admin calls; they show it to the trainer too.
    life: whose versions these are (see `GenerationDriver.update`).

  Raises:
    ValueError: other machines reach the trainer and there is no token.
    RuntimeError: the address cannot be bound.
  """
  if config.kind == "transfer":
    return TransferTransport(config, token, life)
  return OrbaxTransport(config, directory, life)


class _Figures:
  """What was published and pulled; of any thread."""

  def __init__(self):
    self.newest = -1
    self._lock = threading.Lock()
    self._published: list[Moved] = []
    self._pulled: list[Moved] = []

  def published(self, moved: Moved) -> Moved:
    with self._lock:
      self.newest = moved.version
      self._published.append(moved)
    return moved

  def pulled(self, moved: Moved) -> None:
    with self._lock:
      if moved.bytes:
        self._pulled.append(moved)

  def metrics(self) -> dict[str, float]:
    with self._lock:
      published, self._published = self._published, []
      pulled, self._pulled = self._pulled, []
    figures: dict[str, float] = {"pulls": len(pulled)}
    for name, moves in (("publish", published), ("pull", pulled)):
      if moves:
        size = sum(moved.bytes for moved in moves)
        seconds = sum(moved.seconds for moved in moves)
        figures[f"{name}_bytes"] = size
        figures[f"{name}_seconds"] = seconds
        figures[f"{name}_bytes_per_second"] = size / max(seconds, 1e-9)
    return figures


def _took(status: dict[str, Any], life: str, version: int) -> bool:
  """Whether a generator has this version of a life, or a newer one."""
  accepted = status["accepted_version"]
  return status["life"] == life and accepted is not None and accepted >= version


class TransferTransport:
  """Generators pull from the trainer's devices."""

  def __init__(self, config: Config, token: str | None, life: str = ""):
    """Listens, and learns the addresses of all processes.

    Raises:
      ValueError: other machines reach the address and there is no token.
      RuntimeError: the address cannot be bound.
    """
    host = listening_host(config, token)
    port = config.port + jax.process_index() if config.port else 0
    self._timeout_seconds = config.timeout_seconds
    self._life = life
    self._publisher = Publisher(
      host=host,
      port=port,
      token=token,
      dtype=config.dtype,
      lease_seconds=config.timeout_seconds,
    )
    self.addresses = _of_all_processes(self._publisher.address)
    self._figures = _Figures()

  def publish(self, params: Any, version: int) -> Moved:
    """See Transport."""
    return self._figures.published(self._publisher.publish(params, version))

  async def offer(self, client: Generator) -> None:
    """See Transport."""
    answer = await client.pull(
      self._figures.newest, self.addresses, self._life, self._timeout_seconds
    )
    self._figures.pulled(Moved(**answer))

  def metrics(self) -> dict[str, float]:
    """See Transport."""
    return self._figures.metrics()

  def close(self) -> None:
    """See Transport."""
    self._publisher.close()


def listening_host(config: Config, token: str | None) -> str:
  """The address at which generators reach this process of the trainer.

  Raises:
    ValueError: other machines reach it and there is no token.
  """
  host = _own_address() if config.host == "auto" else config.host
  if token is None and not _is_loopback(host):
    raise ValueError(
      f"host is {config.host!r}, which other machines reach; generators and "
      "trainer need the admin token then, or keep to 127.0.0.1"
    )
  return host


def _is_loopback(host: str) -> bool:
  with contextlib.suppress(ValueError):
    return ipaddress.ip_address(host).is_loopback
  return host == "localhost"


def _own_address() -> str:
  """Of the interface by which this machine reaches others."""
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.connect(("192.0.2.1", 9))  # Chooses a route; sends nothing.
    return probe.getsockname()[0]


def _of_all_processes(address: str) -> tuple[str, ...]:
  """The addresses of all processes of this job, in their order."""
  if jax.process_count() == 1:
    return (address,)
  padded = np.zeros(_LONGEST_ADDRESS, np.uint8)
  padded[: len(address)] = np.frombuffer(address.encode(), np.uint8)
  gathered = multihost_utils.process_allgather(padded)
  return tuple(bytes(one).rstrip(b"\0").decode() for one in gathered)


class OrbaxTransport:
  """Generators read what the trainer writes."""

  def __init__(
    self, config: Config, directory: str | os.PathLike, life: str = ""
  ):
    """Empties the directory: versions of an earlier run are not this one's."""
    self._directory = pathlib.Path(directory).absolute()
    self._timeout_seconds = config.timeout_seconds
    self._dtype = config.dtype
    self._life = life
    self._figures = _Figures()
    self._lock = threading.Lock()  # Of readers and what they may read.
    self._readers: collections.Counter[int] = collections.Counter()
    self._written: list[int] = []
    if jax.process_index() == 0:
      if self._directory.exists():
        shutil.rmtree(self._directory)
      self._directory.mkdir(parents=True)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices(f"emptied {self._directory}")
    self._checkpointer = ocp.AsyncCheckpointer(
      ocp.PyTreeCheckpointHandler(),
      multiprocessing_options=ocp.options.MultiprocessingOptions(
        barrier_sync_key_prefix="weights"
      ),
    )

  def publish(self, params: Any, version: int) -> Moved:
    """See Transport; waits until the version before is written."""
    if version <= self._figures.newest:
      raise ValueError(
        f"weights have version {version}; it must be greater than "
        f"{self._figures.newest}, which was published before"
      )
    began = time.monotonic()
    self._checkpointer.wait_until_finished()
    self._make_room()
    copy = owned_copy(params, self._dtype)
    self._checkpointer.save(self._path(version), args=ocp.args.PyTreeSave(copy))
    self._written.append(version)
    size = sum(
      shard.data.nbytes
      for leaf in jax.tree.leaves(copy)
      for shard in leaf.addressable_shards
      if shard.replica_id == 0
    )
    seconds = time.monotonic() - began
    return self._figures.published(
      Moved(version=version, bytes=size, seconds=seconds)
    )

  async def offer(self, client: Generator) -> None:
    """See Transport."""
    status = await client.status()
    with self._reading_newest() as version:
      if _took(status, self._life, version):
        return
      began = time.monotonic()
      try:
        async with asyncio.timeout(self._timeout_seconds):
          await self._finished(version)
          path = str(self._path(version))
          await client.update(path, version, self._life)
      except TimeoutError as error:
        raise TimeoutError(
          f"generator {client.address} did not take version {version} from "
          f"{self._path(version)} within {self._timeout_seconds:g} s"
        ) from error
      self._figures.pulled(
        Moved(
          version=version,
          bytes=_bytes_below(self._path(version)),
          seconds=time.monotonic() - began,
        )
      )

  def metrics(self) -> dict[str, float]:
    """See Transport."""
    return self._figures.metrics()

  def close(self) -> None:
    """See Transport."""
    self._checkpointer.wait_until_finished()
    self._checkpointer.close()

  def _path(self, version: int) -> pathlib.Path:
    return self._directory / str(version)

  async def _finished(self, version: int) -> None:
    """Orbax gives a version its name when all processes have written."""
    while not self._path(version).exists():
      self._checkpointer.check_for_errors()
      await asyncio.sleep(_POLL_SECONDS)

  @contextlib.contextmanager
  def _reading_newest(self) -> Iterator[int]:
    """Keeps the newest version on disk."""
    with self._lock:
      version = self._figures.newest
      self._readers[version] += 1
    try:
      yield version
    finally:
      with self._lock:
        self._readers[version] -= 1

  def _make_room(self) -> None:
    """Deletes versions that nobody reads or will read."""
    if jax.process_index() != 0:
      return
    with self._lock:
      gone = [v for v in self._written[: 1 - _KEPT] if not self._readers[v]]
    for version in gone:
      shutil.rmtree(self._path(version))
      self._written.remove(version)


def _bytes_below(directory: pathlib.Path) -> int:
  files = (path for path in directory.rglob("*") if path.is_file())
  return sum(path.stat().st_size for path in files)
