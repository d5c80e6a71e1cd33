"""The launcher with parts that only pretend: a line of Python each.

    python fake_run.py RESTARTS GRACE_SECONDS TRAINERS GENERATORS

The last two are JSON lists of programs. Each may use `first()`: whether it is
the first of its name that was started.
"""

import json
import pathlib
import runpy
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]

PRELUDE = """
import atexit, os, pathlib, signal, subprocess, sys, time
def first():
  path = pathlib.Path({mark!r})
  before = path.exists()
  path.touch()
  return not before
def forever():
  while True:
    time.sleep(3600)
"""


def main(restarts, grace, trainers, generators):
  local = runpy.run_path(str(ROOT / "launch" / "local.py"))
  with tempfile.TemporaryDirectory() as scratch:

    def parts(role, programs):
      made = []
      for index, program in enumerate(json.loads(programs)):
        mark = str(pathlib.Path(scratch) / f"{role}{index}")
        code = PRELUDE.format(mark=mark) + program
        made.append(local["Part"](role, index, (sys.executable, "-c", code)))
      return made

    return local["Launcher"](
      lambda: parts("trainer", trainers),
      parts("generator", generators),
      restarts=int(restarts),
      grace_seconds=float(grace),
    ).run()


if __name__ == "__main__":
  sys.exit(main(*sys.argv[1:]))
