"""Operations: what a traced program does, and what a model cannot do without.

The products of a traced program are counted with the turns of its loops, so
what is computed again for the backward pass counts again. Ideal is the least
that the result takes (Kaplan et al. 2020; PaLM's appendix B for attention):

    forward   2 N tokens + 2 L H h T^2 rows         (causal: half of T^2)
    update    three times that

with N the weights that multiply something: all but an embedding of its own.
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
  """Weights that multiply every token, those of the output head among them."""
  weights = transformer.Policy(config).num_params()
  others = (2 - config.tied - head) * config.vocab_size * config.d_model
  return weights - others


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


_KERNELS = {"splash_mha_fwd": 2, "splash_mha_dkv": 5}
"""Products of [T, h] and [h, T] in a kernel, by its name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
  """One call of a kernel on one device."""

  flops: float
  size: int
  """Of a head, which a matrix unit may be larger than."""


def kernel(op: hlo.Op) -> Kernel | None:
  """What a kernel computes; None where that is not known.

  Causal attention: every block of pairs of tokens that is not wholly above the
  diagonal.
  """
  products = next((n for k, n in _KERNELS.items() if k in op.name), None)
  shapes = re.search(r"operand_layout_constraints=\{(.*)", op.rest)
  queries = shapes and re.search(r"\b(?:bf16|f32)\[([\d,]+)\]", shapes[1])
  if products is None or not queries:
    return None
  *heads, length, size = (int(n) for n in queries[1].split(","))
  taken = _causal_share(op.rest)
  work = 2 * taken * products * math.prod(heads) * length**2 * size
  return Kernel(flops=work, size=size)


def _causal_share(rest: str) -> float:
  """Pairs of blocks that a kernel takes, of all; half if it names no blocks."""
  blocks = re.search(r"\bs8\[\d+,(\d+),(\d+)\]", rest)
  if blocks is None:
    return 0.5
  rows, columns = int(blocks[1]), int(blocks[2])
  taken = sum(
    j * rows < (i + 1) * columns for i in range(rows) for j in range(columns)
  )
  return taken / (rows * columns)
