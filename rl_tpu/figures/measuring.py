"""Fills a study's file, cell by cell, several processes beside each other.

A cell that the file holds is not measured again, so the same command goes on
after a stop. Each process has cores of its own: two small models train faster
on one core each than on two together. Time is linear in the missing cells.
"""

import concurrent.futures
import itertools
import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable, Sequence

import jax

from rl_tpu import metrics
from rl_tpu.figures import study as studies
from rl_tpu.figures.study import Cell, Row, Scale, Study

Note = Callable[[str], None]


def fill(study: Study, scale: Scale, jobs: int, note: Note) -> None:
  """Measures the cells that the study's file lacks.

  Args:
    study: whose file grows by the rows of a cell at a time.
    scale: of the cells.
    jobs: processes that measure beside each other, >= 1.
    note: takes a line whenever a cell is done, with the time left.

  Raises:
    Exception: a cell failed: its error. Those done before it are in the file.
  """
  path = study.csv(scale)
  cells = study.cells(scale)
  held = studies.by_cell(cells, studies.read(path))
  missing = [cell for cell in cells if not held[studies.key(cell)]]
  began = time.monotonic()
  for done, (cell, new) in enumerate(_each(study, missing, scale, jobs), 1):
    held[studies.key(cell)] = new
    studies.write(path, itertools.chain.from_iterable(held.values()))
    spent = time.monotonic() - began
    left = spent / done * (len(missing) - done)
    words = ", ".join(f"{n} {v}" for n, v in cell.items())
    note(f"{study.name}: {done} of {len(missing)} ({words}), {left:.0f} s left")


def again(study: Study, scale: Scale, index: int) -> None:
  """Measures one cell of the file anew and compares.

  Raises:
    ValueError: other figures came out than the file has, or it lacks the cell.
  """
  cells = study.cells(scale)
  cell = cells[index % len(cells)]
  held = studies.measured(cell, studies.read(study.csv(scale)))
  if not held:
    raise ValueError(f"{study.csv(scale)} has no row of {cell}")
  found = [
    studies.figures(r) for r in measure(study.name, study.root, cell, scale)
  ]
  for old, new in zip(map(studies.figures, held), found, strict=True):
    differing = {
      n: (old.get(n), new[n]) for n in new if old.get(n, "") != new[n]
    }
    if differing:
      raise ValueError(
        f"{study.name}, {cell}: measured again it is not what the file has "
        f"(column: file, now): {differing}"
      )


def _each(study: Study, cells: Sequence[Cell], scale: Scale, jobs: int):
  """Pairs of cell and rows, in the order in which they are done."""
  if not cells:
    return
  context = multiprocessing.get_context("spawn")
  dealt = context.Queue()
  for share in shares(sorted(os.sched_getaffinity(0)), jobs):
    dealt.put(share)
  with concurrent.futures.ProcessPoolExecutor(
    jobs, context, _prepare, (dealt,)
  ) as pool:
    waiting = {
      pool.submit(measure, study.name, study.root, cell, scale): cell
      for cell in cells
    }
    try:
      for future in concurrent.futures.as_completed(waiting):
        yield waiting[future], future.result()
    finally:
      pool.shutdown(wait=True, cancel_futures=True)


def shares(cores: Sequence[int], jobs: int) -> list[list[int]]:
  """The cores of each of so many processes; all, if there are fewer cores."""
  return [list(cores[index::jobs] or cores) for index in range(jobs)]


def _prepare(dealt) -> None:
  """Of a process: its cores, then what it compiles is kept."""
  os.sched_setaffinity(0, dealt.get())
  keep_compiled()


def keep_compiled() -> None:
  """Lets this process find what others of this folder's runs compiled."""
  cache = pathlib.Path("runs/cache/compiled").absolute()
  cache.mkdir(parents=True, exist_ok=True)
  jax.config.update("jax_compilation_cache_dir", str(cache))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def measure(
  name: str, root: pathlib.Path, cell: Cell, scale: Scale
) -> list[Row]:
  """A cell's rows with its columns, the seconds it took, and the commit."""
  began = time.monotonic()
  jax.clear_caches()  # Programs of other cells: on disk, so not lost.
  found = list(Study(name, root).module.measure(dict(cell), scale))
  if not found:
    raise ValueError(f"{name}: measure({cell}) gave no row")
  about = {
    "seconds": round((time.monotonic() - began) / len(found), 3),
    "commit": (metrics.commit() or "unknown")[:10],
  }
  return [cell | row | about for row in found]
