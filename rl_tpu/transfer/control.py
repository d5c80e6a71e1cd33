"""The calls by which a generator asks a trainer process for shards.

    Describe(version)           what this process owns of a version
    Offer(version, pull, ids)   makes shards ready to be pulled, once
    Done(pull)                  the generator has what it wanted, or gave up

Each answer has a `state`: `here`; `ahead` (the version is not published yet);
or `superseded` (it is gone, `newest` is what to ask for). The token, if there
is one, travels as in every admin call, and like the weights in clear.
"""

import dataclasses
import time
from typing import Any

import grpc
import jax.numpy as jnp

from rl_tpu import messages
from rl_tpu.transfer.shards import Box

SERVICE = "rl_tpu.Weights"
DESCRIBE, OFFER, DONE = "Describe", "Offer", "Done"
HERE, AHEAD, SUPERSEDED = "here", "ahead", "superseded"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved:
  """What a publication or a pull moved, in one process."""

  version: int
  bytes: int
  seconds: float

  @property
  def bytes_per_second(self) -> float:
    """Bandwidth."""
    return self.bytes / max(self.seconds, 1e-9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
  """One tensor of a version."""

  name: str
  shape: tuple[int, ...]
  dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnedShard:
  """A shard that a trainer process owns; its id is its place in their list."""

  tensor: int
  """Place of its tensor among those of the version."""
  box: Box
  checksum: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
  """What one trainer process owns of a version."""

  tensors: tuple[Tensor, ...]
  """All of the version's, in the order of their names."""
  shards: tuple[OwnedShard, ...]
  transfer_address: str
  """From where its shards are pulled."""

  def pack(self) -> dict[str, Any]:
    """Its fields, for a message."""
    return {
      "tensors": [(t.name, t.dtype, t.shape) for t in self.tensors],
      "shards": [(s.tensor, *s.box, s.checksum) for s in self.shards],
      "transfer_address": self.transfer_address,
    }

  @classmethod
  def unpack(cls, message: dict[str, Any]) -> "Description":
    """The description that was packed.

    Raises:
      WireError: it does not follow the format.
    """
    messages.check_fields(
      message, {"tensors": list, "shards": list, "transfer_address": str}
    )
    try:
      tensors = tuple(
        Tensor(name=name, dtype=str(jnp.dtype(dtype)), shape=tuple(shape))
        for name, dtype, shape in message["tensors"]
      )
      shards = tuple(
        OwnedShard(
          tensor=tensor, box=Box(tuple(start), tuple(shape)), checksum=checksum
        )
        for tensor, start, shape, checksum in message["shards"]
      )
      for shard in shards:
        whole = Box((0,) * len(shard.box.shape), tensors[shard.tensor].shape)
        if shard.box.size and shard.box.overlap(whole) != shard.box:
          raise ValueError(f"{shard} is no part of {tensors[shard.tensor]}")
    except (TypeError, ValueError, IndexError) as error:
      raise messages.WireError(
        f"a description of weights does not follow the format: {error}"
      ) from error
    return cls(
      tensors=tensors,
      shards=shards,
      transfer_address=message["transfer_address"],
    )


class Peer:
  """One trainer process, as a generator speaks to it."""

  def __init__(self, address: str, token: str | None):
    self.address = address
    self._metadata = messages.credentials(token)
    self._channel = grpc.insecure_channel(
      address, [("grpc.max_receive_message_length", -1)]
    )

  def close(self) -> None:
    """Ends the connection."""
    self._channel.close()

  def call(self, name: str, deadline: float, **fields: Any) -> dict[str, Any]:
    """Calls the process; its answer's fields.

    Args:
      name: of the call.
      deadline: on the clock of `time.monotonic`.
      **fields: of the call.

    Raises:
      TimeoutError: no answer came before the deadline.
      ConnectionError: the process is not there.
      PermissionError: the token is missing or wrong.
      RuntimeError: the process refused.
    """
    method = self._channel.unary_unary(f"/{SERVICE}/{name}")
    left = max(deadline - time.monotonic(), 0.0)
    try:
      data = method(
        messages.pack_map(**fields), timeout=left, metadata=self._metadata
      )
    except grpc.RpcError as error:
      assert isinstance(error, grpc.Call)
      raise self._translated(name, error) from error
    return messages.unpack_map(data)

  def _translated(self, name: str, error: grpc.Call) -> Exception:
    text = f"trainer process {self.address}, {name}: {error.details()}"
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
      return TimeoutError(
        f"trainer process {self.address} did not answer {name} in time"
      )
    if code is grpc.StatusCode.UNAVAILABLE:
      return ConnectionError(text)
    if code is grpc.StatusCode.UNAUTHENTICATED:
      return PermissionError(text)
    return RuntimeError(text)
