"""The tree keeps its own rules: layers, pins, and what the README promises."""

import pathlib
import re
import subprocess
import sys

import pytest

from rl_tpu import __main__ as command_line

ROOT = pathlib.Path(__file__).parent.parent


def test_imports_point_down():
  # In a process of its own: it disables the loggers that there are.
  lint = "from importlinter.cli import lint_imports as l; raise SystemExit(l())"
  done = subprocess.run([sys.executable, "-c", lint], cwd=ROOT)
  assert done.returncode == 0


def test_every_requirement_is_pinned():
  lines = (ROOT / "requirements.txt").read_text().splitlines()
  pins = [line for line in lines if not line.startswith("#")]
  assert len(pins) > 50
  assert [p for p in pins if not re.match(r"[\w.\-\[\]]+==[\w.]+", p)] == []


def test_help_lists_every_command():
  out = subprocess.run(
    [sys.executable, "-m", "rl_tpu", "--help"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  ).stdout
  for name in command_line.COMMANDS:
    assert re.search(rf"^  {name} ", out, re.MULTILINE)


@pytest.mark.parametrize("asked", [["help"], ["-h"], ["train", "--help"]])
def test_help_may_be_asked_for_anywhere(asked, capsys):
  assert command_line.main(["rl_tpu", *asked]) == 0
  assert "usage: python -m rl_tpu COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["fly"]])
def test_a_wrong_command_is_refused(arguments, capsys):
  assert command_line.main(["rl_tpu", *arguments]) == 2
  assert "train" in "".join(capsys.readouterr())


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_a_folder_that_is_not_there_is_refused(capsys):
  config = ROOT / "experiments/your_data/config.py"
  flag = f"--config={config}:/nowhere"
  assert command_line.main(["rl_tpu", "train", flag]) == 2
  assert "/nowhere/config.json is not there" in capsys.readouterr().err


METHODS = [path.stem for path in (ROOT / "experiments/methods").glob("*.py")]


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_into_a_config_by_one_word(method):
  config = ROOT / "experiments/your_data/config.py"
  read = command_line._read_config
  plain, changed = (
    read(["rl_tpu", f"--config={config}{word}"]) for word in ("", f":{method}")
  )
  assert changed.name == f"your_data_{method}"
  assert changed.task == plain.task
  trajectories = lambda c: c.groups_per_batch * c.group_size  # noqa: E731
  assert trajectories(changed) == trajectories(plain)
  assert changed.algorithm != plain.algorithm or changed.learner.minibatches > 1


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_a_word_that_names_no_method_is_refused(capsys):
  flag = f"--config={ROOT}/experiments/your_data/config.py:soa"
  assert command_line.main(["rl_tpu", "train", flag]) == 2
  said = capsys.readouterr().err
  assert "soa is not there; after the colon" in said and "running_mean" in said


def test_every_experiment_builds():
  from rl_tpu import config, parts

  # Peers run in environments of their own.
  peers = ROOT / "experiments/benchmarks/peers"
  found = sorted((ROOT / "experiments").rglob("*.py"))
  found = [path for path in found if path.parent != peers]
  built = []
  for path in found:
    scope = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    if "get_config" in scope:
      built.append(config.build(parts.Config, scope["get_config"]()).name)
  assert "quickstart" in built
