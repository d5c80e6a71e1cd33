r"""Mixture of experts: each token passes k of E feed-forward blocks.

For token x, with the router's weights W and SwiGLU experts f_e (Shazeer et al.
2017, arXiv:1701.06538, without noise; as in Qwen3-MoE, arXiv:2505.09388):

    p = softmax(W x),    C = the k largest of p,
    y = sum_{e in C} g_e f_e(x),    g_e = p_e / sum_{c in C} p_c   (or p_e)

The router computes in float32 whatever the activations are: experts that
learner and generator choose differently are the largest mismatch there is. The
choice has no gradient; the router learns through g.

A pass may be told the choice of a token instead (router replay; R3: Ma et al.
2025, arXiv:2510.11370): C is then that of the generator, and g is still the
router's own, over C, with its gradient. Whatever separates the numbers of the
two sides then moves a token's gates a little, never its experts.

There is no capacity, so no token is ever dropped and a token's result depends
on nothing else in the batch, padding included. Tokens are sorted by expert and
multiplied in groups (a grouped kernel on TPUs; on CPUs XLA multiplies all
tokens by all experts, which suits small models only). So few tokens that
weights cost more to read than to multiply by are multiplied by every expert: a
plain product reads a layer's weights where they lie, while those of a kernel
are copied out of their stack first.

On a mesh each device holds E / expert of the experts, 1 / tensor of each one's
hidden units, and rows of its own (but along `tensor`): `shard_map`, so that
nothing is left to the compiler. Of the two that have to meet, what is smaller
travels along `expert`:

- the experts, where a device has many tokens (training): it gathers all of
  them, and their gradient is scattered. Its work is that of its own tokens;
- the tokens, where it has few (decoding): it gets those of all devices along
  the axis, works on the pairs of its own experts, and results are summed and
  scattered. Nothing depends on how balanced the experts are but the time.

Along `tensor` one all-reduce joins the parts of the output, and another one
those of the gradient of x.

Axes: n tokens, k experts a token, E experts (e of them on this device), D
model, F hidden units of an expert, L layers, R rows, T tokens of a row.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Bool, Float, Int

from rl_tpu import sharding
from rl_tpu.types import Estimate

_FEW = 128
"""Tokens for which reading an expert's weights takes longer than multiplying
all of them by it: on TPUs 160 to 560 operations take as long as a byte."""
_LANES = 128
"""What megablox takes has sizes that are multiples of this."""
_TILES = (512, 2048, 1024)
"""Its largest tiles: of rows, inputs and outputs. With all inputs in a tile, an
expert's weights stay where they are from one tile of rows to the next."""
_TILE = 3 * 2**19
"""Most weights of a tile: VMEM holds two, of rows and outputs too."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
  """What the router did with each token."""

  experts: Int[Array, "... k"]
  """Chosen, the most likely first."""
  entropy: Float[Array, "..."]
  """Of the router's distribution over all experts, in nats; no gradient."""


class Weights(nnx.Module):
  """The weights of E SwiGLU experts, stacked."""

  def __init__(self, experts: int, d: int, f: int, weight: Callable[..., Any]):
    """Draws them; `weight` makes one from shape, logical axes and fan-in."""
    self.gate = weight((experts, d, f), ("expert", "embed", "mlp"), d)
    self.up = weight((experts, d, f), ("expert", "embed", "mlp"), d)
    self.down = weight((experts, f, d), ("expert", "mlp", "embed"), f)


class MixtureOfExperts(nnx.Module):
  """The feed-forward block of a layer with experts.

  The router is whole on every device and, like norms, not decayed: decay would
  draw all tokens' choices together without a gradient that says so.
  """

  def __init__(
    self,
    experts: int,
    per_token: int,
    normalize: bool,
    sizes: tuple[int, int],
    weight: Callable[..., Any],
  ):
    """Draws the weights; see `Weights` and `mixture`. `sizes` are D and F."""
    self.router = weight((sizes[0], experts), (None, None), sizes[0])
    self.experts = Weights(experts, *sizes, weight)
    self.per_token, self.normalize = per_token, normalize

  def __call__(
    self, x: Float[Array, "... D"], replayed: Int[Array, "... k"] | None
  ) -> tuple[Float[Array, "... D"], Routing]:
    """Acts on each token by itself."""
    own = self.experts
    return mixture(
      x,
      self.router[...],
      (own.gate[...], own.up[...], own.down[...]),
      per_token=self.per_token,
      normalize=self.normalize,
      replayed=replayed,
    )


Experts = tuple[
  Float[Array, "E D F"], Float[Array, "E D F"], Float[Array, "E F D"]
]
"""Weights gate, up and down."""


def mixture(
  x: Float[Array, "... D"],
  router: Float[Array, "D E"],
  experts: Experts,
  *,
  per_token: int,
  normalize: bool,
  replayed: Int[Array, "... k"] | None = None,
) -> tuple[Float[Array, "... D"], Routing]:
  """Routes tokens, and sums what their experts make of them.

  Costs 6 n k D F operations, memory of n k (D + 3 F) activations. On a mesh n
  is a device's tokens where experts travel; where tokens do, all that reach it,
  which may all have chosen its own experts, and F its own hidden units.

  Args:
    x: activations, in rows whose order under a mesh is that of its devices.
    router: float32.
    experts: weights, cast to the dtype of `x`.
    per_token: k.
    normalize: whether the k gates of a token sum to 1.
    replayed: experts that are chosen for a token, or -1: it chooses itself.
  """
  if jax.sharding.get_abstract_mesh().empty:
    tokens, replayed = jax.tree.map(_listed, (x, replayed))
    gates, routing = route(tokens, router, per_token, normalize, replayed)
    experts = jax.tree.map(lambda weight: weight.astype(x.dtype), experts)
    result = _summed(tokens, routing.experts, gates, experts), routing
    return _apart(result, x.shape[:-1])
  # Rows of tokens, which may be of one token each.
  rows = jax.tree.map(
    lambda a: a.reshape(len(a), -1, a.shape[-1]), (x, replayed)
  )
  result = _on_mesh(per_token, normalize, rows, router, experts)
  return jax.tree.map(lambda a: a.reshape(*x.shape[:-1], *a.shape[2:]), result)


def _listed(x: Float[Array, "... D"]) -> Float[Array, "n D"]:
  """All tokens in one list."""
  return x.reshape(-1, x.shape[-1])


def _apart(tree: Any, shape: tuple[int, ...]) -> Any:
  """Arrays over a list of tokens, which come in this shape."""
  return jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), tree)


def _on_mesh(
  per_token: int,
  normalize: bool,
  given: tuple[Float[Array, "R T D"], Int[Array, "R T k"] | None],
  router: Float[Array, "D E"],
  experts: Experts,
) -> tuple[Float[Array, "R T D"], Routing]:
  """Lets each device work on its share, and joins what they get.

  `given` are tokens, and the choices to replay.
  """
  mesh = jax.sharding.get_abstract_mesh()
  rows = sharding.partition_spec(("rows", "context"))
  inward = sharding.partition_spec(("expert", "embed", "mlp"))
  outward = sharding.partition_spec(("expert", "mlp", "embed"))
  # One sequence in prefill, say, need not divide over the devices.
  parts = sharding.ways(mesh, "rows")
  count, length, width = given[0].shape
  given = jax.tree.map(
    lambda x: jnp.pad(x, ((0, -count % parts), (0, 0), (0, 0))), given
  )
  own = len(given[0]) // parts * length // sharding.ways(mesh, "context")
  reached = own * sharding.ways(mesh, "expert")
  held = sum(weight.size for weight in experts) // sharding.ways(mesh, "mlp")
  experts_travel = reached * per_token * width > held

  def on_device(given, router, experts):
    shape = given[0].shape[:2]
    tokens, replayed = jax.tree.map(_listed, given)
    gates, routing = route(tokens, router, per_token, normalize, replayed)
    gate, up, down = (weight.astype(tokens.dtype) for weight in experts)
    # The embed axis of a weight is gathered for the layer.
    gate, up = (_gathered(weight, "embed", 1) for weight in (gate, up))
    experts = gate, up, _gathered(down, "embed", 2)
    chosen = routing.experts
    if experts_travel:
      experts = jax.tree.map(lambda w: _gathered(w, "expert", 0), experts)
      y = _summed(tokens, chosen, gates, experts)
    else:
      tokens, chosen, gates = (
        _gathered(x, "expert", 0) for x in (tokens, chosen, gates)
      )
      first = jax.lax.axis_index(sharding.RULES["expert"]) * len(gate)
      own = (chosen >= first) & (chosen < first + len(gate))
      chosen = jnp.where(own, chosen - first, len(gate))
      y = _summed(tokens, chosen, gates, experts, some=True)
      y = jax.lax.psum_scatter(y, sharding.RULES["expert"], tiled=True)
    return _apart((jax.lax.psum(y, sharding.RULES["mlp"]), routing), shape)

  result = jax.shard_map(
    on_device,
    in_specs=(rows, jax.P(), (inward, inward, outward)),
    out_specs=rows,
    check_vma=False,
  )(given, router, experts)
  return jax.tree.map(lambda a: a[:count], result)


def _gathered(x: jax.Array, axis: str, dimension: int) -> jax.Array:
  """The parts of all devices along a logical axis."""
  return jax.lax.all_gather(x, sharding.RULES[axis], axis=dimension, tiled=True)


def route(
  x: Float[Array, "n D"],
  router: Float[Array, "D E"],
  per_token: int,
  normalize: bool,
  replayed: Int[Array, "n k"] | None = None,
) -> tuple[Float[Array, "n k"], Routing]:
  """Gates in float32, and whom they open; of equals, the first.

  Where `replayed` is not -1 it is whom.
  """
  logits = jnp.matmul(x.astype(jnp.float32), router, precision="highest")
  logp = jax.nn.log_softmax(logits)
  chosen = jax.lax.top_k(logits, per_token)[1]
  if replayed is not None:
    chosen = jnp.where(replayed >= 0, replayed.astype(chosen.dtype), chosen)
  gates = jnp.exp(jnp.take_along_axis(logp, chosen, axis=-1))
  if normalize:
    gates /= jnp.sum(gates, axis=-1, keepdims=True)
  entropy = jax.lax.stop_gradient(-jnp.sum(jnp.exp(logp) * logp, axis=-1))
  return gates, Routing(experts=chosen, entropy=entropy)


def _summed(
  x: Float[Array, "n D"],
  experts: Int[Array, "n k"],
  gates: Float[Array, "n k"],
  weights: Experts,
  some: bool = False,
) -> Float[Array, "n D"]:
  """Sums gate times expert over each token's experts.

  Args:
    x: tokens.
    experts: chosen, in [0, e).
    gates: theirs.
    weights: of e experts.
    some: whether pairs may have expert e, which is another device's.
  """
  if len(x) <= _FEW:
    return _every(x, experts, gates, weights)
  return _grouped(x, experts, gates, weights, some)


def _every(
  x: Float[Array, "n D"],
  experts: Int[Array, "n k"],
  gates: Float[Array, "n k"],
  weights: Experts,
) -> Float[Array, "n D"]:
  """`_summed` with all tokens multiplied by each expert, mostly for nothing."""
  gate, up, down = weights
  chosen = experts == jnp.arange(len(gate))[:, None, None]
  by_expert = jnp.sum(jnp.where(chosen, gates, 0), axis=-1)
  # A batch of products: weights are read as they lie, one expert's at a time.
  tokens = jnp.broadcast_to(x, (len(gate), *x.shape))
  hidden = jax.nn.silu(tokens @ gate) * (tokens @ up)
  hidden *= by_expert.astype(x.dtype)[:, :, None]
  return jnp.einsum("enf,efd->nd", hidden, down)


def _grouped(
  x: Float[Array, "n D"],
  experts: Int[Array, "n k"],
  gates: Float[Array, "n k"],
  weights: Experts,
  some: bool,
) -> Float[Array, "n D"]:
  """`_summed` with the n k pairs sorted by expert.

  Pairs of other devices' experts come last, in no group, and are not
  multiplied.
  """
  gate, up, down = weights
  group = experts.reshape(-1)
  order = jnp.argsort(group, stable=True)
  place = jnp.argsort(order)
  chosen = group[:, None] == jnp.arange(len(gate))
  sizes = jnp.sum(chosen, axis=0, dtype=jnp.int32)
  grouped = (jnp.arange(group.size) < jnp.sum(sizes))[:, None]

  def times(rows, weights):
    # Nothing promises zeros past the last group, nor in the gradient there.
    rows = jnp.where(grouped, rows, 0) if some else rows
    product: Any = matmul(rows, weights, sizes)
    return jnp.where(grouped, product, 0) if some else product

  rows = _spread(x, order, place, experts.shape[1])
  hidden = jax.nn.silu(times(rows, gate)) * times(rows, up)
  # Gates act on F numbers a pair rather than on the D that come out.
  hidden *= gates.reshape(-1).astype(x.dtype)[order][:, None]
  out = times(hidden, down)
  y: Any = _collected(out, order, place, experts.shape[1])
  return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread(
  x: Float[Array, "n D"],
  order: Int[Array, " m"],
  place: Int[Array, " m"],
  per_token: int,
) -> Float[Array, "m D"]:
  """Each token's row for each of its pairs, in the order of pairs.

  Its gradient is `_collected`, and the other way round: both read where the
  gradient of an index would add to places in memory, one after the other.
  """
  return x[order // per_token]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _collected(
  pairs: Float[Array, "m D"],
  order: Int[Array, " m"],
  place: Int[Array, " m"],
  per_token: int,
) -> Float[Array, "n D"]:
  """The sum over each token's pairs."""
  return jnp.sum(pairs[place].reshape(-1, per_token, pairs.shape[1]), axis=1)


def _with_order(function: Any) -> Callable[..., Any]:
  """The forward pass of `function`; its gradient needs the order too."""

  def forward(x, order, place, per_token):
    return function(x, order, place, per_token), (order, place)

  return forward


_spread.defvjp(
  _with_order(_spread), lambda k, kept, g: (_collected(g, *kept, k), None, None)
)
_collected.defvjp(
  _with_order(_collected), lambda k, kept, g: (_spread(g, *kept, k), None, None)
)


@jax.custom_vjp
def matmul(
  rows: Float[Array, "m D"],
  weights: Float[Array, "e D F"],
  sizes: Int[Array, " e"],
) -> Float[Array, "m F"]:
  """The first sizes[0] rows times weights[0], the next by weights[1], ...

  On TPUs this is JAX's megablox kernel where sizes are multiples of its lanes.
  XLA's own takes tiles that need not divide an expert's units (half as many
  operations again for 768 of them), and for the gradient of weights it
  multiplies all rows once for each group (libtpu 0.0.42).
  """
  if _fits_kernel(rows, weights):
    return of_rows(rows, weights, sizes)
  return jax.lax.ragged_dot(rows, weights, sizes)


def _forward(rows, weights, sizes):
  return matmul(rows, weights, sizes), (rows, weights, sizes)


def _backward(residuals, gradient):
  rows, weights, sizes = residuals
  if _fits_kernel(rows, weights):
    by_rows = of_rows(gradient, weights, sizes, turned=True)
    return by_rows, of_weights(rows, gradient, sizes), None
  by_rows = jax.lax.ragged_dot(gradient, weights.swapaxes(1, 2), sizes)
  _, pull = jax.vjp(lambda w: jax.lax.ragged_dot(rows, w, sizes), weights)
  return by_rows, *pull(gradient), None


matmul.defvjp(_forward, _backward)


def _fits_kernel(rows, weights) -> bool:
  sizes = (len(rows), *weights.shape[1:])
  return sharding.on_tpu() and not any(size % _LANES for size in sizes)


def of_rows(rows, weights, sizes, turned=False, interpret=False):
  """`matmul` by the TPU kernel, or by the transposed weights."""
  outputs, inputs = weights.shape[1:] if turned else weights.shape[:0:-1]
  tile = _tile(inputs, _TILES[1])
  # Two tiles of outputs at least: one for each core of a chip.
  most = max(_LANES, min(_TILES[2], _TILE // tile, outputs // 2))
  return gmm(
    rows,
    weights,
    sizes,
    rows.dtype,
    (_tile(len(rows), _TILES[0]), tile, _tile(outputs, most)),
    transpose_rhs=turned,
    interpret=interpret,
  )


def of_weights(rows, gradient, sizes, interpret=False):
  """The gradient of `matmul`'s weights by the TPU kernel."""
  shapes = (*rows.shape, gradient.shape[1])
  most = (_TILES[0], _TILES[2], _TILES[2])
  tiling = tuple(map(_tile, shapes, most))
  return tgmm(rows.T, gradient, sizes, rows.dtype, tiling, interpret=interpret)


def _tile(size: int, most: int) -> int:
  """The largest multiple of the lanes up to `most` that divides a size."""
  return max(t for t in range(_LANES, most + 1, _LANES) if size % t == 0)


def loads(
  routing: Routing, mask: Bool[Array, "R T"], experts: int
) -> dict[str, Estimate]:
  """Estimates of one pass over packed rows, for `imbalance`.

  `expert_load` is [L, E]: how many of the masked tokens each expert got, over
  their number. `router_entropy` is a mean over tokens and layers. They add over
  microbatches without error.

  Args:
    routing: of all layers, [L, R, T, ...].
    mask: tokens to count; not padding.
    experts: E.
  """
  chosen = routing.experts[..., None] == jnp.arange(experts)
  chosen &= mask[..., None, None]
  total = jnp.sum(chosen, axis=(1, 2, 3)).astype(jnp.float32)
  entropy = jnp.sum(jnp.mean(routing.entropy, axis=0), where=mask)
  count = jnp.sum(mask).astype(jnp.float32)
  return {
    "expert_load": Estimate(total=total, count=count),
    "router_entropy": Estimate(total=entropy, count=count),
  }


def imbalance(load: Float[np.ndarray, "L E"]) -> dict[str, float]:
  """What the loads of a batch say, on the host.

  Returns:
    `expert_load_max`: of the busiest expert over the mean expert of its layer,
    in the worst layer; 1 is balance, E / k collapse. `dead_experts`: share of
    experts, over all layers, that got no token.
  """
  busiest = load.max(axis=-1) / load.mean(axis=-1)
  return {
    "expert_load_max": float(busiest.max()),
    "dead_experts": float((load == 0).mean()),
  }
