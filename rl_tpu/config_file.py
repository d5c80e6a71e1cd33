"""What is wrong with --config=FILE[:ARG] and the flags behind it, in a line.

ml_collections reads files and flags; where it fails, its errors speak of its
own insides. So here the file is loaded once more, and each flag is looked up in
what it gives, to find what the person who wrote them can mend.
"""

import difflib
import importlib.util
import pathlib
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from rl_tpu.config import ConfigError

_KINDS = {bool: "true or false", int: "an int", float: "a number"}


def explain(name: str, arguments: Sequence[str]) -> ConfigError | None:
  """Finds the fault of a program's flags; None: nothing is wrong that is known.

  Args:
    name: of the flag that names the file.
    arguments: all of the program's.
  """
  given = [argument.partition("=") for argument in arguments]
  files = [value for flag, _, value in given if flag == f"--{name}"]
  if not files:
    return None
  try:
    values = _load(files[-1]).to_dict()
    for flag, equals, value in given:
      path = flag.removeprefix(f"--{name}.")
      if path != flag and equals:
        _check(values, [name, *path.split(".")], value)
      elif meant := _meant(values, name, flag):
        return ConfigError(f"{flag} is not a flag; did you mean {meant}?")
  except ConfigError as error:
    return error
  return None


def _meant(values: Any, name: str, flag: str) -> str | None:
  """The flag of a field which stands without its section's name, or misspelt.

  `--seed` and `--confg.seed` are `--config.seed`.
  """
  whole = flag.removeprefix("--")
  for path in (whole, whole.partition(".")[2]):
    if flag.startswith("--") and path.split(".")[0] in values:
      return f"--{name}.{path}"
  return None


def _load(named: str) -> Any:
  """What the file's `get_config` gives."""
  path, colon, argument = named.partition(":")
  file = pathlib.Path(path)
  whole = file.resolve()
  if not file.is_file():
    raise ConfigError(f"{path} is not there")
  spec = importlib.util.spec_from_file_location("explained_config", whole)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
    return module.get_config(*([argument] if colon else []))
  except ConfigError:
    raise
  except Exception as error:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f.lineno for f in frames if pathlib.Path(f.filename) == whole]
    place = f"{path}:{own[-1]}" if own else path
    said = f"{type(error).__name__}: {error}"
    raise ConfigError(f"{place}: {said}") from error


def _check(values: Any, path: Sequence[str], value: str) -> None:
  """Refuses a field that is not there, and what is not of its type."""
  for depth, part in enumerate(path[1:], 1):
    if not isinstance(values, Mapping) or part not in values:
      raise _unknown(values, ".".join(path[:depth]), part)
    values = values[part]
  kind = type(values)
  if kind in _KINDS and not _reads(kind, value):
    where = ".".join(path)
    raise ConfigError(f"{where} is {value!r}; it must be {_KINDS[kind]}")


def _reads(kind: type, value: str) -> bool:
  if kind is bool:
    return value.lower() in ("true", "false", "t", "f", "1", "0")
  try:
    kind(value)
  except ValueError:
    return False
  return True


def _unknown(values: Any, section: str, part: str) -> ConfigError:
  known = sorted(values) if isinstance(values, Mapping) else []
  if not known:
    return ConfigError(f"{section} is no section; it has no field {part!r}")
  close = difflib.get_close_matches(part, known, 1)
  hint = f"did you mean {close[0]!r}?" if close else f"it has {known}"
  return ConfigError(f"{section} has no field {part!r}; {hint}")
