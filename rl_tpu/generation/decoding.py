"""The decode state and what happens to it in the graph.

A slot holds one running sequence: the keys and values of its tokens, its last
token, and everything that decides how it goes on. Insertion computes keys and
values only; the first token comes from the same decode step as every other.
So there is one sampling path, and a sequence that is resumed (prompt and
partial answer inserted again) continues as if it had never stopped.

Host and device exchange two arrays. `pack` lays out the sequences to insert as
one int32 array, a sequence a row; `decode` answers with one int32 array, a slot
a row. Floats travel as their bits.

Axes: S slots, B sequences inserted together, P padded prompt (a bucket),
C cache entries, l layers of one stack, K heads of keys and values, h head size,
E stop ids, W columns of a row, n decode steps of one dispatch, H tokens of the
sampler's head, L layers and k experts that each takes a token through.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from rl_tpu import sharding
from rl_tpu.generation import sampling
from rl_tpu.generation.jetstream import engine_api
from rl_tpu.models import attention, paged, transformer
from rl_tpu.types import Request

RUNNING, STOPPED, EXHAUSTED = 0, 1, 2
"""How a slot stands after a dispatch: goes on, stop id, budget used up."""

_LEAD = 3
"""Columns before the row of a packed sequence: its slot, the slot whose cache
it shares and how many entries of that."""

_ROW = (
  *("token", "position", "budget", "top_k", "stop_from"),
  *("temperature", "top_p", "min_p"),
  *("seed", "prompt_index", "member"),
)
_CURSOR = slice(0, 3)
_TOP_K, _STOP_FROM = 3, 4
_FLOATS = slice(5, 8)
_IDENTITY = slice(8, 11)
_STOP_IDS = len(_ROW)
"""Columns of a slot's row: where the sequence stands, how it samples (floats
as bits), who it is, and from here on its stop ids."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
  """A sequence to put into a slot: a new request, or one that goes on."""

  slot: int
  tokens: np.ndarray
  """i32[T]: the prompt and what was sampled so far."""
  budget: int
  """Tokens that may still be sampled, >= 1."""
  request: Request
  """Whose sampling settings and identity these are."""
  source: int = 0
  """A slot whose cache begins with the same tokens; may be `slot` itself."""
  shared: int = 0
  """How many entries are taken from there, in [0, T); 0 shares nothing."""

  @property
  def missing(self) -> np.ndarray:
    """The tokens whose keys and values must be computed.

    The last token's are computed again by the decode step that continues it;
    without a shared prefix it is here all the same, so that every prefill has
    a token.
    """
    return self.tokens[self.shared : -1] if self.shared else self.tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
  """Every slot's cache and row; a slot is free when its budget is 0.

  The cache lies as attention reads it (`attention.as_cache`): what it sums over
  comes last in memory for keys, next to last for values.
  """

  cache: transformer.Stacks
  """Keys [l, S, K, h, C], or [l, S, K, C, h] where they are paged, and values
  [l, S, K, C, h] of each stack of layers."""
  rows: Int[Array, "S W"]
  """Last token, its position and the tokens that may still be sampled; then
  sampling settings, identity and stop ids (-1 where unused)."""


@struct.dataclass
class Result(engine_api.ResultTokens):
  """What one dispatch sampled: JetStream's result and what learning needs."""

  logp_idx: tuple[int, int] = struct.field(pytree_node=False)
  """Columns of the log-probabilities, as bits."""
  topk_ids_idx: tuple[int, int] = struct.field(pytree_node=False)
  """Columns of the heads' tokens, step by step."""
  topk_logp_idx: tuple[int, int] = struct.field(pytree_node=False)
  """Columns of the heads' log-probabilities, as bits."""
  routed: tuple[int, int] = struct.field(pytree_node=False)
  """L and k of the experts, whose columns come next."""
  version: int = struct.field(pytree_node=False)
  """Of the weights that sampled."""

  @classmethod
  def of(
    cls,
    data: jax.Array,
    steps: int,
    head_size: int,
    routed: tuple[int, int],
    version: int,
  ) -> "Result":
    """Names the columns that `decode` returned; L = k = 0: no experts."""
    n, heads = steps, steps * head_size
    return cls(
      data=data,
      tokens_idx=(0, n),
      valid_idx=(n, 2 * n),
      length_idx=(2 * n, 2 * n + 1),
      samples_per_slot=1,
      logp_idx=(2 * n + 1, 3 * n + 1),
      topk_ids_idx=(3 * n + 1, 3 * n + 1 + heads),
      topk_logp_idx=(3 * n + 1 + heads, 3 * n + 1 + 2 * heads),
      routed=routed,
      version=version,
    )

  def convert_to_numpy(self) -> "Result":
    """Waits for the result and copies it to the host, once."""
    return dataclasses.replace(self, data=np.asarray(self.data))

  @property
  def tokens(self) -> Int[np.ndarray, "S n"]:
    """Sampled tokens, meaningful where valid."""
    return self._columns(self.tokens_idx)

  @property
  def counts(self) -> Int[np.ndarray, " S"]:
    """Tokens that each slot sampled; they come first in its row."""
    return self._columns(self.valid_idx).sum(axis=1)

  @property
  def logp(self) -> Float[np.ndarray, "S n"]:
    """Under the distribution sampled from."""
    return self._columns(self.logp_idx).view(np.float32)

  @property
  def topk_ids(self) -> Int[np.ndarray, "S n H"]:
    """The head of each step; H = 0 where none is kept."""
    return self._heads(self.topk_ids_idx)

  @property
  def topk_logp(self) -> Float[np.ndarray, "S n H"]:
    """Of the heads' tokens."""
    return self._heads(self.topk_logp_idx).view(np.float32)

  @property
  def experts(self) -> Int[np.ndarray, "S n L k"]:
    """Those that gave each token its distribution; L = 0: not recorded."""
    slots, steps = self.tokens.shape
    columns = self._columns((self.topk_logp_idx[1], -1)).astype(np.int16)
    return columns.reshape(slots, steps, *self.routed)

  @property
  def standing(self) -> Int[np.ndarray, " S"]:
    """How each slot stands: RUNNING, STOPPED or EXHAUSTED."""
    return self._columns((-1, None))[:, 0]

  def _columns(self, span: tuple[int, int | None]) -> np.ndarray:
    return np.asarray(self.data)[:, slice(*span)]

  def _heads(self, span: tuple[int, int]) -> np.ndarray:
    slots, steps = self.tokens.shape
    size = (span[1] - span[0]) // steps
    return self._columns(span).reshape(slots, steps, size)


def empty_state(
  policy: transformer.Policy, slots: int, entries: int, max_stop_ids: int
) -> DecodeState:
  """A state without a running sequence."""
  return DecodeState(
    cache=_empty_cache(policy, slots, entries),
    rows=jnp.zeros((slots, _STOP_IDS + max_stop_ids), jnp.int32),
  )


def _empty_cache(
  policy: transformer.Policy, slots: int, entries: int
) -> transformer.Stacks:
  config = policy.config
  shape = (config.num_layers // policy.stacks, slots, config.num_kv_heads)
  size, dtype = config.head_dim, config.compute_dtype
  keys = (size, entries)
  if _paged(policy):
    entries = paged.entries(entries)
    keys = (entries, size)
  return [
    (
      jnp.zeros((*shape, *keys), dtype),
      jnp.zeros((*shape, entries, size), dtype),
    )
    for _ in range(policy.stacks)
  ]


def _paged(policy: transformer.Policy) -> bool:
  return paged.suits(policy.config.head_dim, policy.config.compute_dtype)


def state_shardings(mesh: jax.sharding.Mesh) -> Any:
  """Slots over the mesh's data axes, cache heads over its tensor axis."""
  caches: Any = sharding.named(mesh, None, "slots", "kv_heads", None, None)
  rows: Any = sharding.named(mesh, "slots")
  return DecodeState(cache=caches, rows=rows)


def cache_sharding(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """Of keys and values [l, B, P, K, h] on their way to the state."""
  return sharding.named(mesh, None, "slots", None, "kv_heads", None)


def pack(
  admissions: Sequence[Admission],
  *,
  rows: int,
  bucket: int,
  slots: int,
  max_stop_ids: int,
) -> Int[np.ndarray, "B _"]:
  """Lays out sequences: their headers, and the padded missing tokens."""
  tokens = np.zeros((rows, bucket), np.int32)
  for row, admission in zip(tokens, admissions, strict=False):
    row[: len(admission.missing)] = admission.missing
  lead = headers(admissions, rows=rows, slots=slots, max_stop_ids=max_stop_ids)
  return np.concatenate([lead, tokens], axis=1)


def headers(
  admissions: Sequence[Admission],
  *,
  rows: int,
  slots: int,
  max_stop_ids: int,
) -> Int[np.ndarray, "B _"]:
  """Where each sequence goes, and the row of its slot.

  Unused ones name slot `slots`, which does not exist: inserting drops them.
  """
  packed = np.zeros((rows, _LEAD + _STOP_IDS + max_stop_ids), np.int32)
  packed[:, 0] = slots
  row = packed[:, _LEAD:]
  row[:, _STOP_IDS:] = -1
  for i, admission in enumerate(admissions):
    request = admission.request
    how, last = request.sampling, len(admission.tokens) - 1
    packed[i, :_LEAD] = admission.slot, admission.source, admission.shared
    row[i, _CURSOR] = admission.tokens[last], last, admission.budget
    row[i, _TOP_K] = how.top_k
    row[i, _STOP_FROM] = len(request.tokens) + how.min_tokens
    floats = np.array([how.temperature, how.top_p, how.min_p], np.float32)
    row[i, _FLOATS] = floats.view(np.int32)
    who = (request.seed, request.prompt_index, request.member)
    row[i, _IDENTITY] = np.array(who, np.uint32).view(np.int32)
    row[i, _STOP_IDS : _STOP_IDS + len(how.stop_ids)] = how.stop_ids
  return packed


def padded_tokens(
  packed: Int[Array, "B _"], max_stop_ids: int
) -> Int[Array, "B P"]:
  """The token columns of packed sequences."""
  return packed[:, _LEAD + _STOP_IDS + max_stop_ids :]


def insert(
  state: DecodeState,
  prefilled: transformer.Stacks,
  packed: Int[Array, "B _"],
) -> DecodeState:
  """Writes packed sequences, and their prefilled cache, into their slots.

  The entry of the last token and those of the padding are written too; they
  lie at or after its position, where nothing looks before they are overwritten.
  Layers are written one after the other: where a mesh splits slots each of its
  devices gets the entries of all sequences, but never of all layers at once.
  """

  def write(stack, layer, new):
    return write_layer(stack, layer, packed[:, 0], new)

  return insert_by_layers(state, prefilled, packed, write)


def insert_by_layers(
  state: DecodeState,
  prefilled: transformer.Stacks,
  packed: Int[Array, "B _"],
  write: Callable[[Any, Any, Any], Any],
) -> DecodeState:
  """Inserts packed sequences; `write` does so for a layer of a stack.

  It gets the stack's cache, the layer's number, and the keys and values that
  were prefilled for that layer, and returns the cache.
  """

  def one(layer, stack, new):
    return write(stack, layer, jax.tree.map(lambda x: x[layer], new))

  cache = [
    jax.lax.fori_loop(0, len(stack[0]), functools.partial(one, new=new), stack)
    for stack, new in zip(state.cache, prefilled, strict=True)
  ]
  return DecodeState(cache=cache, rows=_write_rows(state, packed))


def write_layer(
  stack: transformer.KeysValues,
  layer: Int[Array, ""],
  slot: Int[Array, " B"],
  new: transformer.KeysValues,
) -> transformer.KeysValues:
  """A cache with the first entries of these slots replaced in one layer."""
  written = []
  for held, own in zip(stack, attention.as_cache(*new), strict=True):
    first = (slice(size) for size in own.shape[1:])
    written.append(held.at[layer, slot, *first].set(own, mode="drop"))
  keys, values = written
  return keys, values


def extend(
  policy: transformer.Policy,
  params: transformer.Params,
  state: DecodeState,
  packed: Int[Array, "B _"],
) -> DecodeState:
  """Inserts packed sequences whose caches begin like those of other slots.

  Each takes the first entries of its source and computes the rest, if there
  is a rest. In each layer all sources are read before any slot is written.
  Cost: one copy of a slot's cache a sequence, and the missing tokens against
  it.
  """
  slot, source, shared = packed[:, :_LEAD].T
  tokens = padded_tokens(packed, state.rows.shape[1] - _STOP_IDS)
  missing: Sequence[Any] = [None] * len(state.cache)
  if tokens.shape[1]:
    missing = policy.extend(params, tokens, shared, state.cache, source)

  def write(stack, layer, new):
    taken = tuple(held[layer, source] for held in stack)
    if tokens.shape[1]:
      taken = attention.continued(taken, new, shared)
    return tuple(
      held.at[layer, slot].set(own, mode="drop")
      for held, own in zip(stack, taken, strict=True)
    )

  return insert_by_layers(state, missing, packed, write)


def _write_rows(
  state: DecodeState, packed: Int[Array, "B _"]
) -> Int[Array, "S W"]:
  rows = packed[:, _LEAD : _LEAD + state.rows.shape[1]]
  return state.rows.at[packed[:, 0]].set(rows, mode="drop")


def release(state: DecodeState, freed: Bool[Array, " S"]) -> DecodeState:
  """Stops the sequences of these slots."""
  budget = jnp.where(freed, 0, state.rows[:, 2])
  return dataclasses.replace(state, rows=state.rows.at[:, 2].set(budget))


def decode(
  policy: transformer.Policy,
  params: transformer.Params,
  state: DecodeState,
  steps: int,
  head_size: int,
  record_experts: bool = False,
) -> tuple[DecodeState, Int[Array, "S _"]]:
  """Runs `steps` decode steps; sequences end in the graph.

  A sequence ends with a stop id (which is kept) or when its budget is used up;
  from then on its slot neither emits nor advances.

  Returns:
    The state, and i32[S, 3n + 2nH + 2]: tokens [n], valid [n], length [1],
    logp as bits [n], the heads' tokens [n, H] and logp as bits [n, H], the
    experts [n, L, k] where they are recorded, and how the slot stands [1].
  """
  settings = _settings(state.rows)
  identity = state.rows[:, _IDENTITY].astype(jnp.uint32)
  sampling_keys = sampling.identity_keys(*identity.T)
  stop_ids = state.rows[:, _STOP_IDS:]
  starts = state.rows[:, 1]
  model, held = _model(policy, params, state, steps)

  def one_step(carry, step):
    held, tokens, positions, budget = carry
    active = budget > 0
    logits, held, routing = model(held, tokens, positions, step)
    logits = _bar_stop_ids(logits, state.rows, positions, active)
    sampled, logp, head = sampling.sample(
      logits, sampling_keys, positions + 1, settings, active, head_size
    )
    hit = jnp.any(sampled[:, None] == stop_ids, axis=1) & active
    carry = (
      held,
      jnp.where(active, sampled, tokens),
      positions + active,
      jnp.where(hit, 0, budget - active),
    )
    experts = routing.experts if record_experts else None
    return carry, ((sampled, active, logp, hit), head, experts)

  cursor = state.rows[:, _CURSOR].T
  carry, (emitted, heads, experts) = jax.lax.scan(
    one_step, (held, *cursor), jnp.arange(steps)
  )
  held, last, positions, budget = carry
  cache = held
  if not _paged(policy):
    cache = _by_axis(
      lambda cache, new, axis: _append(
        cache, new, starts, positions - starts, axis
      ),
      state.cache,
      held,
    )
  tokens, valid, logp, hit = (x.T for x in emitted)
  ended = valid[:, 0] & (budget == 0)
  standing = jnp.where(jnp.any(hit, axis=1), STOPPED, EXHAUSTED)
  columns = (
    tokens,
    valid,
    positions[:, None] + 1,
    _bits(logp),
    *_head_columns(heads),
    *_expert_columns(experts),
    jnp.where(ended, standing, RUNNING)[:, None],
  )
  packed = jnp.concatenate([c.astype(jnp.int32) for c in columns], axis=1)
  cursor = jnp.stack([last, positions, budget], axis=1)
  rows = state.rows.at[:, _CURSOR].set(cursor)
  return DecodeState(cache=cache, rows=rows), packed


def _model(
  policy: transformer.Policy,
  params: transformer.Params,
  state: DecodeState,
  steps: int,
) -> tuple[Callable[..., tuple[jax.Array, Any, Any]], transformer.Stacks]:
  """One step of the model, and what it takes along from step to step.

  A step gives logits, that, and the routing. What goes along is a paged cache,
  written as it goes: a slot that has ended writes its last token's entry again,
  which does not count. Otherwise it is the entries of this dispatch, beside a
  cache that is only read.
  """
  if _paged(policy):

    def in_place(cache, tokens, positions, _):
      return policy.decode_paged(params, tokens, positions, cache)

    return in_place, state.cache

  slots, entries = state.rows.shape[0], state.cache[0][0].shape[-1]
  before = jnp.arange(entries) < state.rows[:, 1, None]

  def beside(recent, tokens, positions, step):
    known = jnp.broadcast_to(jnp.arange(steps) < step, (slots, steps))
    caches = [(state.cache, before), (recent, known)]
    logits, new, routing = policy.decode(params, tokens, positions, caches)
    recent = _by_axis(
      lambda cache, token, axis: jax.lax.dynamic_update_index_in_dim(
        cache, token.astype(cache.dtype), step, axis
      ),
      recent,
      new,
    )
    return logits, recent, routing

  return beside, _empty_cache(policy, slots, steps)


def _settings(rows: Int[Array, "S W"]) -> sampling.Settings:
  floats = jax.lax.bitcast_convert_type(rows[:, _FLOATS], jnp.float32)
  temperature, top_p, min_p = floats.T
  return sampling.Settings(
    temperature=temperature, top_k=rows[:, _TOP_K], top_p=top_p, min_p=min_p
  )


def _bar_stop_ids(
  logits: Float[Array, "S V"],
  rows: Int[Array, "S W"],
  positions: Int[Array, " S"],
  active: Bool[Array, " S"],
) -> Float[Array, "S V"]:
  """Takes stop ids out of reach where too few tokens have been sampled."""
  barred = active & (positions + 1 < rows[:, _STOP_FROM])

  def bar():
    stop_ids = rows[:, _STOP_IDS:]
    wanted = barred[:, None] & (stop_ids >= 0)
    column = jnp.where(wanted, stop_ids, logits.shape[1])
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, column].set(-jnp.inf, mode="drop")

  return jax.lax.cond(jnp.any(barred), bar, lambda: logits)


def _head_columns(
  heads: tuple[Int[Array, "n S H"], Float[Array, "n S H"]] | None,
) -> list[Int[Array, "S _"]]:
  """A row of columns for each slot, step after step."""
  if heads is None:
    return []
  ids, logp = heads
  rows = (x.swapaxes(0, 1) for x in (ids, _bits(logp)))
  return [x.reshape(x.shape[0], -1) for x in rows]


def _expert_columns(
  experts: Int[Array, "n L S k"] | None,
) -> list[Int[Array, "S _"]]:
  """The same, and in a step layer after layer."""
  if experts is None:
    return []
  by_slot = jnp.moveaxis(experts, 2, 0)
  return [by_slot.reshape(len(by_slot), -1)]


def _bits(x: Float[Array, "*axes"]) -> Int[Array, "*axes"]:
  return jax.lax.bitcast_convert_type(x, jnp.int32)


def _by_axis(
  update: Callable[[jax.Array, jax.Array, int], jax.Array],
  cache: transformer.Stacks,
  new: transformer.Stacks,
) -> transformer.Stacks:
  """Maps over all keys, then values, told which axis their entries lie on."""
  return [
    (update(keys, new_keys, 4), update(values, new_values, 3))
    for (keys, values), (new_keys, new_values) in zip(cache, new, strict=True)
  ]


def _append(
  cache: Float[Array, "l S *entry"],
  new: Float[Array, "l S *step"],
  starts: Int[Array, " S"],
  counts: Int[Array, " S"],
  axis: int,
) -> Float[Array, "l S *entry"]:
  """Writes the first counts[s] entries of `new` behind those of each slot.

  On TPUs by choices, one for each step, which pass over the cache once: a
  scatter, or a product with a batch of slots, would change its layout and back.
  """
  if not sharding.on_tpu():
    return _scatter(cache, new, starts, counts, axis)
  entry = jnp.arange(cache.shape[axis]) - starts[:, None]
  other = [a for a in range(5) if a not in (1, axis)]
  for step in range(new.shape[axis]):
    here = (entry == step) & (step < counts[:, None])
    one = jax.lax.slice_in_dim(new, step, step + 1, axis=axis)
    cache = jnp.where(jnp.expand_dims(here, other), one, cache)
  return cache


def _scatter(
  cache: Float[Array, "l S *entry"],
  new: Float[Array, "l S *step"],
  starts: Int[Array, " S"],
  counts: Int[Array, " S"],
  axis: int,
) -> Float[Array, "l S *entry"]:
  """Slots are a batch dimension, so it stays local to their devices."""
  step = jnp.arange(new.shape[axis])
  entry = jnp.where(
    step < counts[:, None], starts[:, None] + step, cache.shape[axis]
  )
  dimensions = jax.lax.ScatterDimensionNumbers(
    update_window_dims=tuple(a for a in range(5) if a not in (1, axis)),
    inserted_window_dims=(axis,),
    scatter_dims_to_operand_dims=(axis,),
    operand_batching_dims=(1,),
    scatter_indices_batching_dims=(0,),
  )
  return jax.lax.scatter(
    cache,
    entry[..., None],
    new,
    dimensions,
    unique_indices=True,
    mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
  )
