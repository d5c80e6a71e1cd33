"""The decode kernel of TPUs, interpreted, against plain attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from rl_tpu import sharding
from rl_tpu.models import attention, paged

LENGTHS = jnp.array([0, 5, 127, 300])
"""None, some, all but one of a page, and two pages and a part."""


def narrow(seed, *shape):
  return jax.random.normal(jax.random.key(seed), shape).astype(jnp.bfloat16)


@pytest.mark.parametrize(("tensor", "kv_heads"), [(None, 2), (2, 2)])
def test_ragged_slots_attend_as_one_token_does_and_are_written_in_place(
  tensor, kv_heads
):
  capacity = paged.entries(301)
  q, k, v = (narrow(i, 4, n, 128) for i, n in enumerate((4, *[kv_heads] * 2)))
  keys, values = (narrow(i, 3, 4, kv_heads, capacity, 128) for i in (3, 4))
  seen = jnp.arange(capacity) < LENGTHS[:, None]
  plain = (keys[1].swapaxes(-1, -2), values[1], seen)
  expected = attention.one_token(q, k, v, [plain])
  attend = jax.jit(paged.attend)
  operands = (q, k, v, keys, values, jnp.int32(1), LENGTHS)
  with pltpu.force_tpu_interpret_mode():
    if tensor is None:
      mixed, written = attend(*operands)
    else:
      shape = sharding.MeshShape(data=2, tensor=tensor)
      with jax.set_mesh(sharding.make_mesh(shape, jax.devices())):
        mixed, written = attend(*operands)
  np.testing.assert_allclose(
    *(np.asarray(x, np.float32) for x in (mixed, expected)), atol=0.02
  )
  for got, cache, new in zip(written, (keys, values), (k, v), strict=True):
    slot = jnp.arange(4)
    should = cache.at[1, slot, :, LENGTHS].set(new)
    np.testing.assert_array_equal(*(np.asarray(x) for x in (got, should)))


@pytest.mark.parametrize(
  ("context", "page", "capacity"),
  [
    (64, 128, 128),
    (257, 128, 384),
    (4096, 2048, 4096),
    (5000, 2048, 6144),
    (32768, 4096, 32768),
  ],
)
def test_a_slot_is_whole_pages(context, page, capacity):
  assert paged.entries(context) == capacity
  assert paged.page_size(capacity) == page


def test_what_the_kernel_would_round_or_cannot_take_stays_plain(monkeypatch):
  assert not paged.suits(128, "bfloat16")  # No TPU.
  monkeypatch.setattr(sharding, "on_tpu", lambda: True)
  assert paged.suits(128, "bfloat16")
  assert not paged.suits(64, "bfloat16")
  assert not paged.suits(128, "float32")
