"""What processes say to each other: msgpack maps, checked as they arrive.

Every gRPC call of ours carries such a map, with the format's version; a secret
travels beside it, as metadata. Whatever bytes arrive, unpacking returns or
raises WireError.
"""

import hmac
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgpack

VERSION = 1
"""Of this format; both ends must speak the same one."""


class WireError(ValueError):
  """A message that does not follow the format; says where."""


def pack_map(**fields: Any) -> bytes:
  """A message with named fields and the format's version."""
  return cast(bytes, msgpack.packb({"v": VERSION, **fields}))


def unpack_map(data: bytes, **kinds: type) -> dict[str, Any]:
  """The fields of a message.

  Args:
    data: the message.
    **kinds: fields that must be there, and their types.

  Raises:
    WireError: it is not such a message.
  """
  try:
    message = msgpack.unpackb(data)
  except ValueError as error:
    raise WireError(f"a message is not msgpack: {error}") from error
  if not isinstance(message, dict):
    raise WireError(f"a message is {_kind(message)}; it must be a map")
  if message.get("v") != VERSION:
    raise WireError(
      f"a message has format version {message.get('v')!r}; it must be {VERSION}"
    )
  return check_fields(message, kinds)


def _kind(value: Any) -> str:
  return type(value).__name__


def check_fields(message: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
  """The named fields of a map, each of its type.

  Raises:
    WireError: it is no map, or a field is missing or of another type.
  """
  if not isinstance(message, dict):
    raise WireError(f"a field is {_kind(message)}; it must be a map")
  for name, kind in kinds.items():
    value = message.get(name)
    if kind is float and type(value) is int:
      message[name] = value = float(value)
    if type(value) is not kind:
      raise WireError(
        f"{name} is {_kind(value)} in a message; it must be {kind.__name__}"
      )
  return message


def check_integers(
  name: str, values: Sequence[Any], least: int, end: int
) -> None:
  """Refuses what is no integer in [least, end).

  Raises:
    WireError: names the field, the value and what is allowed.
  """
  for value in values:
    if type(value) is not int or not least <= value < end:
      raise WireError(
        f"{name} has {value!r} in a message; "
        f"it must be an integer in [{least}, {end})"
      )


def credentials(token: str | None) -> tuple[tuple[str, str], ...]:
  """Metadata of a call that shows the token."""
  return (("authorization", f"Bearer {token}"),) if token else ()


def authorized(
  metadata: Iterable[tuple[str, str | bytes]], token: str | None
) -> bool:
  """Whether a call's metadata shows the token; None asks for none."""
  if token is None:
    return True
  given = dict(metadata).get("authorization", "")
  given = given if isinstance(given, bytes) else given.encode()
  return hmac.compare_digest(given, f"Bearer {token}".encode())
