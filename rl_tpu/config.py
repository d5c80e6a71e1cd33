"""From an ml_collections config to frozen dataclasses, and back.

Defaults live in the dataclasses alone. `to_config_dict` turns an instance into
the ConfigDict that an experiment file returns and flags override; `build` goes
the other way and refuses unknown keys, wrong types and values out of range,
naming the field by its full path. Below `train.py` nothing sees a ConfigDict.

A section whose fields depend on a name (an algorithm, a task) is a `Choice`:
the field's metadata says how the name is found, `{"find": algorithms.get}`,
and the module found has a dataclass `Config`.
"""

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections
from ml_collections import config_dict


class ConfigError(ValueError):
  """A config that cannot be run; the message names the field."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """A module by its name, and that module's settings."""

  name: str
  config: Any


def to_config_dict(instance: Any) -> ml_collections.ConfigDict:
  """A ConfigDict with every field of a dataclass instance, or of a Choice."""
  return ml_collections.ConfigDict(_plain(instance, placeholders=True))


def to_json(instance: Any) -> dict[str, Any]:
  """The same as values that survive json unchanged."""
  return json.loads(json.dumps(_plain(instance, placeholders=False)))


def _plain(instance: Any, placeholders: bool) -> dict[str, Any]:
  if isinstance(instance, Choice):
    return {"name": instance.name, **_plain(instance.config, placeholders)}
  hints = typing.get_type_hints(type(instance))
  plain = {}
  for field in dataclasses.fields(instance):
    value = getattr(instance, field.name)
    if dataclasses.is_dataclass(value):
      value = _plain(value, placeholders)
    elif isinstance(value, Mapping):
      value = dict(value)
    elif value is None and placeholders:
      value = _placeholder(hints[field.name])
    plain[field.name] = value
  return plain


def _placeholder(hint: Any) -> Any:
  """Typed emptiness, so that a flag can fill an optional scalar."""
  scalars = [t for t in typing.get_args(hint) if t in (int, float, str, bool)]
  return config_dict.placeholder(scalars[0]) if len(scalars) == 1 else None


def build(cls: type, values: Mapping[str, Any], path: str = "config") -> Any:
  """Builds dataclass `cls` from a mapping, checking every field.

  Raises:
    ConfigError: an unknown or missing key, a wrong type, or a value that the
      dataclass itself refuses; the message starts with the field's path.
  """
  if isinstance(values, ml_collections.ConfigDict):
    values = values.to_dict()
  hints = typing.get_type_hints(cls)
  fields = {field.name: field for field in dataclasses.fields(cls)}
  _refuse_unknown(values, fields, path)
  arguments = {}
  for name, field in fields.items():
    if name in values:
      arguments[name] = _value(
        hints[name], field, values[name], f"{path}.{name}"
      )
    elif _required(field):
      raise ConfigError(f"{path}.{name} is missing")
  try:
    return cls(**arguments)
  except ConfigError:
    raise
  except ValueError as error:
    raise ConfigError(f"{path}: {error}") from error


def _required(field: dataclasses.Field) -> bool:
  missing = dataclasses.MISSING
  return field.default is missing and field.default_factory is missing


def _refuse_unknown(values, allowed, path: str):
  unknown = sorted(set(values) - set(allowed))
  if unknown:
    raise ConfigError(
      f"{path}.{unknown[0]} is not a field; {path} has {sorted(allowed)}"
    )


def _value(hint: Any, field: dataclasses.Field, value: Any, path: str) -> Any:
  """Checks one value against its annotation."""
  origin, options = typing.get_origin(hint), typing.get_args(hint)
  if hint is Choice:
    return _choice(field.metadata["find"], value, path)
  if origin in (typing.Union, types.UnionType):
    if value is None:
      return None
    (hint,) = (option for option in options if option is not type(None))
    return _value(hint, field, value, path)
  if dataclasses.is_dataclass(hint):
    if not isinstance(value, Mapping):
      raise ConfigError(f"{path} is {value!r}; it must be a section")
    return build(typing.cast(type, hint), value, path)
  if origin is typing.Literal:
    if value not in options:
      raise ConfigError(f"{path} is {value!r}; it must be one of {options}")
    return value
  if origin is tuple:
    return _sequence(options[0], field, value, path)
  if hint is float and type(value) is int:
    return float(value)
  if isinstance(value, Mapping) and origin is Mapping:
    return dict(value)
  if origin is not None or type(value) is not hint:
    name = getattr(origin or hint, "__name__", str(hint))
    raise ConfigError(f"{path} is {value!r}; it must be of type {name}")
  return value


def _sequence(hint: Any, field, value: Any, path: str) -> tuple:
  if isinstance(value, str) or not isinstance(value, list | tuple):
    raise ConfigError(f"{path} is {value!r}; it must be a list")
  return tuple(
    _value(hint, field, item, f"{path}[{index}]")
    for index, item in enumerate(value)
  )


def _choice(find, value: Any, path: str) -> Choice:
  """Finds the module that a section names, then builds its own Config."""
  if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
    raise ConfigError(f"{path} is {value!r}; it must be a section with a name")
  settings = {key: item for key, item in value.items() if key != "name"}
  try:
    module = find(value["name"])
  except ValueError as error:
    raise ConfigError(f"{path}.name: {error}") from error
  allowed = {field.name for field in dataclasses.fields(module.Config)}
  unknown = set(settings) - allowed
  if unknown:
    raise ConfigError(
      f"{path}.{min(unknown)} is not a field of {value['name']}, which has "
      f"{sorted(allowed)}. Where a flag "
      f"changed {path}.name: the file's other fields are those of what it "
      "names; use a config file for this one (methods: experiments/methods)"
    )
  return Choice(name=value["name"], config=build(module.Config, settings, path))


def digest(described: Any) -> str:
  """A name for plain values: equal values, equal name, in every process."""
  text = json.dumps(described, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(
  saved: Mapping,
  current: Mapping,
  path: str = "config",
  says: str = "the run has {!r}, asked for {!r}",
) -> list[str]:
  """Lines that say where two plain configs differ, by field."""
  lines = []
  for key in sorted(set(saved) | set(current)):
    one, other = saved.get(key), current.get(key)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
      lines += differences(one, other, f"{path}.{key}", says)
    elif one != other:
      lines.append(f"{path}.{key}: {says.format(one, other)}")
  return lines
