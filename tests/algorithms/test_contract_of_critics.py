"""What every algorithm with a critic promises of each of its value losses.

As `test_contract.py` does of the policy's loss; a new file is covered alike.
"""

import dataclasses
import functools
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from test_contract import (
  BINS,
  assert_same,
  lay_out,
  map_both,
  packed,
)

from rl_tpu import algorithms

LIVE = {"mse": "values", "hl_gauss": "value_logits"}
"""What each value loss is differentiated by."""


def cases():
  """(algorithm, value loss)."""
  for name in algorithms.names():
    module = algorithms.get(name)
    if hasattr(module, "value_loss"):
      kinds = typing.get_type_hints(module.Config)["value_loss"]
      for kind in typing.get_args(kinds):
        yield name, kind


every_critic = pytest.mark.parametrize(("name", "kind"), list(cases()))


def example(name, kind, dtype=jnp.float32):
  """Returns on both sides of the support's low end."""
  module = algorithms.get(name)
  config = module.Config(
    value_loss=kind, value_bins=BINS, value_low=-1.0, value_high=0.5
  )
  outputs, batch = lay_out(packed(), dtype)
  inside = (batch.returns > -1.0)[batch.action_mask]
  assert 0 < inside.sum() < inside.size
  return module, config, outputs, batch


@functools.partial(jax.jit, static_argnums=(0, 3))
def evaluate(module, outputs, batch, config):
  """Metrics with the loss, and its gradient by what the critic gave."""

  def loss(live):
    live = dataclasses.replace(outputs, **live)
    estimate, metrics = module.value_loss(live, batch, config)
    return estimate.total, metrics | {"loss": estimate}

  live = {name: getattr(outputs, name) for name in LIVE.values()}
  gradient, metrics = jax.grad(loss, has_aux=True)(live)
  return metrics, gradient


def test_sao_and_vapo_have_both_losses():
  found = set(cases())
  assert {(n, k) for n in ("sao", "vapo") for k in LIVE} <= found


@every_critic
def test_it_counts_action_tokens_and_moves_what_it_is_of(name, kind):
  module, config, outputs, batch = example(name, kind)
  metrics, gradient = evaluate(module, outputs, batch, config)
  assert metrics["loss"].count == np.sum(batch.action_mask)
  for field, slopes in gradient.items():
    moved = np.any(np.reshape(slopes, (*batch.tokens.shape, -1)), axis=-1)
    expected = batch.action_mask if field == LIVE[kind] else False
    np.testing.assert_array_equal(moved, np.broadcast_to(expected, moved.shape))


@every_critic
def test_its_gradient_is_the_finite_difference(name, kind):
  with jax.enable_x64(True):
    module, config, outputs, batch = example(name, kind, jnp.float64)
    _, gradient = evaluate(module, outputs, batch, config)
    gradient = gradient[LIVE[kind]].ravel()
    assert gradient.dtype == jnp.float64
    start, unravel = ravel_pytree(getattr(outputs, LIVE[kind]))

    def difference(direction, step=1e-6):
      def total(numbers):
        live = dataclasses.replace(outputs, **{LIVE[kind]: unravel(numbers)})
        return module.value_loss(live, batch, config)[0].total

      ends = [total(start + sign * step * direction) for sign in (1, -1)]
      return (ends[0] - ends[1]) / (2 * step)

    slopes = jax.jit(jax.vmap(difference))(jnp.eye(start.size))
    np.testing.assert_allclose(slopes, gradient, rtol=1e-6, atol=1e-7)


@every_critic
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_no_number_off_the_mask_reaches_it(name, kind, poison):
  module, config, outputs, batch = example(name, kind)
  expected = evaluate(module, outputs, batch, config)

  def spoil(x):
    mask = batch.action_mask.reshape(*x.shape[:2], *[1] * (x.ndim - 2))
    return jnp.where(mask, x, poison)

  outputs = jax.tree.map(spoil, outputs)
  batch = dataclasses.replace(batch, returns=spoil(batch.returns))
  assert_same(evaluate(module, outputs, batch, config), expected)


@every_critic
def test_splitting_rows_adds_up(name, kind):
  module, config, outputs, batch = example(name, kind)
  metrics, gradient = evaluate(module, outputs, batch, config)
  parts = [
    evaluate(
      module, *map_both(lambda x, row=row: x[row], outputs, batch), config
    )
    for row in (slice(0, 1), slice(1, None))
  ]
  summed = {key: parts[0][0][key] + parts[1][0][key] for key in metrics}
  assert_same(summed, metrics)
  joined = jax.tree.map(lambda *x: jnp.concatenate(x), *(p[1] for p in parts))
  assert_same(joined, gradient)


@pytest.mark.parametrize("name", sorted({name for name, _ in cases()}))
@pytest.mark.parametrize(
  ("fields", "allowed"),
  [
    ({"value_loss": "huber"}, "one of .*hl_gauss"),
    ({"value_clip": 0.0}, "> 0 or None"),
    ({"value_clip": 0.2, "value_loss": "hl_gauss"}, "None where value_loss is"),
    ({"value_low": 1.0}, "finite and < value_high, which is 1.0"),
    ({"value_low": -np.inf}, "finite and < value_high"),
    ({"value_high": np.inf}, "finite"),
    ({"value_bins": 1}, ">= 2"),
    ({"value_sigma": 0.0}, r"in \(0, value_bins\], which is 51"),
    ({"value_sigma": 52.0}, r"in \(0, value_bins\], which is 51"),
  ],
)
def test_its_fields_are_named_with_value_and_what_is_allowed(
  name, fields, allowed
):
  field, value = next(iter(fields.items()))
  expected = f"{name}.Config.{field} is {re.escape(repr(value))}; it must be "
  with pytest.raises(ValueError, match=expected + allowed):
    algorithms.get(name).Config(**fields)
