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


STARTS = jnp.array([0, 17])


def continuation(length=24, kv_heads=2):
  """Queries, keys and values of new tokens, then a cache's keys and values."""
  keys = jax.random.split(jax.random.key(0), 5)
  heads = (4, *[kv_heads] * 4)
  return [
    jax.random.normal(key, (2, length, n, 128))
    for key, n in zip(keys, heads, strict=True)
  ]


def test_new_tokens_see_the_same_however_many_are_scored_at_once(monkeypatch):
  q, k, v, *held = continuation()
  arrays = (k, v, attention.as_cache(*held), STARTS)
  at_once = attention.extended(q, *arrays)
  monkeypatch.setattr(attention, "_SCORES", 7 * 48)
  np.testing.assert_allclose(attention.extended(q, *arrays), at_once, atol=1e-5)
  parts = attention.extended(q.at[:, 6:].set(0), *arrays)
  np.testing.assert_allclose(parts[:, :6], at_once[:, :6], atol=1e-5)


@pytest.mark.parametrize("mesh_shape", [None, {"fsdp": 2, "tensor": 2}])
def test_the_tpu_kernel_continues_a_cache_as_plain_attention_does(mesh_shape):
  q, k, v, *held = continuation(length=256)
  starts = jnp.array([0, 130])
  plain = attention.extended(q, k, v, attention.as_cache(*held), starts)
  by_head = [x.swapaxes(1, 2) for x in held]

  def kernel(q, k, v):
    return attention.splash_extended(q, k, v, by_head, starts, interpret=True)

  if mesh_shape is None:
    got = kernel(q, k, v)
  else:
    shape = sharding.MeshShape(**mesh_shape)
    with jax.set_mesh(sharding.make_mesh(shape, jax.devices())):
      got = jax.jit(kernel)(q, k, v)
  np.testing.assert_allclose(got, plain, atol=1e-4)


def test_what_continues_a_cache_lies_behind_what_counts_and_ends_with_it():
  _, k, v, keys, values = continuation()
  got = attention.from_cache(
    *attention.continued(attention.as_cache(keys, values), (k, v), STARTS)
  )
  for whole, held, new in zip(got, (keys, values), (k, v), strict=True):
    np.testing.assert_array_equal(whole[0], new[0])
    np.testing.assert_array_equal(whole[1, :17], held[1, :17])
    np.testing.assert_array_equal(whole[1, 17:], new[1, :7])


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
