"""Commands: what is printed is what is run."""

import subprocess

from launch import steps
from launch.steps import Step

ODD = 'it\'s $(a) `b` "c" \\ \n\nEND\n'


def test_a_command_gets_its_files_and_its_input(tmp_path, monkeypatch, capfd):
  step = Step(
    argv=(
      "bash",
      "-c",
      'cat - "$1"; echo "$2"',
      "bash",
      "a b/f.txt",
      "it's $x",
    ),
    stdin=ODD,
    files=(("a b/f.txt", ODD),),
  )
  monkeypatch.chdir(tmp_path)
  assert steps.run([step]) == 0
  ran = capfd.readouterr().out
  assert ran == 2 * ODD + "it's $x\n"
  (tmp_path / "a b" / "f.txt").unlink()
  done = subprocess.run(
    ["bash", "-c", steps.script([step])],
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout == ran


def test_output_of_commands_is_not_held_back(tmp_path, capfd):
  """What follows a log for hours must show it meanwhile."""
  step = Step(argv=("bash", "-c", "readlink /proc/$$/fd/1"))
  assert steps.run([step]) == 0
  assert "pipe" not in capfd.readouterr().out
  assert "pipe" in step.ask().stdout


def test_the_first_that_fails_is_the_last_but_for_those_that_may(tmp_path):
  def touch(name, code=0, may_fail=False):
    command = f"touch {tmp_path}/{name}; exit {code}"
    return Step(argv=("bash", "-c", command), may_fail=may_fail)

  sent = [touch("a", 3, may_fail=True), touch("b", 4), touch("c")]
  assert steps.run(sent) == 4
  assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
  for name in "ab":
    (tmp_path / name).unlink()
  done = subprocess.run(["bash", "-c", steps.script(sent)])
  assert done.returncode == 4
  assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
