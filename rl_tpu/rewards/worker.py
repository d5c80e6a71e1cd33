"""The process that scores: one function, one answer after another.

  python -m rl_tpu.rewards.worker FUNCTION SECONDS MEMORY_BYTES

FUNCTION is `module:name`, or `path/to/file.py:name`, whose folder may be
imported from. First of all it says whether that is there: `{"ready": ...}`, or
`{"refused": ...}`, after which it ends. Then it reads a JSON list of arguments
a line from stdin and writes a JSON object a line to what was stdout:
`{"value": ...}`, or `{"raised": ...}` with where in the function's file
(`where`) and the lines of code that led there (`lines`); NumPy's numbers are
numbers. It ends
when stdin does, so that it does not outlive whoever it works for; should it
hang then, its own alarm ends it. Nothing here imports JAX: a worker starts in
the time that its function's module takes.
"""

import importlib
import importlib.util
import json
import os
import pathlib
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any


def main(function: str, seconds: float, memory_bytes: int) -> None:
  """Serves until stdin ends."""
  # What the function prints must not be taken for an answer.
  replies = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)

  def say(reply: str) -> None:
    replies.write(reply + "\n")
    replies.flush()

  try:
    score = load(function)
  except Exception as error:
    say(json.dumps({"refused": _named(error)}))
    sys.exit(1)
  resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
  say(json.dumps({"ready": function}))
  for line in sys.stdin:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
      value = score(*json.loads(line))
      reply = json.dumps({"value": value}, default=_number)
    except Exception as error:
      reply = json.dumps({"raised": _named(error), **_place(error, score)})
    signal.setitimer(signal.ITIMER_REAL, 0)
    say(reply)


def load(function: str) -> Callable[..., Any]:
  """The function of a module, or of a file; raises whatever its code does."""
  where, _, name = function.rpartition(":")
  if not where.endswith(".py"):
    return getattr(importlib.import_module(where), name)
  path = pathlib.Path(where).absolute()
  sys.path.append(str(path.parent))
  # A name that hides no module: the file may be called as one is.
  spec = importlib.util.spec_from_file_location(f"file_{path.stem}", path)
  assert spec is not None and spec.loader is not None, "its name ends with .py"
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module
  spec.loader.exec_module(module)
  return getattr(module, name)


def _named(error: Exception) -> str:
  return repr(error)[:500]


def _place(error: Exception, score: Callable[..., Any]) -> dict[str, str]:
  """Where it was raised, as the function's author sees it."""
  frames = [
    frame
    for frame in traceback.extract_tb(error.__traceback__)
    if frame.filename != __file__
  ]
  code = getattr(score, "__code__", None)
  inside = [f for f in frames if code and f.filename == code.co_filename]
  if not inside:
    return {"where": "", "lines": ""}
  path = os.path.relpath(inside[-1].filename)
  return {
    "where": f"{path}:{inside[-1].lineno}",
    "lines": "".join(traceback.format_list(frames[-8:]))[:4000],
  }


def _number(value: Any) -> float:
  """What JSON does not know: NumPy's scalars."""
  if hasattr(value, "__float__"):
    return float(value)
  raise TypeError(f"{value!r} is of no JSON type")


if __name__ == "__main__":
  main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
