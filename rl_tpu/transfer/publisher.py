"""The trainer's side: every process serves the shards that it owns.

A publisher keeps a copy of the newest weights, sharded as the trainer's, and
answers the calls of `control` in threads of its own, so pulls overlap with
training. A shard is handed to JAX's transfer server only when a generator asks
for it: what is published and never pulled costs one copy, not one a version.

A generator that pulls slower than versions come would never see one whole. So
the oldest version that is being pulled stays too, for as long as its
generators go on asking (`lease_seconds` since the last time). Two copies are
the most that there are.
"""

import concurrent.futures
import dataclasses
import functools
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import jax
import jax.numpy as jnp
from jax.experimental import transfer

from rl_tpu import messages
from rl_tpu.transfer import control
from rl_tpu.transfer.control import Moved
from rl_tpu.transfer.shards import Box, inspect, is_ready

_THREADS = 16
_TAKE_BACK_SECONDS = 1.0
"""For an offer that nobody took to arrive here."""


def owned_copy(params: Any, dtype: str | None) -> Any:
  """A copy that shares no buffer with `params`, in the same shardings.

  Args:
    params: a tree of arrays, which may be donated once this returns.
    dtype: of the copy's floating-point arrays; None keeps theirs.
  """
  leaves, tree = jax.tree.flatten(params)
  copy = _copy_program(dtype, tuple(leaf.sharding for leaf in leaves))
  return jax.block_until_ready(tree.unflatten(copy(leaves)))


@functools.lru_cache
def _copy_program(
  dtype: str | None, shardings: tuple[jax.sharding.Sharding, ...]
) -> Callable[[list[jax.Array]], list[jax.Array]]:
  def one(x: jax.Array) -> jax.Array:
    if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating):
      x = x.astype(dtype)
    return jnp.copy(x)

  return jax.jit(
    lambda leaves: list(map(one, leaves)), out_shardings=list(shardings)
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Version:
  """One version as this process holds it."""

  described: bytes
  """The answer to Describe."""
  shards: tuple[jax.Array, ...]
  """On a device each, by id."""
  leases: dict[str, float] = dataclasses.field(default_factory=dict)
  """Until when each pull that is under way has asked for it to stay."""


class Publisher:
  """Offers the newest weights of one trainer process to generators."""

  def __init__(
    self,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    dtype: str | None = None,
    lease_seconds: float = 60.0,
  ):
    """Listens at once.

    Args:
      host: address of this process, as generators reach it.
      port: of the control calls; 0 takes a free one.
      token: that calls must carry; None asks for none.
      dtype: of the floating-point weights as they travel; None keeps theirs.
      lease_seconds: how long a pull keeps its version after each call.

    Raises:
      RuntimeError: the address cannot be bound.
    """
    self._token = token
    self._dtype = dtype
    self._lease_seconds = lease_seconds
    self._lock = threading.Lock()
    self._versions: dict[int, _Version] = {}
    self._newest = -1
    self._offers: dict[str, list[tuple[int, jax.Array]]] = {}
    self._sums: dict[str, float] = dict.fromkeys(
      ("publishes", "published_bytes", "publish_seconds", "offered_bytes",
       "pulls", "superseded", "withdrawn_offers"), 0.0
    )  # fmt: skip
    device = jax.local_devices()[0]
    self._transfer = transfer.start_transfer_server(
      device.client, f"{host}:0", [f"{host}:0"]
    )
    self._withdrawals = concurrent.futures.ThreadPoolExecutor(
      1, thread_name_prefix="withdrawals"
    )
    self._server = grpc.server(
      concurrent.futures.ThreadPoolExecutor(
        _THREADS, thread_name_prefix="weights"
      ),
      options=[("grpc.so_reuseport", 0)],
    )
    calls = {
      control.DESCRIBE: self._describe,
      control.OFFER: self._offer,
      control.DONE: self._done,
    }
    self._server.add_generic_rpc_handlers(
      (
        grpc.method_handlers_generic_handler(
          control.SERVICE,
          {
            name: grpc.unary_unary_rpc_method_handler(self._checked(call))
            for name, call in calls.items()
          },
        ),
      )
    )
    port = self._server.add_insecure_port(f"{host}:{port}")
    self.address = f"{host}:{port}"
    self._server.start()

  def publish(self, params: Any, version: int) -> Moved:
    """Copies the weights and offers them in place of what was offered.

    Called in every process of the trainer. The copy is made when this returns,
    so `params` may be donated.

    Raises:
      ValueError: the version is not newer than the newest so far.
    """
    if version <= self._newest:
      raise ValueError(
        f"weights have version {version}; it must be greater than "
        f"{self._newest}, which was published before"
      )
    began = time.monotonic()
    made = self._owned(owned_copy(params, self._dtype))
    with self._lock:
      self._versions[version] = made
      self._newest = version
      self._drop()
    moved = Moved(
      version=version,
      bytes=sum(shard.nbytes for shard in made.shards),
      seconds=time.monotonic() - began,
    )
    self._count(
      publishes=1, published_bytes=moved.bytes, publish_seconds=moved.seconds
    )
    return moved

  def counters(self) -> dict[str, float]:
    """Sums so far: publications and pulls, their bytes and seconds."""
    with self._lock:
      return dict(self._sums)

  def close(self) -> None:
    """Stops listening and lets go of all versions."""
    self._server.stop(0).wait()
    self._withdrawals.shutdown()
    with self._lock:
      self._versions.clear()
      self._offers.clear()

  def _owned(self, params: Any) -> _Version:
    """The shards that no other process or device owns, and their checksums."""
    tensors, shards, places = [], [], []
    for number, (path, array) in enumerate(
      jax.tree_util.tree_leaves_with_path(params)
    ):
      tensors.append(
        control.Tensor(
          name=jax.tree_util.keystr(path),
          shape=array.shape,
          dtype=str(array.dtype),
        )
      )
      for shard in array.addressable_shards:
        if shard.replica_id == 0:
          shards.append(shard.data)
          places.append((number, Box.of(shard.index, array.shape)))
    checksums = jax.device_get([inspect(shard)[0] for shard in shards])
    description = control.Description(
      tensors=tuple(tensors),
      shards=tuple(
        control.OwnedShard(tensor=number, box=box, checksum=int(checksum))
        for (number, box), checksum in zip(places, checksums, strict=True)
      ),
      transfer_address=self._transfer.address(),
    )
    answer = messages.pack_map(state=control.HERE, **description.pack())
    return _Version(described=answer, shards=tuple(shards))

  def _drop(self) -> None:
    """Lets go of versions that are neither newest nor the oldest pulled."""
    now = time.monotonic()
    pulled = set()
    for version, held in self._versions.items():
      for pull in [p for p, until in held.leases.items() if until < now]:
        del held.leases[pull]
        self._withdraw(pull)
      if held.leases:
        pulled.add(version)
    kept = {self._newest, min(pulled, default=self._newest)}
    self._versions = {v: self._versions[v] for v in kept}

  def _withdraw(self, pull: str) -> None:
    """Frees what a generator asked for and then, being gone, did not take."""
    offers = self._offers.pop(pull, [])
    if offers:
      self._withdrawals.submit(self._take_back, offers)

  def _take_back(self, offers: list[tuple[int, jax.Array]]) -> None:
    """Pulls offers here and drops them: there is no call that cancels one.

    Which of them were taken is not known, and pulling one that was waits for
    the next offer of its id; so those that do not come are offered once more.
    """
    connection = self._transfer.connect(self._transfer.address())
    like = [
      jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
      for _, x in offers
    ]
    arrays = [
      connection.pull(uuid, [one])[0]
      for (uuid, _), one in zip(offers, like, strict=True)
    ]
    _wait(arrays, _TAKE_BACK_SECONDS)
    for (uuid, shard), array in zip(offers, arrays, strict=True):
      if not is_ready(array):
        self._transfer.await_pull(uuid, [shard])
    _wait(arrays, 60 * _TAKE_BACK_SECONDS)
    self._count(withdrawn_offers=sum(map(is_ready, arrays)))

  def _count(self, **amounts: float) -> None:
    with self._lock:
      for name, amount in amounts.items():
        self._sums[name] += amount

  # Calls.

  def _checked(self, call: Callable[[dict[str, Any]], bytes]):
    """A call that needs the token, if there is one."""

    def checked(data: bytes, context: grpc.ServicerContext) -> bytes:
      if not messages.authorized(
        context.invocation_metadata() or (), self._token
      ):
        context.abort(
          grpc.StatusCode.UNAUTHENTICATED,
          "calls need the metadata 'authorization: Bearer TOKEN'",
        )
      try:
        return call(messages.unpack_map(data))
      except messages.WireError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return checked

  def _describe(self, message: dict[str, Any]) -> bytes:
    messages.check_fields(message, {"version": int})
    with self._lock:
      held = self._versions.get(message["version"])
      return self._elsewhere(message) if held is None else held.described

  def _elsewhere(self, message: dict[str, Any]) -> bytes:
    """The answer to a call for a version that is not here."""
    ahead = message["version"] > self._newest
    self._sums["superseded"] += not ahead
    return messages.pack_map(
      state=control.AHEAD if ahead else control.SUPERSEDED, newest=self._newest
    )

  def _offer(self, message: dict[str, Any]) -> bytes:
    messages.check_fields(message, {"version": int, "pull": str, "ids": list})
    pull = message["pull"]
    with self._lock:
      held = self._versions.get(message["version"])
      if held is None:
        return self._elsewhere(message)
      messages.check_integers("ids", message["ids"], 0, len(held.shards))
      held.leases[pull] = time.monotonic() + self._lease_seconds
      offers = [(secrets.randbits(62), held.shards[i]) for i in message["ids"]]
      self._offers.setdefault(pull, []).extend(offers)
      self._sums["offered_bytes"] += sum(shard.nbytes for _, shard in offers)
    for uuid, shard in offers:
      self._transfer.await_pull(uuid, [shard])
    return messages.pack_map(
      state=control.HERE, uuids=[uuid for uuid, _ in offers]
    )

  def _done(self, message: dict[str, Any]) -> bytes:
    messages.check_fields(message, {"pull": str, "complete": bool})
    with self._lock:
      for held in self._versions.values():
        held.leases.pop(message["pull"], None)
      if message["complete"]:
        self._offers.pop(message["pull"], None)
        self._sums["pulls"] += 1
      else:
        self._withdraw(message["pull"])
      if self._versions:
        self._drop()
    return messages.pack_map()


def _wait(arrays: list[jax.Array], seconds: float) -> None:
  """Waits until all arrays are here, but no longer than some time."""
  deadline = time.monotonic() + seconds
  while time.monotonic() < deadline and not all(map(is_ready, arrays)):
    time.sleep(0.02)
