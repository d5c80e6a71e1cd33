"""A trainer of two real processes: as one, and none ends alone."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
import rich.console
import tiny_run
import trainer_process
import two_processes

from rl_tpu import checkpoint, envs, metrics, parts, processes, train
from rl_tpu.generation import policies
from rl_tpu.view import View

ROOT = pathlib.Path(__file__).parent.parent
ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "PJRT_NPROC": "8",
  "PYTHONPATH": str(ROOT),
}
FIGURES = ("loss", "grad_norm", "reward", "clip_fraction")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
  return tmp_path_factory.mktemp("trainers")


def start(directory, faults=("", ""), **changes):
  """Both processes of a trainer."""
  port = two_processes.free_port()
  running = []
  for index, fault in enumerate(faults):
    distributed = {
      "coordinator": f"127.0.0.1:{port}",
      "processes": 2,
      "process": index,
      "heartbeat_seconds": 5,
    }
    arguments = [directory, json.dumps(distributed), json.dumps(changes), fault]
    running.append(
      subprocess.Popen(
        [sys.executable, trainer_process.__file__, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | ENVIRONMENT,
      )
    )
  return running


def ends(running):
  """Exit codes and outputs."""
  try:
    outputs = [process.communicate(timeout=300)[0] for process in running]
  finally:
    for process in running:
      process.kill()
  return [process.returncode for process in running], outputs


def alone(directory, **changes):
  """The same run in this process, perhaps from where it is."""
  config = trainer_process.get_config(directory, {}, changes)
  module = envs.get("reasoning_gym")
  with pytest.MonkeyPatch.context() as patch, open(os.devnull, "w") as nowhere:
    patch.setattr(
      module.Task, "environment", lambda task, p: tiny_run.OddFirst(p)
    )
    train.run(config, View(0, rich.console.Console(file=nowhere)))
  return config


def outcome(directory, **changes):
  """The last weights, and figures of every batch."""
  config = trainer_process.get_config(directory, {}, changes)
  policy = parts.make_learner(config, parts.meshes(config)[0]).policy
  newest = policies.newest(config.run_directory / "checkpoints")
  assert newest is not None and int(newest.name) == config.batches
  params = checkpoint.restore_run_params(newest, policy.abstract_params())
  rows = metrics.RunLog(config.run_directory, resume_at=config.batches).rows
  trained = [[row[name] for name in FIGURES] for row in rows if "loss" in row]
  return jax.device_get(params), trained


@pytest.fixture(scope="module")
def unbroken(base):
  alone(base / "alone", batches=3)
  return outcome(base / "alone", batches=3)


def assert_same(one, other):
  for x, y in zip(*map(jax.tree.leaves, (one[0], other[0])), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5)
  np.testing.assert_allclose(one[1], other[1], rtol=1e-4, atol=1e-5)
  assert len(one[1]) == 3


def test_two_processes_train_as_one_does(base, unbroken):
  codes, outputs = ends(start(base / "two", batches=3))
  assert codes == [0, 0], outputs
  figures = [json.loads(output.splitlines()[-1]) for output in outputs]
  assert figures[0]["batches"] == 3
  assert figures[1] == {"process": 1, "version": 3}
  assert_same(outcome(base / "two", batches=3), unbroken)


def test_a_signal_to_one_stops_all_and_another_number_goes_on(base, unbroken):
  directory = base / "stopped"
  codes, outputs = ends(
    start(directory, ("2:await", "1:term"), batches=3, checkpoint_every=100)
  )
  assert codes == [130, 130], outputs
  assert all("stopped after batch 2 of 3" in text for text in outputs), outputs
  alone(directory, batches=3, checkpoint_every=100, resume="must")
  assert_same(outcome(directory, batches=3), unbroken)


@pytest.mark.parametrize("index", [0, 1])
def test_an_error_in_one_ends_all_and_names_it(base, index):
  faults = ["", ""]
  faults[index] = "2:raise"
  directory = base / f"error{index}"
  codes, outputs = ends(start(directory, faults))
  assert codes == [1, 1], outputs
  assert "Traceback" in outputs[index]
  named = f"trainer process {index} failed: ZeroDivisionError: a fault"
  assert named in outputs[1 - index]
  config = trainer_process.get_config(directory, {}, {})
  assert policies.newest(config.run_directory / "checkpoints").name == "1"


@pytest.mark.parametrize(
  ("fault", "named"),
  [
    ("1:exit", "trainer process 1 on .* gives no sign of life"),
    ("1:stop", "trainer process 1 on .* is dead or hangs: no sign of life"),
  ],
)
def test_a_process_that_is_dead_or_hangs_is_noticed(base, fault, named):
  running = start(base / fault.partition(":")[2], ("", fault))
  text = running[0].communicate(timeout=300)[0]
  running[1].kill()
  running[1].communicate()
  assert running[0].returncode == 1, text
  assert re.search(named, text), text


@pytest.mark.parametrize("index", [0, 1])
def test_a_main_thread_that_hangs_ends_all_and_shows_where(base, index):
  faults = ["", ""]
  faults[index] = "1:hang"
  codes, outputs = ends(start(base / f"hang{index}", faults))
  assert codes == [1, 1], outputs
  named = rf"trainer process {index} on .* hangs: its main thread did nothing"
  for text in outputs:
    assert re.search(named, text), text
  assert "trainer_process.py" in outputs[index]
  assert "in faulty" in outputs[index]


@pytest.mark.parametrize(
  ("fields", "named"),
  [
    ({"processes": 2}, "processes is 2; it must be 1, or coordinator set"),
    ({"coordinator": "a:1", "processes": 2, "process": 2}, "process is 2"),
    ({"heartbeat_seconds": 1}, "heartbeat_seconds is 1; it must be >= 5"),
    ({"hang_seconds": 5}, "hang_seconds is 5; it must be >= 60"),
  ],
)
def test_a_wrong_field_is_named(fields, named):
  with pytest.raises(ValueError, match=named):
    processes.Config(**fields)


def test_what_is_sent_arrives_to_the_bit():
  # With one process the exchange adds up one array; the shapes are the point.
  sent = {
    "tokens": np.arange(6, dtype=np.int32).reshape(2, 3),
    "mask": np.array([True, False, True]),
    "logp": np.array([-0.0, np.nan, -np.inf, 1e-40], np.float32),
    "version": np.int32(7),
    "none": np.zeros((0, 4), np.float32),
  }
  team = processes.Team(processes.Config())
  shapes = {n: (np.shape(a), np.asarray(a).dtype.str) for n, a in sent.items()}
  arrays = {name: np.asarray(array) for name, array in sent.items()}
  received = team._exchange(json.loads(json.dumps(shapes)), arrays)
  for name, array in arrays.items():
    assert received[name].dtype == array.dtype
    assert received[name].shape == array.shape
    assert received[name].tobytes() == array.tobytes()
