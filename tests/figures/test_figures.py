"""Studies: found, measured cell by cell, resumed, judged, drawn."""

import pathlib
import sys

import pytest

from rl_tpu import __main__ as command_line
from rl_tpu import figures
from rl_tpu.config import ConfigError
from rl_tpu.figures import command, drawing, measuring, table
from rl_tpu.figures import study as studies

STUDY = '''
"""Does twice a number grow?"""
import os
import pathlib
from rl_tpu.figures import Claim, Verdict
from experiments import shared

def judge(rows):
  seen = max(row["twice"] for row in rows)
  outcome = "passed" if seen == 6 else "weaker"
  return Verdict(outcome=outcome, seen=f"{seen:g}")

CLAIM = Claim(shows="it grows", rule="three is six", judge=judge)
ARTEFACTS = {"Fig. 1": CLAIM, "Table 2": CLAIM}

def cells(scale):
  numbers = (3,) if scale == "smoke" else (1, 2, 3)
  return [dict(seed=seed, number=n) for seed in (0, 1) for n in numbers]

def measure(cell, scale):
  with open(pathlib.Path("measured"), "a") as file:
    file.write(f"{cell['number']}\\n")
  if cell["number"] == shared.BROKEN:
    raise ZeroDivisionError("number 2 is broken")
  twice = 2.0 * cell["number"] + shared.ADD
  return [dict(batch=batch, twice=twice) for batch in (1, 2)]

def draw(rows, figure):
  axes = figure.subplots()
  axes.plot([r["number"] for r in rows], [r["twice"] for r in rows])
'''


@pytest.fixture
def root(tmp_path, monkeypatch):
  """A folder of experiments of its own, with one study, as current folder."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / "experiments" / "doubling").mkdir(parents=True)
  folder = tmp_path / "experiments"
  (folder / "shared.py").write_text("ADD = 0.0\nBROKEN = None\n")
  (folder / "doubling" / "twice.py").write_text(STUDY)
  (folder / "doubling" / "config.py").write_text("def get_config(): ...\n")
  marks = f"# Figures\n{table.BEGIN}\n{table.END}\nafter\n"
  (folder / "README.md").write_text(marks)
  known = {n: sys.modules.pop(n) for n in [*sys.modules] if _ours(n)}
  yield folder
  for name in [n for n in sys.modules if _ours(n)]:
    del sys.modules[name]
  sys.modules |= known


def _ours(name: str) -> bool:
  return name.split(".")[0] == "experiments"


def measured() -> list[str]:
  return sorted(pathlib.Path("measured").read_text().split())


def run(*arguments):
  return command.run([*arguments, "--jobs=1"])


def test_a_study_is_measured_judged_drawn_and_listed(root):
  result = run("all")
  assert result["artefacts"]["passed"] == [
    "doubling Fig. 1",
    "doubling Table 2",
  ]
  assert result["passed"] == 2 and result["weaker"] == result["not_seen"] == 0
  assert measured() == ["1", "1", "2", "2", "3", "3"]
  rows = studies.read(root / "doubling" / "results" / "twice.csv")
  assert [(r["seed"], r["number"], r["batch"]) for r in rows] == [
    (seed, number, batch)
    for seed in (0, 1)
    for number in (1, 2, 3)
    for batch in (1, 2)
  ]
  assert all(row["twice"] == 2.0 * row["number"] for row in rows)
  for ending in ("png", "svg"):
    path = root / "doubling" / "figures" / f"twice.{ending}"
    assert path.stat().st_size > 1000
  text = (root / "README.md").read_text()
  assert "\n| Fig. 1 |" in text and "\n| Table 2 |" in text
  assert "| it grows | three is six | 6 | pass |" in text
  assert text.startswith("# Figures\n") and text.endswith("\nafter\n")


def test_what_the_file_holds_is_not_measured_again(root):
  (root / "shared.py").write_text("ADD = 0.0\nBROKEN = 2\n")
  with pytest.raises(ZeroDivisionError, match="number 2 is broken"):
    run("twice")
  rows = studies.read(root / "doubling" / "results" / "twice.csv")
  assert [row["number"] for row in rows] == [1, 1]
  (root / "shared.py").write_text("ADD = 0.0\nBROKEN = None\n")
  pathlib.Path("measured").unlink()
  assert run("twice")["passed"] == 2
  assert "1" in measured() and measured().count("1") == 1


def test_only_drawing_measures_nothing_and_says_what_is_unfinished(root):
  assert run("all", "--draw_only")["unfinished"] == ["doubling/twice"]
  assert not pathlib.Path("measured").exists()
  assert "not measured yet" in (root / "README.md").read_text()


def test_a_smoke_run_leaves_the_committed_files_alone(root):
  assert run("all", "--scale=smoke")["passed"] == 2
  assert measured() == ["3", "3"]
  assert not (root / "doubling" / "results").exists()
  assert pathlib.Path("runs/figures/smoke/doubling/twice.csv").exists()


def test_rows_of_cells_that_are_no_more_go_and_new_ones_are_measured(root):
  run("twice")
  path = root / "doubling" / "twice.py"
  path.write_text(path.read_text().replace("(1, 2, 3)", "(3, 4)"))
  sys.modules.pop("experiments.doubling.twice")
  pathlib.Path("measured").unlink()
  run("twice")
  assert measured() == ["4", "4"]
  rows = studies.read(root / "doubling" / "results" / "twice.csv")
  assert {row["number"] for row in rows} == {3, 4}


def test_a_cell_measured_again_must_give_what_its_file_has(root):
  run("twice")
  assert run("twice", "--again=4") == {"again": ["doubling/twice"]}
  sys.modules["experiments.shared"].ADD = 1e-3
  with pytest.raises(ValueError, match=r"'twice': \('4', '4.001'\)"):
    run("twice", "--again=4")


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["thrice"], "'thrice' is no study; they are doubling/twice"),
    (["--jobs=0"], "--jobs is 0; it must be >= 1"),
  ],
)
def test_what_is_not_there_is_refused_by_name(root, arguments, message):
  with pytest.raises(ConfigError, match=message):
    command.run(arguments)


def test_outside_a_repository_the_command_says_where_it_runs(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  assert command_line.main(["rl_tpu", "figures"]) == 2
  assert "experiments is not there" in capsys.readouterr().err


def test_half_a_study_is_named(root):
  path = root / "doubling" / "twice.py"
  path.write_text(path.read_text().replace("def draw(", "def drawn("))
  with pytest.raises(ValueError, match="doubling/twice defines no draw"):
    run("all")


def test_a_cell_twice_is_refused(root):
  path = root / "doubling" / "twice.py"
  path.write_text(path.read_text().replace("(1, 2, 3)", "(1, 1)"))
  with pytest.raises(ValueError, match=r"cells\('cpu'\) repeats a cell"):
    run("twice")


def test_values_survive_their_file(tmp_path):
  cell = {"eta": float("inf"), "k": "full", "centered": True, "sigma": 0.05}
  rows = [
    cell | {"reward": 1 / 3, "note": "a, b"},
    cell | {"reward": float("nan")},
  ]
  path = tmp_path / "values.csv"
  studies.write(path, rows)
  found = studies.read(path)
  assert studies.measured(cell, found) == found and len(found) == 2
  assert found[0]["reward"] == 0.333333333 and found[0]["note"] == "a, b"
  assert found[1]["reward"] != found[1]["reward"] and "note" not in found[1]


def test_an_interval_is_students():
  mean, half = drawing.interval([1.0, 2.0, 3.0])
  assert mean == 2.0 and half == pytest.approx(4.302653 / 3**0.5)
  assert drawing.interval([1.0])[1] != drawing.interval([1.0])[1]
  mean, half = drawing.difference([1.0, 2.0, 4.0], [0.0, 1.0, 3.0])
  assert (mean, half) == (1.0, 0.0)


def test_every_study_here_has_distinct_artefacts_and_cells():
  root = pathlib.Path(__file__).parents[2] / "experiments"
  seen = []
  for study in figures.find(root):
    seen += [(study.folder, artefact) for artefact in study.claims]
    for scale in ("smoke", "cpu"):
      assert study.cells(scale)
  assert len(seen) == len(set(seen))


def test_cores_are_dealt_without_one_left_idle():
  assert measuring.shares([0, 1], 2) == [[0], [1]]
  assert measuring.shares([0, 1, 2], 2) == [[0, 2], [1]]
  assert measuring.shares([3], 2) == [[3], [3]]
