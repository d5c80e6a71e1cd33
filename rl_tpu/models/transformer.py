"""The decoder of the Qwen and Llama family, for learner and generator alike.

Pre-norm blocks with RMSNorm, rotary positions, grouped-query attention
(optional RMSNorm on q and k, as in Qwen3, or biases, as in Qwen2) and SwiGLU,
one or a mixture (`moe`); tied or untied head.
Layers are stacked and scanned, so compile time does not grow with depth. A
generator may hold them in several stacks (`Policy.stacks`), scanned one after
another: CPUs compute with a whole array where they would copy a layer out of a
stack at every step.

The Flax modules describe the weights and what a layer does. `Policy` binds a
`Config` to functions over a plain pytree of weights: that tree is what gets
sharded, differentiated, published and checkpointed.

Axes: R rows, T tokens, S slots, C context, L layers, D model, H heads, K heads
of keys and values, h head size, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from rl_tpu import sharding
from rl_tpu.models import attention, moe, paged, quantization
from rl_tpu.models.rotary import Scaling, Turns, rotary, turns

Params = dict[str, Any]
KeysValues = tuple[jax.Array, jax.Array]
Stacks = Sequence[KeysValues]
"""Keys and values of every layer: a pair for each stack of layers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Sizes and switches of one decoder."""

  vocab_size: int
  """Rows of the embedding; a multiple of 128 suits TPUs."""
  d_model: int
  """Width of the residual stream."""
  num_layers: int
  """Blocks, >= 1."""
  num_heads: int
  """Query heads."""
  num_kv_heads: int
  """Key and value heads; divides num_heads."""
  head_dim: int
  """Size of one head, even."""
  d_ff: int
  """Hidden units of the feed-forward block, or of each expert."""
  num_experts: int = 0
  """Feed-forward blocks of a layer, of which each token passes some; 0: one,
  for all tokens."""
  experts_per_token: int = 0
  """Of num_experts, in [1, num_experts]; 0 where there are none."""
  normalize_gates: bool = True
  """A token's experts are weighted to sum to 1 (Qwen3-MoE), not as likely as
  the router finds them."""
  rope_theta: float = 1e6
  """Base of the rotary frequencies."""
  rope_scaling: Scaling | None = None
  """Of the rotary frequencies, for longer contexts (Llama 3.1, YaRN)."""
  norm_eps: float = 1e-6
  """Added to the mean square in RMSNorm."""
  qk_norm: bool = True
  """RMSNorm on each query and key head (Qwen3)."""
  attention_bias: Literal["qkv", "qkvo"] | None = None
  """Projections with a bias: of query, key and value (Qwen2), or of the output
  too."""
  tied: bool = True
  """The head is the transposed embedding."""
  compute_dtype: str = "float32"
  """Of activations: float32 or bfloat16. The learner's weights, and logits, are
  float32; a generator holds weights as they are computed with."""
  remat: Literal["none", "dots", "full"] = "none"
  """What the backward pass of a layer computes again: nothing, all but products
  with weights, sums of norms and attention's kernel, or all; each holds less
  memory than the one before."""
  unroll: int = 1
  """Layers that a step of the scan over them computes, >= 1; from num_layers on
  there is no loop. Saves CPUs from moving activations into stacks and out of
  them again, for a compile time that grows with it."""

  def __post_init__(self):
    for field in dataclasses.fields(self):
      least = 0 if field.default == 0 else 1
      if field.type is int and getattr(self, field.name) < least:
        raise ValueError(
          f"{field.name} is {getattr(self, field.name)}; it must be >= {least}"
        )
    fewest = min(self.num_experts, 1)
    if not fewest <= self.experts_per_token <= self.num_experts:
      raise ValueError(
        f"experts_per_token is {self.experts_per_token}; it must be in "
        f"[{fewest}, num_experts = {self.num_experts}]"
      )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f"num_kv_heads is {self.num_kv_heads}; "
        f"it must divide num_heads {self.num_heads}"
      )
    if self.head_dim % 2:
      raise ValueError(f"head_dim is {self.head_dim}; it must be even")
    if self.attention_bias not in ("qkv", "qkvo", None):
      raise ValueError(
        f"attention_bias is {self.attention_bias!r}; "
        "it must be 'qkv', 'qkvo' or None"
      )
    if self.remat not in ("none", "dots", "full"):
      raise ValueError(
        f"remat is {self.remat!r}; it must be 'none', 'dots' or 'full'"
      )
    if self.compute_dtype not in ("float32", "bfloat16"):
      raise ValueError(
        f"compute_dtype is {self.compute_dtype!r}; "
        "it must be 'float32' or 'bfloat16'"
      )

  @property
  def routed(self) -> tuple[int, int]:
    """Layers, and experts of each, that a token passes."""
    return self.num_layers, self.experts_per_token


def _size(d_model, num_layers, num_heads, num_kv_heads, head_dim, d_ff, **kw):
  return Config(
    d_model=d_model,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    d_ff=d_ff,
    **{"vocab_size": 384, **kw},
  )


_QWEN3 = {"vocab_size": 151_936}
SIZES: dict[str, Config] = {
  "tiny": _size(64, 2, 4, 4, 16, 192, rope_theta=1e4),
  "1m": _size(128, 4, 4, 2, 32, 448, rope_theta=1e4),
  "5m": _size(256, 6, 8, 4, 32, 768, rope_theta=1e4),
  "qwen3-0.6b": _size(1024, 28, 16, 8, 128, 3072, **_QWEN3),
  "qwen3-1.7b": _size(2048, 28, 16, 8, 128, 6144, **_QWEN3),
  "qwen3-4b": _size(2560, 36, 32, 8, 128, 9728, **_QWEN3),
  "qwen3-8b": _size(4096, 36, 32, 8, 128, 12_288, tied=False, **_QWEN3),
  "qwen3-14b": _size(5120, 40, 40, 8, 128, 17_408, tied=False, **_QWEN3),
  "qwen3-32b": _size(5120, 64, 64, 8, 128, 25_600, tied=False, **_QWEN3),
  "tiny-moe": _size(
    *(64, 2, 4, 4, 16, 48), num_experts=8, experts_per_token=2, rope_theta=1e4
  ),
  "qwen3-30b-a3b": _size(
    *(2048, 48, 32, 4, 128, 768),
    num_experts=128,
    experts_per_token=8,
    tied=False,
    **_QWEN3,
  ),
  "llama3-8b": _size(
    *(4096, 32, 32, 8, 128, 14_336),
    vocab_size=128_256,
    rope_theta=5e5,
    norm_eps=1e-5,
    qk_norm=False,
    tied=False,
  ),
}
"""Shapes by name, 0.1M to 32B parameters; a3b: 3B active."""


def sized(name: str, **changes: Any) -> Config:
  """The config of this name, with some fields changed.

  Raises:
    ValueError: no such size; lists those there are.
  """
  if name not in SIZES:
    raise ValueError(f"model is {name!r}; it must be one of {sorted(SIZES)}")
  return dataclasses.replace(SIZES[name], **changes)


def _weight(rngs: nnx.Rngs, shape, axes: sharding.LogicalAxes, fan_in: int):
  """A float32 weight with its logical axes, normal with std fan_in^-1/2."""
  value = jax.random.normal(rngs.params(), shape) / math.sqrt(fan_in)
  return nnx.Param(value, logical_axes=axes)


def _bias(*shape: int):
  """A float32 bias of zeros, whole on every device; like norms, not decayed."""
  return nnx.Param(jnp.zeros(shape), logical_axes=(None,) * len(shape))


_SUMS = "sums"
"""Name of what products with weights and the sums of norms give."""
_SAVED = {
  "none": None,
  "dots": jax.checkpoint_policies.save_only_these_names(_SUMS, attention.KEPT),
  "full": jax.checkpoint_policies.nothing_saveable,
}
"""By `Config.remat`, what a layer keeps for its backward pass."""


class RMSNorm(nnx.Module):
  """x / rms(x) * scale over the last axis, computed in float32."""

  def __init__(self, size: int, eps: float):
    self.scale = nnx.Param(jnp.ones(size), logical_axes=(None,))
    self.eps = eps

  def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Normalises the last axis."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    mean_square = checkpoint_name(mean_square, _SUMS)
    normed = wide * jax.lax.rsqrt(mean_square + self.eps)
    return (normed * self.scale[...]).astype(x.dtype)


class Attention(nnx.Module):
  """The projections around attention; the caller says who attends to whom."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    d, h = config.d_model, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    self.query = _weight(rngs, (d, heads, h), ("embed", "heads", None), d)
    self.key = _weight(rngs, (d, kv_heads, h), ("embed", "kv_heads", None), d)
    self.value = _weight(rngs, (d, kv_heads, h), ("embed", "kv_heads", None), d)
    self.out = _weight(rngs, (heads, h, d), ("heads", None, "embed"), heads * h)
    if config.attention_bias:
      self.query_bias = _bias(heads, h)
      self.key_bias = _bias(kv_heads, h)
      self.value_bias = _bias(kv_heads, h)
    if config.attention_bias == "qkvo":
      self.out_bias = _bias(d)
    if config.qk_norm:
      self.query_norm = RMSNorm(h, config.norm_eps)
      self.key_norm = RMSNorm(h, config.norm_eps)
    self.config = config

  def __call__(
    self,
    x: Float[Array, "... D"],
    by: Turns,
    attend: Callable[
      [jax.Array, jax.Array, jax.Array], tuple[jax.Array, KeysValues]
    ],
  ) -> tuple[Float[Array, "... D"], KeysValues]:
    """Mixes tokens; returns the new keys and values beside the output.

    Heads are turned as positions want it. `attend` says what keys and values
    are: as computed, or as a cache holds them.
    """
    q = self._project("query", "...d,dnh->...nh", x)
    k = self._project("key", "...d,dnh->...nh", x)
    v = self._project("value", "...d,dnh->...nh", x)
    if self.config.qk_norm:
      q, k = self.query_norm(q), self.key_norm(k)
    mixed, keys_values = attend(rotary(q, by), rotary(k, by), v)
    # Names of summed axes ascend with their place in memory: einsum sums over
    # them by name, and in another order each step would transpose the weight.
    return self._project("out", "...gh,ghd->...d", mixed), keys_values

  def _project(self, name: str, equation: str, x: jax.Array) -> jax.Array:
    """Applies a weight, and its bias if it has one."""
    y = jnp.einsum(equation, x, getattr(self, name)[...].astype(x.dtype))
    y = checkpoint_name(y, _SUMS)
    bias = getattr(self, f"{name}_bias", None)
    return y if bias is None else y + bias[...].astype(x.dtype)


class FeedForward(nnx.Module):
  """SwiGLU: down(silu(gate x) * up x); nothing is routed."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    d, f = config.d_model, config.d_ff
    self.gate = _weight(rngs, (d, f), ("embed", "mlp"), d)
    self.up = _weight(rngs, (d, f), ("embed", "mlp"), d)
    self.down = _weight(rngs, (f, d), ("mlp", "embed"), f)

  def __call__(
    self, x: Float[Array, "... D"], replayed: None
  ) -> tuple[Float[Array, "... D"], None]:
    """Acts on each token by itself."""
    gate, up = (
      checkpoint_name(x @ weight[...].astype(x.dtype), _SUMS)
      for weight in (self.gate, self.up)
    )
    return (jax.nn.silu(gate) * up) @ self.down[...].astype(x.dtype), None


class Block(nnx.Module):
  """One pre-norm layer."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
    self.attention = Attention(config, rngs)
    self.feed_forward_norm = RMSNorm(config.d_model, config.norm_eps)
    self.feed_forward = _feed_forward(config, rngs)

  def __call__(self, x, by: Turns, attend, replayed=None):
    """Adds attention, then the feed-forward block, to the residual stream.

    Experts to replay are given as to `moe.mixture`. Returns keys, values and
    routing (None without experts) beside it.
    """
    mixed, keys_values = self.attention(
      _whole(self.attention_norm(x)), by, attend
    )
    x = _by_tokens(x + _scattered(mixed))
    y, routing = self.feed_forward(_whole(self.feed_forward_norm(x)), replayed)
    return _by_tokens(x + _scattered(y)), (keys_values, routing)


def _by_tokens(x: jax.Array) -> jax.Array:
  """Splits the residual stream by tokens among the devices that split heads.

  Along `sequence` it is split everywhere.

  Each then normalises and adds its own tokens, where all of them would do so
  for every token; a layer's sums over these devices become as many bytes of
  scattered sums and gathers (Korthikanti et al. 2022).
  """
  if x.ndim < 3 or not sharding.splits(x.shape[1], "tokens"):
    return x
  return sharding.constrain(x, "rows", "tokens", None)


def _whole(x: jax.Array) -> jax.Array:
  """All tokens of a part, for products with weights; undoes `_by_tokens`."""
  if x.ndim < 3 or not sharding.splits(x.shape[1], "tokens"):
    return x
  return sharding.constrain(x, "rows", "context", None)


@jax.custom_vjp
def _scattered(x: jax.Array) -> jax.Array:
  """`_by_tokens` of a product with weights, its gradient `_whole`.

  Left to itself the compiler may keep that gradient split, and then sums the
  gradient of the weights over these devices too.
  """
  return _by_tokens(x)


_scattered.defvjp(lambda x: (_by_tokens(x), None), lambda _, g: (_whole(g),))


def _feed_forward(config: Config, rngs: nnx.Rngs):
  """A layer's block, or its experts."""
  if not config.num_experts:
    return FeedForward(config, rngs)
  return moe.MixtureOfExperts(
    config.num_experts,
    config.experts_per_token,
    config.normalize_gates,
    (config.d_model, config.d_ff),
    functools.partial(_weight, rngs),
  )


class Transformer(nnx.Module):
  """Embedding, stacked blocks, final norm and head: the weights as a tree."""

  def __init__(self, config: Config, rngs: nnx.Rngs):
    d, v = config.d_model, config.vocab_size
    self.embedding = _weight(rngs, (v, d), ("vocab", "embed"), d)
    stack = nnx.vmap(lambda r: Block(config, r), in_axes=0, out_axes=0)
    self.layers = stack(rngs.split(config.num_layers))
    self.final_norm = RMSNorm(d, config.norm_eps)
    if not config.tied:
      self.head = _weight(rngs, (d, v), ("embed", "vocab"), d)


@functools.lru_cache
def _abstract(module: type[nnx.Module], config: Config) -> tuple[Any, Any]:
  """Graph definition and abstract state, without computing anything."""
  make: Any = module
  return nnx.split(nnx.eval_shape(lambda: make(config, nnx.Rngs(0))))


def _with_params(module: type[nnx.Module], config: Config, params: Any) -> Any:
  """The module around a tree of its weights."""
  graph, state = _abstract(module, config)
  state = jax.tree.map(lambda leaf: leaf, state)
  nnx.replace_by_pure_dict(state, params)
  return nnx.merge(graph, state)


@dataclasses.dataclass(frozen=True)
class Policy:
  """A decoder as functions of (params, tokens); hashable, holds no arrays."""

  config: Config
  stacks: int = 1
  """Arrays that a weight of the layers is split into, each of as many layers;
  keys and values come in as many. The learner's is 1."""
  kv_grid: quantization.Grid = "none"
  """What keys and values are rounded to, before anything attends to them; the
  learner's is none."""

  def __post_init__(self):
    if self.stacks < 1 or self.config.num_layers % self.stacks:
      raise ValueError(
        f"stacks is {self.stacks}; it must divide num_layers "
        f"{self.config.num_layers}"
      )

  def init(self, key: jax.Array) -> Params:
    """Draws float32 weights; jit it with shardings for a large model."""
    model = Transformer(self.config, nnx.Rngs(params=key))
    return self.split(nnx.to_pure_dict(nnx.split(model)[1]))

  def split(self, params: Params) -> Params:
    """The weights in this policy's stacks, given those of one stack.

    Copies the layers where there are several; cost is linear in their bytes.
    """
    if self.stacks == 1:
      return params
    depth = self.config.num_layers // self.stacks
    parts = [
      jax.tree.map(lambda x: x[first : first + depth], params["layers"])  # noqa: B023
      for first in range(0, self.config.num_layers, depth)
    ]
    return {**params, "layers": parts}

  def served(self, params: Params) -> Params:
    """The weights as a generator holds them, given the learner's.

    In this policy's stacks, and rounded now to what each product would round
    them to; norms and routers compute in float32.
    """

    def narrow(path, weight):
      wide = path[-1].key in ("scale", "router")
      return weight if wide else weight.astype(self.config.compute_dtype)

    return self.split(jax.tree_util.tree_map_with_path(narrow, params))

  def abstract_params(self) -> Params:
    """Shapes and dtypes of the weights."""
    whole = nnx.to_pure_dict(_abstract(Transformer, self.config)[1])
    return jax.eval_shape(self.split, whole)

  def logical_axes(self) -> Params:
    """Logical axes of each weight; stacked ones start with 'layers'."""

    def axes(variable):
      own = variable.get_metadata()["logical_axes"]
      stacked = len(variable.shape) - len(own)
      return ("layers",) * stacked + own

    state = jax.tree.map(
      axes,
      _abstract(Transformer, self.config)[1],
      is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    whole = nnx.to_pure_dict(state)
    if self.stacks == 1:
      return whole
    return {**whole, "layers": [whole["layers"]] * self.stacks}

  def param_shardings(self, mesh: jax.sharding.Mesh) -> Params:
    """Where each weight lives on `mesh`; raises where it does not divide."""
    return sharding.tree_shardings(
      mesh, self.abstract_params(), self.logical_axes()
    )

  def num_params(self) -> int:
    """Number of weights."""
    leaves = jax.tree.leaves(self.abstract_params())
    return sum(math.prod(leaf.shape) for leaf in leaves)

  def hidden(
    self,
    params: Params,
    tokens: Int[Array, "R T"],
    positions: Int[Array, "R T"],
    trajectory_ids: Int[Array, "R T"],
  ) -> Float[Array, "R T D"]:
    """Final hidden states of packed rows; no token sees another trajectory."""
    return self.routed(params, tokens, positions, trajectory_ids)[0]

  def routed(
    self,
    params: Params,
    tokens: Int[Array, "R T"],
    positions: Int[Array, "R T"],
    trajectory_ids: Int[Array, "R T"],
    replayed: Int[Array, "R T L k"] | None = None,
  ) -> tuple[Float[Array, "R T D"], moe.Routing | None]:
    """Final hidden states, and each layer's routing, [L, R, T, ...].

    Args:
      params: weights, in one stack.
      tokens: packed rows.
      positions: of each in its trajectory.
      trajectory_ids: -1 on padding.
      replayed: experts that each layer takes for a token instead of those that
        it would choose; -1 where it chooses.

    Raises:
      ValueError: rows or their tokens do not divide over the mesh in force.
    """
    sharding.check_even("a packed batch", tokens.shape[0], "rows")
    sharding.check_even("a row", tokens.shape[1], "context")
    rows = tokens.shape
    # On one device tokens pass the layers as one list: products of matrices,
    # where over two axes of tokens a CPU would transpose a copy of them for the
    # gradient of each weight.
    stream = (-1,) if sharding.one_device() else rows

    def apart(x):
      return x.reshape(*rows, *x.shape[-2:])

    def attend(_, q, k, v):
      mixed = attention.packed(apart(q), apart(k), apart(v), trajectory_ids)
      return mixed.reshape(q.shape)

    if replayed is not None:
      by_layer = jnp.moveaxis(replayed, 2, 0)
      replayed = by_layer.reshape(len(by_layer), *stream, replayed.shape[3])
    x = self._embed(params, tokens.reshape(stream), "rows")
    x, _, routing = self._layers(
      params, x, positions.reshape(stream), attend, replayed=replayed
    )
    routing = jax.tree.map(
      lambda a: a.reshape(len(a), *rows, *a.shape[x.ndim :]), _joined(routing)
    )
    x = _whole(self._final_norm(params, x))
    return x.reshape(*rows, -1), routing

  def logits(
    self, params: Params, hidden: Float[Array, "... D"]
  ) -> Float[Array, "... V"]:
    """Float32 logits of hidden states."""
    name, equation = "head", "...d,dv->...v"
    if self.config.tied:
      name, equation = "embedding", "...d,vd->...v"
    return jnp.einsum(
      equation,
      hidden,
      params[name].astype(hidden.dtype),
      preferred_element_type=jnp.float32,
    )

  def prefill(
    self,
    params: Params,
    tokens: Int[Array, "S T"],
    positions: Int[Array, "S T"] | None = None,
    ids: Int[Array, "S T"] | None = None,
  ) -> Stacks:
    """Keys and values, [l, S, T, K, h], of right-padded rows.

    Positions and ids are those of packed rows; without them a row is one
    sequence. Entries of padding are meaningless and must stay masked.
    """
    if positions is None or ids is None:
      ids = jnp.zeros_like(tokens)
      positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def attend(_, q, k, v):
      return attention.packed(q, k, v, ids)

    x = self._embed(params, tokens, "slots")
    _, keys_values, _ = self._layers(params, x, positions, attend)
    return keys_values

  def extend(
    self,
    params: Params,
    tokens: Int[Array, "S T"],
    starts: Int[Array, " S"],
    cache: Stacks,
    sources: Int[Array, " S"],
  ) -> Stacks:
    """Keys and values, [l, S, T, K, h], of tokens that continue a cache.

    Row s, right-padded, goes on at position starts[s] behind as many entries of
    slot sources[s] of a decode cache. Slots are taken layer by layer: where a
    mesh splits them, its devices exchange one layer of them at a time. Cost is
    linear in S * T * (C + T).
    """
    positions = starts[:, None] + jnp.arange(tokens.shape[1])

    def attend(layer, q, k, v):
      keys, values = (
        sharding.constrain(held[sources], "slots", "kv_heads", None, None)
        for held in layer
      )
      return attention.extended(q, k, v, (keys, values), starts)

    x = self._embed(params, tokens, "slots")
    _, new, _ = self._layers(params, x, positions, attend, cache)
    return new

  def decode(
    self,
    params: Params,
    tokens: Int[Array, " S"],
    positions: Int[Array, " S"],
    caches: Sequence[tuple[Stacks, Bool[Array, "S C"]]],
  ) -> tuple[Float[Array, "S V"], Stacks, moe.Routing | None]:
    """One token a slot against its caches, each of a size of its own.

    A cache is keys and values, [l, S, K, h, C] and [l, S, K, C, h], and which
    entries count. It is only read: the token's own key and value ([l, S, K, h])
    come back to be written once, and the routing, [L, S, ...]. Cost is linear
    in S * C.
    """
    by_stack = list(zip(*(cache for cache, _ in caches), strict=True))
    seen = [counted for _, counted in caches]

    def attend(layer, q, k, v):
      read = [(*kv, counted) for kv, counted in zip(layer, seen, strict=True)]
      return attention.one_token(q, k, v, read)

    x = self._embed(params, tokens, "slots")
    x, new, routing = self._layers(params, x, positions, attend, by_stack)
    logits = self.logits(params, self._final_norm(params, x))
    return logits, new, _joined(routing)

  def decode_paged(
    self,
    params: Params,
    tokens: Int[Array, " S"],
    positions: Int[Array, " S"],
    cache: Stacks,
  ) -> tuple[Float[Array, "S V"], Stacks, moe.Routing | None]:
    """`decode` with a cache for `paged.attend`, which is written in place.

    Keys and values are both [l, S, K, C, h]; entries before a slot's position
    count. Cost is linear in them.
    """
    layers = params["layers"]
    stacks = layers if isinstance(layers, list) else [layers]
    by = self._turns(positions)

    def body(carry, layer):
      x, held = carry
      weights, index = layer

      def attend(q, k, v):
        k, v = (quantization.snap_cache(x, self.kv_grid) for x in (k, v))
        keys, values = held
        return paged.attend(q, k, v, keys, values, index, positions)

      block = _with_params(Block, self.config, weights)
      x, (held, routed) = block(x, by, attend)
      return (x, held), routed

    x, written = self._embed(params, tokens, "slots"), []
    routing = []
    for stack, held in zip(stacks, cache, strict=True):
      numbers = jnp.arange(held[0].shape[0])
      (x, held), routed = jax.lax.scan(body, (x, held), (stack, numbers))
      written.append(held)
      routing.append(routed)
    logits = self.logits(params, self._final_norm(params, x))
    return logits, written, _joined(routing)

  def _turns(self, positions: Int[Array, "..."]) -> Turns:
    config = self.config
    half = config.head_dim // 2
    return turns(positions, half, config.rope_theta, config.rope_scaling)

  def _embed(self, params, tokens, axis):
    x = params["embedding"][tokens].astype(self.config.compute_dtype)
    return sharding.constrain(x, axis, *(None,) * (x.ndim - 1))

  def _final_norm(self, params, x):
    norm = RMSNorm(self.config.d_model, self.config.norm_eps)
    norm.scale = nnx.Param(params["final_norm"]["scale"])
    return norm(x)

  def _layers(
    self, params, x, positions, attend: Callable, cache=None, replayed=None
  ):
    """Scans the stacks of blocks; `attend` gets a layer's cache first.

    Experts to replay are [L, ..., k], where there is one stack. Returns what
    leaves the last block; keys and values, and routing, by stack.
    """
    layers = params["layers"]
    stacks = layers if isinstance(layers, list) else [layers]
    x, by = _by_tokens(x), self._turns(positions)

    def mix(layer_cache, q, k, v):
      k, v = (quantization.snap_cache(x, self.kv_grid) for x in (k, v))
      return attend(layer_cache, q, k, v), (k, v)

    def body(x, layer):
      weights, layer_cache, experts = layer
      block = _with_params(Block, self.config, weights)
      return block(x, by, functools.partial(mix, layer_cache), experts)

    policy = _SAVED[self.config.remat]
    if policy is not None and cache is None:
      # Inside a scan nothing can be merged with the backward pass anyway.
      body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    unroll = min(self.config.unroll, self.config.num_layers // len(stacks))
    keys_values, routing = [], []
    for stack in zip(stacks, cache or [None] * len(stacks), strict=True):
      x, (new, routed) = jax.lax.scan(
        body, x, (*stack, replayed), unroll=unroll
      )
      keys_values.append(new)
      routing.append(routed)
    return x, keys_values, routing


def _joined(routing: Sequence[moe.Routing | None]) -> moe.Routing | None:
  """The routing of all layers, given that of each stack of them."""
  return jax.tree.map(lambda *stacks: jnp.concatenate(stacks), *routing)
