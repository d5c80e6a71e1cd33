"""The generator's side: pulls a version, whole and checked, or raises.

Each process of a generator pulls for its own devices: every trainer process is
asked what it owns, the shards that overlap with what a device here needs are
pulled to it, once, compared with their checksums and joined to the generator's
sharding. Tensors come in waves of limited size, the next under way while one is
checked, so the generator needs the memory of two waves beside the new weights.

JAX's pull returns at once, with arrays that are ready when their bytes are
here. Asking whether they are, in place of waiting for them, needs no thread
that could be stuck for good: the deadline is kept, and a pull that a hung
trainer never answers costs its arrays' memory until its connection breaks.
"""

import contextlib
import dataclasses
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import transfer

from rl_tpu import messages
from rl_tpu.transfer import control
from rl_tpu.transfer.control import Description, Moved, Peer, Tensor
from rl_tpu.transfer.shards import Box, Cut, cover, inspect, is_ready, join
from rl_tpu.types import VersionedParams

_POLL_SECONDS = 0.002
_AHEAD_SECONDS = 0.02
_GOODBYE_SECONDS = 2.0
_WAVE_BYTES = 256 * 2**20


class SupersededError(RuntimeError):
  """The trainer let go of a version; `newest` is what it has."""

  def __init__(self, version: int, newest: int):
    super().__init__(
      f"version {version} was superseded; the trainer's newest is {newest}"
    )
    self.newest = newest


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
  """A shard to be pulled: from whom, and what should arrive."""

  peer: Peer
  transfer_address: str
  id: int
  tensor: Tensor
  box: Box
  checksum: int

  def __str__(self) -> str:
    start, shape = self.box
    return (
      f"weight {self.tensor.name} (shard at {start} of shape {shape}) of "
      f"trainer process {self.peer.address}"
    )

  @property
  def bytes(self) -> int:
    """Size on the way."""
    return self.box.size * jnp.dtype(self.tensor.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
  """How one tensor comes to this process."""

  like: jax.ShapeDtypeStruct
  sources: tuple[_Source, ...]
  """The shards needed here."""
  destinations: tuple[Any, ...]
  """Where each is pulled to."""
  blocks: tuple[tuple[Any, Box, dict[int, Cut]], ...]
  """What each device here holds, and which sources give it what."""

  @property
  def bytes(self) -> int:
    """Size of what is pulled."""
    return sum(source.bytes for source in self.sources)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wave:
  """Some tensors, and their shards on the way."""

  plans: list[_Plan]
  pieces: list[list[jax.Array]]


class Puller:
  """Pulls weights into the devices of one process, one version at a time."""

  def __init__(self, token: str | None = None, wave_bytes: int = _WAVE_BYTES):
    """Connects at the first pull.

    Args:
      token: of the trainer's calls.
      wave_bytes: what is pulled together, > 0; a tensor is not divided.
    """
    self._token = token
    self._wave_bytes = wave_bytes
    self._server: transfer.TransferServer | None = None
    self._connections: dict[str, transfer.TransferConnection] = {}
    self.abandoned = 0
    """Shards that were asked for and had not arrived when a pull gave up."""

  def pull(
    self,
    addresses: Sequence[str],
    version: int,
    abstract: Any,
    timeout_seconds: float,
  ) -> tuple[VersionedParams, Moved]:
    """Pulls one version, in exactly the shardings of `abstract`.

    Args:
      addresses: of all processes of the trainer, as `Publisher.address`.
      version: the one wanted; one that is not published yet is waited for.
      abstract: a tree of ShapeDtypeStruct with shardings. Floating-point
        weights are cast to its dtypes.
      timeout_seconds: for all of it.

    Raises:
      SupersededError: the version is gone.
      TimeoutError: a process or a tensor did not come in time; names it.
      ConnectionError: a process is gone; names it.
      ValueError: the weights are of another model, incomplete, not finite, or
        differ from their checksum; names the tensor.
    """
    began = time.monotonic()
    deadline = began + timeout_seconds
    pull = secrets.token_hex(8)
    peers = [Peer(address, self._token) for address in addresses]
    complete = False
    try:
      described = [_described(peer, version, deadline) for peer in peers]
      plans = _plan(dict(zip(peers, described, strict=True)), abstract)
      arrays = self._move(plans, version, pull, deadline)
      complete = True
    finally:
      if not complete:
        self._connections.clear()
      _say_goodbye(peers, pull, complete)
    params = jax.tree.unflatten(jax.tree.structure(abstract), arrays)
    moved = Moved(
      version=version,
      bytes=sum(plan.bytes for plan in plans),
      seconds=time.monotonic() - began,
    )
    return VersionedParams(version=version, params=params), moved

  def _move(
    self, plans: list[_Plan], version: int, pull: str, deadline: float
  ) -> list[jax.Array]:
    """The tensors, in the order of their plans."""
    arrays: list[jax.Array] = []
    earlier: _Wave | None = None
    for group in _waves(plans, self._wave_bytes):
      wave = self._start(group, version, pull, deadline)
      if earlier is not None:
        arrays += self._finish(earlier, deadline)
      earlier = wave
    if earlier is not None:
      arrays += self._finish(earlier, deadline)
    return arrays

  def _start(
    self, plans: list[_Plan], version: int, pull: str, deadline: float
  ) -> _Wave:
    """Asks for the shards of some tensors; returns before they arrive."""
    wanted: dict[Peer, list[_Source]] = {}
    for plan in plans:
      for source in plan.sources:
        wanted.setdefault(source.peer, []).append(source)
    uuids: dict[tuple[Peer, int], int] = {}
    for peer, sources in wanted.items():
      ids = [source.id for source in sources]
      answer = _here(
        peer.call(control.OFFER, deadline, version=version, pull=pull, ids=ids),
        version,
      )
      messages.check_fields(answer, {"uuids": list})
      messages.check_integers("uuids", answer["uuids"], 0, 2**62)
      for number, uuid in zip(ids, answer["uuids"], strict=True):
        uuids[peer, number] = uuid
    pieces = [
      [
        self._connection(source).pull(
          uuids[source.peer, source.id],
          [
            jax.ShapeDtypeStruct(
              source.box.shape,
              source.tensor.dtype,
              sharding=jax.sharding.SingleDeviceSharding(device),
            )
          ],
        )[0]
        for source, device in zip(plan.sources, plan.destinations, strict=True)
      ]
      for plan in plans
    ]
    return _Wave(plans=plans, pieces=pieces)

  def _connection(self, source: _Source) -> transfer.TransferConnection:
    address = source.transfer_address
    server = self._server
    if server is None:
      host = _own_address(address)
      device = jax.local_devices()[0]
      self._server = server = transfer.start_transfer_server(
        device.client, f"{host}:0", [f"{host}:0"]
      )
    if address not in self._connections:
      self._connections[address] = server.connect(address)
    return self._connections[address]

  def _finish(self, wave: _Wave, deadline: float) -> list[jax.Array]:
    """Waits for a wave, checks every shard and joins them."""
    arrived = [
      (source, piece)
      for plan, pieces in zip(wave.plans, wave.pieces, strict=True)
      for source, piece in zip(plan.sources, pieces, strict=True)
    ]
    for place, (source, piece) in enumerate(arrived):
      while not is_ready(piece):
        if time.monotonic() >= deadline:
          self.abandoned += len(arrived) - place
          raise TimeoutError(f"{source} has not arrived in time")
        time.sleep(_POLL_SECONDS)
      try:
        piece.block_until_ready()
      except jax.errors.JaxRuntimeError as error:
        raise ConnectionError(f"{source} did not arrive: {error}") from error
    reports = jax.device_get([inspect(piece) for _, piece in arrived])
    for (source, _), report in zip(arrived, reports, strict=True):
      _check(source, checksum=int(report[0]), nonfinite=int(report[1]))
    return list(map(_joined, wave.plans, wave.pieces))


def _say_goodbye(peers: Sequence[Peer], pull: str, complete: bool) -> None:
  """Lets the trainer free what it holds for a pull; it may be gone."""
  deadline = time.monotonic() + _GOODBYE_SECONDS
  for peer in peers:
    with contextlib.suppress(OSError, RuntimeError):
      peer.call(control.DONE, deadline, pull=pull, complete=complete)
    peer.close()


def _own_address(peer: str) -> str:
  """The address of this machine on its way to a peer, given as host:port."""
  host, _, port = peer.rpartition(":")
  family, *_, to = socket.getaddrinfo(
    host.strip("[]"), int(port), type=socket.SOCK_DGRAM
  )[0]
  with socket.socket(family, socket.SOCK_DGRAM) as probe:
    probe.connect(to)  # Chooses a route; sends nothing.
    own = probe.getsockname()[0]
  return f"[{own}]" if ":" in own else own


def _here(answer: dict[str, Any], version: int) -> dict[str, Any]:
  """An answer that is not about another version."""
  messages.check_fields(answer, {"state": str})
  if answer["state"] == control.SUPERSEDED:
    messages.check_fields(answer, {"newest": int})
    raise SupersededError(version, answer["newest"])
  return answer


def _described(peer: Peer, version: int, deadline: float) -> Description:
  """What a process owns of a version, once it is published there."""
  newest: int | None = None
  while True:
    try:
      answer = _here(
        peer.call(control.DESCRIBE, deadline, version=version), version
      )
    except TimeoutError:
      if newest is None:
        raise
      break
    if answer["state"] == control.HERE:
      return Description.unpack(answer)
    newest = messages.check_fields(answer, {"newest": int})["newest"]
    time.sleep(_AHEAD_SECONDS)
  raise TimeoutError(
    f"trainer process {peer.address} has not published version {version} "
    f"in time; its newest is {newest}"
  )


def _plan(described: dict[Peer, Description], abstract: Any) -> list[_Plan]:
  """How each tensor of `abstract` comes here, in their order.

  Raises:
    ValueError: what the trainer has is not what is wanted.
  """
  wanted = [
    (jax.tree_util.keystr(path), like)
    for path, like in jax.tree_util.tree_leaves_with_path(abstract)
  ]
  tensors = next(iter(described.values())).tensors
  for peer, description in described.items():
    if description.tensors != tensors:
      raise ValueError(
        f"trainer process {peer.address} has other tensors than the first one"
      )
  _check_tensors(tensors, dict(wanted))
  sources: dict[str, list[_Source]] = {name: [] for name, _ in wanted}
  for peer, description in described.items():
    for number, shard in enumerate(description.shards):
      tensor = tensors[shard.tensor]
      sources[tensor.name].append(
        _Source(
          peer=peer,
          transfer_address=description.transfer_address,
          id=number,
          tensor=tensor,
          box=shard.box,
          checksum=shard.checksum,
        )
      )
  return [_plan_tensor(name, like, sources[name]) for name, like in wanted]


def _check_tensors(
  tensors: Sequence[Tensor], wanted: dict[str, jax.ShapeDtypeStruct]
) -> None:
  """Refuses tensors of another model."""
  given = {tensor.name: tensor for tensor in tensors}
  for name in wanted:
    if name not in given:
      raise ValueError(f"the trainer has no weight {name}")
  for name, tensor in given.items():
    if name not in wanted:
      raise ValueError(f"the trainer has a weight {name}; the policy has none")
    like, dtype = wanted[name], jnp.dtype(tensor.dtype)
    floats = [jnp.issubdtype(d, jnp.floating) for d in (dtype, like.dtype)]
    if tensor.shape != like.shape or not (all(floats) or dtype == like.dtype):
      raise ValueError(
        f"weight {name} of the trainer is {tensor.dtype}{tensor.shape}; "
        f"it must be {like.dtype}{like.shape}"
      )


def _plan_tensor(
  name: str, like: jax.ShapeDtypeStruct, sources: list[_Source]
) -> _Plan:
  assert like.sharding is not None, "the caller says where weights belong"
  boxes = [source.box for source in sources]
  needed: dict[int, Any] = {}
  blocks = []
  indices = like.sharding.addressable_devices_indices_map(like.shape)
  for device, index in indices.items():
    box = Box.of(index or (), like.shape)
    try:
      cuts = cover(box, boxes)
    except ValueError as error:
      raise ValueError(f"weight {name} is incomplete: {error}") from error
    for place in cuts:
      needed.setdefault(place, device)
    blocks.append((device, box, cuts))
  places = {place: number for number, place in enumerate(needed)}
  return _Plan(
    like=like,
    sources=tuple(sources[place] for place in needed),
    destinations=tuple(needed.values()),
    blocks=tuple(
      (device, box, {places[place]: cut for place, cut in cuts.items()})
      for device, box, cuts in blocks
    ),
  )


def _waves(plans: list[_Plan], most: int) -> Iterator[list[_Plan]]:
  """Runs of tensors of at most so many bytes, or a single one."""
  wave: list[_Plan] = []
  for plan in plans:
    if wave and sum(one.bytes for one in wave) + plan.bytes > most:
      yield wave
      wave = []
    wave.append(plan)
  if wave:
    yield wave


def _check(source: _Source, *, checksum: int, nonfinite: int) -> None:
  if checksum != source.checksum:
    raise ValueError(
      f"{source} arrived with checksum {checksum:#010x}; the trainer's is "
      f"{source.checksum:#010x}"
    )
  if nonfinite:
    raise ValueError(f"{source} holds {nonfinite} values that are not finite")


def _joined(plan: _Plan, pieces: list[jax.Array]) -> jax.Array:
  """A tensor in the generator's sharding, from shards in the trainer's."""
  like = plan.like
  blocks = []
  for device, box, cuts in plan.blocks:
    parts = [jax.device_put(pieces[place], device) for place in cuts]
    if (
      len(parts) == 1
      and parts[0].shape == box.shape
      and parts[0].dtype == like.dtype
    ):
      blocks.append(parts[0])
    else:
      blocks.append(
        join(
          parts, cuts=tuple(cuts.values()), shape=box.shape, dtype=like.dtype
        )
      )
  return jax.make_array_from_single_device_arrays(
    like.shape, like.sharding, blocks
  )
