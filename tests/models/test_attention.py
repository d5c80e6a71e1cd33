"""Attention's ways of saying the same thing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu import sharding
from rl_tpu.models import attention

IDS = jnp.array([[0] * 100 + [1] * 100 + [-1] * 56, [2] * 256])


def tensors(heads=4, kv_heads=2, size=128):
  keys = jax.random.split(jax.random.key(0), 3)
  shapes = [(2, 256, n, size) for n in (heads, kv_heads, kv_heads)]
  return [
    jax.random.normal(key, shape)
    for key, shape in zip(keys, shapes, strict=True)
  ]


@pytest.mark.parametrize(
  "mesh_shape",
  [None, {"fsdp": 2, "tensor": 2}, {"sequence": 2, "tensor": 2}],
)
def test_H22_the_tpu_kernel_is_the_plain_attention_forward_and_backward(
  mesh_shape,
):
  """Interpreted here; on a mesh each device has its own part of them."""
  q, k, v = tensors()
  counted = (IDS >= 0)[..., None, None]
  weight = jax.random.normal(jax.random.key(5), q.shape) * counted

  def plain(q, k, v):
    return (attention.packed(q, k, v, IDS) * weight).sum()

  def kernel(q, k, v):
    out = attention.splash_packed(q, k, v, IDS, interpret=True)
    return (out * weight).sum()

  by_all = jax.value_and_grad(plain, (0, 1, 2))(q, k, v)
  if mesh_shape is None:
    got = jax.value_and_grad(kernel, (0, 1, 2))(q, k, v)
  else:
    shape = sharding.MeshShape(**mesh_shape)
    with jax.set_mesh(sharding.make_mesh(shape, jax.devices())):
      got = jax.jit(jax.value_and_grad(kernel, (0, 1, 2)))(q, k, v)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4, rtol=1e-4),
    got,
    by_all,
  )


def test_on_a_cpu_there_is_no_tpu():
  assert not sharding.on_tpu()
  mesh = sharding.make_mesh(sharding.MeshShape(), jax.devices())
  with jax.set_mesh(mesh):
    assert not sharding.on_tpu()


def test_new_tokens_see_the_same_however_many_are_scored_at_once(monkeypatch):
  keys, values, cached_keys, cached_values = (
    jax.random.normal(key, (2, 24, 2, 128))
    for key in jax.random.split(jax.random.key(0), 4)
  )
  q = jax.random.normal(jax.random.key(1), (2, 24, 4, 128))
  arrays = (q, keys, values, cached_keys, cached_values, jnp.array([0, 17]))
  at_once = attention.extended(*arrays)
  monkeypatch.setattr(attention, "_SCORES", 7 * 48)
  np.testing.assert_allclose(attention.extended(*arrays), at_once, atol=1e-5)
  q = q.at[:, 6:].set(0)
  parts = attention.extended(q, *arrays[1:])
  np.testing.assert_allclose(parts[:, :6], at_once[:, :6], atol=1e-5)


def test_one_token_sees_several_caches_as_one():
  q, k, v = (x[:, 0] for x in tensors())
  _, keys, values = tensors(kv_heads=2)
  seen = jnp.arange(256) < jnp.array([[7], [256]])
  cached = attention.as_cache(keys, values)
  whole = attention.one_token(q, k, v, [(*cached, seen)])
  parts = [
    (*attention.as_cache(keys[:, part], values[:, part]), seen[:, part])
    for part in (slice(0, 5), slice(5, None))
  ]
  split = attention.one_token(q, k, v, parts)
  np.testing.assert_allclose(split, whole, atol=1e-6)
