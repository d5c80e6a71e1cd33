"""python -m rl_tpu figures [NAME ...]: measure, draw, judge.

NAME is a study, as `score_centering/toys`, `toys`, or a folder with all of its
studies, as `sao`; `all`, or none, is every one.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, get_args

from rl_tpu.config import ConfigError
from rl_tpu.figures import drawing, measuring, table
from rl_tpu.figures import study as studies


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m rl_tpu figures",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("names", nargs="*", metavar="NAME")
  parser.add_argument(
    "--scale",
    choices=get_args(studies.Scale),
    default="cpu",
    help="smoke: minutes, proves that it runs; cpu: the committed figures; "
    "paper: the papers' sizes, for a pod",
  )
  parser.add_argument(
    "--jobs",
    type=int,
    default=2,
    help="cells measured beside each other, each on its share of the cores",
  )
  parser.add_argument(
    "--draw_only",
    action="store_true",
    help="measure nothing: pictures and table from the files there are",
  )
  parser.add_argument(
    "--again",
    type=int,
    metavar="INDEX",
    help="measure only this cell of each study, and compare with its file",
  )
  return parser


def run(arguments: Sequence[str]) -> dict[str, Any]:
  """Does what the command line asks.

  Returns:
    `artefacts` (of all judged studies), how many `passed`, are `weaker` or
    `not_seen`, and `unfinished`: studies that cells are missing of.

  Raises:
    ConfigError: a name or number is not allowed.
  """
  asked = _parser().parse_args(arguments)
  if asked.jobs < 1:
    raise ConfigError(f"--jobs is {asked.jobs}; it must be >= 1")
  root = pathlib.Path("experiments")
  names = [name for name in asked.names if name != "all"]
  found = studies.find(root, names)
  if asked.again is not None:
    for study in found:
      measuring.again(study, asked.scale, asked.again)
    return {"again": [study.name for study in found]}
  done = found
  if not asked.draw_only:
    done = measuring.fill(found, asked.scale, asked.jobs, _note)
  verdicts = {study: _judge(study, asked.scale) for study in done}
  if asked.scale == "cpu":
    table.write(root / "README.md", studies.find(root))
  artefacts: dict[str, list[str]] = {"passed": [], "weaker": [], "not_seen": []}
  for study in found:
    for name, verdict in (verdicts[study] or {}).items():
      artefacts[verdict.outcome].append(f"{study.folder} {name}")
  counts = {outcome: len(names) for outcome, names in artefacts.items()}
  unfinished = [study.name for study in found if verdicts[study] is None]
  return {"artefacts": artefacts, **counts, "unfinished": unfinished}


def _judge(study: studies.Study, scale: studies.Scale) -> table.Verdicts | None:
  """Judges a study and draws its picture; None where cells are missing."""
  judged = table.judge(study, scale)
  if judged is None:
    return None
  rows, verdicts = judged
  drawing.draw(study, scale, rows)
  for name, verdict in verdicts.items():
    _note(f"{study.name}, {name}: {verdict.outcome}: {verdict.seen}")
  return verdicts


def _note(line: str) -> None:
  print(f"rl_tpu: {line}", file=sys.stderr, flush=True)
