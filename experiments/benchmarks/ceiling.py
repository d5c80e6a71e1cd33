"""The matrix products of a decoder alone: a ceiling for whatever runs it.

Every product of every layer is computed once, on weights of its own, in the
faster of two layouts; nothing is normalised, attended to, sampled or moved.
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
