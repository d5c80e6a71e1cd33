"""Fills studies' files, cell by cell, several processes beside each other.

A cell that the file holds is not measured again, so the same command goes on
after a stop. Each process has cores of its own: two small models train faster
on one core each than on two together. Time is linear in the missing cells.
"""

import collections
import concurrent.futures
import itertools
import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import jax

from rl_tpu import metrics
from rl_tpu.figures import study as studies
from rl_tpu.figures.study import Cell, Row, Scale, Study

Note = Callable[[str], None]


def fill(
  found: Sequence[Study], scale: Scale, jobs: int, note: Note
) -> Iterator[Study]:
  """Measures the cells that files lack, one study's after another's.

  A process that is done with the last cell of a study goes on with the next
  study's, so that none waits and each starts once. The first cell of every
  study comes before all others: faults show early, and what it compiles is
  there for the rest.

  Args:
    found: studies whose files grow by the rows of a cell at a time.
    scale: of the cells.
    jobs: processes that measure beside each other, >= 1.
    note: takes a line whenever a cell is done, with the time left.

  Yields:
    Each study as soon as its file has all cells.

  Raises:
    Exception: a cell failed: its error. Those done before it are in the files.
  """
  held = {
    s: studies.by_cell(s.cells(scale), studies.read(s.csv(scale)))
    for s in found
  }
  missing = [
    (study, cell)
    for study in found
    for cell in study.cells(scale)
    if not held[study][studies.key(cell)]
  ]
  firsts = {study: cell for study, cell in reversed(missing)}
  missing.sort(key=lambda one: firsts[one[0]] is not one[1])
  left = collections.Counter(study for study, _ in missing)
  yield from (study for study in found if not left[study])
  began = time.monotonic()
  for done, (study, cell, new) in enumerate(_each(missing, scale, jobs), 1):
    rows = held[study]
    rows[studies.key(cell)] = new
    studies.write(
      study.csv(scale), itertools.chain.from_iterable(rows.values())
    )
    left[study] -= 1
    seconds = (time.monotonic() - began) / done * (len(missing) - done)
    words = ", ".join(f"{n} {v}" for n, v in cell.items())
    note(
      f"{study.name} ({words}): {done} of {len(missing)}, {seconds:.0f} s left"
    )
    if not left[study]:
      yield study


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


def _each(
  missing: Sequence[tuple[Study, Cell]], scale: Scale, jobs: int
) -> Iterator[tuple[Study, Cell, list[Row]]]:
  """Studies, cells and their rows, in the order in which they are done."""
  if not missing:
    return
  context = multiprocessing.get_context("spawn")
  dealt = context.Queue()
  for share in shares(sorted(os.sched_getaffinity(0)), jobs):
    dealt.put(share)
  with concurrent.futures.ProcessPoolExecutor(
    jobs, context, _prepare, (dealt,)
  ) as pool:
    waiting = {
      pool.submit(measure, study.name, study.root, cell, scale): (study, cell)
      for study, cell in missing
    }
    try:
      for future in concurrent.futures.as_completed(waiting):
        yield *waiting[future], future.result()
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
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


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
