"""Operations: what a traced program does, and what a model cannot do without.

The products of a traced program are counted with the turns of its loops, so
what is computed again for the backward pass counts again. Ideal is the least
that the result takes (Kaplan et al. 2020; PaLM's appendix B for attention):

    forward   2 N tokens + 2 L H h T^2 rows         (causal: half of T^2)
    update    three times that

with N the weights that multiply a token: all but an embedding of its own and
the experts that the token does not pass.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.extend

from rl_tpu.aot import hlo
from rl_tpu.models import transformer


def forward(
  config: transformer.Config, rows: int, length: int, head: bool = True
) -> float:
  """Least operations of a forward pass over full rows; `head`: to logits."""
  products = 2 * multiplying(config, head) * length * rows
  return products + attention(config, rows, length)


def attention(config: transformer.Config, rows: int, length: int) -> float:
  """Those of `forward` that are no products with weights."""
  wide = config.num_layers * config.num_heads * config.head_dim
  return 2.0 * wide * rows * length**2


def multiplying(config: transformer.Config, head: bool = True) -> int:
  """Weights that multiply each token: of its experts, not of all."""
  shared, experts = weights(config, head)
  return shared + experts * config.experts_per_token // max(
    1, config.num_experts
  )


def weights(config: transformer.Config, head: bool = True) -> tuple[int, int]:
  """Weights that multiply every token, and those of all experts."""
  every = transformer.Policy(config).num_params()
  others = (2 - config.tied - head) * config.vocab_size * config.d_model
  each = 3 * config.d_model * config.d_ff
  experts = config.num_layers * config.num_experts * each
  return every - others - experts, experts


def touched(experts: int, chosen: float) -> float:
  """Share of the experts that so many choices, all alike likely, reach."""
  return 1 - (1 - 1 / experts) ** chosen if experts else 0.0


def traced(jaxpr: Any) -> float:
  """Operations of the products in a program, kernels aside, on all devices."""
  total = 0.0
  for equation in jaxpr.eqns:
    params = equation.params
    if equation.primitive.name == "dot_general":
      (left, _), _ = params["dimension_numbers"]
      inside = math.prod(equation.invars[0].aval.shape[i] for i in left)
      total += 2.0 * inside * math.prod(equation.outvars[0].aval.shape)
    elif equation.primitive.name == "cond":
      total += max(traced(branch.jaxpr) for branch in params["branches"])
    elif equation.primitive.name != "pallas_call":
      turns = params.get("length", 1)
      if equation.primitive.name == "shard_map":
        turns = math.prod(
          params["mesh"].shape[axis] for axis in params["newly_manual_axes"]
        )
      total += turns * sum(traced(inner) for inner in _inner(params))
  return total


def _inner(params: dict[str, Any]):
  """The programs inside of an operation."""
  for value in params.values():
    if isinstance(value, jax.extend.core.ClosedJaxpr):
      yield value.jaxpr
    elif isinstance(value, jax.extend.core.Jaxpr):
      yield value


_KERNELS = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}
"""Products of [T, h] and [h, T] in a kernel, by its name."""
GROUPED = 0.91
"""Share of the peak that a grouped product reaches: of a v5p core's, in the
compiler's static count of instruction bundles for megablox's `gmm` with a fixed
grid and tiles of (512, 1024, 768); 0.96 with (512, 2048, 768)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
  """One call of a kernel on one device."""

  flops: float
  size: int | None = None
  """Of a head, which a matrix unit may be larger than."""
  efficiency: float = 1.0
  """Share of the peak that it may reach."""
  bytes: float = 0.0
  """That it reads from HBM and writes there."""


def kernel(op: hlo.Op, experts: int = 0) -> Kernel | None:
  """What a kernel, or what else has no cycles, does; None if not known.

  Causal attention: every block of pairs of tokens that is not wholly above the
  diagonal, which ends with the last query and the last key. Grouped products:
  see `_grouped`. Gathers and scatters read once what they move, and write it.

  Args:
    op: the call.
    experts: of a layer on all devices.
  """
  if op.opcode == "fusion":
    return Kernel(flops=0.0, bytes=2.0 * hlo.shape_bytes(op.shape))
  if "ragged-dot-metadata" in op.name:
    return Kernel(flops=0.0)
  if "gmm" in op.name or "ragged-dot" in op.name:
    return _grouped(op, experts)
  products = next((n for k, n in _KERNELS.items() if k in op.name), None)
  shapes = re.search(r"operand_layout_constraints=\{(.*)", op.rest)
  arrays = re.findall(
    r"\b(?:bf16|f32)\[([\d,]+)\]", shapes[1] if shapes else ""
  )
  if products is None or len(arrays) < 2:
    return None
  queries, keys = ([int(n) for n in array.split(",")] for array in arrays[:2])
  *heads, length, size = queries
  results = re.findall(r"\b(?:bf16|f32)\[([\d,]+)\]", op.shape)
  if any(found.count(",") > len(heads) + 1 for found in results):
    products += 1  # Partial gradients of q come from this kernel too.
  pairs = _causal_share(op.rest, length, keys[-2]) * length * keys[-2]
  work = 2 * products * pairs * math.prod(heads) * size
  return Kernel(flops=work, size=size)


def _grouped(op: hlo.Op, experts: int) -> Kernel | None:
  """Rows in groups by a matrix each, or the gradient of the matrices.

  Experts are taken to be chosen alike often, so a device that holds e of E has
  e / E of the rows. All groups but one share a tile of rows with another one,
  which is multiplied once more.
  """
  shapes = re.search(r"operand_layout_constraints=\{(.*)", op.rest)
  arrays = [
    [int(n) for n in found.split(",")]
    for found in re.findall(
      r"\b(?:bf16|f32)\[([\d,]+)\]", f"{op.shape} {shapes and shapes[1]}"
    )
  ]
  weights = next((a for a in arrays if len(a) == 3), None)
  rows = next((a[0] for a in arrays if len(a) == 2), None)
  if not experts or weights is None or rows is None:
    return None
  count, *sizes = weights
  own = rows * count / experts
  padded = own + (count - 1) * _row_tile(op, rows, count)
  if tiling := re.search(r'ragged_dot_tiling="\d+,\d+,(\d+)"', op.rest):
    # XLA's tile of outputs need not divide them.
    outputs = arrays[0][-1]
    padded *= -(-outputs // int(tiling[1])) * int(tiling[1]) / outputs
  moved = touched(experts, rows) * math.prod(weights) + own * sum(sizes)
  return Kernel(
    flops=2 * padded * math.prod(sizes), efficiency=GROUPED, bytes=2.0 * moved
  )


def _row_tile(op: hlo.Op, rows: int, groups: int) -> float:
  """Rows of a tile; there is a number for each tile, and each group but one."""
  numbers = [int(n) for n in re.findall(r"\bs32\[(\d+)\]", op.rest)]
  return rows / max(1, max(numbers, default=0) - groups + 1)


def _causal_share(rest: str, queries: int, keys: int) -> float:
  """Pairs of blocks that a kernel takes, of all; of pairs, if it names none.

  The queries are those of the last keys: new ones behind a cache, or, where
  devices share a row, the ones that see most.
  """
  before = keys - queries
  blocks = re.search(r"\bs8\[\d+,(\d+),(\d+)\]", rest)
  if blocks is None:
    return (before + queries / 2) / keys
  rows, columns = int(blocks[1]), int(blocks[2])
  taken = sum(
    j * keys * rows < (before * rows + (i + 1) * queries) * columns
    for i in range(rows)
    for j in range(columns)
  )
  return taken / (rows * columns)
