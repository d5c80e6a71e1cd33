"""Decoding on TPUs: entries written where they lie, and a ragged kernel.

    out_s = sum_{c <= p_s} softmax_c(q_s . k_sc / sqrt(h)) v_sc

for the token at position p_s of each slot s. JAX's paged attention reads only
the pages that a slot has in use, where plain products read them all. It knows
nothing of layers: a page of any layer, slot and head is a page of one long
array, so that no layer is copied out of the cache for it. The token's own key
and value are written first, S * K rows in place.

Other caches (of small heads, in float32) stay with `attention.one_token`.

Axes: l layers, S slots, C entries, H heads, K heads of keys and values, h head
size, P pages of a slot and head.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.paged_attention import (
  paged_attention_kernel as kernel,
)
from jaxtyping import Array, Float, Int

from rl_tpu import sharding

_LANES = 128
"""Heads that the kernel takes are a multiple of this."""
_PAGES = (128, 4096)
"""Least and most entries of a page. The kernel fetches one while it computes
with another, so that small ones wait for memory to answer."""
_TILE = 16
"""Rows of bfloat16 that lie together in memory."""


def suits(size: int, dtype: jax.typing.DTypeLike) -> bool:
  """Whether caches of this head size and dtype are paged here.

  The kernel rounds keys and values to bfloat16.
  """
  narrow = jnp.dtype(dtype) == jnp.bfloat16
  return sharding.on_tpu() and size % _LANES == 0 and narrow


def page_size(capacity: int) -> int:
  """A power of two; the longest slots have at least two pages."""
  least, most = _PAGES
  half = 1 << (capacity // 2).bit_length() - 1
  return min(max(half, least), most)


def entries(context: int) -> int:
  """Entries of a slot that has room for this context, in whole pages."""
  page = page_size(context)
  return -(-context // page) * page


def attend(
  q: Float[Array, "S H h"],
  k: Float[Array, "S K h"],
  v: Float[Array, "S K h"],
  keys: Float[Array, "l S K C h"],
  values: Float[Array, "l S K C h"],
  layer: Int[Array, ""],
  positions: Int[Array, " S"],
) -> tuple[
  Float[Array, "S H h"],
  tuple[Float[Array, "l S K C h"], Float[Array, "l S K C h"]],
]:
  """Writes one token a slot into the cache and attends to what is there.

  Each device has its own slots and heads. Cost is linear in the entries in use.

  Returns:
    The mixed values, and the cache's keys and values.
  """
  by_device = _on_device
  if not jax.sharding.get_abstract_mesh().empty:
    heads = sharding.partition_spec(("slots", "heads", None))
    kv_heads = sharding.partition_spec(("slots", "kv_heads", None))
    cache = sharding.partition_spec((None, "slots", "kv_heads", None, None))
    by_device = jax.shard_map(
      _on_device,
      in_specs=(
        *(heads, kv_heads, kv_heads, cache, cache),
        *(sharding.partition_spec(()), sharding.partition_spec(("slots",))),
      ),
      out_specs=(heads, (cache, cache)),
      check_vma=False,
    )
  return by_device(q, k, v, keys, values, layer, positions)


def _on_device(q, k, v, keys, values, layer, positions):
  _, slots, kv_heads, capacity, size = keys.shape
  row = layer * slots * kv_heads + jnp.arange(slots * kv_heads)
  position = jnp.repeat(positions, kv_heads)
  keys, values = _written(keys, values, k, v, row * capacity + position)
  pages = capacity // page_size(capacity)
  paged = (1, -1, page_size(capacity), size)
  # To the kernel every head of a slot is a sequence of one head.
  mixed = kernel.paged_attention(
    q.astype(jnp.float32).reshape(slots * kv_heads, -1, size) / math.sqrt(size),
    keys.reshape(paged),
    values.reshape(paged),
    position + 1,
    row[:, None] * pages + jnp.arange(pages),
    pages_per_compute_block=1,
    megacore_mode="batch"
    if _cores() == 2 and slots * kv_heads % 2 == 0
    else None,
  )
  return mixed.reshape(q.shape).astype(q.dtype), (keys, values)


def _cores() -> int:
  """Of one device."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.num_cores if device is not None and device.num_cores else 1


def _written(keys, values, k, v, rows):
  """The cache with rows of it, one a slot and head, replaced in place.

  A scatter would do it row by row. Memory moves in whole tiles, and no two of
  these rows lie in one.
  """
  size, count = keys.shape[-1], rows.shape[0]
  flat = jax.ShapeDtypeStruct((keys.size // size, size), keys.dtype)
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  new = pl.BlockSpec(memory_space=pltpu.VMEM)
  written = pl.pallas_call(
    _write,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(1,),
      in_specs=(new, anywhere, anywhere),
      out_specs=(anywhere, anywhere),
      scratch_shapes=(
        pltpu.VMEM((2, count, _TILE, size), keys.dtype),
        pltpu.SemaphoreType.DMA,
      ),
    ),
    out_shape=(flat, flat),
    input_output_aliases={2: 0, 3: 1},
    name="write_entries",
  )(
    rows,
    jnp.stack([k, v]).astype(jnp.float32).reshape(2, count, 1, size),
    keys.reshape(flat.shape),
    values.reshape(flat.shape),
  )
  return (x.reshape(keys.shape) for x in written)


def _write(rows, new, _keys, _values, keys, values, tiles, done):
  """Reads the tiles of all rows, replaces a row of each, writes them back."""
  count = tiles.shape[1]

  def copy(which, cache, i, back):
    first = pl.multiple_of(rows[i] // _TILE * _TILE, _TILE)
    there, here = cache.at[pl.ds(first, _TILE)], tiles.at[which, i]
    ends = (here, there) if back else (there, here)
    return pltpu.make_async_copy(*ends, done)

  def for_all(act):
    def turn(i, _):
      act(0, keys, i)
      act(1, values, i)

    jax.lax.fori_loop(0, count, turn, None)

  def replace(which, _, i):
    tile = tiles[which, i].astype(jnp.float32)
    row = jax.lax.broadcasted_iota(jnp.int32, tile.shape, 0)
    tile = jnp.where(row == rows[i] % _TILE, new[which, i], tile)
    tiles[which, i] = tile.astype(tiles.dtype)

  for_all(lambda *which: copy(*which, back=False).start())
  for_all(lambda *which: copy(*which, back=False).wait())
  for_all(replace)
  for_all(lambda *which: copy(*which, back=True).start())
  for_all(lambda *which: copy(*which, back=True).wait())
