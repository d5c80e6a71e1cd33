"""SIGTERM and SIGINT to the launcher, with all parts of a run at work."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import psutil
import pytest
import trainer_process

from rl_tpu import metrics

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = """
import pathlib
import tiny_run
from rl_tpu import config, parts, sharding

def get_config():
  return config.to_config_dict(tiny_run.get_config(
    pathlib.Path({below!r}),
    cache={cache!r},
    schedule="async",
    batches={batches},
    max_staleness=1,
    checkpoint_every=1_000,
    devices=parts.Devices(trainer=sharding.MeshShape(data=2)),
  ))
"""
BATCHES, GROUPS = 12, 4


def launch(file, resume):
  return subprocess.Popen(
    [
      *(sys.executable, str(ROOT / "launch" / "local.py")),
      *(f"--config={file}", f"--resume={resume}"),
      *("--trainers=2", "--generators=2"),
    ],
    env={
      **os.environ,
      "PYTHONPATH": str(ROOT / "tests"),
      "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def ports_of(process):
  """Those on which its parts listen, and that its parts were told."""
  found = set()
  for child in psutil.Process(process.pid).children(recursive=True):
    with contextlib.suppress(psutil.NoSuchProcess):
      text = " ".join(child.cmdline())
      found |= {int(port) for port in re.findall(r"--port=(\d+)", text)}
      found |= {
        connection.laddr.port
        for connection in child.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
      }
  return found


def left_of(file):
  """Processes that know of a run."""
  found = []
  for process in psutil.process_iter():
    with contextlib.suppress(psutil.Error):
      if str(file) in " ".join(process.cmdline()):
        found.append(process)
  return found


def run_until(process, batch):
  """The lines up to the one of a batch of the trainer."""
  lines = []
  for line in process.stdout:
    lines.append(line.rstrip("\n"))
    if re.match(rf"\[trainer 0\] +{batch}/{BATCHES} ", line):
      return lines
  raise AssertionError("\n".join(lines))


@pytest.fixture
def file(tmp_path):
  """Of the config; who knows of it at the end is killed."""
  yield tmp_path / "tiny.py"
  for process in left_of(tmp_path):
    process.kill()


@pytest.mark.slow
def test_signals_to_the_launcher_leave_nothing_but_a_run_that_goes_on(
  tmp_path, file
):
  cache = trainer_process.shared_cache()
  below = tmp_path / "runs"
  file.write_text(CONFIG.format(below=str(below), cache=cache, batches=BATCHES))
  stops = ((signal.SIGTERM, "never", 3), (signal.SIGINT, "must", 7))
  for number, resume, batch in stops:
    with launch(file, resume) as process:
      lines = run_until(process, batch)
      ports = ports_of(process)
      process.send_signal(number)
      lines += process.stdout.read().splitlines()
    assert process.returncode == 130, "\n".join(lines)
    assert any("stopped after batch" in line for line in lines)
    assert left_of(file) == []
    assert len(ports) >= 3
    for port in ports:
      with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", port))
        one.listen()
  with launch(file, "must") as process:
    lines = process.stdout.read().splitlines()
  assert process.returncode == 0, "\n".join(lines)
  assert json.loads(lines[-1])["batches"] == BATCHES
  assert left_of(file) == []
  rows = metrics.read_jsonl(below / "async-0" / "batches.jsonl")
  assert [row["batch"] for row in rows] == list(range(1, BATCHES + 1))
  trained = [index for row in rows for index in row["prompts"]]
  assert sorted(trained) == list(range(BATCHES * GROUPS))
