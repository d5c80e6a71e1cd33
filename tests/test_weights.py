import jax
import jax.numpy as jnp
import pytest

from rl_tpu import sharding, weights
from rl_tpu.models import transformer

POLICY = transformer.Policy(transformer.sized("tiny"))


def test_X09_weights_arrive_on_the_generators_devices_as_a_copy():
  devices = jax.devices()
  trainer = sharding.make_mesh(sharding.MeshShape(fsdp=2, tensor=2), devices)
  generator = sharding.make_mesh(sharding.MeshShape(tensor=4), devices[4:])
  there = POLICY.param_shardings(generator)
  params = jax.device_put(
    POLICY.init(jax.random.key(0)), POLICY.param_shardings(trainer)
  )
  expected = jax.device_get(params)
  published = weights.publish(params, 3, there)
  assert published.version == 3
  jax.tree.map(lambda x: x.delete(), params)  # as donating them would
  for got, want in zip(
    jax.tree.leaves(published.params), jax.tree.leaves(expected), strict=True
  ):
    assert got.sharding.device_set == set(devices[4:])
    assert jnp.array_equal(got, want)


def test_on_one_mesh_the_copy_survives_donation():
  mesh = sharding.make_mesh(sharding.MeshShape(), jax.devices())
  there = POLICY.param_shardings(mesh)
  params = jax.device_put(POLICY.init(jax.random.key(0)), there)
  published = weights.publish(params, 0, there)
  jax.tree.map(lambda x: x.delete(), params)
  assert jnp.isfinite(published.params["embedding"]).all()


def test_X09_weights_that_stay_where_they_were_are_an_error(monkeypatch):
  mesh = sharding.make_mesh(sharding.MeshShape(), jax.devices()[1:])
  params = POLICY.init(jax.random.key(0))
  monkeypatch.setattr(sharding, "reshard", lambda tree, where: tree)
  with pytest.raises(RuntimeError, match=r"\['embedding'\] arrived on \[0\]"):
    weights.publish(params, 0, POLICY.param_shardings(mesh))
