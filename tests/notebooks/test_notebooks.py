"""Every notebook runs, and what is shown beside it is of the same cells."""

import importlib.util
import pathlib

import jupytext
import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))


def load_execute():
  spec = importlib.util.spec_from_file_location(
    "execute", FOLDER / "execute.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def pictures(notebook):
  return [
    output
    for cell in notebook.cells
    for output in cell.get("outputs", ())
    if "image/png" in output.get("data", {})
  ]


@pytest.mark.slow
@pytest.mark.notebook
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_runs_from_a_fresh_kernel_and_draws(source):
  assert pictures(load_execute().executed(source))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_committed_outputs_are_of_the_same_cells(source):
  shown = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
  cells = jupytext.read(source).cells
  assert [cell.source for cell in shown.cells] == [c.source for c in cells]
  assert pictures(shown)
  kinds = {
    output.output_type
    for cell in shown.cells
    for output in cell.get("outputs", ())
  }
  assert "error" not in kinds


def test_a_name_that_no_notebook_has_is_refused():
  with pytest.raises(SystemExit, match="no notebook begins with"):
    load_execute().sources(["07"])
