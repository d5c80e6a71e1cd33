"""The process that scores: one function, one answer after another.

  python -m rl_tpu.rewards.worker MODULE:FUNCTION SECONDS MEMORY_BYTES

Reads a JSON list of arguments a line from stdin and writes a JSON object a line
to what was stdout: `{"value": ...}`, or `{"raised": ...}`. It ends when stdin
does, so that it does not outlive whoever it works for; should it hang then, its
own alarm ends it. Nothing here imports JAX: a worker starts in the time that
its function's module takes.
"""

import importlib
import json
import os
import resource
import signal
import sys
from typing import Any


def main(function: str, seconds: float, memory_bytes: int) -> None:
  """Serves until stdin ends."""
  # What the function prints must not be taken for an answer.
  replies = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  module, name = function.split(":")
  score = getattr(importlib.import_module(module), name)
  resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))

  def say(reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()

  say({"ready": function})
  for line in sys.stdin:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
      reply = {"value": score(*json.loads(line))}
    except Exception as error:
      reply = {"raised": repr(error)[:500]}
    signal.setitimer(signal.ITIMER_REAL, 0)
    say(reply)


if __name__ == "__main__":
  main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
