"""Whose a run's directory is: one process trains in it at a time.

A second run of the same directory would mix its log and checkpoints with the
first one's. The claim is a lock that the kernel keeps for the process and frees
with it, however it ends, so a killed run leaves nothing to clean up. On a
network file system the lock of a host that died lasts until the server has
missed it for a while: that is no reason never to try again.
"""

import contextlib
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator
from typing import Literal

from rl_tpu.config import ConfigError

Resume = Literal["auto", "never", "must"]


class Held(ConfigError):
  """The directory is another run's for now; trying again may help."""


@contextlib.contextmanager
def held(directory: pathlib.Path) -> Iterator[None]:
  """Holds the lock of a run's directory, which is made if it is not there.

  Raises:
    Held: another process has it; says which.
  """
  directory.mkdir(parents=True, exist_ok=True)
  path = directory / "lock"
  with open(path, "a+") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      file.seek(0)
      raise Held(
        f"{directory} is another run's: {file.read().strip()} trains in it; "
        "wait for its end, or choose another config.directory"
      ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    yield


def check(
  resume: Resume, directory: pathlib.Path, newest: pathlib.Path | None
) -> None:
  """Refuses to go on, or to start anew, where that is not wanted.

  Args:
    resume: `auto` allows both.
    directory: the run's.
    newest: its newest checkpoint, if it has one.

  Raises:
    ConfigError: names the directory.
  """
  if resume == "never" and newest is not None:
    raise ConfigError(
      f"config.resume is 'never', but {directory} holds checkpoint "
      f"{newest.name}; choose another config.directory or remove it"
    )
  if resume == "must" and newest is None:
    raise ConfigError(
      f"config.resume is 'must', but {directory} holds no checkpoint"
    )
