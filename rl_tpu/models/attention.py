"""Who attends to whom: packed rows, the continuation of a cache, one token.

    out_t = sum_s softmax_s(q_t . k_s / sqrt(h)) v_s

over the tokens s that t may see, each group of H/K query heads sharing a head
of keys and values (grouped-query attention, Ainslie et al. 2023).

Packed rows are what the learner spends its attention on. On TPUs they go
through JAX's splash kernel, which never holds [T, T] and skips the blocks above
the diagonal; elsewhere, or where a row is no multiple of the kernel's lanes,
through products of whole matrices. On a mesh each device has its own rows and
heads, and of its rows the queries of its own part of the context, with the keys
and values of all of it.

Axes: R rows, T tokens, S slots, C cache entries, n tokens of one dispatch,
H heads, K heads of keys and values, h head size.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_mask as splash_masks,
)
from jaxtyping import Array, Bool, Float, Int

from rl_tpu import sharding
from rl_tpu.models import paged

_LANES = 128
"""Rows and heads that splash takes are multiples of this."""
_BLOCK = 512
"""Largest tile of splash, in tokens."""
_BACKWARD_BLOCKS = (1024, 4096)
"""Least and most keys and values of a tile of the backward pass. Each writes a
partial gradient of q; larger ones take more pairs that the mask leaves out."""
_PARTIAL = 8
"""Partial gradients of q to aim at. Rows for which they would be more get a
kernel of their own for it, which computes two products of five again."""

_SCORES = 2**25
"""Most pairs of a token and an entry that `extended` scores at once, for each
row and head."""

KEPT = "attention"
"""Name of what splash's backward pass needs of its forward pass, for policies
of rematerialisation."""


def packed(
  q: Float[Array, "R T H h"],
  k: Float[Array, "R T K h"],
  v: Float[Array, "R T K h"],
  trajectory_ids: Int[Array, "R T"],
) -> Float[Array, "R T H h"]:
  """Causal attention inside each trajectory of a row."""
  length, size = q.shape[1], q.shape[3]
  lanes = _LANES * sharding.parts("context")
  if sharding.on_tpu() and length % lanes == 0 and size % _LANES == 0:
    return splash_packed(q, k, v, trajectory_ids)
  if sharding.parts("context") > 1:
    k, v = (
      sharding.constrain(x, "rows", None, "kv_heads", None) for x in (k, v)
    )
  causal = jnp.tril(jnp.ones((length, length), bool))
  same = trajectory_ids[:, :, None] == trajectory_ids[:, None, :]
  return _grouped(q, k, v, causal & same)


def _grouped(
  q: Float[Array, "R T H h"],
  k: Float[Array, "R S K h"],
  v: Float[Array, "R S K h"],
  mask: Bool[Array, "R T S"],
) -> Float[Array, "R T H h"]:
  """Attention where the mask allows; each token must see one at least.

  All queries that share a head of keys and values are one matrix, so that no
  product, forward or backward, has to transpose a copy of the scores.
  """
  rows, length, heads, size = q.shape
  kv_heads, groups = k.shape[2], heads // k.shape[2]
  q = (q * (1 / math.sqrt(size))).reshape(rows, length, kv_heads, groups, size)
  q = q.transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, size)
  k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
  scores = jnp.einsum(
    "rkqh,rksh->rkqs", q, k, preferred_element_type=jnp.float32
  ).reshape(rows, kv_heads, groups, length, -1)
  scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  weights = weights.reshape(rows, kv_heads, groups * length, -1)
  mixed = jnp.einsum("rkqs,rksh->rkqh", weights, v)
  mixed = mixed.reshape(rows, kv_heads, groups, length, size)
  return mixed.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, size)


def splash_packed(q, k, v, trajectory_ids, interpret=False):
  """`packed` by the TPU kernel: each device its own rows, heads and queries."""
  length, heads = q.shape[1:3]
  parts = sharding.parts("context")
  block, own = math.gcd(_BLOCK, length), math.gcd(_BLOCK, length // parts)
  least, most = _BACKWARD_BLOCKS
  fused = length <= _PARTIAL * most
  wanted = max(least, length // _PARTIAL) if fused else least
  backward = math.gcd(wanted, length)
  sizes = splash.BlockSizes(
    block_q=own,
    block_kv=block,
    block_q_dkv=own,
    block_kv_dkv=backward,
    block_kv_dkv_compute=block,
    block_q_dq=None if fused else own,
    block_kv_dq=None if fused else backward,
    use_fused_bwd_kernel=fused,
  )

  causal = splash_masks.CausalMask((length, length))
  kernel = _kernel(causal, heads, sizes, interpret, parts)
  q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
  return _by_device(kernel, q, k, v, trajectory_ids, trajectory_ids)


def _kernel(mask, heads, sizes, interpret, parts=1) -> Any:
  """Splash for one row, with the same mask for each head."""
  return splash.make_splash_mha(
    splash_masks.MultiHeadMask([mask] * heads),
    head_shards=1,
    q_seq_shards=parts,
    block_sizes=sizes,
    interpret=interpret,
    residual_checkpoint_name=KEPT,
  )


def _by_device(
  kernel: Any,
  q: Float[Array, "R H T h"],
  k: Float[Array, "R K S h"],
  v: Float[Array, "R K S h"],
  q_ids: Int[Array, "R T"],
  kv_ids: Int[Array, "R S"],
) -> Float[Array, "R T H h"]:
  """Each device its own rows, heads and queries; as are ids, so they see."""

  def local(kernel, q, k, v, q_ids, kv_ids):
    return jax.vmap(kernel)(q, k, v, splash.SegmentIds(q=q_ids, kv=kv_ids))

  q = q * (1 / math.sqrt(q.shape[-1]))
  q, k, v = (checkpoint_name(x, KEPT) for x in (q, k, v))
  by_device = local
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.empty:
    by_heads = sharding.partition_spec(("rows", "heads", "context", None))
    by_kv_heads = sharding.partition_spec(("rows", "kv_heads", None, None))
    masks = sharding.partition_spec((None, "context"))
    by_device = jax.shard_map(
      local,
      in_specs=(
        kernel.manual_sharding_spec(jax.NamedSharding(mesh, masks)),
        *(by_heads, by_kv_heads, by_kv_heads),
        sharding.partition_spec(("rows", "context")),
        sharding.partition_spec(("rows", None)),
      ),
      out_specs=by_heads,
      check_vma=False,
    )
  mixed: Any = by_device(kernel, q, k, v, q_ids, kv_ids)
  return mixed.swapaxes(1, 2)


def extended(
  q: Float[Array, "S T H h"],
  k: Float[Array, "S T K h"],
  v: Float[Array, "S T K h"],
  cache: tuple[Float[Array, "S K _ _"], Float[Array, "S K C h"]],
  starts: Int[Array, " S"],
) -> Float[Array, "S T H h"]:
  """Attention of new tokens to a cache's first entries, and causally.

  On TPUs by the kernel, where it suits. Elsewhere as many tokens at once as
  `_SCORES` allows, one part after the other: all scores of a long row would not
  fit. Cost is linear in T * (C + T).
  """
  new, cached, size = q.shape[1], cache[1].shape[2], q.shape[3]
  paged_here = paged.suits(size, cache[1].dtype)
  if paged_here and new % _LANES == 0 and cached % _LANES == 0:
    return splash_extended(q, k, v, cache, starts)
  keys, values = from_cache(*cache)
  keys = jnp.concatenate([keys.astype(k.dtype), k], axis=1)
  values = jnp.concatenate([values.astype(v.dtype), v], axis=1)
  entry = jnp.arange(cached + new)
  seen = entry < starts[:, None]

  def attend(first, q):
    token = first + jnp.arange(q.shape[1])[:, None]
    causal = (entry >= cached) & (entry - cached <= token)
    mask = seen[:, None] | causal
    return jax.nn.dot_product_attention(q, keys, values, mask=mask[:, None])

  most = max(1, _SCORES // (cached + new))
  if new <= most:
    return attend(0, q)
  size = next(n for n in range(most, 0, -1) if new % n == 0)
  parts = jax.lax.map(
    lambda first: attend(
      first, jax.lax.dynamic_slice_in_dim(q, first, size, axis=1)
    ),
    jnp.arange(0, new, size),
  )
  return parts.swapaxes(0, 1).reshape(q.shape)


def splash_extended(q, k, v, cache, starts, interpret=False):
  """`extended` by the TPU kernel, for caches [S, K, C, h] of keys and values.

  New tokens follow the whole cache; entries that do not count have another id.
  """
  new, cached = q.shape[1], cache[1].shape[2]
  q, *both = (x.swapaxes(1, 2) for x in (q, k, v))
  k, v = (
    jnp.concatenate([held, x.astype(held.dtype)], axis=2)
    for held, x in zip(cache, both, strict=True)
  )
  causal = splash_masks.CausalMask((new, cached + new), offset=cached)
  sizes = splash.BlockSizes(
    block_q=math.gcd(_BLOCK, new), block_kv=math.gcd(_BLOCK, cached + new)
  )
  entry = jnp.arange(cached + new)
  counted = (entry < starts[:, None]) | (entry >= cached)
  ids = jnp.zeros((len(starts), new), jnp.int32)
  kernel = _kernel(causal, q.shape[1], sizes, interpret)
  return _by_device(kernel, q, k, v, ids, jnp.where(counted, 0, 1))


def as_cache(
  keys: Float[Array, "*L S C K h"], values: Float[Array, "*L S C K h"]
) -> tuple[Float[Array, "*L S K _ _"], Float[Array, "*L S K C h"]]:
  """Keys and values as they lie in a decode cache.

  Each head's then is one matrix: keys [h, C], in the order in which their
  product with one token reads them, several times faster than strided on CPUs.
  In a paged cache they are [C, h] like values.
  """
  values = jnp.moveaxis(values, -3, -2)
  if paged.suits(keys.shape[-1], keys.dtype):
    return jnp.moveaxis(keys, -3, -2), values
  return jnp.moveaxis(keys, -3, -1), values


def from_cache(
  keys: Float[Array, "*L S K _ _"], values: Float[Array, "*L S K C h"]
) -> tuple[Float[Array, "*L S C K h"], Float[Array, "*L S C K h"]]:
  """The inverse of `as_cache`."""
  if paged.suits(values.shape[-1], values.dtype):
    keys = jnp.moveaxis(keys, -2, -3)
  else:
    keys = jnp.moveaxis(keys, -1, -3)
  return keys, jnp.moveaxis(values, -2, -3)


def continued(
  cache: tuple[Float[Array, "S K _ _"], Float[Array, "S K C h"]],
  new: tuple[Float[Array, "S T K h"], Float[Array, "S T K h"]],
  starts: Int[Array, " S"],
) -> tuple[Float[Array, "S K _ _"], Float[Array, "S K C h"]]:
  """A cache with new entries from `starts` on, without those beyond its end."""
  by_entry = paged.suits(cache[1].shape[-1], cache[1].dtype)
  axes = (2 if by_entry else 3, 2)
  keys, values = (
    _continued(held, own.astype(held.dtype), starts, axis)
    for held, own, axis in zip(cache, as_cache(*new), axes, strict=True)
  )
  return keys, values


def _continued(held, new, starts, axis):
  room = [(0, 0)] * held.ndim
  room[axis] = (0, new.shape[axis])

  def put(held, new, start):
    return jax.lax.dynamic_update_slice_in_dim(held, new, start, axis - 1)

  whole = jax.vmap(put)(jnp.pad(held, room), new, starts)
  return jax.lax.slice_in_dim(whole, 0, held.shape[axis], axis=axis)


def one_token(
  q: Float[Array, "S H h"],
  k: Float[Array, "S K h"],
  v: Float[Array, "S K h"],
  caches: list[
    tuple[Float[Array, "S K h C"], Float[Array, "S K C h"], Bool[Array, "S C"]]
  ],
) -> Float[Array, "S H h"]:
  """Attention of one token a slot to caches and to itself.

  A cache is keys, values (see `as_cache`), and which entries count. The softmax
  is over all of them together, in float32. Cost is linear in the entries,
  counted or not.
  """
  slots, heads, size = q.shape
  grouped = q.reshape(slots, k.shape[1], heads // k.shape[1], size)
  wide = {"preferred_element_type": jnp.float32}
  scores = []
  for keys, _, seen in caches:
    score = jnp.einsum("skgh,skhc->skgc", grouped, keys, **wide)
    scores.append(jnp.where(seen[:, None, None, :], score, -jnp.inf))
  itself = jnp.einsum("skgh,skh->skg", grouped, k, **wide)
  scores = jnp.concatenate([*scores, itself[..., None]], axis=-1)
  weights = jax.nn.softmax(scores / math.sqrt(size), axis=-1).astype(q.dtype)
  mixed = weights[..., -1:] * v[:, :, None, :]
  first = 0
  for keys, values, _ in caches:
    last = first + keys.shape[3]
    own = weights[..., first:last]
    mixed += jnp.einsum("skgc,skch->skgh", own, values)
    first = last
  return mixed.reshape(slots, heads, size)
