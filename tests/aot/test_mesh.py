"""Where the chips of a slice lie in a mesh, asked of described topologies."""

import jax
import numpy as np
import pytest

from rl_tpu import sharding
from rl_tpu.aot import programs
from rl_tpu.topology import Topology

Shape = sharding.MeshShape


def mesh(topology, shape, first=0):
  return sharding.make_mesh(shape, programs.devices(topology)[first:])


def groups(mesh, axis):
  """The chips that differ along one axis of the mesh alone, a group a row."""
  at = sharding.AXES.index(axis)
  return np.moveaxis(mesh.devices, at, -1).reshape(-1, mesh.devices.shape[at])


def box(group):
  """Sides of the smallest box in the torus that holds the chips."""
  places = np.array([chip.coords for chip in group])
  return sorted((places.max(axis=0) - places.min(axis=0) + 1).tolist())


def test_each_axis_has_axes_of_the_torus_to_itself():
  made = mesh(Topology(name="v5p:4x4x4"), Shape(fsdp=16, tensor=4))
  assert {tuple(box(group)) for group in groups(made, "tensor")} == {(1, 1, 4)}
  assert {tuple(box(group)) for group in groups(made, "fsdp")} == {(1, 4, 4)}


def test_only_data_crosses_slices():
  topology = Topology(name="v5p:2x2x2", slices=2)
  made = mesh(topology, Shape(data=4, fsdp=2, tensor=2))
  for axis in ("fsdp", "tensor"):
    for group in groups(made, axis):
      assert len({chip.slice_index for chip in group}) == 1
  order = [chip.slice_index for chip in groups(made, "data")[0]]
  assert order == [0, 0, 1, 1]


def test_an_axis_that_would_cross_slices_is_refused():
  topology = Topology(name="v5p:2x2x2", slices=2)
  with pytest.raises(ValueError, match=r"MeshShape\.data is 1 on 2 slices"):
    mesh(topology, Shape(fsdp=16))


def test_chips_that_fill_no_box_keep_their_order():
  topology = Topology(name="v5e:4x4")
  rest = programs.devices(topology)[3:9]
  made = sharding.make_mesh(Shape(fsdp=3, tensor=2), rest)
  assert made.devices.reshape(-1).tolist() == rest


def test_devices_that_are_no_tpus_keep_their_order():
  made = sharding.make_mesh(Shape(fsdp=4, tensor=2), jax.devices())
  assert made.devices.reshape(-1).tolist() == jax.devices()[:8]
