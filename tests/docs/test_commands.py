"""Every command of the documentation is executed, at a small size.

Pages share a working directory that looks like the repository, in which the
commands of each run in the page's order: those of rl_tpu in this process, the
others through a shell. The pages that add a file to rl_tpu have a copy of it.
What another test executes is in ELSEWHERE, with that test; of such commands the
flags are read all the same.
"""

import contextlib
import json
import os
import pathlib
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.request

import pages
import pytest

from rl_tpu import __main__ as command_line

pytestmark = pytest.mark.filterwarnings(
  "ignore:the load_module:DeprecationWarning"  # of ml_collections
)
ROOT = pages.ROOT
SERVES = "-m rl_tpu serve"
TRAIN = "-m rl_tpu train"
ELSEWHERE = {
  # Installs packages, then trains, which README's own test does here instead.
  "bash launch/quickstart.sh": "its last line, through QUICKSTART",
  "bash launch/test.sh": "this is it",
  "launch/local.py": "tests/launch/test_local.py",
  "config.remote.addresses": "tests/integration/test_remote.py",
  "serve.weights=awaited": "tests/integration/test_remote.py",
  # Five to ten minutes for a pod's model.
  "-m rl_tpu compile": "tests/aot/test_compile.py",
  # Would write into the repository's folders of results.
  "-m rl_tpu figures": "tests/figures/test_smoke.py",
}
"""Parts of commands that are not executed here, and where they are."""
QUICKSTART = (
  ".venv/bin/python -m rl_tpu train --config=experiments/quickstart.py"
)
MODEL = "/models/Qwen3-0.6B"
NOTHING_IMITATED = "--config.warm_start.batches=0"
FOLDER = str(ROOT / "tests/golden/huggingface/qwen2_tied_sharded")
COPIES = ("docs/new_algorithm.md", "docs/new_environment.md")
"""Pages that add to rl_tpu."""
SMALL = {
  "train": {
    "batches": 1,
    "groups_per_batch": 4,
    "warm_start.trajectories_per_batch": 8,
    "evaluation.every": 0,
    "evaluation.problems": 4,
    "engine.slots": 8,
    "engine.prefill_batches": "(8,)",
  },
  "evaluate": {"evaluate.problems": 4, "engine.prefill_batches": "(8,)"},
  "serve": {"engine.prefill_batches": "(8,)"},
  "simulate": {"batches": 4, "groups_per_batch": 8, "group_size": 4},
}
"""What makes a command small, by its name: fields of the config."""


def small(arguments: list[str]) -> list[str]:
  """The command's arguments and what makes it small."""
  changes = dict(SMALL.get(arguments[0], {}))
  if arguments[0] == "train" and not any("warm_start" in a for a in arguments):
    changes |= {"warm_start.batches": 2, "warm_start.wrong_batches": 0}
    if any(a.endswith(MODEL) or a.endswith(FOLDER) for a in arguments):
      changes["warm_start.batches"] = 0
  elif arguments[0] == "train" and NOTHING_IMITATED not in arguments:
    changes["warm_start.batches"] = 2
  return arguments + [f"--config.{k}={v}" for k, v in changes.items()]


def elsewhere(text: str) -> str | None:
  return next((ELSEWHERE[part] for part in ELSEWHERE if part in text), None)


def arguments_of(text: str) -> list[str] | None:
  """What follows `-m rl_tpu`; None for another command."""
  words = shlex.split(text.split(" > ")[0].removesuffix("&"))
  return words[3:] if words[1:3] == ["-m", "rl_tpu"] else None


class Reader:
  """Who follows pages, in a folder that is theirs."""

  def __init__(self, folder: pathlib.Path, capsys, ports, own: bool):
    """`own`: the folder's rl_tpu is another than ours, for a process."""
    self._folder, self._capsys, self._own = folder, capsys, own
    self._ports = ports
    self._servers: list[subprocess.Popen] = []

  def write(self, file: pages.File) -> None:
    path = self._folder / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(file.text)

  def run(self, text: str) -> None:
    """Runs a command; what it serves goes on until `close`."""
    for port, free in self._ports.items():
      text = text.replace(port, free)
    text = text.replace(MODEL, FOLDER)
    arguments = arguments_of(text)
    if elsewhere(text):
      self.check_flags(arguments)
    elif arguments is None:
      self.shell(text)
    elif self._own or "--preflight" in arguments:
      # A preflight describes as many CPU devices as the meshes have.
      python = [sys.executable, "-m", "rl_tpu", *small(arguments)]
      self.shell(shlex.join(python))
    elif arguments[0] == "serve":
      self.serve(small(arguments))
    else:
      self.call(small(arguments))

  def check_flags(self, arguments: list[str] | None) -> None:
    if arguments is not None and arguments[0] in command_line.COMMANDS:
      command_line._read_config(["rl_tpu", *arguments[1:]])

  def call(self, arguments: list[str]) -> None:
    """A command of rl_tpu, in this process."""
    self._capsys.readouterr()
    code = command_line.main(["rl_tpu", *arguments])
    said = self._capsys.readouterr()
    assert code == 0, said.err + said.out
    if "--help" not in arguments:
      json.loads(said.out.splitlines()[-1])

  def shell(self, text: str) -> None:
    python = f"{shlex.quote(sys.executable)} "
    for name in (".venv/bin/python ", "python "):
      text = python + text.removeprefix(name) if text.startswith(name) else text
    done = subprocess.run(
      ["bash", "-c", text],
      cwd=self._folder,
      env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
      capture_output=True,
      text=True,
      timeout=300,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"

  def serve(self, arguments: list[str]) -> None:
    """Starts it and waits until it says that it serves."""
    log = self._folder / f"serve{len(self._servers)}.log"
    with open(log, "w") as file:
      server = subprocess.Popen(
        [sys.executable, "-m", "rl_tpu", *arguments],
        cwd=self._folder,
        stdout=file,
        stderr=subprocess.STDOUT,
      )
    self._servers.append(server)
    wait_for(server, self._ports["8471"], log)

  def close(self) -> None:
    for server in self._servers:
      server.terminate()
      assert server.wait(60) in (0, 130), "a server did not stop as told"


def wait_for(server: subprocess.Popen, port: str, log: pathlib.Path) -> None:
  """Until it answers; it says in vain when it has ended."""
  address = f"http://127.0.0.1:{port}/v1/models"
  while server.poll() is None:
    with contextlib.suppress(OSError):
      urllib.request.urlopen(address, timeout=60).close()
      return
    with contextlib.suppress(subprocess.TimeoutExpired):
      server.wait(0.2)
  raise AssertionError(log.read_text())


def free_ports(*names: str) -> dict[str, str]:
  """A free port for each that pages name."""
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in names]
    for one in sockets:
      one.bind(("127.0.0.1", 0))
    return {
      name: str(one.getsockname()[1])
      for name, one in zip(names, sockets, strict=True)
    }


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
  """A folder with what is in the repository, for runs of its own."""
  folder = tmp_path_factory.mktemp("checkout")
  for path in ROOT.iterdir():
    if path.name not in (".git", ".venv", "runs"):
      (folder / path.name).symlink_to(path)
  return folder


@pytest.fixture
def copy(tmp_path):
  """A copy of the repository, to add to."""
  names = ("rl_tpu", "experiments", "tests", "pyproject.toml")
  for name in names:
    path = ROOT / name
    if path.is_dir():
      ignore = shutil.ignore_patterns("golden", "__pycache__", "results")
      shutil.copytree(path, tmp_path / name, ignore=ignore)
    else:
      shutil.copy(path, tmp_path / name)
  return tmp_path


def follow(page: str, folder, capsys, monkeypatch, own=False):
  monkeypatch.chdir(folder)
  monkeypatch.setattr(command_line, "_prepare_jax", lambda config: None)
  reader = Reader(folder, capsys, free_ports("8470", "8471"), own)
  if page == "README.md":
    reader.run(QUICKSTART)
  try:
    for step in pages.steps(pages.read(page)):
      if isinstance(step, pages.File):
        reader.write(step)
      else:
        reader.run(step.text)
  finally:
    reader.close()


@pytest.mark.slow
@pytest.mark.parametrize(
  "page", [page for page in pages.documents() if page not in COPIES]
)
def test_what_a_page_says_can_be_done(page, checkout, capsys, monkeypatch):
  follow(page, checkout, capsys, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("page", COPIES)
def test_what_a_page_adds_to_the_project_works(page, copy, capsys, monkeypatch):
  follow(page, copy, capsys, monkeypatch, own=True)


def test_every_exception_is_of_a_command_that_is_there():
  texts = [
    step.text
    for page in pages.documents()
    for step in pages.steps(pages.read(page))
    if isinstance(step, pages.Command)
  ]
  for part in ELSEWHERE:
    assert any(part in text for text in texts), part
