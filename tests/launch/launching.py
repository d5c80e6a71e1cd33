"""Plans that tests of backends share, and what they print."""

import pathlib
import subprocess
import sys

from launch import backends, example
from launch.settings import Settings
from rl_tpu.config import build

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHELLCHECK = pathlib.Path(sys.executable).parent / "shellcheck"
POD = f"--config={ROOT}/experiments/pods/qwen3_1p7b_v5e16.py"
TWO_SLICES = (POD, "--slices=2", "--config.devices.trainer.data=2")
"""A trainer of 2 slices of v5e:4x4, 4 hosts each; generators of v5e:2x4."""
SMALL = (
  f"--config={ROOT}/experiments/pods/qwen3_8b_v5p64.py",
  "--config.seed=3",
)
"""A trainer of one slice of v5p:4x4x4; generators of v5p:2x2x1."""


def settings(**fields):
  values = example.get_config().to_dict() | {"name": "try1"} | fields
  return build(Settings, values, "settings")


def plan(backend, run=TWO_SLICES, **fields):
  return backends.plan_on(backend, settings(**fields), run)


def launch(*arguments, **options):
  """Runs the command line."""
  return subprocess.run(
    [sys.executable, "-m", "launch", *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=300,
    **options,
  )


def flags_of(command, name):
  """Values of a flag in a command."""
  return [
    argument.partition("=")[2]
    for argument in command
    if argument.partition("=")[0] == name
  ]
