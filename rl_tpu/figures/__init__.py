"""The papers' figures and tables, remade: python -m rl_tpu figures.

A study is one Python file in a folder of experiments/ that defines

| name | what |
|---|---|
| `ARTEFACTS` | what it remakes: a `Claim` for each figure or table |
| `cells(scale)` | what is measured: dicts of the same columns, often a seed |
| `measure(cell, scale)` | one cell's rows of figures |
| `draw(rows, figure)` | the picture, on a matplotlib figure |

`measuring` fills results/NAME.csv beside it cell by cell, so that what was
interrupted goes on; `drawing` and `table` need nothing but that file.
"""

from rl_tpu.figures.study import Cell as Cell
from rl_tpu.figures.study import Claim as Claim
from rl_tpu.figures.study import Row as Row
from rl_tpu.figures.study import Study as Study
from rl_tpu.figures.study import Verdict as Verdict
from rl_tpu.figures.study import find as find
