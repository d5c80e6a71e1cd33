"""How processes of the learner's benchmark tell what a batch cost.

One JSON object a line of standard output; what libraries print goes to
standard error, not between the answers.
"""

import json
import resource
import sys
import time


def begin(version: str) -> None:
  """Keeps standard output for answers; the first says what answers."""
  sys.stdout = sys.stderr
  tell({"version": version})


def now() -> tuple[float, float]:
  """Seconds and processor seconds."""
  return time.perf_counter(), time.process_time()


def cost(tokens: int, began: tuple[float, float]) -> None:
  """Answers with what was done since `began`, and the peak of memory."""
  ended = now()
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  tell(
    {
      "tokens": tokens,
      "cpu_seconds": ended[1] - began[1],
      "seconds": ended[0] - began[0],
      "peak_mb": peak / 1024,
    }
  )


def tell(answer: dict) -> None:
  """One line."""
  print(json.dumps(answer), file=sys.__stdout__, flush=True)
