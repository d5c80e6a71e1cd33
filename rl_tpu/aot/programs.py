"""What is compiled, where for, and the compiler's answer, kept on disk.

The topology is one of described devices: libtpu compiles for it without a TPU.
Compiling costs minutes of processor time, so an answer is kept under the hash
of what it depends on: the program's text, the options and the compiler.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from rl_tpu import learner as learners
from rl_tpu import packing, parts, sharding
from rl_tpu.config import ConfigError
from rl_tpu.topology import OPTIONS, Topology
from rl_tpu.types import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """The compiler's answer for one program."""

  text: str
  """The module; empty where it did not fit."""
  memory: dict[str, int]
  """Bytes of one device by part; empty where it did not fit."""
  refused: str | None = None
  """What the compiler said where the program did not fit."""

  @property
  def hbm(self) -> int:
    """Bytes of one device while the program runs."""
    parts_of = self.memory
    return sum(parts_of.values()) - 2 * parts_of.get("donated", 0)


def devices(topology: Topology) -> list[Any]:
  """The chips of a topology, described.

  Raises:
    ConfigError: libtpu is not installed, or knows no such topology.
  """
  from jax.experimental import topologies

  try:
    described = topologies.get_topology_desc(
      platform="tpu",
      topology_name=topology.name,
      num_slices=topology.slices,
    )
  except (jax.errors.JaxRuntimeError, ValueError, RuntimeError) as error:
    reason = str(error).splitlines()[0]
    raise ConfigError(f"topology {topology.name!r}: {reason}") from error
  return list(described.devices)


def mesh_for(
  section: str, shape: sharding.MeshShape, topology: Topology
) -> jax.sharding.Mesh:
  """The mesh of one side of a config on all chips of a topology.

  Raises:
    ConfigError: it has another number of devices.
  """
  if shape.size != topology.size:
    axes = {axis: getattr(shape, axis) for axis in sharding.AXES}
    raise ConfigError(
      f"{section} is {axes}, {shape.size} devices; topology {topology} has "
      f"{topology.size} chips"
    )
  return sharding.make_mesh(shape, devices(topology))


def trainer(
  config: parts.Config, mesh: jax.sharding.Mesh
) -> tuple[learners.Learner, Batch]:
  """The learner, and the shapes of a batch.

  Every trajectory is taken to fill the generator's context.
  """
  learner = parts.make_learner(config, mesh)
  trajectories = config.groups_per_batch * config.group_size
  a_row = config.learner.row_length // config.engine.context_length
  multiple = config.learner.rows_multiple
  needed = -(-trajectories // a_row)
  rows = multiple * packing.bucket(-(-needed // multiple))
  batch = packing.abstract(
    rows,
    config.learner.row_length,
    trajectories,
    head_size=config.engine.behavior_top_k,
    routed=config.model.routed if config.learner.router_replay else None,
    baselines="baselines" in learner.requires,
  )
  return learner, batch


def compile_cached(
  traced: jax.stages.Traced,
  mesh: jax.sharding.Mesh,
  cache: pathlib.Path,
  note: Callable[[str], None],
) -> Compiled:
  """Compiles a program, or takes the answer from the cache.

  Args:
    traced: the program.
    mesh: of described devices.
    cache: directory of answers.
    note: told whether it is compiled.
  """
  with jax.set_mesh(mesh):
    lowered = traced.lower()
  known = [
    lowered.as_text(),
    json.dumps(OPTIONS, sort_keys=True),
    mesh.devices.flat[0].device_kind,
    str([(d.id, d.coords) for d in mesh.devices.flat]),
    *(f"{p} {importlib.metadata.version(p)}" for p in ("jaxlib", "libtpu")),
  ]
  name = hashlib.sha256("\0".join(known).encode()).hexdigest()[:16]
  path = cache / f"{name}.json.gz"
  if path.exists():
    note(f"taken from {path}")
    return Compiled(**json.loads(gzip.decompress(path.read_bytes())))
  note("compiling, which may take minutes")
  result = _compile(lowered)
  cache.mkdir(parents=True, exist_ok=True)
  new = path.with_suffix(".new")
  new.write_bytes(gzip.compress(json.dumps(vars(result)).encode()))
  new.replace(path)
  return result


def _compile(lowered: jax.stages.Lowered) -> Compiled:
  try:
    with _not_cached_by_jax():
      compiled = lowered.compile(compiler_options=OPTIONS)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return Compiled(text="", memory={}, refused=_first_sentence(str(error)))
  memory: Any = compiled.memory_analysis()
  return Compiled(
    text=compiled.as_text() or "",
    memory={
      "arguments": memory.argument_size_in_bytes,
      "results": memory.output_size_in_bytes,
      "donated": memory.alias_size_in_bytes,
      "temporary": memory.temp_size_in_bytes,
      "code": memory.generated_code_size_in_bytes,
    },
  )


@contextlib.contextmanager
def _not_cached_by_jax() -> Iterator[None]:
  """JAX's own cache takes programs for described devices, but cannot read them.

  One that takes less than the least time is not written.
  """
  name = "jax_persistent_cache_min_compile_time_secs"
  before = getattr(jax.config, name)
  jax.config.update(name, math.inf)
  try:
    yield
  finally:
    jax.config.update(name, before)


def _first_sentence(message: str) -> str:
  found = re.search(r"RESOURCE_EXHAUSTED: (.*?\.)(?:\s|$)", message, re.S)
  return found[1] if found else message.splitlines()[0]
