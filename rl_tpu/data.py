"""Prompts and demonstrations: stored with TFDS, ordered by Grain.

`prepare` writes a task's rows once, as a TFDS dataset of array_record files
that is read at random, without TensorFlow. Streams are infinite functions of
an index: entry i is row `shuffle_e(i mod n)` of epoch e = i div n, every row
once an epoch and each epoch in its own order. The index is the whole state, so
resuming is going on at an index, wherever in an epoch it lies and whether or
not batches divide an epoch.

`heldout` numbers its prompts from `HELDOUT_INDEX` on, so that they never share
a sampling key with training.
"""

import contextlib
import hashlib
import io
import os
import pathlib
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import grain
import numpy as np

from rl_tpu.types import Prompt

Row = Mapping[str, Any]
RowSource = Sequence[Row] | grain.sources.RandomAccessDataSource[Row]
SPLITS = ("train", "heldout")
HELDOUT_INDEX = 2**30
"""Indices of a run's training prompts lie below, held-out ones from here."""


class RecordedTask(Protocol):
  """What `prepare` needs of a task; `rl_tpu.envs.Task` says more."""

  @property
  def name(self) -> str:
    """Of the folder that keeps its rows."""
    ...

  @property
  def fields(self) -> Mapping[str, type]:
    """The fields of a row; each is `str`, `int` or `float`."""
    ...

  @property
  def fingerprint(self) -> str:
    """Everything the rows depend on."""
    ...

  def records(self, split: Any) -> Iterable[Row]:
    """Yields the rows of a split."""
    ...


class Rows:
  """The rows of one split on disk, by index; text comes as str."""

  def __init__(self, source: RowSource):
    self._source = source

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Row:
    row = self._source[index]
    return {
      name: value.decode("utf-8") if isinstance(value, bytes) else value
      for name, value in row.items()
    }


def prepare(
  task: RecordedTask, directory: str | os.PathLike
) -> dict[str, Rows]:
  """Returns the rows of each split, writing them if they are not there.

  They lie in `directory/<task.name>/<hash of the task's fingerprint>`, which
  appears complete or not at all: several processes may prepare at once, and an
  interrupted one leaves nothing that is taken for data.

  Raises:
    ValueError: a split is empty.
  """
  tfds = _import_tfds()
  identity = f"{task.fingerprint} {sorted(_kinds(task).items())}"
  digest = hashlib.sha256(identity.encode("utf-8")).hexdigest()[:16]
  final = pathlib.Path(directory).absolute() / task.name / digest
  if not final.exists():
    _write(tfds, task, final)
  builder = tfds.builder_from_directory(final)
  return {split: Rows(builder.as_data_source(split=split)) for split in SPLITS}


def _import_tfds() -> Any:
  """TFDS without the banner that it prints where TensorFlow is missing."""
  with contextlib.redirect_stdout(io.StringIO()):
    import tensorflow_datasets as tfds
  return tfds


def _kinds(task: RecordedTask) -> dict[str, str]:
  return {name: kind.__name__ for name, kind in task.fields.items()}


def _write(tfds: Any, task: RecordedTask, final: pathlib.Path):
  """Builds in a directory of its own, then renames it into place."""
  splits = {split: list(task.records(split)) for split in SPLITS}
  for split, rows in splits.items():
    if not rows:
      raise ValueError(
        f"Split {split!r} of {task.name} is empty; the task must give rows "
        f"to each of {SPLITS} (more questions, or another held-out share)"
      )
  building = final.parent / f"building-{uuid.uuid4().hex}"
  try:
    builder = _builder(tfds, task, splits, building)
    tfds.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):
      builder.download_and_prepare()
    try:
      os.rename(builder.data_dir, final)
    except OSError:
      # Another process was first; its rows are the same.
      if not final.exists():
        raise
  finally:
    shutil.rmtree(building, ignore_errors=True)


def _builder(
  tfds: Any,
  task: RecordedTask,
  splits: Mapping[str, list[Row]],
  directory: pathlib.Path,
):
  features = {
    str: tfds.features.Text(),
    int: tfds.features.Scalar(np.int64),
    float: tfds.features.Scalar(np.float64),
  }
  schema = {name: features[kind] for name, kind in task.fields.items()}

  # Every task has a class of this name; TFDS's global registry takes one.
  with tfds.core.registered.skip_registration():

    class RowsBuilder(tfds.core.GeneratorBasedBuilder):
      """The rows of one task."""

      VERSION = tfds.core.Version("1.0.0")

      def _info(self):
        return tfds.core.DatasetInfo(
          builder=self, features=tfds.features.FeaturesDict(schema)
        )

      def _split_generators(self, dl_manager):
        del dl_manager
        return {
          split: self._generate_examples(rows) for split, rows in splits.items()
        }

      def _generate_examples(self, rows):
        yield from enumerate(rows)

  return RowsBuilder(data_dir=str(directory), file_format="array_record")


class _Shuffled:
  """Row of a stream's index: each row once an epoch, each epoch its order."""

  def __init__(self, rows: RowSource, seed: int):
    if not len(rows):
      raise ValueError("The source of a stream is empty; it must hold rows")
    self._rows = grain.MapDataset.source(rows).seed(seed).shuffle().repeat(None)

  def __getitem__(self, index: int) -> Row:
    if not 0 <= index < HELDOUT_INDEX:
      raise IndexError(
        f"Index {index} of a stream; it must be in [0, {HELDOUT_INDEX})"
      )
    row = self._rows[index]
    assert row is not None, "only filters leave rows out"
    return row


class PromptStream:
  """An infinite stream of prompts: `stream[index]`, the same in every process.

  `make_prompt(row, index)` is the task's `prompt`.
  """

  def __init__(
    self,
    source: RowSource,
    *,
    seed: int,
    make_prompt: Callable[[Row, int], Prompt],
  ):
    self._rows = _Shuffled(source, seed)
    self._make_prompt = make_prompt

  def __getitem__(self, index: int) -> Prompt:
    return self._make_prompt(self._rows[index], index)


def heldout(
  source: RowSource,
  count: int,
  make_prompt: Callable[[Row, int], Prompt],
) -> list[Prompt]:
  """Returns the first `count` rows as prompts, the same in every run."""
  if not 1 <= count <= len(source):
    raise ValueError(
      f"Asked for {count} held-out prompts; it must be in [1, {len(source)}], "
      "what the split holds"
    )
  return [make_prompt(source[i], HELDOUT_INDEX + i) for i in range(count)]


class DemonstrationStream:
  """Batches of demonstrations, a function of the step alone.

  Row r of batch s is entry s * batch_size + r of the shuffled rows. Of
  `host_count` hosts each takes every host_count-th row: no row twice, none
  missing, and as many steps on each.

  `demonstrate(row, rng, wrong)` is the task's `demonstration`.
  """

  def __init__(
    self,
    source: RowSource,
    *,
    seed: int,
    batch_size: int,
    demonstrate: Callable[
      [Row, np.random.Generator, float], tuple[np.ndarray, np.ndarray]
    ],
    host_index: int = 0,
    host_count: int = 1,
  ):
    if batch_size < 1 or batch_size % host_count:
      raise ValueError(
        f"batch_size is {batch_size}; it must be a positive multiple of the "
        f"{host_count} hosts, so that all of them make equal steps"
      )
    if not 0 <= host_index < host_count:
      raise ValueError(
        f"host_index is {host_index}; it must be in [0, {host_count})"
      )
    self._rows = _Shuffled(source, seed)
    self._seed = seed
    self._demonstrate = demonstrate
    self._batch_size = batch_size
    self._own_rows = range(host_index, batch_size, host_count)

  def batch(
    self, step: int, wrong: float = 0.0
  ) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns this host's (prompt i32[P], answer i32[n]) of one step.

    An answer is wrong with probability `wrong`, in [0, 1].
    """
    first = step * self._batch_size
    return [self._one(first + row, wrong) for row in self._own_rows]

  def _one(self, index: int, wrong: float):
    rng = np.random.default_rng([self._seed, index])
    return self._demonstrate(self._rows[index], rng, wrong)
