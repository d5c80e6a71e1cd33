r"""Mixture of experts: each token passes k of E feed-forward blocks.

For token x, with the router's weights W and SwiGLU experts f_e (Shazeer et al.
2017, arXiv:1701.06538, without noise; as in Qwen3-MoE, arXiv:2505.09388):

    p = softmax(W x),    C = the k largest of p,
    y = sum_{e in C} g_e f_e(x),    g_e = p_e / sum_{c in C} p_c   (or p_e)

The router computes in float32 whatever the activations are: experts that
learner and generator choose differently are the largest mismatch there is. The
choice has no gradient; the router learns through g.

There is no capacity, so no token is ever dropped and a token's result depends
on nothing else in the batch, padding included. Tokens are sorted by expert and
multiplied in groups (`jax.lax.ragged_dot`, a grouped kernel on TPUs; on CPUs
XLA multiplies all tokens by all experts, which suits small models only).

On a mesh each device holds E / expert of the experts, and 1 / tensor of each
one's hidden units, and works on the tokens of its own rows that chose those:
`shard_map`, so that nothing is left to the compiler. Devices along `expert` and
`tensor` hold the same rows; one all-reduce of the [n, D] output a layer joins
their parts, as in tensor parallelism, and another one the gradient of x. No
token travels, so nothing depends on how balanced the experts are but the time.

Axes: n tokens, k experts a token, E experts (e of them on this device), D
model, F hidden units of an expert, L layers, R rows, T tokens of a row.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jaxtyping import Array, Bool, Float, Int

from rl_tpu import sharding
from rl_tpu.types import Estimate

_LANES = 128
"""What megablox takes has sizes that are multiples of this."""
_TILES = (512, 1024, 1024)
"""Its largest tiles: of rows, inputs and outputs."""


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
    self, x: Float[Array, "... D"]
  ) -> tuple[Float[Array, "... D"], Routing]:
    """Acts on each token by itself."""
    own = self.experts
    return mixture(
      x,
      self.router[...],
      (own.gate[...], own.up[...], own.down[...]),
      per_token=self.per_token,
      normalize=self.normalize,
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
) -> tuple[Float[Array, "... D"], Routing]:
  """Routes tokens, and sums what their experts make of them.

  Costs 6 n k D F operations, memory of n k (D + 3 F) activations: also on a
  mesh, where n is a device's tokens, all of which may have chosen the experts
  of one device. Operations there are those of the device's own experts and
  hidden units.

  Args:
    x: activations, in rows whose order under a mesh is that of its devices.
    router: float32.
    experts: weights, cast to the dtype of `x`.
    per_token: k.
    normalize: whether the k gates of a token sum to 1.
  """
  tokens = x.reshape(-1, x.shape[-1])
  local = functools.partial(_local, per_token=per_token, normalize=normalize)
  if jax.sharding.get_abstract_mesh().empty:
    result = local(tokens, router, experts)
  else:
    result = _on_mesh(local, tokens, router, experts)
  return jax.tree.map(lambda a: a.reshape(*x.shape[:-1], *a.shape[1:]), result)


def _on_mesh(
  local: Callable[..., tuple[jax.Array, Routing]],
  tokens: Float[Array, "n D"],
  router: Float[Array, "D E"],
  experts: Experts,
) -> tuple[Float[Array, "n D"], Routing]:
  """Lets each device add its experts' share for its tokens."""
  rows = sharding.partition_spec(("rows",))
  # The embed axis of a weight is gathered for the layer (fsdp).
  inward = sharding.partition_spec(("expert", None, "mlp"))
  outward = sharding.partition_spec(("expert", "mlp", None))
  joined = (*sharding.RULES["expert"], *sharding.RULES["mlp"])

  def on_device(tokens, router, experts):
    first = jax.lax.axis_index("expert") * experts[0].shape[0]
    y, routing = local(tokens, router, experts, first)
    return jax.lax.psum(y, joined), routing

  # One sequence in prefill, say, need not divide over the devices.
  mesh = jax.sharding.get_abstract_mesh()
  ways = math.prod(mesh.shape[axis] for axis in sharding.RULES["rows"])
  count = len(tokens)
  result = jax.shard_map(
    on_device,
    in_specs=(rows, jax.P(), (inward, inward, outward)),
    out_specs=rows,
    check_vma=False,
  )(jnp.pad(tokens, ((0, -count % ways), (0, 0))), router, experts)
  return jax.tree.map(lambda a: a[:count], result)


def _local(
  tokens: Float[Array, "n D"],
  router: Float[Array, "D E"],
  experts: Experts,
  first: Int[Array, ""] | int = 0,
  *,
  per_token: int,
  normalize: bool,
) -> tuple[Float[Array, "n D"], Routing]:
  """The share of experts `first`, `first + 1`, ... in every token's result."""
  gates, routing = route(tokens, router, per_token, normalize)
  weights = jax.tree.map(lambda weight: weight.astype(tokens.dtype), experts)
  gates = gates.astype(tokens.dtype)
  return _grouped(tokens, routing.experts - first, gates, weights), routing


def route(
  x: Float[Array, "n D"],
  router: Float[Array, "D E"],
  per_token: int,
  normalize: bool,
) -> tuple[Float[Array, "n k"], Routing]:
  """Gates in float32, and whom they open; of equals, the first."""
  logits = jnp.matmul(x.astype(jnp.float32), router, precision="highest")
  logp = jax.nn.log_softmax(logits)
  chosen = jax.lax.top_k(logits, per_token)[1]
  gates = jnp.exp(jnp.take_along_axis(logp, chosen, axis=-1))
  if normalize:
    gates /= jnp.sum(gates, axis=-1, keepdims=True)
  entropy = jax.lax.stop_gradient(-jnp.sum(jnp.exp(logp) * logp, axis=-1))
  return gates, Routing(experts=chosen, entropy=entropy)


def _grouped(
  x: Float[Array, "n D"],
  experts: Int[Array, "n k"],
  gates: Float[Array, "n k"],
  weights: Experts,
) -> Float[Array, "n D"]:
  """Sums gate times expert over those of `experts` in [0, e).

  The n k pairs are sorted by expert. Those of other devices come last, in no
  group, and are not multiplied.
  """
  gate, up, down = weights
  count = gate.shape[0]
  own = (experts >= 0) & (experts < count)
  group = jnp.where(own, experts, count).reshape(-1)
  order = jnp.argsort(group, stable=True)
  sizes = jnp.bincount(group, length=count + 1)[:count].astype(jnp.int32)
  # Nothing promises zeros past the last group, nor in the gradient there.
  grouped = (jnp.arange(group.size) < jnp.sum(sizes))[:, None]
  rows = jnp.where(grouped, x[order // experts.shape[1]], 0)
  hidden = jax.nn.silu(matmul(rows, gate, sizes))
  hidden *= matmul(rows, up, sizes)
  out = jnp.where(grouped, matmul(hidden, down, sizes), 0)
  pairs = out[jnp.argsort(order)].reshape(*experts.shape, -1)
  return jnp.einsum("nkd,nk->nd", pairs, gates)


@jax.custom_vjp
def matmul(
  rows: Float[Array, "m D"],
  weights: Float[Array, "e D F"],
  sizes: Int[Array, " e"],
) -> Float[Array, "m F"]:
  """The first sizes[0] rows times weights[0], the next by weights[1], ...

  On TPUs XLA has a grouped kernel for this and for the gradient of `rows`, but
  for that of `weights` it multiplies all rows once for each group (libtpu
  0.0.42). JAX's megablox kernel takes its place where sizes are multiples of
  the kernel's lanes.
  """
  return jax.lax.ragged_dot(rows, weights, sizes)


def _forward(rows, weights, sizes):
  return matmul(rows, weights, sizes), (rows, weights, sizes)


def _backward(residuals, gradient):
  rows, weights, sizes = residuals
  turned = weights.swapaxes(1, 2)
  by_rows = jax.lax.ragged_dot(gradient, turned, sizes)
  shapes = (*rows.shape, gradient.shape[1])
  if sharding.on_tpu() and not any(size % _LANES for size in shapes):
    return by_rows, of_weights(rows, gradient, sizes), None
  _, pull = jax.vjp(lambda w: jax.lax.ragged_dot(rows, w, sizes), weights)
  return by_rows, *pull(gradient), None


matmul.defvjp(_forward, _backward)


def of_weights(rows, gradient, sizes, interpret=False):
  """The gradient of `matmul`'s weights by the TPU kernel."""
  shapes = (*rows.shape, gradient.shape[1])
  tiling = tuple(
    max(tile for tile in range(_LANES, most + 1, _LANES) if size % tile == 0)
    for size, most in zip(shapes, _TILES, strict=True)
  )
  return tgmm(rows.T, gradient, sizes, rows.dtype, tiling, interpret=interpret)


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
