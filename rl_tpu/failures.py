"""Episodes that failed, told to a person: each distinct failure once.

A reward function with a typing error fails hundreds of episodes alike. The
first is shown with the lines of the user's own code that it came through, the
others are counted, and the count is told at the end.
"""

import collections
import logging
import pathlib
import sysconfig
import traceback
from typing import Any

from rl_tpu.types import EpisodeError

_log = logging.getLogger(__name__)
_OURS = str(pathlib.Path(__file__).parent)
_STANDARD = sysconfig.get_path("stdlib")
_DEEPEST = 8
"""Most frames that are shown, the innermost ones."""


class EpisodesFailed(RuntimeError):
  """So many episodes failed that the run ends; the message says of what."""


def ending(error: BaseException) -> EpisodesFailed | None:
  """What ended a run, where failed episodes are behind its error."""
  cause: BaseException | None = error
  while cause is not None and not isinstance(cause, EpisodesFailed):
    cause = cause.__cause__
  return cause


class Failures:
  """Those of one part of a run."""

  def __init__(self):
    self._counts = collections.Counter[Any]()
    self._shown: dict[Any, str] = {}
    self.first: str = ""
    """What the first of all was."""

  def add(self, what: str, error: BaseException) -> None:
    """Shows a failure, or counts it where its like was shown.

    Args:
      what: failed, and what became of it.
      error: why.
    """
    key = _key(error)
    self._counts[key] += 1
    if key in self._shown:
      return
    self._shown[key] = words(error)
    self.first = self.first or words(error)
    _log.warning("%s: %s%s", what, words(error), _detail(error))

  def close(self) -> None:
    """Tells how often each came again; everything may come anew after it."""
    for key, count in self._counts.items():
      if count > 1:
        _log.warning("the same %d more times: %s", count - 1, self._shown[key])
    self._counts.clear()
    self._shown.clear()


def words(error: BaseException) -> str:
  """An error in one line; those of episodes say themselves what they are."""
  return str(error) if isinstance(error, EpisodeError) else repr(error)


def _key(error: BaseException) -> Any:
  """Equal for failures that are one fault."""
  if isinstance(error, EpisodeError) and error.same:
    return error.kind, error.same
  origin = error.__cause__ or error
  frames = _frames(origin)
  if not frames:
    return words(error)
  return type(origin), frames[-1].filename, frames[-1].lineno


def _detail(error: BaseException) -> str:
  """The lines of code that it came through, indented, on lines of their own."""
  if isinstance(error, EpisodeError) and error.detail:
    return "\n" + error.detail.rstrip()
  frames = _frames(error.__cause__ or error)
  return "".join(["\n", *traceback.format_list(frames)]).rstrip()


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
  """From the first that is neither ours nor Python's on; all without one."""
  frames = list(traceback.extract_tb(error.__traceback__))
  theirs = [
    number
    for number, frame in enumerate(frames)
    if not frame.filename.startswith((_OURS, _STANDARD, "<"))
    or "site-packages" in frame.filename
  ]
  return frames[theirs[0] if theirs else 0 :][-_DEEPEST:]
