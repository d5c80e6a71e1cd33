"""What one compiled program takes: memory, time, network.

Memory is the compiler's own: what the program holds in HBM is what it will
hold. Times are estimates, never measured:

    compute = cycles / clock + kernels' operations / peak

where `cycles` is the compiler's model (see `hlo`; good for products,
pessimistic for what waits for memory). Attention's kernel is taken at the peak
that heads of its size allow, a grouped product at a measured share of the peak,
and gathers and scatters at the bandwidth of HBM (see `flops.kernel`); those of
decoding have a model of their own (`kernels`). Collectives stand beside it, in
bytes, and in seconds by the model of `topology`. What cannot be right is None,
and `doubts` says why.
"""

import collections
import dataclasses
from typing import Any

from rl_tpu.aot import flops, hlo, kernels
from rl_tpu.aot.programs import Compiled
from rl_tpu.topology import Topology

GIB = 2**30
_LONGEST = 100.0
"""Seconds that no single operation takes. The compiler's estimate of some
fusions overflows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """What is known of a program before it is compiled; bytes of one device."""

  what: str
  """In words: how many rows of how many tokens."""
  tokens: int
  """Tokens of one run, on all devices."""
  flops: float
  """Operations of its products, on one device, kernels aside."""
  ideal_flops: float = 0.0
  """The fewest operations of one device."""
  ideal_attention: float = 0.0
  """Those of them that are no products with weights."""
  least_bytes: float = 0.0
  """The least that one device reads from HBM."""
  held: dict[str, int]
  """Bytes of its arguments, by what they are."""
  beside: dict[str, int] = dataclasses.field(default_factory=dict)
  """Bytes that lie in HBM while it runs without being its arguments."""
  on_host: dict[str, int] = dataclasses.field(default_factory=dict)
  """Bytes in the memory of the device's host, by what they are."""
  experts: int = 0
  """Of a layer; 0 where tokens are not routed."""
  cheap_branches: bool = False
  """Whether its conditionals are about what training does not ask for."""
  most_turns: int | None = None
  """Of a loop that turns as often as its arguments say; None: it has none."""
  remedies: str
  """What to change where it does not fit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
  """Collectives of one kind over groups of one size."""

  kind: str
  members: int
  count: int
  bytes: int
  """That a device sends, over the whole program."""
  seconds: float


class Estimate:
  """A program, its compiler's answer and what follows from both."""

  def __init__(
    self,
    name: str,
    work: Work,
    compiled: Compiled,
    topology: Topology,
    devices: list[Any],
  ):
    """Reads the compiled text.

    Args:
      name: of the program.
      work: what is known of it.
      compiled: the compiler's answer.
      topology: what it was compiled for.
      devices: of its mesh, in order.
    """
    self.name, self.work, self.compiled = name, work, compiled
    self.topology = topology
    self.program = hlo.Program(ops=[], kernels=[], collectives=[], unknown=[])
    if compiled.refused is None:
      self.program = hlo.read(
        compiled.text, work.cheap_branches, work.most_turns
      )
    self.traffic = _traffic(self.program, topology, devices)
    self.doubts = self._doubts()

  @property
  def hbm(self) -> int:
    """Bytes of one device."""
    return self.compiled.hbm + sum(self.work.beside.values())

  @property
  def headroom(self) -> float:
    """Share of the memory that stays free."""
    return 1 - self.hbm / self.topology.chip.memory

  @property
  def fits(self) -> bool:
    """Whether it can run at all."""
    return self.compiled.refused is None and self.headroom >= 0

  @property
  def flops(self) -> float:
    """Operations of one device, kernels included."""
    known = (
      (flops.kernel(op, self.work.experts), n) for op, n in self.program.kernels
    )
    return self.work.flops + sum(k.flops * n for k, n in known if k)

  @property
  def seconds(self) -> float | None:
    """Estimated compute; None where there are doubts."""
    return None if self.doubts else self._seconds()

  @property
  def ideal_seconds(self) -> float:
    """The least time of its operations, or of its reads."""
    chip = self.topology.chip
    return max(
      self.work.ideal_flops / chip.flops, self.work.least_bytes / chip.bandwidth
    )

  @property
  def allowed_seconds(self) -> float:
    """The ideal at the compiler's rates, for products and for kernels.

    Products with weights, and attention that has no kernel, as fast as a large
    product; the program's kernels as they are; and nothing else.
    """
    chip, products = self.topology.chip, self.work.ideal_flops
    known = (
      flops.kernel(op, self.work.experts) for op, _ in self.program.kernels
    )
    if any(kernel and kernel.size for kernel in known):
      products -= self.work.ideal_attention
    kernels = sum(self.kernel_seconds(op) * n for op, n in self.program.kernels)
    return products / (chip.flops * chip.product) + kernels

  @property
  def network_seconds(self) -> float:
    """Of the collectives, one after the other."""
    return sum(traffic.seconds for traffic in self.traffic)

  @property
  def tokens_per_second(self) -> float | None:
    """Where no collective hides behind compute."""
    if self.seconds is None:
      return None
    return self.work.tokens / (self.seconds + self.network_seconds)

  def kernel_seconds(self, op: hlo.Op) -> float:
    """One call of a kernel: at the peak it may reach, or reading HBM."""
    chip, kernel = self.topology.chip, flops.kernel(op, self.work.experts)
    waiting = kernels.seconds(op, chip)
    if waiting is not None:
      return waiting
    if kernel is None:
      return 0.0
    share = kernel.efficiency * min(1.0, (kernel.size or chip.unit) / chip.unit)
    return max(
      kernel.flops / (chip.flops * share), kernel.bytes / chip.bandwidth
    )

  def _seconds(self) -> float:
    return self.program.cycles / self.topology.chip.clock + sum(
      self.kernel_seconds(op) * times for op, times in self.program.kernels
    )

  def _doubts(self) -> list[str]:
    """Why the compute estimate cannot be right."""
    if self.compiled.refused is not None:
      return ["it does not fit"]
    doubts = [
      f"the text does not say how often loop {name} turns"
      for name in self.program.unknown
    ]
    strange = {
      op.name
      for op, _ in self.program.kernels
      if flops.kernel(op, self.work.experts) is None
      and kernels.seconds(op, self.topology.chip) is None
    }
    doubts += [f"kernel {name} has no model" for name in sorted(strange)]
    doubts += [
      f"the compiler gives one {op.name} {op.cycles:.3g} cycles"
      for op, _ in self.program.ops
      if op.cycles > _LONGEST * self.topology.chip.clock
    ]
    if (
      not doubts
      and self.work.ideal_flops
      and (self._seconds() < self.ideal_seconds)
    ):
      doubts.append(
        f"{self._seconds():.3g} s would be an MFU above 1; the ideal is "
        f"{self.ideal_seconds:.3g} s"
      )
    return doubts


def _traffic(
  program: hlo.Program, topology: Topology, devices: list[Any]
) -> list[Traffic]:
  """Collectives by kind and group size, the slowest first."""
  counts: dict[Any, list[float]] = collections.defaultdict(lambda: [0, 0, 0.0])
  for found in program.collectives:
    if not found.total:
      continue
    sums = counts[found.kind, found.groups.shape[1]]
    sums[0] += found.times
    sums[1] += found.total
    sums[2] += found.total / topology.speed(devices, found.groups)
  rows = [
    Traffic(
      kind=kind,
      members=members,
      count=int(count),
      bytes=int(size),
      seconds=seconds,
    )
    for (kind, members), (count, size, seconds) in counts.items()
  ]
  return sorted(rows, key=lambda row: -row.seconds)
