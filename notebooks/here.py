"""Imported first by every notebook: where they run, and how figures look.

The working directory becomes the repository's, so that `rl_tpu` and
`experiments` are found and what is compiled and cached is shared with the
command line. A CPU is two devices, one for either side of a run.
"""

import os
import pathlib
import sys

from IPython import get_ipython

ROOT = pathlib.Path(__file__).resolve().parents[1]
os.chdir(ROOT)
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import matplotlib.pyplot as plt  # noqa: E402

from rl_tpu.figures import drawing, measuring  # noqa: E402

plt.rcParams.update(drawing.STYLE)
jax.config.update("jax_num_cpu_devices", 2)
measuring.keep_compiled()
if (shell := get_ipython()) is not None:
  shell.run_line_magic("matplotlib", "inline")
