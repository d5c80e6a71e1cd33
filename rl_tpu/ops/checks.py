"""What a loss refuses before it computes: shapes, missing inputs, fields."""

import dataclasses
import typing
from typing import Any

from jaxtyping import Array

from rl_tpu.types import Batch, PolicyOutputs


def required(value: Array | None, name: str) -> Array:
  """`value`, which must not be None.

  Raises:
    ValueError: if it is None.
  """
  if value is None:
    raise ValueError(f"{name} is None; it must be set before it is used")
  return value


def check_shapes(batch: Batch, outputs: PolicyOutputs | None = None) -> None:
  """Raises ValueError unless per-token arrays are [R,T] and per-trajectory [N].

  JAX would broadcast [R,1] or [T] in silence.
  """
  rows, row = batch.tokens.shape, batch.group_ids.shape
  expected = [(f"batch.{name}", batch, name, rows) for name in Batch.ROW_FIELDS]
  expected += [
    (f"batch.{name}", batch, name, row) for name in ("truncated", "baselines")
  ]
  if outputs is not None:
    expected += [
      (f"outputs.{field.name}", outputs, field.name, rows)
      for field in dataclasses.fields(outputs)
    ]
  for label, owner, name, shape in expected:
    array = getattr(owner, name)
    if array is not None and array.shape[: len(shape)] != shape:
      raise ValueError(
        f"{label} has shape {array.shape}; it must start with {shape}, "
        "like batch.tokens [R,T] or batch.group_ids [N]"
      )


def check_fields(config: Any, *checks: tuple[str, bool, str]) -> None:
  """Raises ValueError for the first (field, is it good, what is allowed)."""
  for name, good, allowed in checks:
    if not good:
      algorithm = type(config).__module__.rsplit(".", 1)[-1]
      raise ValueError(
        f"{algorithm}.Config.{name} is {getattr(config, name)!r}; "
        f"it must be {allowed}"
      )


def check_choices(config: Any) -> None:
  """Raises ValueError unless each Literal field has one of its values."""
  checks = []
  for name, hint in typing.get_type_hints(type(config)).items():
    if typing.get_origin(hint) is typing.Literal:
      allowed = typing.get_args(hint)
      good = getattr(config, name) in allowed
      checks.append((name, good, f"one of {allowed}"))
  check_fields(config, *checks)
