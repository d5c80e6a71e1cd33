"""Flags and config files with a fault: one line that says which."""

import pytest

from rl_tpu import __main__ as command_line

pytestmark = pytest.mark.filterwarnings(
  "ignore:the load_module:DeprecationWarning"  # of ml_collections
)
GOOD = "experiments/quickstart.py"
BROKEN = """
def get_config():
  return helper(a=1)


def helper():
  pass
"""


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (["--config=experiments/quikstart.py"], "quikstart.py is not there"),
    (
      [f"--config={GOOD}", "--config.learner.learning_rat=1"],
      "config.learner has no field 'learning_rat'; did you mean "
      "'learning_rate'?",
    ),
    ([f"--config={GOOD}", "--config.zzz=1"], "config has no field 'zzz'; it"),
    (
      [f"--config={GOOD}", "--config.seed=one"],
      "config.seed is 'one'; it must be an int",
    ),
    (
      [f"--config={GOOD}", "--config.seed.deep=1"],
      "config.seed is no section; it has no field 'deep'",
    ),
    (
      [f"--config={GOOD}", "--config.algorithm.name=sao"],
      "config.algorithm.baseline is not a field of sao",
    ),
    (
      [f"--config={GOOD}", "--confg.seed=1"],
      "--confg.seed is not a flag; did you mean --config.seed?",
    ),
    (
      [f"--config={GOOD}", "--learner.row_length=64"],
      "did you mean --config.learner.row_length?",
    ),
    (["--config=experiments/of_run.py:runs/nope"], "experiments/of_run.py:22:"),
    (["--config=experiments/quickstart.py:never"], "schedule is 'never'"),
    (
      ["--config={broken}"],
      "broken.py:3: TypeError: helper() got an unexpecte",
    ),
    (
      ["--config={broken}", "--config.seed=1"],
      "broken.py:3: TypeError: helper",
    ),
  ],
)
def test_a_fault_is_one_line_that_names_it(flags, said, tmp_path, capsys):
  broken = tmp_path / "broken.py"
  broken.write_text(BROKEN)
  flags = [flag.replace("{broken}", str(broken)) for flag in flags]
  assert command_line.main(["rl_tpu", "train", *flags]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("rl_tpu: ") and said in line


def test_a_command_that_is_not_there_is_named(capsys):
  assert command_line.main(["rl_tpu", "trian"]) == 2
  assert capsys.readouterr().err.startswith("rl_tpu: command is 'trian'")


def test_a_command_nearly_spelt_is_named(capsys):
  assert command_line.main(["rl_tpu", "trian", f"--config={GOOD}"]) == 2
  assert "did you mean 'train'?" in capsys.readouterr().err
