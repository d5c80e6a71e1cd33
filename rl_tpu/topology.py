"""What a TPU chip can do, and what its network can.

The figures are Google's (cloud.google.com/tpu/docs, pages v5e, v5p and v6e) but
for `memory`, which is what the compiler lets a program use, and `product`, what
its own cycles make of a product of 8192^3 with `OPTIONS`. Clocks follow from
the peak: 2 * units * size^2 operations a cycle.

The network is modelled, never simulated. Chips of a slice form a torus. A group
whose members differ along k of its axes moves its bytes in rings along these
axes at once: at the speed of k links both ways where the axes close (16 long in
two dimensions, a multiple of 4 in three), one way where they do not. A group
that spans slices moves them through each chip's share of the data-centre
network. Collectives are taken one after the other.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_tpu.config import ConfigError

OPTIONS: dict[str, str | bool] = {
  "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
  "xla_tpu_scoped_vmem_limit_kib": "65536",
}
"""Of the TPU's compiler, here and where a run is. Weights split over fsdp alone
would otherwise travel in pieces, one product each: 2.3 times the estimated time
of an update. With more of the vector memory for one operation, products get
larger tiles: 0.97 of v5e's peak in place of 0.88."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """Peaks of one chip."""

  kinds: tuple[str, ...]
  """What JAX calls its devices, described or real."""
  flops: float
  """bf16 operations a second."""
  memory: float
  """Bytes of HBM that a program may use."""
  bandwidth: float
  """Bytes of HBM a second."""
  clock: float
  """Cycles a second."""
  unit: int
  """Rows and columns of a matrix unit."""
  cores: int
  """That share its memory and run one program."""
  product: float
  """Share of the peak that the compiler gives a large product."""
  link: float
  """Bytes a second over one link, one way."""
  dimensions: int
  """Of the torus."""
  dcn: float
  """Bytes a second of a chip's share in the data-centre network."""

  def closes(self, length: int) -> bool:
    """Whether an axis of a slice so long is a ring."""
    return length == 16 if self.dimensions == 2 else length % 4 == 0


_GIB = 2**30
CHIPS = {
  "v5e": Chip(
    kinds=("TPU v5 lite", "TPU v5e"),
    flops=197e12,
    memory=15.75 * _GIB,
    bandwidth=819e9,
    clock=1.5e9,
    unit=128,
    cores=1,
    product=0.97,
    link=50e9,
    dimensions=2,
    dcn=3.125e9,
  ),
  "v5p": Chip(
    kinds=("TPU v5", "TPU v5p"),
    flops=459e12,
    memory=95.74 * _GIB,
    bandwidth=2765e9,
    clock=1.75e9,
    unit=128,
    cores=2,
    product=0.98,
    link=100e9,
    dimensions=3,
    dcn=6.25e9,
  ),
  "v6e": Chip(
    kinds=("TPU v6 lite", "TPU v6e"),
    flops=918e12,
    memory=31.25 * _GIB,
    bandwidth=1640e9,
    clock=1.75e9,
    unit=256,
    cores=1,
    product=0.81,
    link=100e9,
    dimensions=2,
    dcn=12.5e9,
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Of the command `compile`: where the two sides of a run would live."""

  topology: str | None = None
  """The trainer's slice, such as v5e:4x4 or v5p:4x4x4."""
  slices: int = 1
  """The trainer's slices, >= 1."""
  generator_topology: str | None = None
  """The generator's one slice; None: the trainer's."""

  def trainer(self) -> "Topology":
    """Where the trainer would live.

    Raises:
      ConfigError: there is no such topology.
    """
    if self.topology is None:
      raise ConfigError(
        "topology is missing; give one, such as --topology=v5e:4x4"
      )
    return Topology(name=self.topology, slices=self.slices)

  def generator(self) -> "Topology":
    """Where the generator would live: slices compile each by itself."""
    if self.generator_topology is None:
      return Topology(name=self.trainer().name)
    return Topology(name=self.generator_topology)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
  """Slices of one shape: `v5p:4x4x4` of `slices` slices."""

  name: str
  slices: int = 1

  def __post_init__(self):
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)", self.name)
    if found is None or found[1] not in CHIPS:
      raise ConfigError(
        f"topology is {self.name!r}; it must be CHIP:AxB or CHIP:AxBxC with a "
        f"chip of {sorted(CHIPS)}, such as v5e:4x4 or v5p:4x4x4"
      )
    if len(self.shape) != self.chip.dimensions:
      raise ConfigError(
        f"topology is {self.name!r}; a slice of {found[1]} has "
        f"{self.chip.dimensions} dimensions"
      )
    if self.slices < 1:
      raise ConfigError(f"slices is {self.slices}; it must be >= 1")

  @property
  def chip(self) -> Chip:
    """What its chips are."""
    return CHIPS[self.name.split(":")[0]]

  @property
  def shape(self) -> tuple[int, ...]:
    """Chips along each axis of a slice."""
    return tuple(int(n) for n in self.name.split(":")[1].split("x"))

  @property
  def size(self) -> int:
    """Chips of all slices."""
    return int(np.prod(self.shape)) * self.slices

  def __str__(self) -> str:
    """As the command line names it."""
    return self.name if self.slices == 1 else f"{self.name} x {self.slices}"

  def speed(self, devices: Sequence[Any], groups: np.ndarray) -> float:
    """Bytes a second that each device of a group can send.

    Args:
      devices: of the program's mesh, in its order.
      groups: their numbers, a group a row.
    """
    if not groups.shape[1]:
      return self.chip.dcn  # between slices, where none is named
    speeds = []
    for group in groups:
      members = {int(n): devices[n] for n in group}.values()
      if len({getattr(d, "slice_index", 0) for d in members}) > 1:
        return self.chip.dcn
      if len(members) > 1:
        speeds.append(self._links(list(members)))
    return min(speeds, default=math.inf)

  def _links(self, group: Sequence[Any]) -> float:
    places = np.array(
      [device.coords[: self.chip.dimensions] for device in group]
    )
    ways = 0
    for axis, length in enumerate(self.shape):
      if len(set(places[:, axis])) > 1:
        ways += 2 if self.chip.closes(length) else 1
    return ways * self.chip.link
