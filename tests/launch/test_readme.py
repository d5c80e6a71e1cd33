"""Every launch command of the pages, with --dry_run; the image's pins."""

import base64
import json
import re
import shlex
import shutil
import subprocess
import sys

import launching
import pytest

from launch import __main__ as command_line
from launch import backends

pytestmark = pytest.mark.filterwarnings("ignore:the load_module")


def lines_of(readme):
  """Commands in its indented blocks."""
  text = (launching.ROOT / readme).read_text()
  blocks = re.findall(r"(?:^    .+\n)+", text, re.MULTILINE)
  joined = [re.sub(r"\\\n\s*", "", block) for block in blocks]
  return [line.strip() for block in joined for line in block.splitlines()]


LINES = lines_of("launch/README.md")
COMMANDS = [
  line.partition("python -m launch ")[2].split()
  for line in [*LINES, *lines_of("docs/pods.md")]
  if "python -m launch " in line and "BACKEND" not in line
]


def test_the_readme_has_a_command_for_every_backend():
  assert {command[0] for command in COMMANDS} == {"local", *backends.CLOUDS}
  assert any("--sweep" in command for command in COMMANDS)
  for do in ("logs", "status", "stop"):
    assert any(f"--do={do}" in command for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c)[:60])
def test_commands_of_the_readme_can_be_rehearsed(command, monkeypatch, capsys):
  monkeypatch.chdir(launching.ROOT)
  # Only --dry_run itself may start anything: nothing does.
  monkeypatch.setattr(subprocess, "Popen", None)
  monkeypatch.setattr(subprocess, "run", None)
  command = [word for word in command if word != "--dry_run"]
  assert command_line.main([*command, "--dry_run"]) == 0
  printed = capsys.readouterr().out
  monkeypatch.undo()
  checked = subprocess.run(
    [str(launching.SHELLCHECK), "--shell=bash", "-"],
    input=printed,
    capture_output=True,
    text=True,
  )
  assert checked.returncode == 0, checked.stdout
  wanted = {"local": "rl_tpu", "gke": "kubectl", "tpu_vm": "gcloud"}
  assert wanted.get(command[0], "xpk workload") in printed or "local.py" in (
    printed
  )


def test_other_commands_of_the_readme_are_what_tools_take():
  others = [
    shlex.split(line)[0]
    for line in LINES
    if not line.startswith("python -m launch")
  ]
  assert set(others) == {"podman", "kubectl"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_the_secret_of_the_readme_is_one_that_kubectl_makes():
  (command,) = (line for line in LINES if line.startswith("kubectl"))
  done = subprocess.run(
    ["bash", "-c", f"{command} --dry-run=client --output=json"],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  made = json.loads(done.stdout)
  assert (made["kind"], made["metadata"]["name"]) == ("Secret", "rl-tpu")
  assert len(base64.b64decode(made["data"]["token"])) == 64


def test_the_command_itself_can_be_asked_for_help_and_rehearsed():
  done = launching.launch("--help")
  assert done.returncode == 0
  for backend in ("local", *backends.CLOUDS):
    assert backend in done.stdout
  done = launching.launch(
    *("gke", "--settings=launch/example.py", "--dry_run", launching.POD)
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("#!/usr/bin/env bash\n")


def test_the_image_has_what_is_pinned():
  text = (launching.ROOT / "launch" / "Containerfile").read_text()
  pins = dict(
    line.split("#")[0].strip().split("==")
    for line in (launching.ROOT / "requirements.txt").read_text().splitlines()
    if "==" in line
  )
  assert f'"jax[tpu]=={pins["jax"]}"' in text
  assert re.search(r"pathwaysutils==[\d.]+", text)
  assert "--requirement requirements.txt" in text
  python = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
  assert f"FROM {python}\n" in text


def test_a_command_under_pathways_says_that_the_image_has_it(
  monkeypatch, capsys
):
  from launch import under_pathways

  monkeypatch.setitem(sys.modules, "pathwaysutils", None)
  assert under_pathways.main(["launch", "train"]) == 1
  assert "launch/Containerfile installs it" in capsys.readouterr().err


def test_a_command_under_pathways_registers_it_first(monkeypatch):
  from launch import under_pathways

  done = []

  class Pretended:
    @staticmethod
    def initialize():
      done.append("initialize")

  monkeypatch.setitem(sys.modules, "pathwaysutils", Pretended)
  monkeypatch.setattr(
    under_pathways.command_line,
    "main",
    lambda arguments: done.append(json.dumps(arguments)) or 0,
  )
  assert under_pathways.main(["launch", "train"]) == 0
  assert done == ["initialize", '["launch", "train"]']
