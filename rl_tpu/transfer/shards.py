"""Parts of tensors: where they lie, whether they arrived whole, how they join.

A box is a part of a tensor in global indices. Its checksum is

    sum_i bits_i * (hash(i) | 1)   mod 2^32

over its elements in row-major order, taken where the shard is, by the same
program at both ends. Odd weights are invertible, so a change of one element is
always found; weights that depend on the place find elements that moved.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped, UInt32


class Box(NamedTuple):
  """A part of a tensor: its first index and its size, by dimension."""

  start: tuple[int, ...]
  shape: tuple[int, ...]

  @classmethod
  def of(cls, index: tuple[slice, ...], shape: tuple[int, ...]) -> "Box":
    """The box of a shard's index into a tensor of this shape."""
    ends = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    return cls(
      tuple(start for start, _ in ends), tuple(stop - at for at, stop in ends)
    )

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)

  def overlap(self, other: "Box") -> "Box | None":
    """What both have in common; None if that is nothing."""
    start = tuple(map(max, self.start, other.start))
    stop = [min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True)]
    shape = tuple(b - a for a, b in zip(start, stop, strict=True))
    return Box(start, shape) if all(n > 0 for n in shape) else None

  def within(self, outer: "Box") -> tuple[int, ...]:
    """Its first index, counted from that of `outer`."""
    return tuple(a - b for a, b in zip(self.start, outer.start, strict=True))


class Cut(NamedTuple):
  """What a shard gives to a block: from where, to where, how much."""

  source: tuple[int, ...]
  target: tuple[int, ...]
  shape: tuple[int, ...]


def cover(block: Box, boxes: Sequence[Box]) -> dict[int, Cut]:
  """What each of `boxes` gives to `block`, by its place in the sequence.

  Raises:
    ValueError: two of them overlap, or together they do not fill the block.
  """
  parts: dict[int, Box] = {}
  for place, box in enumerate(boxes):
    part = box.overlap(block)
    if part is None:
      continue
    for other in parts.values():
      if part.overlap(other) is not None:
        raise ValueError(f"shards overlap at {part}")
    parts[place] = part
  missing = block.size - sum(part.size for part in parts.values())
  if missing:
    raise ValueError(
      f"{missing} of the {block.size} elements at {block} belong to no shard"
    )
  return {
    place: Cut(part.within(boxes[place]), part.within(block), part.shape)
    for place, part in parts.items()
  }


def is_ready(array: jax.Array) -> bool:
  """Whether its values, or the error in their place, are there."""
  return cast(Any, array).is_ready()


@functools.partial(jax.jit, static_argnames=("cuts", "shape", "dtype"))
def join(
  pieces: Sequence[Shaped[Array, "..."]],
  *,
  cuts: tuple[Cut, ...],
  shape: tuple[int, ...],
  dtype: jnp.dtype,
) -> Shaped[Array, "..."]:
  """Puts cuts of shards, all on one device, together to a block."""
  block = jnp.zeros(shape, dtype)
  for piece, cut in zip(pieces, cuts, strict=True):
    stop = [a + n for a, n in zip(cut.source, cut.shape, strict=True)]
    part = jax.lax.slice(piece, cut.source, stop).astype(dtype)
    block = jax.lax.dynamic_update_slice(block, part, cut.target)
  return block


@jax.jit
def inspect(shard: Shaped[Array, "..."]) -> UInt32[Array, "2"]:
  """Checksum of a shard, and how many of its values are not finite."""
  nonfinite = jnp.zeros((), jnp.uint32)
  if jnp.issubdtype(shard.dtype, jnp.inexact):
    nonfinite = jnp.sum(~jnp.isfinite(shard), dtype=jnp.uint32)
  bits = _bits(shard)
  weights = _position_weights(bits.shape)
  checksum = jnp.sum(bits * weights, dtype=jnp.uint32)
  return jnp.stack([checksum, nonfinite])


def _bits(shard: Shaped[Array, "..."]) -> UInt32[Array, "..."]:
  """The bits of each element; eight bytes become two entries."""
  if shard.dtype == jnp.bool_:
    return shard.astype(jnp.uint32)
  width = min(shard.dtype.itemsize, 4)
  unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width]
  return jax.lax.bitcast_convert_type(shard, unsigned).astype(jnp.uint32)


def _position_weights(shape: tuple[int, ...]) -> UInt32[Array, "..."]:
  """An odd number for each place, as unlike its neighbours' as can be."""
  place = jnp.zeros(shape, jnp.uint32)
  for axis, size in enumerate(shape):
    own = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    place = place * jnp.uint32(size) + own
  mixed = place * jnp.uint32(0x9E3779B1)
  mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x85EBCA77)
  return (mixed ^ (mixed >> 13)) | 1
