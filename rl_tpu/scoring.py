r"""From hidden states to PolicyOutputs, a chunk of positions at a time.

Logits are the largest array there is (32k tokens of a 152k vocabulary: 20 GB in
float32), and each position's are needed only to make a few numbers:

    logp(v) = z_v / temperature - log sum_u exp(z_u / temperature)

for the token taken and for the sampler's head (score centering, where it is
normalised over the whole vocabulary too), and -sum_v p_v logp(v), the entropy.
So positions pass the output head in chunks, one after the other, and the
backward pass computes a chunk's logits again instead of keeping them: nothing
larger than [R, chunk, V] lives at any time, for one more product with the
output head. What is kept is each position's normaliser, the logarithm above:
with it the gradient of the logits,

    d logp(v) / d z_u = ([u = v] - exp(z_u / temperature - normaliser))
                        / temperature,

is one pass over a product as it leaves the matrix unit. Under a mesh the head's
weight is gathered once, before the chunks, and its gradient summed over devices
once, after them.

Axes: R rows, T tokens, K sampler's head, D model, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from rl_tpu import ops, sharding
from rl_tpu.models import moe, transformer
from rl_tpu.types import Batch, Estimate, PolicyOutputs


def policy_outputs(
  policy: transformer.Policy,
  params: transformer.Params,
  batch: Batch,
  requires: frozenset[str],
  chunk: int,
) -> PolicyOutputs:
  """The outputs of `outputs_and_loads`, which says what they are."""
  return outputs_and_loads(policy, params, batch, requires, chunk)[0]


def outputs_and_loads(
  policy: transformer.Policy,
  params: transformer.Params,
  batch: Batch,
  requires: frozenset[str],
  chunk: int,
) -> tuple[PolicyOutputs, dict[str, Estimate]]:
  """One forward pass; differentiable in `params`.

  Args:
    policy: the model.
    params: its weights, which are the target policy here.
    batch: packed rows; temperatures are > 0. Where it has the experts of the
      behavior policy, these are what each layer takes (`moe`).
    requires: which of `entropy` and `target_topk_logp` to compute beside
      `target_logp`; what else it names is not computed here.
    chunk: most positions of each row whose logits live at once; 0: all. T is
      split into equal chunks, the last padded.

  Returns:
    Outputs aligned to tokens, in f32; 0 for the first token of a trajectory,
    for padding, and where the head's id is -1. Beside them `moe.loads`, empty
    without experts.

  Raises:
    ValueError: the head is asked for and the batch has none.
  """
  hidden, routing = policy.routed(
    params,
    batch.tokens,
    batch.positions,
    batch.trajectory_ids,
    _replayed(batch),
  )
  loads = {}
  if routing is not None:
    loads = moe.loads(
      routing, batch.trajectory_ids >= 0, policy.config.num_experts
    )
  topk_ids = None
  if "target_topk_logp" in requires:
    topk_ids = ops.required(batch.behavior_topk_ids, "batch.behavior_topk_ids")
    topk_ids = _each_slot(ops.shift_to_logits, fill=-1)(topk_ids)
  positions = (
    hidden,
    ops.next_tokens(batch.tokens, batch.trajectory_ids),
    ops.shift_to_logits(batch.temperature, 1.0),
    topk_ids,
  )

  def score_rows(weight, positions):
    def score(part):
      hidden, labels, temperature, topk_ids = part
      logits: Any = _rounded_back(policy.logits(weight, hidden), hidden.dtype)
      entropy = "entropy" in requires
      return _score(logits, labels, temperature, topk_ids, entropy)

    if sharding.one_device():
      return _by_chunks(_without_rows(score), positions, chunk)
    return _by_chunks(score, positions, chunk)

  rows, length = batch.tokens.shape
  if sharding.one_device():
    # One list, as in `Policy.routed`, and chunks as large.
    positions = jax.tree.map(
      lambda x: x.reshape(1, -1, *x.shape[2:]), positions
    )
    chunk *= rows

  name = "embedding" if policy.config.tied else "head"
  scored = _on_own_rows(score_rows)({name: params[name]}, positions)
  scored = jax.tree.map(
    lambda x: sharding.constrain(
      x.reshape(rows, length, *x.shape[2:]), "rows", *(None,) * (x.ndim - 1)
    ),
    scored,
  )
  topk = scored.pop("target_topk_logp", None)
  if topk is not None:
    topk = _each_slot(ops.shift_to_tokens)(topk)
  aligned = {name: ops.shift_to_tokens(x) for name, x in scored.items()}
  return PolicyOutputs(**aligned, target_topk_logp=topk), loads


def _replayed(batch: Batch) -> Int[Array, "R T L k"] | None:
  """The experts of the batch, each at the token that was routed to them."""
  experts = batch.behavior_experts
  if experts is None:
    return None
  flat = experts.reshape(*experts.shape[:2], -1)
  return _each_slot(ops.shift_to_logits, fill=-1)(flat).reshape(experts.shape)


def _each_slot(shift: Callable[..., Array], **options: Any):
  """A shift of [R,T] for each of the K slots of [R,T,K]."""
  return jax.vmap(functools.partial(shift, **options), in_axes=-1, out_axes=-1)


def _without_rows(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
  """Lets it map [C,...], given [1,C,...]."""

  def on_list(arrays):
    mapped = function(jax.tree.map(lambda x: x[0], arrays))
    return jax.tree.map(lambda x: x[None], mapped)

  return on_list


def _on_own_rows(function: Callable[[Any, Any], Any]):
  """Lets each device map its own tokens; the first argument comes whole to all.

  Left to the compiler, the gradient of that argument would be summed over
  devices in every chunk.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return function
  rows = sharding.partition_spec(("rows", "context"))
  return jax.shard_map(
    function,
    in_specs=(jax.P(), rows),
    out_specs=rows,
    axis_names={*sharding.RULES["rows"], *sharding.RULES["context"]},
    check_vma=False,
  )


def _score(
  logits: Float[Array, "R C V"],
  labels: Int[Array, "R C"],
  temperature: Float[Array, "R C"],
  topk_ids: Int[Array, "R C K"] | None,
  with_entropy: bool,
) -> dict[str, Array]:
  """What the logits of some positions say of labels and head; -1 is no id."""
  used = (labels >= 0)[..., None]
  logits = jnp.where(used, logits, 0.0) / temperature[..., None]
  total = _normaliser(logits)
  picked = _picked(logits, jnp.maximum(labels, 0)[..., None])
  logp = jnp.where(used, picked - total, 0.0)
  scored = {"target_logp": logp[..., 0]}
  if topk_ids is not None:
    known = used & (topk_ids >= 0)
    head = jnp.take_along_axis(logits, jnp.maximum(topk_ids, 0), axis=-1)
    scored["target_topk_logp"] = jnp.where(known, head - total, 0.0)
  if with_entropy:
    mean = jnp.sum(jnp.exp(logits - total) * logits, axis=-1)
    scored["entropy"] = jnp.where(used[..., 0], total[..., 0] - mean, 0.0)
  return scored


_NORMALISER = "normaliser"
"""Name of what the backward pass of a chunk keeps."""


@jax.custom_jvp
def _normaliser(logits: Float[Array, "R C V"]) -> Float[Array, "R C 1"]:
  """Log sum exp; its gradient is taken from its value."""
  return jax.nn.logsumexp(logits, axis=-1, keepdims=True)


@_normaliser.defjvp
def _normaliser_jvp(primals, tangents):
  (logits,), (tangent,) = primals, tangents
  total = checkpoint_name(_normaliser(logits), _NORMALISER)
  change = jnp.exp(logits - total) * tangent
  return total, jnp.sum(change, axis=-1, keepdims=True)


@jax.custom_jvp
def _picked(
  logits: Float[Array, "R C V"], ids: Int[Array, "R C 1"]
) -> Float[Array, "R C 1"]:
  """The logits of these ids; its gradient is a choice, not a scatter."""
  return jnp.take_along_axis(logits, ids, axis=-1)


@_picked.defjvp
def _picked_jvp(primals, tangents):
  logits, ids = primals
  chosen = jnp.arange(logits.shape[-1]) == ids
  change = jnp.where(chosen, tangents[0], 0.0)
  return _picked(logits, ids), jnp.sum(change, axis=-1, keepdims=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _rounded_back(logits: Array, dtype: jnp.dtype) -> Array:
  """The same; its gradient is rounded to what the head is multiplied in."""
  del dtype
  return logits


_rounded_back.defvjp(
  lambda logits, dtype: (logits, None),
  lambda dtype, _, gradient: (gradient.astype(dtype),),
)


def _by_chunks(function: Callable[[Any], Any], arrays: Any, chunk: int) -> Any:
  """Maps [R,T,...] to [R,T,...] in equal chunks of at most `chunk` positions.

  Padding repeats the last position, which predicts nothing.
  """
  rows, length = jax.tree.leaves(arrays)[0].shape[:2]
  count = -(-length // chunk) if chunk else 1
  if count == 1:
    return function(arrays)
  size = -(-length // count)
  padding = count * size - length

  def split(x):
    widths = [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, widths, mode="edge")
    return x.reshape(rows, count, size, *x.shape[2:]).swapaxes(0, 1)

  def join(x):
    x = x.swapaxes(0, 1)
    return x.reshape(rows, count * size, *x.shape[3:])[:, :length]

  # Inside a loop nothing can be merged with the backward pass anyway.
  keep = jax.checkpoint_policies.save_only_these_names(_NORMALISER)
  again = jax.checkpoint(function, prevent_cse=False, policy=keep)
  return jax.tree.map(join, jax.lax.map(again, jax.tree.map(split, arrays)))
