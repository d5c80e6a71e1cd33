"""A run as on a pod, of which any part is killed, stopped or cut off."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from rl_tpu import metrics

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = """
import itertools, pathlib, sys
sys.path.insert(0, {tests!r})
import tiny_run
from rl_tpu import config, parts, sharding
from rl_tpu.generation import roster
from rl_tpu.transfer import puller

finish, calls = puller.Puller._finish, itertools.count()

def cut(self, wave, deadline):
  if next(calls) == 3:
    raise ConnectionError("the test cut this transfer")
  return finish(self, wave, deadline)

puller.Puller._finish = cut

def get_config():
  return config.to_config_dict(tiny_run.get_config(
    pathlib.Path({below!r}),
    schedule="async",
    batches={batches},
    max_staleness={staleness},
    devices=parts.Devices(trainer=sharding.MeshShape(data=2)),
    remote=roster.Config(
      health_seconds=0.5,
      retry_seconds=0.5,
      timeout_seconds=5.0,
      failures_to_open=2,
      patience_seconds=200.0,
    ),
  ))
"""
BATCHES, STALENESS, GROUPS = 40, 2, 4
PATIENCE_SECONDS = 500.0
STOPPED_SECONDS = 20.0


class Chaos:
  """Breaks one part after the other, as the run's log grows."""

  def __init__(self, launcher, log):
    self._launcher, self._log = psutil.Process(launcher.pid), log
    self._resumes = []
    self.trained_at = []
    """Batches that were trained when each part broke."""

  def parts(self, role):
    """Processes of a role, in the order of their start."""
    found = []
    for child in self._launcher.children():
      with contextlib.suppress(psutil.NoSuchProcess):
        if role in child.cmdline():
          found.append(child)
    return sorted(found, key=lambda process: process.create_time())

  def trained(self):
    """Batches in the log; its last line may be half written."""
    if not self._log.exists():
      return 0
    return self._log.read_bytes().count(b"\n")

  def wait(self, batches):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while self.trained() < batches:
      assert self._launcher.is_running(), "the run ended early"
      assert self._launcher.status() != psutil.STATUS_ZOMBIE
      assert time.monotonic() < deadline, f"{self.trained()} batches"
      self._resume_those_due()
      time.sleep(0.02)

  def kill(self, role, which):
    self.trained_at.append(self.trained())
    self.parts(role)[which].kill()

  def stop(self, role, which):
    """It goes on by itself later; see `end`."""
    self.trained_at.append(self.trained())
    process = self.parts(role)[which]
    process.suspend()
    self._resumes.append((time.monotonic() + STOPPED_SECONDS, process))

  def _resume_those_due(self):
    for due in [r for r in self._resumes if r[0] < time.monotonic()]:
      self._resumes.remove(due)
      with contextlib.suppress(psutil.NoSuchProcess):
        due[1].resume()

  def end(self):
    while self._resumes:
      self._resume_those_due()
      time.sleep(0.1)


def ledger(directory):
  """Prompts that were trained, in order, and those that were dropped."""
  rows = metrics.read_jsonl(directory / "batches.jsonl")
  assert [row["batch"] for row in rows] == list(range(1, BATCHES + 1))
  newest = directory / "checkpoints" / str(BATCHES) / "meta" / "metadata"
  actor = json.loads(newest.read_text())["actor"]
  trained = [index for row in rows for index in row["prompts"]]
  return trained, [index for index, _ in actor["dropped"]], actor


@pytest.mark.slow
def test_chaos_costs_time_but_no_prompt(tmp_path):
  file = tmp_path / "tiny.py"
  file.write_text(
    CONFIG.format(
      tests=str(ROOT / "tests"),
      below=str(tmp_path / "runs"),
      batches=BATCHES,
      staleness=STALENESS,
    )
  )
  directory = tmp_path / "runs" / "async-0"
  command = [sys.executable, str(ROOT / "launch" / "local.py")]
  with (tmp_path / "output").open("w+") as output:
    launcher = subprocess.Popen(
      [
        *(*command, f"--config={file}", "--restarts=9"),
        *("--trainers=2", "--generators=2"),
      ],
      env={
        **os.environ,
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
      },
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    chaos = Chaos(launcher, directory / "batches.jsonl")
    try:
      for batches, act, role, which in (
        (3, chaos.kill, "serve", 0),
        (6, chaos.kill, "train", 0),
        (9, chaos.stop, "serve", 0),
        (12, chaos.kill, "train", 1),
        (17, chaos.kill, "serve", 1),
        (22, chaos.kill, "train", 0),
        (27, chaos.kill, "serve", 0),
      ):
        chaos.wait(batches)
        act(role, which)
      chaos.wait(BATCHES)
      chaos.end()
      code = launcher.wait(PATIENCE_SECONDS)
      left = [p for p in psutil.process_iter() if str(file) in cmdline(p)]
    finally:
      with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher.pid).children(recursive=True):
          child.kill()
      launcher.send_signal(signal.SIGKILL)
      launcher.wait()
      output.seek(0)
      lines = output.read().splitlines()
      print("\n".join(lines[-80:]))
  assert code == 0
  assert left == []
  assert any("the test cut this transfer" in line for line in lines)
  assert sum("trainer 0] resuming" in line for line in lines) == 3
  trained, dropped, actor = ledger(directory)
  assert len(trained) == BATCHES * GROUPS
  assert sorted(trained + dropped) == list(range(actor["next_index"]))
  rows = metrics.read_csv(directory / "metrics.csv")
  staleness = [row["staleness_max"] for row in rows if "staleness_max" in row]
  assert len(staleness) == BATCHES
  assert max(staleness) <= STALENESS


def cmdline(process):
  try:
    return " ".join(process.cmdline())
  except psutil.Error:
    return ""
