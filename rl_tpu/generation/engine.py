"""The policy behind JetStream's Engine interface, on its own mesh.

One class, no fork of the model: prefill, insertion and decoding are the
functions of `decoding` around a `transformer.Policy`, jitted with shardings,
the decode state donated. Parameters are always a `types.VersionedParams`, and
every result is stamped with the version of the weights that this dispatch was
given: reading it later, at delivery, would name the wrong one.

Shapes are few: one program per (prefill bucket, number of rows) and one for
decoding, and as many again where prefixes are shared; `warm_up` compiles them
all.

`serve` is the one place where the learner's weights become those that the
engine computes with: in its layout, and with the mismatch that is asked for.

Beside JetStream's interface, whose insertion takes one sequence and no
sampling settings, `admit` prefills and inserts many at once, `release` frees
slots, and `check_request` and `check_params` refuse what the engine cannot
serve.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rl_tpu import sharding
from rl_tpu.generation import decoding
from rl_tpu.generation import prefill as prefills
from rl_tpu.generation.decoding import Admission, DecodeState
from rl_tpu.generation.jetstream import engine_api
from rl_tpu.models import quantization, transformer
from rl_tpu.types import Request, Sampling, VersionedParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Sizes of one engine; each costs memory or a compilation."""

  slots: int = 32
  """Sequences decoded together, >= 1; divides over the mesh's data axes."""
  context_length: int = 64
  """Most tokens of one sequence, prompt included, >= 2."""
  prefill_buckets: tuple[int, ...] = (16, 32, 64)
  """Lengths that prompts are padded to, ascending. The last one limits the
  prompt; it must reach context_length for interrupted sequences to go on."""
  prefill_batches: tuple[int, ...] = (1, 8, 32)
  """Numbers of rows prefilled together, ascending; each is a program for each
  bucket. Rounded up to what the mesh's data axes divide."""
  prompts_per_row: int = 1
  """Most sequences that one row of a prefill holds, >= 1; with 1 each is padded
  by itself, with more they are packed into the rows that need fewest tokens.
  Those that share a prefix keep rows of their own. On one CPU, 16 prompts of
  log-normal length (16 to 500) in buckets (64, 256, 512): 1.08 tokens computed
  for each asked with 8, 1.97 with 1, and 0.57 times the processor time.
  Prompts of one length gain nothing."""
  steps_per_dispatch: int = 2
  """Decode steps of one call, >= 1. More spare host time; but new weights,
  cancellations and free slots wait for the end of a dispatch."""
  dispatch_ahead: bool = False
  """Enqueues the next prefill and dispatch before the last one's result is
  read, so that devices do not wait for the host; unless that result surely
  frees a slot that a request waits for. Tokens and versions are the same. An
  answer that ends by a stop id leaves its slot unused for one dispatch more:
  where answers take 8 dispatches that cost 7 and 15 % of the tokens a processor
  second in two runs on one CPU, where devices hardly wait for the host. The
  time of prefills counts as that of their dispatch."""
  max_stop_ids: int = 4
  """Most stop ids of one request, >= 1."""
  behavior_top_k: int = 0
  """K most likely tokens kept with each sampled one, for score centering, in
  [0, vocab_size]; 0 keeps none (Score Centering: 128; vocab_size is exact).
  Costs 8 K bytes a token."""
  record_experts: bool = False
  """Keeps with each sampled token the experts that gave it, for a learner
  with router_replay. Costs 2 bytes for each layer and expert of a token: 768 a
  token of Qwen3-30B-A3B."""
  min_shared_prefix: int = 64
  """Sequences that begin with at least this many tokens of another slot's take
  its keys and values over in place of computing them: the members of a group,
  the next turn of a conversation. >= 0; 0 never does. Only what the weights in
  service computed is shared."""
  mismatch: quantization.Config = dataclasses.field(
    default_factory=quantization.Config
  )
  """What sets this engine apart from the learner at equal version: rounded
  weights and cache, noise, old weights. Training sees all of it; evaluations
  are sampled without, by an engine of their own that training waits for."""

  def __post_init__(self):
    for name, least in (
      ("slots", 1),
      ("context_length", 2),
      ("prompts_per_row", 1),
      ("steps_per_dispatch", 1),
      ("max_stop_ids", 1),
      ("behavior_top_k", 0),
      ("min_shared_prefix", 0),
    ):
      if getattr(self, name) < least:
        raise ValueError(
          f"{name} is {getattr(self, name)}; it must be >= {least}"
        )
    for name in ("prefill_buckets", "prefill_batches"):
      sizes = getattr(self, name)
      if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
        raise ValueError(
          f"{name} is {sizes}; it must hold ascending numbers >= 1"
        )

  @property
  def max_prompt_length(self) -> int:
    """Longest prompt: it fits a bucket and leaves room for a token."""
    return min(self.prefill_buckets[-1], self.context_length - 1)

  @property
  def shares_prefixes(self) -> bool:
    """Whether any prompt is long enough to share a prefix."""
    return 0 < self.min_shared_prefix < self.max_prompt_length

  def bucket(self, length: int) -> int:
    """The smallest bucket that holds `length` tokens.

    Raises:
      ValueError: there is none.
    """
    for bucket in self.prefill_buckets:
      if length <= bucket:
        return bucket
    raise ValueError(
      f"a prompt of {length} tokens does not fit the largest prefill bucket, "
      f"{self.prefill_buckets[-1]}; add a bucket or shorten the prompt"
    )


@struct.dataclass
class Prefix:
  """One prefilled sequence, waiting for a slot."""

  cache: Any
  packed: Any


class _Programs(NamedTuple):
  """The jitted functions of one (policy, config, mesh)."""

  draw_noise: Callable[[Any], Any]
  serve: Callable[[Any, Any], Any]
  empty_state: Callable[[], DecodeState]
  prefill: Callable[..., Any]
  insert: Callable[..., DecodeState]
  admit: jax.stages.Wrapped
  extend: jax.stages.Wrapped
  release: Callable[..., DecodeState]
  decode: jax.stages.Wrapped


@functools.lru_cache
def _programs(
  policy: transformer.Policy, config: Config, mesh: jax.sharding.Mesh
) -> _Programs:
  """Jits the functions; engines of equal arguments share the compilations.

  `policy` is the one that serves, with its stacks of layers.
  """
  whole = sharding.named(mesh)
  weights = policy.param_shardings(mesh)
  caches = decoding.cache_sharding(mesh)
  entries = max(config.context_length, config.prefill_buckets[-1])

  def empty_state():
    return decoding.empty_state(
      policy, config.slots, entries, config.max_stop_ids
    )

  states = decoding.state_shardings(mesh)
  draw_noise = functools.partial(
    quantization.draw_noise, config=config.mismatch
  )
  given = None
  if config.mismatch.weight_noise:
    given = dataclasses.replace(policy, stacks=1).param_shardings(mesh)

  def serve(params, noise):
    return policy.served(
      quantization.snap_weights(params, config.mismatch, noise)
    )

  def prefill(params, packed):
    tokens = decoding.padded_tokens(packed, config.max_stop_ids)
    return policy.prefill(params, tokens)

  def admit(params, state, packed):
    if config.prompts_per_row > 1:
      return prefills.insert(policy, params, state, packed)
    return decoding.insert(state, prefill(params, packed), packed)

  def extend(params, state, packed):
    return decoding.extend(policy, params, state, packed)

  def decode(params, state):
    return decoding.decode(
      policy,
      params,
      state,
      config.steps_per_dispatch,
      config.behavior_top_k,
      config.record_experts,
    )

  return _Programs(
    draw_noise=jax.jit(draw_noise, out_shardings=given),
    serve=jax.jit(serve, out_shardings=weights),
    empty_state=jax.jit(empty_state, out_shardings=states),
    prefill=jax.jit(
      prefill, in_shardings=(weights, whole), out_shardings=caches
    ),
    insert=jax.jit(
      decoding.insert,
      in_shardings=(states, caches, whole),
      out_shardings=states,
      donate_argnums=0,
    ),
    admit=jax.jit(
      admit,
      in_shardings=(weights, states, whole),
      out_shardings=states,
      donate_argnums=1,
    ),
    extend=jax.jit(
      extend,
      in_shardings=(weights, states, whole),
      out_shardings=states,
      donate_argnums=1,
    ),
    release=jax.jit(
      decoding.release,
      in_shardings=(states, whole),
      out_shardings=states,
      donate_argnums=0,
    ),
    decode=jax.jit(
      decode,
      in_shardings=(weights, states),
      out_shardings=(states, whole),
      donate_argnums=1,
    ),
  )


def _stacks(policy: transformer.Policy, mesh: jax.sharding.Mesh) -> int:
  """TPUs slice a stack as they read it; elsewhere a layer is an array."""
  on_tpu = mesh.devices.flat[0].platform == "tpu"
  return 1 if on_tpu else policy.config.num_layers


class PolicyEngine(engine_api.Engine):
  """Serves one policy on one mesh."""

  def __init__(
    self,
    policy: transformer.Policy,
    mesh: jax.sharding.Mesh,
    config: Config,
  ):
    """Prepares the programs; nothing is compiled or allocated yet.

    Raises:
      ValueError: slots or weights do not divide over the mesh, the head is
        larger than the vocabulary, the mismatch does not fit the weights, or
        experts are to be recorded where there are none.
    """
    ways = sharding.ways(mesh, "slots")
    if config.slots % ways:
      raise ValueError(
        f"slots is {config.slots}; it must be a multiple of {ways}, the size "
        f"of mesh axes {sharding.RULES['slots']}"
      )
    if sharding.ways(mesh, "context") > 1:
      raise ValueError(
        f"the generator's mesh has sequence {sharding.ways(mesh, 'context')}; "
        "it must be 1: use tensor or fsdp"
      )
    vocabulary = policy.config.vocab_size
    if config.behavior_top_k > vocabulary:
      raise ValueError(
        f"behavior_top_k is {config.behavior_top_k}; it must be at most "
        f"vocab_size, {vocabulary}"
      )
    if config.record_experts and not policy.config.num_experts:
      raise ValueError(
        "record_experts is True; it must be False for a policy without experts "
        "(num_experts 0)"
      )
    self.policy = policy
    self.config = config
    self._mesh = mesh
    self._served = dataclasses.replace(
      policy, stacks=_stacks(policy, mesh), kv_grid=config.mismatch.kv
    )
    self._programs = _programs(self._served, config, mesh)
    self._noise: Any = None
    abstract = policy.abstract_params()
    noise = jax.eval_shape(self._programs.draw_noise, abstract)
    self._weights = sharding.placed(
      jax.eval_shape(self._programs.serve, abstract, noise),  # May refuse.
      self._served.param_shardings(mesh),
    )
    self._batches = sorted(
      {-(-min(n, config.slots) // ways) * ways for n in config.prefill_batches}
    )
    self._splits = prefills.cheapest_splits(config.slots, self._batches)
    self.prefilled_tokens = 0
    """Tokens that `admit` had computed, padding included."""

  # What JetStream asks of an engine.

  def load_params(self, params: Any, version: int = 0) -> VersionedParams:
    """Copies the policy's weights to this engine's mesh, as it serves them."""
    moved = sharding.reshard(params, self.policy.param_shardings(self._mesh))
    return self.serve(VersionedParams(version=version, params=moved))

  def zeros(self) -> VersionedParams:
    """Weights that compute nothing, as this engine holds them."""
    where = jax.tree.map(lambda like: like.sharding, self._weights)
    make = jax.jit(
      lambda: jax.tree.map(
        lambda like: jnp.zeros(like.shape, like.dtype), self._weights
      ),
      out_shardings=where,
    )
    return VersionedParams(version=0, params=make())

  def init_decode_state(self) -> DecodeState:
    """A decode state with every slot free."""
    with jax.set_mesh(self._mesh):
      return self._programs.empty_state()

  def prefill(
    self,
    *,
    params: VersionedParams,
    existing_prefix: Prefix | None = None,
    padded_tokens: jax.Array | np.ndarray,
    true_length: int,
    request: Request | None = None,
  ) -> Prefix:
    """Keys and values of one sequence.

    Args:
      params: weights.
      existing_prefix: not offered.
      padded_tokens: i32[>= true_length]; what follows the length is ignored.
      true_length: tokens that count.
      request: sampling settings and identity; JetStream's callers have none,
        and get the defaults with the whole context as budget.
    """
    if existing_prefix is not None:
      raise NotImplementedError("existing_prefix is not supported; pass None")
    tokens = np.asarray(padded_tokens)[:true_length].astype(np.int32)
    room = self.config.context_length - true_length
    request = request or Request(
      prompt_index=0,
      member=0,
      tokens=tokens,
      sampling=Sampling(max_tokens=max(room, 1)),
    )
    self.check_request(request)
    budget = min(request.sampling.max_tokens, room)
    one = Admission(slot=0, tokens=tokens, budget=budget, request=request)
    bucket = self.config.bucket(true_length)
    packed = self._pack_each([[one]], bucket, self._batches[0])
    with jax.set_mesh(self._mesh):
      cache = self._programs.prefill(params.params, packed)
    return Prefix(cache=cache, packed=packed)

  def insert(
    self, prefix: Prefix, decode_state: DecodeState, slot: int
  ) -> DecodeState:
    """Puts a prefilled sequence into a slot; the given state is used up."""
    packed = np.array(prefix.packed)
    packed[0, 0] = slot
    with jax.set_mesh(self._mesh):
      return self._programs.insert(decode_state, prefix.cache, packed)

  def generate(
    self, params: VersionedParams, decode_state: DecodeState
  ) -> tuple[DecodeState, decoding.Result]:
    """Samples up to `steps_per_dispatch` tokens in every active slot.

    Returns before the devices are done; the given state is used up.
    """
    with jax.set_mesh(self._mesh):
      state, data = self._programs.decode(params.params, decode_state)
    steps, head = self.config.steps_per_dispatch, self.config.behavior_top_k
    result = decoding.Result.of(data, steps, head, self.routed, params.version)
    return state, result

  @property
  def routed(self) -> tuple[int, int]:
    """Layers, and experts of each, that are recorded of a token."""
    return self.policy.config.routed if self.config.record_experts else (0, 0)

  def get_prefix_destination_sharding(self) -> Prefix:
    """Where `insert` wants a prefix that was computed elsewhere."""
    caches = decoding.cache_sharding(self._mesh)
    return Prefix(cache=caches, packed=sharding.named(self._mesh))

  def get_tokenizer(self) -> NoReturn:
    """There is none: token in, token out.

    Raises:
      NotImplementedError: always.
    """
    raise NotImplementedError(
      "this engine speaks token ids only; tokenize at the client and send "
      "token_content"
    )

  @property
  def max_concurrent_decodes(self) -> int:
    """Number of slots."""
    return self.config.slots

  @property
  def samples_per_slot(self) -> int:
    """Sequences of one slot."""
    return 1

  @property
  def max_prefill_length(self) -> int:
    """Longest prompt accepted."""
    return self.config.max_prompt_length

  @property
  def mesh(self) -> jax.sharding.Mesh:
    """Devices that hold weights and decode state."""
    return self._mesh

  @property
  def colocated_cpus(self) -> None:
    """Not used."""
    return None

  # What JetStream lacks.

  def set_starting_params(self, params: Any) -> None:
    """Draws the noise of the mismatch, if it has any.

    Args:
      params: the policy's weights that the run began with, on any mesh; with
        the same ones a resumed run has the same noise.
    """
    if self.config.mismatch.weight_noise:
      where = self.policy.param_shardings(self._mesh)
      with jax.set_mesh(self._mesh):
        moved = sharding.reshard(params, where)
        self._noise = self._programs.draw_noise(moved)

  def serve(self, published: VersionedParams) -> VersionedParams:
    """What this engine holds for the policy's weights on its mesh.

    Lays them out, with the mismatch of the config. Copies them where that
    changes anything, which costs their memory twice until the given ones are
    dropped.

    Raises:
      RuntimeError: the noise has not been drawn.
    """
    noise = self.config.mismatch.weight_noise
    if noise and self._noise is None:
      raise RuntimeError(
        f"mismatch.weight_noise is {noise} and relative to the weights that "
        "the run began with; give them to set_starting_params first"
      )
    with jax.set_mesh(self._mesh):
      params = self._programs.serve(published.params, self._noise)
    return dataclasses.replace(published, params=params)

  def admit(
    self,
    params: VersionedParams,
    state: DecodeState,
    admissions: Sequence[Admission],
  ) -> DecodeState:
    """Prefills and inserts sequences, rows of one bucket together.

    Sequences that share a prefix come after all others, so that they may share
    that of one admitted in the same call, unless that one shares itself.
    Returns before the devices are done; the given state is used up.
    """
    most_in_row = self.config.prompts_per_row
    for insert, shares, most, pack in (
      (self._programs.admit, False, most_in_row, self._pack_rows),
      (self._programs.extend, True, 1, self._pack_each),
    ):
      members = [one for one in admissions if (one.shared > 0) == shares]
      lengths = [len(one.missing) for one in members]
      buckets = (0, *self.config.prefill_buckets)
      for bucket, size, rows in prefills.batches(
        lengths, buckets, most, self._splits
      ):
        packed = pack([[members[i] for i in row] for row in rows], bucket, size)
        with jax.set_mesh(self._mesh):
          state = insert(params.params, state, packed)
        self.prefilled_tokens += bucket * size
    return state

  def release(self, state: DecodeState, slots: Sequence[int]) -> DecodeState:
    """Frees slots whose sequences are not wanted any more."""
    freed = np.zeros(self.config.slots, bool)
    freed[list(slots)] = True
    with jax.set_mesh(self._mesh):
      return self._programs.release(state, freed)

  def warm_up(self, params: VersionedParams, state: DecodeState) -> DecodeState:
    """Compiles every program by running it without a sequence."""
    buckets = self.config.prefill_buckets
    programs = [(self._programs.admit, self._pack_rows, buckets)]
    if self.config.shares_prefixes:
      programs.append((self._programs.extend, self._pack_each, (0, *buckets)))
    for insert, pack, lengths in programs:
      for bucket, size in itertools.product(lengths, self._batches):
        packed = pack([], bucket, size)
        with jax.set_mesh(self._mesh):
          state = insert(params.params, state, packed)
    state, _ = self.generate(params, self.release(state, []))
    return jax.block_until_ready(state)

  @property
  def batches(self) -> tuple[int, ...]:
    """Numbers of rows that are prefilled together, ascending."""
    return tuple(self._batches)

  def abstract_arguments(self) -> tuple[Any, DecodeState]:
    """Shapes, dtypes and shardings of the weights and of a decode state."""
    with jax.set_mesh(self._mesh):
      empty = jax.eval_shape(self._programs.empty_state)
    where = jax.tree.broadcast(decoding.state_shardings(self._mesh), empty)
    return self._weights, sharding.placed(empty, where)

  def traced(self) -> dict[str, jax.stages.Traced]:
    """The largest of each kind, by name, on their way to a compiler.

    `prefill`, of packed rows where rows hold several sequences; `extend`, of
    sequences that share a prefix, where any may; `decode`. Nothing is
    allocated: the mesh may be one of described devices.
    """
    params, state = self.abstract_arguments()
    largest = self.config.prefill_buckets[-1], self._batches[-1]
    rows, each = self._pack_rows([], *largest), self._pack_each([], *largest)
    with jax.set_mesh(self._mesh):
      traced = {"prefill": self._programs.admit.trace(params, state, rows)}
      if self.config.shares_prefixes:
        traced["extend"] = self._programs.extend.trace(params, state, each)
      traced["decode"] = self._programs.decode.trace(params, state)
    return traced

  def check_request(self, request: Request) -> None:
    """Refuses what cannot be served.

    Raises:
      ValueError: the prompt is empty, too long or outside the vocabulary; too
        many stop ids; an identity that does not fit 32 bits.
    """
    tokens, config = np.asarray(request.tokens), self.config
    if tokens.ndim != 1 or not len(tokens):
      raise ValueError(
        f"a prompt has shape {tokens.shape}; it must be [P] with P >= 1"
      )
    config.bucket(len(tokens))
    if len(tokens) > config.max_prompt_length:
      raise ValueError(
        f"a prompt of {len(tokens)} tokens leaves no room in the context of "
        f"{config.context_length}; prompts may have {config.max_prompt_length}"
      )
    vocabulary = self.policy.config.vocab_size
    if tokens.min() < 0 or tokens.max() >= vocabulary:
      raise ValueError(
        f"a prompt holds token ids from {tokens.min()} to {tokens.max()}; "
        f"they must be in [0, {vocabulary})"
      )
    if len(request.sampling.stop_ids) > config.max_stop_ids:
      raise ValueError(
        f"a request has {len(request.sampling.stop_ids)} stop ids; at most "
        f"{config.max_stop_ids} are allowed (max_stop_ids)"
      )
    sampling = request.sampling
    numbers = (sampling.top_k, sampling.min_tokens, *sampling.stop_ids)
    if any(not -(2**30) <= number < 2**30 for number in numbers):
      raise ValueError(
        f"top_k, min_tokens and stop_ids are {numbers}; each must be < 2**30"
      )
    for name in ("seed", "prompt_index", "member"):
      if not 0 <= getattr(request, name) < 2**32:
        raise ValueError(
          f"{name} is {getattr(request, name)}; it must be in [0, 2**32)"
        )

  def check_params(self, params: Any) -> None:
    """Refuses weights of another model, or in another place.

    Raises:
      ValueError: names, shapes or dtypes differ from the policy's, or an array
        does not lie on this engine's mesh as it should.
    """
    names = jax.tree.structure(params)
    known = jax.tree.structure(self._weights)
    if names != known:
      raise ValueError(
        f"weights are named {names}; they must be {known}: lay them out with "
        "load_params or serve first"
      )

    def check(path, leaf, like):
      name = jax.tree_util.keystr(path)
      if (leaf.shape, leaf.dtype) != (like.shape, like.dtype):
        raise ValueError(
          f"weight {name} is {leaf.dtype}{leaf.shape}; "
          f"it must be {like.dtype}{like.shape}"
        )
      if not leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim):
        raise ValueError(
          f"weight {name} lies at {leaf.sharding}; it must be at "
          f"{like.sharding}: move it with load_params first"
        )

    jax.tree_util.tree_map_with_path(check, params, self._weights)

  def _pack_rows(
    self, rows: Sequence[Sequence[Admission]], bucket: int, size: int
  ) -> prefills.Packed | np.ndarray:
    """What `admit` takes: `size` rows of a bucket, the first of them given."""
    if self.config.prompts_per_row == 1:
      return self._pack_each(rows, bucket, size)
    return prefills.pack(
      rows,
      size=size,
      bucket=bucket,
      most_in_row=self.config.prompts_per_row,
      slots=self.config.slots,
      max_stop_ids=self.config.max_stop_ids,
    )

  def _pack_each(
    self, rows: Sequence[Sequence[Admission]], bucket: int, size: int
  ) -> np.ndarray:
    """The same with one sequence in each row, as `extend` takes them."""
    return decoding.pack(
      [one for (one,) in rows],
      rows=size,
      bucket=bucket,
      slots=self.config.slots,
      max_stop_ids=self.config.max_stop_ids,
    )
