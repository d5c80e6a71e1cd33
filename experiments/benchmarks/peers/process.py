"""Peers as processes that work only when they are asked.

Each runs a script of this folder under the Python of an environment of its own
and answers a line with a line; while others work it waits and costs nothing.
"""

import json
import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[3]
PEERS = {"hf": "hf_generate.py", "tunix": "tunix_sampler.py"}
"""Scripts by the name of the peer."""

Cost = tuple[int, float, float]
"""Tokens that count, processor seconds, seconds."""


class Process:
  """A process that works only when it is sent a line."""

  def __init__(self, command: Sequence[Any], sizes: dict[str, Any]):
    """Starts `command` with the sizes as its last argument."""
    self._process = subprocess.Popen(
      [*command, json.dumps(sizes)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      cwd=ROOT,
    )
    self.version = self._read()["version"]

  def ask(self, question: Any) -> dict[str, Any]:
    """Sends one line and waits for the answer."""
    assert self._process.stdin
    self._process.stdin.write(json.dumps(question) + "\n")
    self._process.stdin.flush()
    return self._read()

  def close(self) -> None:
    """Lets it end."""
    self._process.communicate()

  def _read(self) -> dict[str, Any]:
    assert self._process.stdout
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError(
        f"a process ended with status {self._process.wait()}: "
        f"{self._process.args}; its error is above"
      )
    return json.loads(line)


class Peer(Process):
  """A process that generates a static batch for each line it is sent."""

  def __init__(self, name: str, home: pathlib.Path, shape: dict[str, Any]):
    super().__init__(command(home, PEERS[name]), shape)

  def batch(self, lengths: list[int]) -> Cost:
    """Sends one batch and waits for its cost."""
    answer = self.ask(lengths)
    return answer["tokens"], answer["cpu_seconds"], answer["seconds"]


def command(home: pathlib.Path, script: str) -> list[pathlib.Path]:
  """Runs a script of this folder in an environment."""
  python = (home / "bin" / "python").absolute()
  return [python, pathlib.Path(__file__).parent / script]


def find(
  choice: str,
) -> tuple[dict[str, pathlib.Path], list[str]]:
  """Environments by peer, and the peers that have none.

  Raises:
    ValueError: the choice names something that is no peer or not there.
  """
  if choice == "none":
    return {}, []
  if choice == "auto":
    homes = {name: ROOT / ".peers" / name for name in PEERS}
  else:
    pairs = (entry.partition("=") for entry in choice.split(","))
    homes = {name: pathlib.Path(home) for name, _, home in pairs}
  there = {
    name: home
    for name, home in homes.items()
    if name in PEERS and (home / "bin" / "python").exists()
  }
  if choice != "auto" and there.keys() != homes.keys():
    raise ValueError(
      f"--peers is {choice!r}; it must be auto, none or NAME=DIRECTORY,... "
      f"with names of {sorted(PEERS)} and environments that exist"
    )
  return there, sorted(PEERS.keys() - there.keys())
