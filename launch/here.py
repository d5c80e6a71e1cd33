"""A run on this machine: what `local.py` starts, and how sweeps start it."""

import sys
from collections.abc import Sequence

from launch import local
from launch.plan import ROOT
from launch.steps import Step


def run(flags: Sequence[str], dry_run: bool) -> int:
  """Runs it to its end, or prints the commands of its processes."""
  return local.main([*flags, *(["--dry_run"] if dry_run else [])])


def start(flags: Sequence[str]) -> Step:
  """The command that runs it to its end."""
  return Step(argv=(sys.executable, str(ROOT / "launch" / "local.py"), *flags))
