"""`python -m rl_tpu train` of a tiny run, as one process of a trainer.

    python trainer_process.py DIRECTORY DISTRIBUTED [CHANGES] [FAULT]

DISTRIBUTED and CHANGES are JSON: fields of `processes.Config` and of the tiny
run. FAULT is `BATCH:WHAT`: what happens here when so many batches are trained.
`raise`; `exit`: it is killed; `stop`: it hangs; `term`: it gets a signal;
`await`: it goes on when the run is to stop; `hang`: its main thread does
nothing any more, for which it has a second.
"""

import dataclasses
import json
import os
import pathlib
import signal
import sys
import time

import tiny_run

from rl_tpu import __main__ as command_line
from rl_tpu import envs, parts, processes, sharding
from rl_tpu.config import to_config_dict
from rl_tpu.learner import Learner


def shared_cache():
  """What is compiled once serves all runs of these tests, and later ones."""
  below = os.environ.get("JAX_COMPILATION_CACHE_DIR", "/tmp/rl_tpu_test_cache")
  return str(pathlib.Path(below) / "trainers")


def get_config(directory, distributed, changes):
  config = tiny_run.get_config(pathlib.Path(directory))
  mesh = sharding.MeshShape(data=2, fsdp=2)
  return dataclasses.replace(
    config,
    cache=shared_cache(),
    devices=parts.Devices(trainer=mesh),
    distributed=processes.Config(**distributed),
    **changes,
  )


def break_at(fault):
  at, what = fault.split(":")
  train, trained = Learner.train, []
  make, teams = processes.Team.__init__, []

  def known(self, *arguments):
    make(self, *arguments)
    teams.append(self)

  def faulty(self, state, batch):
    trained.append(None)
    result = train(self, state, batch)
    if len(trained) == int(at):
      if what == "raise":
        raise ZeroDivisionError("a fault that the test asked for")
      if what == "exit":
        os.kill(os.getpid(), signal.SIGKILL)
      if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
      if what == "term":
        os.kill(os.getpid(), signal.SIGTERM)
      if what == "hang":
        teams[0]._hang_seconds = 1
      while what == "hang":
        time.sleep(0.01)
      while what == "await" and not teams[0].stop_requested:
        time.sleep(0.01)
    return result

  Learner.train = faulty
  processes.Team.__init__ = known


def main(directory, distributed, changes="{}", fault=None):
  module = envs.get("reasoning_gym")
  module.Task.environment = lambda task, prompt: tiny_run.OddFirst(prompt)
  if fault:
    break_at(fault)
  config = get_config(directory, json.loads(distributed), json.loads(changes))
  values = to_config_dict(config)
  file = pathlib.Path(directory) / f"config-{os.getpid()}.py"
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(
    "import ml_collections\nfrom math import inf\n"
    f"def get_config():\n  return ml_collections.ConfigDict({values.to_dict()})"
  )
  return command_line.main(["rl_tpu", "train", f"--config={file}"])


if __name__ == "__main__":
  sys.exit(main(*sys.argv[1:]))
