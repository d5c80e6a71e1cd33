"""Kernels of decoding, which the compiler gives no cycles for.

They wait for memory, so their time is modelled, not estimated by the compiler:

    paged attention   pages * (wait / cores + bytes of a page / (share * HBM))
    written entries   2 * wait + rows * cycles of a row / clock

with every page in use, as the roofline of decoding has it too. A page is
fetched while the kernel computes with another; that the matrix units keep up is
assumed.
"""

import re

from rl_tpu.aot import hlo
from rl_tpu.topology import Chip

SHARE = 0.8
"""Of HBM's bandwidth that a stream of pages reaches; assumed."""
WAIT = 0.35e-6
"""Seconds until memory answers, once for each page and core; assumed."""
ROW = 100
"""Cycles to fetch, replace and return one entry's keys or values; assumed."""


def seconds(op: hlo.Op, chip: Chip) -> float | None:
  """One call of a kernel of decoding on one chip; None for another kernel."""
  shapes = re.search(r"operand_layout_constraints=\{(.*)", op.rest)
  if shapes is None:
    return None
  if op.name.startswith("paged_attention"):
    return _reading(shapes[1], chip)
  if op.name.startswith("write_entries"):
    rows = re.search(r"\bs32\[(\d+)\]", shapes[1])
    return rows and 2 * WAIT + 2 * int(rows[1]) * ROW / chip.clock
  return None


def _reading(shapes: str, chip: Chip) -> float | None:
  """Of all pages that paged attention is told of."""
  tables = re.findall(r"\bs32\[(\d+)\]", shapes)
  pages = re.search(r"\bbf16\[1,\d+,(\d+),(\d+)\]", shapes)
  if len(tables) < 2 or pages is None:
    return None
  keys_and_values = 2 * 2 * int(pages[1]) * int(pages[2])
  transfer = keys_and_values / (SHARE * chip.bandwidth)
  return int(tables[1]) * (WAIT / chip.cores + transfer)
