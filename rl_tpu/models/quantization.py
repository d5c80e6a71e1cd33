r"""Engine mismatch on demand: what a cheaper generator would compute with.

Real generators hold rounded weights and caches, and Score Centering's
experiments (arXiv:2609.20807, appendix B) make that gap on purpose. The arrays
stay float32 or bfloat16: they take values of the narrow grid only, so any
machine shows the mismatch of one that has the narrow format.

  snapped = scale * nearest(x / scale),    scale = max|x| / largest

`nearest` rounds to {-127..127}, {-7..7}, {-3..3}, {-1, 0, 1} or the finite
numbers of float8 e4m3 (largest 448), ties to even. As in the paper, a weight
has one scale for each output channel, whose inputs it sums; embedding and head
included, norms (and a router) left alone. A cache entry has one scale for each
token and head, but 1 in fp8. Relative noise is added before: w + delta, delta =
sigma * N(0, 1) * w_0, drawn once from the starting weights w_0 and the same for
every version.

An engine (`generation.engine`) holds weights and cache so; the learner does
not, and neither does what evaluates a run. A token attends to its own entry as
rounded, as it does in engines that write the cache and then read it. Not
covered: rounded activations (the paper's int8 and fp8 round those of every
matmul too, W8A8) and 4-bit floats.

Two choices keep the grid what it says:

- `x.astype(float8).astype(float32)` may be folded to x under jit, since XLA may
  compute with more precision than asked for. `round` and `reduce_precision`,
  which say the rounding itself, may not.
- Scales have 17 significant bits. A level has at most 7, so level * scale is
  exact in float32: compilers may fuse it into what follows without changing a
  bit, and snapping twice equals snapping once.

Qwix 0.1.8 and AQT 0.9 were tried. In Qwix fp8 is the cast above; its integer
grid, max|x| / (largest + 1/2), shrinks the weights at every snap, and asked for
the paper's it gives other bits jitted than not. AQT has both grids, but scales
that drift under a second snap; with ours, it would save `_nearest` alone.
"""

import dataclasses
import math
import zlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Grid = Literal["none", "int8", "int4", "int3", "int2", "fp8"]
_LARGEST = {"int8": 127.0, "int4": 7.0, "int3": 3.0, "int2": 1.0, "fp8": 448.0}
_GRIDS = ("none", *_LARGEST)

_INPUTS = {
  **dict.fromkeys(("query", "key", "value"), (-3,)),
  "out": (-3, -2),
  **dict.fromkeys(("gate", "up", "down", "head"), (-2,)),
  "embedding": (-1,),
}
"""Axes that a matmul sums over, by the weight's name; axes before them (layers,
experts) and after them are channels. An embedding's channel is a token, as
input and as output."""

_WHOLE = (
  *("scale", "router"),
  *("query_bias", "key_bias", "value_bias", "out_bias"),
)
"""Weights never snapped: of norms, biases, and what chooses experts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How a generator differs from the learner at equal version."""

  weights: Grid = "none"
  """Grid of the weights: none, int8, int4, int3, int2 (-1, 0 and 1 times the
  largest of its channel) or fp8 (e4m3)."""
  group_size: int = 0
  """Inputs that share a scale, >= 0, dividing every weight's inputs; 0 is a
  whole output channel (Score Centering). 32 to 128 is usual for int4."""
  kv: Grid = "none"
  """Grid of cached keys and values: as of the weights."""
  weight_noise: float = 0.0
  """Standard deviation of the noise of every weight, norms included, relative
  to its starting value, >= 0 (Score Centering: 0.001 to 0.05); 0 is none."""
  noise_seed: int = 0
  """Of the noise, in [0, 2**32)."""
  refresh_period: int = 1
  """The generator takes over every n-th version, those that n divides, >= 1;
  n - 1 versions of staleness come with it. Score Centering's staleness s is
  n = s + 1; its offline runs are 10,001."""

  def __post_init__(self):
    for name, good, allowed in (
      ("weights", self.weights in _GRIDS, f"one of {_GRIDS}"),
      ("group_size", self.group_size >= 0, ">= 0"),
      ("kv", self.kv in _GRIDS, f"one of {_GRIDS}"),
      (
        "weight_noise",
        math.isfinite(self.weight_noise) and self.weight_noise >= 0,
        "finite and >= 0",
      ),
      ("noise_seed", 0 <= self.noise_seed < 2**32, "in [0, 2**32)"),
      ("refresh_period", self.refresh_period >= 1, ">= 1"),
    ):
      if not good:
        raise ValueError(
          f"{name} is {getattr(self, name)!r}; it must be {allowed}"
        )
    if self.group_size and self.weights == "none":
      raise ValueError(
        f"group_size is {self.group_size}; it must be 0 where weights is 'none'"
      )

  @property
  def exact(self) -> bool:
    """Whether the generator is the learner's policy at every version."""
    rounded = (self.weights, self.kv) != ("none", "none")
    return not rounded and not self.weight_noise and self.refresh_period == 1

  def refreshes(self, version: int) -> bool:
    """Whether the generator takes over the weights of this version."""
    return version % self.refresh_period == 0


def draw_noise(starting_params: Any, config: Config) -> Any:
  """The noise of a run, a tree like the weights; None where there is none.

  Each tensor's depends on the seed, its name and its own starting values, so a
  resumed run draws the same. Costs the memory of the weights.
  """
  if not config.weight_noise:
    return None
  seed = jax.random.key(config.noise_seed)

  def draw(path, weight):
    key = jax.random.fold_in(seed, zlib.crc32(_name(path).encode()))
    unit = jax.random.normal(key, weight.shape, weight.dtype)
    return config.weight_noise * unit * weight

  return jax.tree_util.tree_map_with_path(draw, starting_params)


def snap_weights(params: Any, config: Config, noise: Any = None) -> Any:
  """The weights that the generator holds for the learner's `params`.

  Shapes and dtypes stay. Jit it with the weights' shardings as `out_shardings`
  to keep those as well.

  Args:
    params: any tree that ends in the decoder's names.
    config: with the grid.
    noise: of `draw_noise`, with the run's starting weights.

  Raises:
    ValueError: noise is missing or not wanted, a weight's inputs do not divide
      into groups, or a weight's name says not what its inputs are.
  """
  if (noise is not None) != (config.weight_noise > 0):
    raise ValueError(
      f"weight_noise is {config.weight_noise} and noise is "
      f"{'missing' if noise is None else 'given'}; draw_noise makes it"
    )
  if noise is not None:
    params = jax.tree.map(jnp.add, params, noise)
  grid = config.weights
  if grid == "none":
    return params

  def snap(path, weight):
    name = _name(path)
    leaf = name.split("/")[-1]
    if leaf in _WHOLE:
      return weight
    if leaf not in _INPUTS:
      raise ValueError(
        f"weight {name} is not one that quantization knows: inputs are named "
        f"for {sorted(_INPUTS)}, and {sorted(_WHOLE)} are left alone"
      )
    return _snap_channels(weight, grid, _INPUTS[leaf], config.group_size, name)

  return jax.tree_util.tree_map_with_path(snap, params)


def snap_cache(
  x: Float[Array, "... K h"], grid: Grid
) -> Float[Array, "... K h"]:
  """Keys or values as the cache holds them; for each entry when written."""
  if grid == "none":
    return x
  if grid == "fp8":
    return _nearest(x.astype(jnp.float32), "fp8").astype(x.dtype)
  return _snap(x, grid)


def _name(path) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _snap_channels(weight, grid, inputs, group_size, name):
  """Snaps a weight whose axes `inputs` are summed over, group by group."""
  last = tuple(range(-len(inputs), 0))
  channels = jnp.moveaxis(weight, inputs, last)
  fan_in = math.prod(channels.shape[axis] for axis in last)
  group = group_size or fan_in
  if fan_in % group:
    raise ValueError(
      f"group_size is {group_size}; it must divide the {fan_in} inputs of "
      f"weight {name}"
    )
  outputs = channels.shape[: -len(inputs)]
  groups = channels.reshape(*outputs, fan_in // group, group)
  snapped = _snap(groups, grid).reshape(channels.shape)
  return jnp.moveaxis(snapped, last, inputs)


def _snap(x: Float[Array, "... n"], grid: str) -> Float[Array, "... n"]:
  """Snaps to a grid whose largest value is that of the last axis."""
  wide = x.astype(jnp.float32)
  top = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
  scale = jax.lax.reduce_precision(top / _LARGEST[grid], 8, 16)
  divisor = jnp.where(scale > 0, scale, 1.0)
  return (_nearest(wide / divisor, grid) * scale).astype(x.dtype)


def _nearest(x: Float[Array, "..."], grid: str) -> Float[Array, "..."]:
  """The nearest level, ties to even; the largest one for what is beyond."""
  if grid == "fp8":
    normal = jax.lax.reduce_precision(x, 8, 3)
    subnormal = jnp.round(x * 2.0**9) / 2.0**9
    level = jnp.where(jnp.abs(x) < 2.0**-6, subnormal, normal)
  else:
    level = jnp.round(x)
  return jnp.clip(level, -_LARGEST[grid], _LARGEST[grid])
