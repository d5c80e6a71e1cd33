"""One thing looked at, and what was found; nothing stops at the first fault."""

import dataclasses
from collections.abc import Callable
from typing import Literal

State = Literal["ok", "failed", "not checked"]


class NotChecked(Exception):
  """Nobody can tell here; the message says why, and what would."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """The outcome of one check."""

  name: str
  state: State
  text: str
  """What was found, or what is wrong."""

  def __str__(self) -> str:
    """As one line."""
    return f"{self.state:11}  {self.name}: {' '.join(self.text.split())}"


def look(name: str, check: Callable[[], str]) -> Finding:
  """Runs a check, which says what it found or raises what is wrong."""
  try:
    return Finding(name=name, state="ok", text=check())
  except NotChecked as reason:
    return Finding(name=name, state="not checked", text=str(reason))
  except Exception as error:
    # A config, a task and its data are a user's code: whatever it raises is the
    # answer, and the other checks are still wanted.
    return Finding(name=name, state="failed", text=words(error))


def words(error: BaseException) -> str:
  """An error as a person reads it: ours by their message alone."""
  if isinstance(error, ValueError | RuntimeError | OSError) and str(error):
    return str(error)
  return f"{type(error).__name__}: {error}"
