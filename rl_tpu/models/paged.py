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
from jax.experimental.pallas.ops.tpu.paged_attention import (
  paged_attention_kernel as kernel,
)
from jaxtyping import Array, Float, Int

from rl_tpu import sharding

_LANES = 128
"""Heads that the kernel takes are a multiple of this."""
_PAGE = 2048
"""Largest page, in entries. The kernel computes with a page at a time; with
smaller ones it waits for itself more than for memory."""


def suits(size: int, dtype: jax.typing.DTypeLike) -> bool:
  """Whether caches of this head size and dtype are paged here.

  The kernel rounds keys and values to bfloat16.
  """
  narrow = jnp.dtype(dtype) == jnp.bfloat16
  return sharding.on_tpu() and size % _LANES == 0 and narrow


def entries(context: int) -> int:
  """Entries of a slot that has room for this context, in whole pages."""
  return -(-context // _LANES) * _LANES


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

  def write(cache, new):
    flat = cache.reshape(-1, size).at[row * capacity + position]
    return flat.set(new.reshape(-1, size).astype(cache.dtype))

  keys, values = write(keys, k), write(values, v)
  page = math.gcd(capacity, _PAGE)
  pages = capacity // page
  # To the kernel every head of a slot is a sequence of one head.
  mixed = kernel.paged_attention(
    q.astype(jnp.float32).reshape(slots * kv_heads, -1, size) / math.sqrt(size),
    keys.reshape(1, -1, page, size),
    values.reshape(1, -1, page, size),
    position + 1,
    row[:, None] * pages + jnp.arange(pages),
    pages_per_compute_block=1,
  )
  shape = (-1, slots, kv_heads, capacity, size)
  mixed = mixed.reshape(q.shape).astype(q.dtype)
  return mixed, (keys.reshape(shape), values.reshape(shape))
