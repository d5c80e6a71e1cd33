"""The table of all studies in experiments/README.md."""

import pathlib
from collections.abc import Iterator, Sequence

from rl_tpu import metrics
from rl_tpu.figures import study as studies
from rl_tpu.figures.study import Row, Scale, Study, Verdict

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
_HEAD = """\
| artefact | command | minutes | the paper shows | rule | seen | outcome |
|---|---|---|---|---|---|---|
"""
_WORDS = {"passed": "pass", "weaker": "weaker", "not_seen": "not seen"}
Verdicts = dict[str, Verdict]
"""By artefact."""


def judge(study: Study, scale: Scale) -> tuple[list[Row], Verdicts] | None:
  """A study's rows and verdicts; None where cells are missing."""
  rows = studies.read(study.csv(scale))
  if not all(studies.by_cell(study.cells(scale), rows).values()):
    return None
  return rows, {name: c.judge(rows) for name, c in study.claims.items()}


def write(readme: pathlib.Path, found: Sequence[Study]) -> None:
  """Replaces what stands between the two marks of a README by their table.

  Raises:
    ValueError: it has no such marks.
  """
  text = readme.read_text()
  if BEGIN not in text or END not in text:
    raise ValueError(f"{readme} lacks the lines {BEGIN} and {END}")
  before, after = text.split(BEGIN)[0], text.split(END)[1]
  lines = "".join(line for study in found for line in _lines(study))
  metrics.write_text(readme, f"{before}{BEGIN}\n{_HEAD}{lines}{END}{after}")


def _lines(study: Study) -> Iterator[str]:
  """One line for each artefact; the minutes are those of the whole study."""
  judged = judge(study, "cpu")
  name, minutes = f"[{study.name}]({study.name}.py)", ""
  if judged:
    picture = study.picture("cpu").relative_to(study.root).with_suffix(".png")
    name += f" ([figure]({picture}))"
    spent = sum(float(row["seconds"]) for row in judged[0]) / 60
    minutes = f"{spent:.1f}" if spent >= 0.1 else "< 0.1"
  for artefact, claim in study.claims.items():
    seen, outcome = "not measured yet", ""
    if judged:
      verdict = judged[1][artefact]
      seen, outcome = verdict.seen, _WORDS[verdict.outcome]
    cells = artefact, name, minutes, claim.shows, claim.rule, seen, outcome
    yield f"| {' | '.join(cells)} |\n"
