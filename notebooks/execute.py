"""Runs notebooks and keeps their outputs: python notebooks/execute.py [NAME].

A notebook is a pair. The `.py` in jupytext's percent format is what is edited
and reviewed; the `.ipynb` beside it, which this writes, is what is looked at.
Without names all of them, each in a kernel of its own.
"""

import pathlib
import sys

import jupytext
import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).resolve().parent
SECONDS = 600
"""A cell may take, on a machine that does other things too."""


def sources(names: list[str]) -> list[pathlib.Path]:
  """The `.py` of the notebooks whose names begin so; of all, if none is given.

  Raises:
    SystemExit: no notebook begins so.
  """
  every = sorted(FOLDER.glob("[0-9]*.py"))
  found = [p for p in every if not names or p.name.startswith(tuple(names))]
  if not found:
    known = ", ".join(path.stem for path in every)
    sys.exit(f"no notebook begins with {names}; they are {known}")
  return found


def executed(source: pathlib.Path) -> nbformat.NotebookNode:
  """The notebook with its outputs.

  Raises:
    nbclient.exceptions.CellExecutionError: a cell failed; its traceback.
  """
  notebook = jupytext.read(source)
  notebook.metadata = {
    "kernelspec": {"name": "python3", "display_name": "Python 3"},
    "language_info": {"name": "python"},
  }
  for index, cell in enumerate(notebook.cells):
    cell.id = f"cell-{index}"
  resources = {"metadata": {"path": str(FOLDER)}}
  client = nbclient.NotebookClient(
    notebook, timeout=SECONDS, kernel_name="python3", resources=resources
  )
  client.execute()
  for cell in notebook.cells:
    cell.metadata.pop("execution", None)  # Times of day.
  return notebook


if __name__ == "__main__":
  for source in sources(sys.argv[1:]):
    nbformat.write(executed(source), source.with_suffix(".ipynb"))
    print(f"{source.stem}: executed", flush=True)
