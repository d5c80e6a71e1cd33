"""Reads a compiled TPU program: its work, its collectives, its loops.

The text of a compiled module carries, at nearly every fusion, the compiler's
own estimate of its cycles. Summed over the schedule, each loop's body as often
as the loop turns, they are the time that one chip computes:

    cycles = sum_op times(op) * estimated_cycles(op)

Loops have no trip count in the text; it is what the counter is compared with in
the loop's condition. Where that is no constant the loop turns as often as it is
said to at most; or it is listed in `unknown`, and sums over it mean nothing. Of
a conditional one branch counts, the dearest unless told otherwise.

Collectives have no cycles; they are listed with their bytes and who takes part.
An asynchronous collective appears in every fusion that goes on while it runs,
under one channel, and counts once. Kernels (Pallas), gathers and scatters have
no cycles either; nor have sorts, which are left out.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

COLLECTIVES = (
  *("all-gather", "all-reduce", "reduce-scatter", "all-to-all"),
  *("collective-permute", "send"),
)
_START = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True)
class Op:
  """One instruction."""

  name: str
  opcode: str
  shape: str
  operands: tuple[str, ...]
  rest: str
  """Attributes, as text."""
  is_root: bool

  def attribute(self, name: str) -> str | None:
    """The computation or number that an attribute names."""
    found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
    return found[1] if found else None

  @property
  def cycles(self) -> int:
    """The compiler's estimate; 0 where it gives none."""
    found = re.search(r'"estimated_cycles":"(\d+)"', self.rest)
    return int(found[1]) if found else 0

  @property
  def source(self) -> str:
    """The end of the name it has in the traced program."""
    found = re.search(r'op_name="([^"]*)"', self.rest)
    return "/".join(found[1].split("/")[-3:]) if found else ""


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective as often as it runs; bytes are those of one device."""

  kind: str
  moved: int
  """Bytes that a device sends, in a ring, each time."""
  groups: np.ndarray
  """Devices that take part, a group a row, numbered as the program's mesh."""
  times: int
  source: str

  @property
  def total(self) -> int:
    """Bytes sent by a device over the whole program."""
    return self.moved * self.times


@dataclasses.dataclass(frozen=True)
class Program:
  """What a compiled module does."""

  ops: list[tuple[Op, int]]
  """Whatever has cycles, and how often it runs."""
  kernels: list[tuple[Op, int]]
  """What has none: Pallas kernels, gathers and scatters, and how often."""
  collectives: list[Collective]
  unknown: list[str]
  """Loops whose trip count the text does not give."""

  @property
  def cycles(self) -> int:
    """Of all operations but kernels and collectives."""
    return sum(op.cycles * times for op, times in self.ops)


Computations = dict[str, dict[str, Op]]


def read(
  text: str, cheap_branches: bool = False, most_turns: int | None = None
) -> Program:
  """Reads the text of a compiled module.

  Args:
    text: of the module.
    cheap_branches: whether of a conditional the cheapest branch counts, not
      the dearest.
    most_turns: of a loop whose trip count the text does not give.
  """
  computations, entry = parse(text)
  choose = min if cheap_branches else max
  return _Walk(computations, choose, most_turns).computation(entry, 1)


def parse(text: str) -> tuple[Computations, str]:
  """All computations by name, and which one is the entry.

  Raises:
    ValueError: the text is no HLO module.
  """
  computations: Computations = {}
  current: dict[str, Op] = {}
  entry = None
  for line in _logical_lines(text):
    if header := _COMPUTATION.match(line):
      current = computations.setdefault(header[2], {})
      entry = header[2] if header[1] else entry
    elif _START.match(line):
      op = _op(line)
      current[op.name] = op
  if entry is None:
    raise ValueError("the text has no ENTRY computation; it is no HLO module")
  return computations, entry


def shape_bytes(shape: str) -> int:
  """Bytes of an array, or of all arrays of a tuple, padding aside."""
  total = 0
  for dtype, dimensions in _ARRAY.findall(shape):
    bits = _BITS.get(dtype)
    if bits is None:
      found = re.match(r"[a-z]+(\d+)", dtype)
      bits = int(found[1]) if found else 0
    elements = math.prod(int(d) for d in dimensions.split(",") if d)
    total += elements * bits // 8
  return total


def replica_groups(rest: str) -> np.ndarray:
  """The groups of a collective, a row each; one empty row if it has none."""
  if found := re.search(r"source_target_pairs=\{(.*?)\}\}", rest):
    numbers = [int(n) for n in re.findall(r"\d+", found[1])]
    return np.array(numbers).reshape(-1, 2)
  if found := re.search(r"replica_groups=mesh\[(.*?)\]\s*(.*?)\{(.*?)\}", rest):
    return _mesh_groups(found[1], found[3])
  pattern = r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
  if found := re.search(pattern, rest):
    shape, dims, order = (
      [int(n) for n in g.split(",")] if g else None for g in found.groups()
    )
    devices = np.arange(math.prod(dims or [])).reshape(dims)
    return devices.transpose(order).reshape(shape)
  if found := re.search(r"replica_groups=\{\{(.*?)\}\}", rest):
    rows = [row.split(",") for row in found[1].split("},{")]
    return np.array([[int(n) for n in row] for row in rows])
  return np.zeros((1, 0), int)


def _mesh_groups(sizes: str, taken: str) -> np.ndarray:
  """Groups along some axes of a mesh, or along parts `'axis':(before)size`."""
  axes: list[str] = []
  shape: list[int] = []
  chosen = dict.fromkeys(re.findall(r"'([^']+)'(?!:)", taken), None)
  parts = {
    name: (int(before), int(size))
    for name, before, size in re.findall(r"'([^']+)':\((\d+)\)(\d+)", taken)
  }
  for name, size in re.findall(r"'([^']+)'=(\d+)", sizes):
    if name in parts:
      before, part = parts[name]
      pieces = (before, part, int(size) // (before * part))
      axes += [name, f"{name} part", name]
      shape += pieces
      chosen[f"{name} part"] = None
    else:
      axes.append(name)
      shape.append(int(size))
  inside = [
    i for i, name in enumerate(axes) if name in chosen and name not in parts
  ]
  outside = [i for i in range(len(axes)) if i not in inside]
  devices = np.arange(math.prod(shape)).reshape(shape)
  size = math.prod(shape[i] for i in inside)
  return devices.transpose(*outside, *inside).reshape(-1, size)


def _logical_lines(text: str) -> Iterator[str]:
  """Lines, with those that belong to the instruction before glued to it."""
  pending = ""
  for line in text.splitlines():
    if _START.match(line) or _COMPUTATION.match(line) or line.rstrip() == "}":
      yield pending
      pending = line
    else:
      pending += " " + line
  yield pending


def _op(line: str) -> Op:
  found = _START.match(line)
  assert found is not None
  rest = line[found.end() :]
  end = _balanced(rest, 0) if rest.startswith("(") else rest.index(" ")
  shape, rest = rest[:end], rest[end:].lstrip()
  start = rest.index("(")
  end = _balanced(rest, start)
  return Op(
    name=found[1],
    opcode=rest[:start],
    shape=shape,
    operands=tuple(re.findall(r"%([\w.\-]+)", rest[start:end])),
    rest=rest[start:],
    is_root=line.lstrip().startswith("ROOT "),
  )


def _balanced(text: str, start: int) -> int:
  """The place after the bracket that closes the one at `start`."""
  depth = 0
  for i in range(start, len(text)):
    depth += {"(": 1, ")": -1}.get(text[i], 0)
    if not depth:
      return i + 1
  raise ValueError(f"a bracket is not closed in {text[:80]!r}")


class _Walk:
  """Goes through a module as it would run."""

  def __init__(
    self,
    computations: Computations,
    choose: Callable[..., Any],
    most_turns: int | None,
  ):
    self._computations, self._choose = computations, choose
    self._most_turns = most_turns
    self._channels: set[str] = set()

  def computation(self, name: str, times: int) -> Program:
    """One computation, run so many times."""
    result = Program(ops=[], kernels=[], collectives=[], unknown=[])
    for op in self._computations[name].values():
      for part in self._parts(op, name, times):
        result.ops.extend(part.ops)
        result.kernels.extend(part.kernels)
        result.collectives.extend(part.collectives)
        result.unknown.extend(part.unknown)
    return result

  def _parts(self, op: Op, inside: str, times: int) -> Iterator[Program]:
    if op.opcode == "while":
      body, condition = op.attribute("body"), op.attribute("condition")
      assert body is not None and condition is not None
      trips = self._trips(op, inside, condition)
      trips = self._most_turns if trips is None else trips
      if trips is None:
        yield Program(ops=[], kernels=[], collectives=[], unknown=[op.name])
      yield self.computation(body, times * (1 if trips is None else trips))
      return
    if op.opcode == "conditional":
      branches = [self.computation(b, times) for b in _branches(op)]
      yield self._choose(branches, key=lambda branch: branch.cycles)
      return
    called = op.attribute("calls") or (
      op.attribute("to_apply") if op.opcode == "call" else None
    )
    if op.opcode in ("call", "async-start") and called is not None:
      yield self.computation(called, times)
      return
    kernels = []
    if 'custom_call_target="tpu_custom_call"' in op.rest:
      kernels = [(op, times)]
    elif called is not None and not op.cycles:
      moved = self._moved(op, called)
      kernels = [(moved, times)] if moved else []
    yield Program(
      ops=[(op, times)] if op.cycles else [],
      kernels=kernels,
      collectives=list(self._collectives(op, called, times)),
      unknown=[],
    )

  def _moved(self, op: Op, called: str) -> Op | None:
    """A fusion that is a gather or scatter, in the shape of what it moves.

    A gather moves what it gives; a scatter writes its updates in place.
    """
    if "kind=kCustom" not in op.rest:
      return None
    inside = self._computations[called]
    for inner in inside.values():
      if inner.opcode == "gather":
        return op
      if inner.opcode == "scatter":
        updates = inside[inner.operands[-1]]
        return dataclasses.replace(op, shape=updates.shape)
    return None

  def _collectives(
    self, op: Op, called: str | None, times: int
  ) -> Iterator[Collective]:
    """That of an operation, or those inside of a fusion."""
    if called is not None:
      scatters = "reduce-scatter" in op.name or "reduce-scatter" in called
      for inner in self._computations[called].values():
        deeper = inner.attribute("calls")
        for found in self._collectives(inner, deeper, times):
          if scatters and found.kind == "all-reduce":
            # A sum of which each device keeps its part moves half.
            found = dataclasses.replace(
              found, kind="reduce-scatter", moved=found.moved // 2
            )
          yield found
      return
    kind = op.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
      return
    channel = op.attribute("channel_id")
    if channel is not None and channel in self._channels:
      return
    if channel is not None:
      self._channels.add(channel)
    groups = replica_groups(op.rest)
    yield Collective(
      kind=kind,
      moved=_moved(kind, op, groups.shape[1]),
      groups=groups,
      times=times,
      source=op.source,
    )

  def _trips(self, loop: Op, inside: str, condition: str) -> int | None:
    """How often a loop turns whose counter grows by one, or None."""
    ops = self._computations[condition]
    compare = next((op for op in ops.values() if op.is_root), None)
    if compare is None:
      return None
    if compare.opcode == "fusion":
      constants = [
        n for name in compare.operands if (n := _constant(ops.get(name)))
      ]
      called = self._computations[compare.attribute("calls") or ""]
      if not any(
        op.opcode == "compare" and "direction=LT" in op.rest
        for op in called.values()
      ):
        return None
      constants += [n for op in called.values() if (n := _constant(op))]
      return constants[0] if len(constants) == 1 else None
    if compare.opcode != "compare" or "direction=LT" not in compare.rest:
      return None
    counter, bound = (ops.get(name) for name in compare.operands)
    limit = _constant(bound)
    if limit is None or counter is None:
      return None
    return limit - self._first(loop, inside, counter)

  def _first(self, loop: Op, inside: str, counter: Op) -> int:
    """What the counter starts from; loops of JAX start from 0."""
    index = int(counter.attribute("index") or 0)
    ops = self._computations[inside]
    state = ops.get(loop.operands[0])
    if state is None or state.opcode != "tuple":
      return 0
    value = ops.get(state.operands[index])
    while value is not None and value.opcode in ("copy", "bitcast"):
      value = ops.get(value.operands[0])
    return _constant(value) or 0


def _branches(op: Op) -> list[str]:
  if found := re.search(r"branch_computations=\{(.*?)\}", op.rest):
    return re.findall(r"%?([\w.\-]+)", found[1])
  both = (op.attribute("true_computation"), op.attribute("false_computation"))
  return [name for name in both if name is not None]


def _constant(op: Op | None) -> int | None:
  if op is None or op.opcode != "constant":
    return None
  found = re.match(r"\((-?\d+)\)", op.rest)
  return int(found[1]) if found else None


def _moved(kind: str, op: Op, members: int) -> int:
  """Bytes that a device sends in a ring of so many members."""
  size = shape_bytes(op.shape)
  if op.opcode.endswith("-start"):
    # Its result is (operand, result, ...): the larger is the whole.
    arrays = [shape_bytes(part) for part in _members(op.shape)]
    size = max(arrays, default=size)
  if kind in ("collective-permute", "send") or not members:
    return size
  if kind == "reduce-scatter" and not op.opcode.endswith("-start"):
    size *= members
  share = size * (members - 1) // members
  return 2 * share if kind == "all-reduce" else share


def _members(shape: str) -> list[str]:
  return [found[0] for found in re.finditer(_ARRAY, shape)]
