"""Rows of a user's own: a JSON-lines file, or a folder that TFDS prepared."""

import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

_SHOWN = 100
"""Characters of a row that an error shows, so that it can be found."""


def read(path: str) -> Iterator[Mapping[str, Any]]:
  """Yields the rows of a .jsonl file, or of every split of a TFDS folder.

  Raises:
    ValueError: a line is no JSON object; says which.
  """
  where = pathlib.Path(path)
  if where.is_dir():
    import tensorflow_datasets as tfds

    sources: Any = tfds.builder_from_directory(where).as_data_source()
    for split in sorted(sources):
      yield from sources[split]
    return
  with open(where, encoding="utf-8") as file:
    for number, line in enumerate(file, 1):
      if not line.strip():
        continue
      try:
        row = json.loads(line)
      except json.JSONDecodeError as error:
        raise ValueError(
          f"{path}: line {number}, column {error.colno}: {error.msg}"
        ) from error
      if not isinstance(row, dict):
        raise ValueError(f"{path}: line {number} is no JSON object")
      yield row


def field(row: Mapping[str, Any], name: str, path: str) -> str:
  """Returns a row's field as text; raises ValueError where it has none."""
  try:
    value = row[name]
  except KeyError as error:
    shown = f"{dict(row)}"
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    raise ValueError(
      f"{path}: a row has no field {name!r}; it has {sorted(row)}: {shown}"
    ) from error
  return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def contents(*paths: str | None) -> dict[str, str]:
  """Names what files hold, for a task's fingerprint; None is no file."""
  return {f"contents of {path}": digest(path) for path in paths if path}


def digest(path: str) -> str:
  """Names the contents of a file, or of all files of a folder."""
  where, found = pathlib.Path(path), hashlib.sha256()
  for file in sorted(where.rglob("*")) if where.is_dir() else [where]:
    if file.is_file():
      found.update(file.name.encode())
      found.update(file.read_bytes())
  return found.hexdigest()
