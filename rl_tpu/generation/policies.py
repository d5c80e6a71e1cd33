"""Weights from storage, for a generator that has a process of its own.

A trainer leaves two kinds of directory: `checkpoint.save_params` writes
weights alone, and a run's checkpoints hold them beside optimizer and buffer.
Both are read straight into the generator's shardings, from a checkpoint the
weights only. What does not fit the model, or is not finite, is refused.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from rl_tpu import checkpoint, sharding
from rl_tpu.generation.engine import PolicyEngine
from rl_tpu.types import VersionedParams


def newest(checkpoints: str | os.PathLike) -> pathlib.Path | None:
  """The newest complete checkpoint below a run's directory of them."""
  complete = [
    path
    for path in pathlib.Path(checkpoints).glob("[0-9]*")
    if path.name.isdigit()
    and all((path / part).is_dir() for part in checkpoint.PARTS)
  ]
  return max(complete, key=lambda path: int(path.name), default=None)


def load(
  engine: PolicyEngine, directory: str | os.PathLike, version: int
) -> VersionedParams:
  """Reads weights for an engine and names their version.

  Raises:
    FileNotFoundError: there is no such directory.
    ValueError: the weights are of another model, incomplete, or not finite.
  """
  path = pathlib.Path(directory).absolute()
  if not path.is_dir():
    raise FileNotFoundError(f"{path} is not there: no weights to load")
  like = abstract(engine)
  if (path / "state").is_dir():
    params = _restore(path / "state", {"params": like})["params"]
  else:
    params = _restore(path, like)
  if not _all_finite(params):
    raise ValueError(f"the weights in {path} are not all finite")
  return engine.serve(VersionedParams(version=version, params=params))


def abstract(engine: PolicyEngine) -> Any:
  """The policy's weights as they arrive on the engine's mesh."""
  policy = engine.policy
  return sharding.placed(
    policy.abstract_params(), policy.param_shardings(engine.mesh)
  )


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
  """Orbax raises anything, Exception itself too, with pages of detail."""
  try:
    yield
  except Exception as error:
    detail = str(error).partition("\n")[0][:300]
    raise ValueError(f"{path} cannot be read: {detail}") from error


def _restore(path: pathlib.Path, abstract: Any) -> Any:
  """Reads the arrays that `abstract` names, after a look at what is there."""
  with ocp.PyTreeCheckpointer() as checkpointer:
    with _reading(path):
      stored = checkpointer.metadata(path).item_metadata
    if stored is None:
      raise ValueError(f"{path} holds no weights that can be read")
    _check(path, stored.tree, abstract)
    with _reading(path):
      return checkpoint.restore_named(checkpointer, path, abstract)


def _check(path: pathlib.Path, stored: Any, abstract: Any) -> None:
  """Refuses what lacks a weight, or has one of another shape."""
  leaves = jax.tree_util.tree_leaves_with_path
  shapes = {
    jax.tree_util.keystr(name): leaf.shape for name, leaf in leaves(stored)
  }
  for key, leaf in leaves(abstract):
    name = jax.tree_util.keystr(key)
    if name not in shapes:
      raise ValueError(f"{path} lacks weight {name}")
    if shapes[name] != leaf.shape:
      raise ValueError(
        f"weight {name} in {path} is {shapes[name]}; it must be {leaf.shape}"
      )


@jax.jit
def _all_finite(params: Any) -> jax.Array:
  leaves = jax.tree.leaves(params)
  return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()
