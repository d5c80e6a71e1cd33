"""What is sent to a cloud: commands, their input, and files that they name.

A backend only makes steps, from which the same text is printed and executed:
what `--dry_run` shows is a shell script that does exactly what a start does.
"""

import dataclasses
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """One command."""

  argv: tuple[str, ...]
  """The program and its arguments; no shell reads them."""
  stdin: str | None = None
  """Text of its standard input; None: nothing."""
  files: tuple[tuple[str, str], ...] = ()
  """Paths, below the working directory, and texts of files it reads."""
  may_fail: bool = False
  """Whether the steps after it follow even if it fails: it ends what may be
  gone already."""

  def __str__(self) -> str:
    """As a shell runs it."""
    lines = []
    for path, text in self.files:
      folder, quoted = str(pathlib.PurePath(path).parent), shlex.quote(path)
      lines += [
        f"mkdir -p {shlex.quote(folder)}",
        f"cat > {quoted} {_here(text)}",
      ]
    command = shlex.join(self.argv)
    if self.stdin is not None:
      command += f" {_here(self.stdin)}"
    elif self.may_fail:
      command += " || true"
    return "\n".join([*lines, command])

  def ask(self) -> subprocess.CompletedProcess[str]:
    """Runs the command and keeps what it says on stdout."""
    return self._run(subprocess.PIPE)

  def run(self) -> int:
    """Runs the command; returns the exit code."""
    sys.stdout.flush()
    return self._run(None).returncode

  def _run(self, stdout: int | None) -> subprocess.CompletedProcess[str]:
    for path, text in self.files:
      file = pathlib.Path(path)
      file.parent.mkdir(parents=True, exist_ok=True)
      file.write_text(text)
    return subprocess.run(
      self.argv,
      input=self.stdin,
      stdin=subprocess.DEVNULL if self.stdin is None else None,
      stdout=stdout,
      text=True,
    )


def script(steps: Sequence[Step]) -> str:
  """All of them as one shell script."""
  return "\n".join(
    ["#!/usr/bin/env bash", "set -euo pipefail", *map(str, steps)]
  )


def run(steps: Sequence[Step]) -> int:
  """Runs them in order, up to the first that fails; returns the exit code."""
  for step in steps:
    code = step.run()
    if code and not step.may_fail:
      return code
  return 0


def _here(text: str) -> str:
  """A here-document whose text no shell touches."""
  mark = "END"
  while mark in text.splitlines():
    mark += "_"
  return f"<<'{mark}'\n{text.rstrip(chr(10))}\n{mark}"
