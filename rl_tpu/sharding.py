"""Meshes, logical axis rules, and moving arrays between meshes.

Weights and activations name their dimensions (`embed`, `heads`, `rows`, ...);
`RULES` says which mesh axes split each of them. Nothing else in the code knows
mesh axes. Meshes are (data, fsdp, sequence, tensor, expert), all of type Auto:
the compiler places the collectives.

Where one row does not fit a device, `sequence` splits its tokens: weights are
split along it as along fsdp, every layer computes its own tokens only, and
attention gathers the keys and values of the row, once a layer, for its own
queries. So activations shrink by the axis; what does not is a layer's gathered
keys and values, 4 K h bytes a token of the row in bfloat16. The gather's time
is linear in the row's tokens, that of attention in their square over the axis,
and the device with the last tokens, whose queries see all the others, has up to
twice its share: it is what the rest of a layer waits for.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "sequence", "tensor", "expert")

RULES: Mapping[str, tuple[str, ...]] = {
  # activations
  "rows": ("data", "fsdp", "expert"),
  "slots": ("data", "fsdp", "expert"),
  "context": ("sequence",),
  "tokens": ("sequence", "tensor"),
  # weights
  "embed": ("fsdp", "sequence"),
  "vocab": ("tensor",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "mlp": ("tensor",),
  "expert": ("expert",),
}
"""Logical axis -> mesh axes that split it. Axes not listed stay whole."""

LogicalAxes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
  """Devices along each mesh axis; their product is the devices used."""

  data: int = 1
  """Copies of the weights, >= 1; the axis that may cross slices."""
  fsdp: int = 1
  """Ways that weights and optimizer state are split, >= 1."""
  sequence: int = 1
  """Ways that the tokens of a row are split, and weights once more, >= 1; for
  rows that do not fit a device. A learner's: generators have 1."""
  tensor: int = 1
  """Ways that heads, hidden units and vocabulary are split, >= 1."""
  expert: int = 1
  """Ways that experts are split, and rows once more, >= 1."""

  def __post_init__(self):
    for axis in AXES:
      if getattr(self, axis) < 1:
        raise ValueError(
          f"MeshShape.{axis} is {getattr(self, axis)}; it must be >= 1"
        )

  @property
  def size(self) -> int:
    """Number of devices."""
    return math.prod(getattr(self, axis) for axis in AXES)


def make_mesh(shape: MeshShape, devices: Sequence[Any]) -> Mesh:
  """Builds a mesh of the first `shape.size` of `devices`.

  Along each axis, chips of a TPU slice that follow each other are neighbours in
  its torus where their number allows it. Slices follow each other along `data`:
  only gradients, once an update, cross the slower network between them.

  Raises:
    ValueError: there are fewer devices than the shape asks for, or `data` is
      not a multiple of their slices.
  """
  if len(devices) < shape.size:
    raise ValueError(
      f"{shape} needs {shape.size} devices; {len(devices)} are given"
    )
  devices = devices[: shape.size]
  sizes = [getattr(shape, axis) for axis in AXES]
  slices = len({getattr(device, "slice_index", 0) for device in devices})
  if shape.data % slices:
    raise ValueError(
      f"MeshShape.data is {shape.data} on {slices} slices; it must be a "
      "multiple of them: no other axis may cross slices"
    )
  if slices > 1:
    grid = mesh_utils.create_hybrid_device_mesh(
      [shape.data // slices, *sizes[1:]],
      [slices] + [1] * (len(AXES) - 1),
      devices,
      allow_split_physical_axes=True,
    )
  elif _fill_a_box(devices):
    grid = mesh_utils.create_device_mesh(
      sizes, devices, allow_split_physical_axes=True
    )
  else:
    grid = np.asarray(devices).reshape(sizes)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _fill_a_box(devices: Sequence[Any]) -> bool:
  """Whether these are all chips of a box in a torus, from its origin on."""
  if not all(hasattr(device, "coords") for device in devices):
    return False
  places = np.array([device.coords for device in devices])
  return len(devices) == np.prod(places.max(axis=0) + 1)


def partition_spec(axes: LogicalAxes) -> PartitionSpec:
  """Mesh axes of an array whose dimensions have these logical names."""
  return PartitionSpec(
    *(RULES.get(axis) if axis is not None else None for axis in axes)
  )


def named(mesh: Mesh, *axes: str | None) -> NamedSharding:
  """Sharding on `mesh` of an array with these logical axes; () replicates."""
  return NamedSharding(mesh, partition_spec(axes))


def ways(mesh: Any, axis: str) -> int:
  """Into how many parts a mesh splits a logical axis."""
  return math.prod(mesh.shape[name] for name in RULES[axis])


def tree_shardings(mesh: Mesh, abstract: Any, axes: Any) -> Any:
  """Shardings for a tree of abstract arrays with a tree of logical axes.

  Raises:
    ValueError: a dimension does not divide over its mesh axes; names the
      tensor, the dimension and the mesh axes.
  """

  def one(path, leaf, leaf_axes):
    for size, axis in zip(leaf.shape, leaf_axes, strict=True):
      split = ways(mesh, axis) if axis in RULES else 1
      if size % split:
        raise ValueError(
          f"{jax.tree_util.keystr(path)}: dimension {axis!r} of size {size} "
          f"does not divide over mesh axes {RULES[axis]} ({split} ways)"
        )
    return named(mesh, *leaf_axes)

  return jax.tree_util.tree_map_with_path(one, abstract, axes)


def placed(abstract: Any, shardings: Any) -> Any:
  """Shapes and dtypes of a tree of arrays together with where they live."""
  return jax.tree.map(
    lambda leaf, where: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=where
    ),
    abstract,
    shardings,
  )


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
  """Asks the compiler for this layout, if a mesh is in force."""
  if jax.sharding.get_abstract_mesh().empty:
    return x
  return jax.lax.with_sharding_constraint(x, partition_spec(axes))


def splits(size: int, axis: str) -> bool:
  """Whether the mesh in force splits a dimension of this size, evenly."""
  return parts(axis) > 1 and size % parts(axis) == 0


def parts(axis: str) -> int:
  """Into how many parts the mesh in force splits a logical axis."""
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty else ways(mesh, axis)


def check_even(what: str, size: int, axis: str) -> None:
  """Refuses a dimension that the mesh in force would split unevenly.

  XLA pads such a dimension. A scatter that adds, as the gradient of an
  embedding does, then adds what stands in the padding to entry 0 (jaxlib
  0.10.2): a wrong gradient without a word.

  Raises:
    ValueError: names what it is, its size and the mesh axes.
  """
  if size % parts(axis):
    raise ValueError(
      f"{what} has {size} {axis}; they must divide over mesh axes "
      f"{RULES[axis]} ({parts(axis)} ways)"
    )


def one_device() -> bool:
  """Whether nothing is split: no mesh is in force, or one of one device."""
  return math.prod(jax.sharding.get_abstract_mesh().shape.values()) == 1


def on_tpu() -> bool:
  """Whether the mesh in force is one of TPUs, real or described."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device is not None and device.platform == "tpu"


def distribute(tree: Any, shardings: Any) -> Any:
  """Puts host arrays on a mesh, each process the shards of its own devices.

  Args:
    tree: numpy arrays, the same in every process of the mesh.
    shardings: of each.
  """

  def one(array: Any, where: NamedSharding) -> jax.Array:
    if where.is_fully_addressable:
      return jax.device_put(array, where)
    array = np.asarray(array)
    return jax.make_array_from_callback(
      array.shape, where, lambda index: array[index]
    )

  return jax.tree.map(one, tree, shardings)


def reshard(tree: Any, shardings: Any) -> Any:
  """Copies a tree of arrays to other shardings, also on other devices.

  The copy never shares buffers with its source, so the source may be donated
  afterwards. Cost is linear in the bytes moved.
  """
  return jax.device_put(tree, shardings, may_alias=False)
