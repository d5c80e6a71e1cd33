"""The table of all studies in experiments/README.md."""

import pathlib
from collections.abc import Sequence

from rl_tpu import metrics
from rl_tpu.figures import study as studies
from rl_tpu.figures.study import Row, Scale, Study, Verdict

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
_HEAD = """\
| artefact | command | minutes | the paper shows | rule | seen | outcome |
|---|---|---|---|---|---|---|
"""
_WORDS = {"passed": "pass", "weaker": "weaker", "not_seen": "not seen"}
Judged = tuple[Study, Sequence[Row], Verdict]


def judge(study: Study, scale: Scale) -> Judged | None:
  """A study with its rows and verdict; None where cells are missing."""
  rows = studies.read(study.csv(scale))
  cells = study.cells(scale)
  if not all(studies.measured(cell, rows) for cell in cells):
    return None
  return study, rows, study.module.judge(rows)


def write(readme: pathlib.Path, found: Sequence[Study]) -> None:
  """Replaces what stands between the two marks of a README by their table.

  Raises:
    ValueError: it has no such marks.
  """
  text = readme.read_text()
  if BEGIN not in text or END not in text:
    raise ValueError(f"{readme} lacks the lines {BEGIN} and {END}")
  before, after = text.split(BEGIN)[0], text.split(END)[1]
  lines = "".join(_line(study) for study in found)
  metrics.write_text(readme, f"{before}{BEGIN}\n{_HEAD}{lines}{END}{after}")


def _line(study: Study) -> str:
  module, judged = study.module, judge(study, "cpu")
  name, minutes, seen, outcome = f"[{study.name}]({study.name}.py)", "", "", ""
  if judged:
    _, rows, verdict = judged
    picture = study.picture("cpu").relative_to(study.root).with_suffix(".png")
    name += f" ([figure]({picture}))"
    spent = sum(float(row["seconds"]) for row in rows) / 60
    minutes = f"{spent:.1f}" if spent >= 0.1 else "< 0.1"
    seen, outcome = verdict.seen, _WORDS[verdict.outcome]
  cells = (
    ", ".join(module.ARTEFACTS),
    name,
    minutes,
    module.SHOWS,
    module.RULE,
    seen or "not measured yet",
    outcome,
  )
  return f"| {' | '.join(cells)} |\n"
