"""From the trainer's weights to the generator's: publishing a version.

Publishing depends on nothing but the version. In one process the weights are
resharded between meshes by a device-to-device copy; the copy shares no buffer
with the learner's state, which is donated to the next update. Where a trainer
has several processes, its weights pass through the host of the generator's.
"""

from typing import Any

import jax
from jax.experimental import multihost_utils

from rl_tpu import sharding
from rl_tpu.types import VersionedParams


def readable(params: Any) -> Any:
  """Weights that this process can read: those given, or copies on the host.

  Every process that has a part of them must call it.
  """
  if all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params)):
    return params
  return multihost_utils.process_allgather(params, tiled=True)


def publish(params: Any, version: int, shardings: Any) -> VersionedParams:
  """Copies `params` to the generator's shardings and stamps the version.

  Args:
    params: the trainer's weights, readable.
    version: batches consumed so far, >= 0.
    shardings: of the generator, a tree like `params`.

  Raises:
    RuntimeError: an array did not arrive on the generator's devices.
  """
  moved = sharding.reshard(params, shardings)
  jax.tree_util.tree_map_with_path(_check_arrived, moved, shardings)
  return VersionedParams(version=version, params=moved)


def _check_arrived(path, array: jax.Array, where: jax.sharding.Sharding):
  if array.sharding.device_set != where.device_set:
    raise RuntimeError(
      f"weights{jax.tree_util.keystr(path)} arrived on "
      f"{sorted(d.id for d in array.sharding.device_set)}; the generator has "
      f"devices {sorted(d.id for d in where.device_set)}"
    )
