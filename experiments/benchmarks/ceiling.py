"""The matrix products of a decoder alone: a ceiling for whatever runs it.

`seconds` is of sampling: every product of every layer is computed once, on
weights of its own, in the faster of two layouts; `update_seconds` is of an
optimizer step. Nothing is normalised, attended to, sampled or moved.
"""

import statistics
import time

import jax

from rl_tpu.models import transformer


def seconds(
  c: transformer.Config, rows: int, prompt: int
) -> tuple[float, float]:
  """Processor seconds of a decode step's products, and of a prefill's.

  Args:
    c: sizes of the decoder.
    rows: sequences decoded, and prefilled, together.
    prompt: tokens of each.
  """
  key = jax.random.key(0)
  heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
  layer = [(heads, c.d_model), (kv, c.d_model), (kv, c.d_model)]
  layer += [(c.d_model, heads), (c.d_ff, c.d_model), (c.d_ff, c.d_model)]
  layer += [(c.d_model, c.d_ff)]
  head = [(c.vocab_size, c.d_model)]

  def fastest(shapes: list[tuple[int, int]], rows: int) -> float:
    weights = [jax.random.normal(key, shape) for shape in shapes]
    columns = {i: jax.random.normal(key, (i, rows)) for _, i in shapes}
    variants = (
      (lambda ws, xs: [w @ xs[w.shape[1]] for w in ws], weights, columns),
      (
        lambda ws, xs: [xs[w.shape[0]] @ w for w in ws],
        [w.T + 0 for w in weights],
        {i: x.T + 0 for i, x in columns.items()},
      ),
    )
    measured = []
    for function, *arguments in variants:
      program = jax.jit(function)
      times = []
      for _ in range(2 + 5):
        began = time.process_time()
        jax.block_until_ready(program(*arguments))
        times.append(time.process_time() - began)
      measured.append(statistics.median(times[2:]))
    return min(measured)

  return (
    fastest(layer * c.num_layers + head, rows),
    fastest(layer * c.num_layers, rows * prompt),
  )


def update_seconds(c: transformer.Config, tokens: int, scored: int) -> float:
  """Processor seconds of the products of a forward and a backward pass.

  y = x w, and from dy its gradients dy w' and x' dy; each once, times how often
  the decoder has its shape.

  Args:
    c: sizes of the decoder.
    tokens: that pass the layers.
    scored: of them, that pass the head.
  """
  heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
  layers = c.num_layers
  products = (
    (tokens, c.d_model, heads, layers),
    (tokens, c.d_model, kv, 2 * layers),
    (tokens, heads, c.d_model, layers),
    (tokens, c.d_model, c.d_ff, 2 * layers),
    (tokens, c.d_ff, c.d_model, layers),
    (scored, c.d_model, c.vocab_size, 1),
  )
  key, total = jax.random.key(0), 0.0
  for rows, width, out, count in products:
    x = jax.random.normal(key, (rows, width))
    w = jax.random.normal(key, (width, out))
    dy = jax.random.normal(key, (rows, out))
    for function, *arguments in (
      (lambda x, w: x @ w, x, w),
      (lambda dy, w: dy @ w.T, dy, w),
      (lambda x, dy: x.T @ dy, x, dy),
    ):
      total += count * _median(jax.jit(function), arguments)
  return total


def _median(program, arguments: list[jax.Array]) -> float:
  """Processor seconds of a call, after two."""
  times = []
  for _ in range(2 + 3):
    began = time.process_time()
    jax.block_until_ready(program(*arguments))
    times.append(time.process_time() - began)
  return statistics.median(times[2:])
