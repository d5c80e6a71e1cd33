"""A trainer here, generators in processes of their own, and one is killed."""

import asyncio
import contextlib
import dataclasses
import io
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

from rl_tpu import metrics, parts, sharding, train
from rl_tpu import transport as transports
from rl_tpu.generation import policies, roster
from rl_tpu.generation.client import GenerationClient
from rl_tpu.types import Request, Sampling
from rl_tpu.view import View

ROOT = pathlib.Path(__file__).parent.parent.parent
CONFIG_FILE = """
import pathlib, sys
sys.path.insert(0, {tests!r})
import tiny_run
from rl_tpu import config

def get_config():
  tiny = tiny_run.get_config(pathlib.Path({below!r}), schedule="async")
  return config.to_config_dict(tiny)
"""
BATCHES = 5
REQUESTS = [
  Request(
    prompt_index=index,
    member=0,
    tokens=np.array(prompt, np.int32),
    sampling=Sampling(max_tokens=8),
  )
  for index, prompt in enumerate([[5, 6], [100, 101, 102], [97], [61, 7]])
]


@contextlib.contextmanager
def generators(below, count):
  """Processes of `serve` without weights; gives them and their addresses."""
  file = below / "tiny.py"
  file.write_text(
    CONFIG_FILE.format(tests=str(ROOT / "tests"), below=str(below / "runs"))
  )
  command = [sys.executable, "-m", "rl_tpu", "serve", f"--config={file}"]
  one_thread = "--xla_cpu_multi_thread_eigen=false"
  with contextlib.ExitStack() as stack:
    started = []
    for _ in range(count):
      process = subprocess.Popen(
        [*command, "--port=0", "--config.serve.weights=awaited"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": one_thread},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
      )
      stack.enter_context(process)
      stack.callback(process.kill)
      started.append(process)
    yield {address_of(process): process for process in started}


def address_of(process):
  said = []
  for line in process.stderr:
    said.append(line)
    if match := re.search(r"nothing yet is served on (127\.0\.0\.1:\d+)", line):
      return match[1]
  raise AssertionError("".join(said))


class Watch(View):
  """A view that does something after a batch."""

  def __init__(self, after):
    super().__init__(0, rich.console.Console(file=io.StringIO()))
    self._after = after

  def batch(self, batch, metrics, seconds_left):
    self._after(batch)


async def ask(address, version):
  """What a generator answers, once it has the weights of a version."""
  async with GenerationClient(address) as client, asyncio.timeout(60):
    while (await client.status())["accepted_version"] != version:
      await asyncio.sleep(0.01)
    return [await client.generate(request) for request in REQUESTS]


def answers_here(config, version):
  """What the weights of a checkpoint answer in this process."""
  driver = parts.make_driver(config, parts.meshes(config)[1])
  path = config.run_directory / "checkpoints" / str(version)
  driver.update(policies.load(driver.engine, path, version))

  async def main():
    asked = [asyncio.create_task(driver.generate(r)) for r in REQUESTS]
    while not all(task.done() for task in asked):
      driver.step()
      await asyncio.sleep(0)
    return [task.result() for task in asked]

  return asyncio.run(main())


def trained_prompts(config, last):
  """The prompts of each batch, one after the other."""
  rows = metrics.read_jsonl(config.run_directory / "batches.jsonl")
  assert [row["batch"] for row in rows] == list(range(1, last + 1))
  return [index for row in rows for index in row["prompts"]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transfer", "orbax"])
def test_a_run_outlives_a_generator_and_a_generator_two_trainers(
  tmp_path, kind
):
  """All generators have the trainer's weights, and no prompt is lost."""
  with generators(tmp_path, 2) as processes:
    config = tiny_run.get_config(
      tmp_path / "runs",
      schedule="async",
      batches=BATCHES,
      max_staleness=2,
      checkpoints_kept=BATCHES,
      remote=roster.Config(
        addresses=tuple(processes),
        health_seconds=0.2,
        retry_seconds=0.2,
        failures_to_open=2,
        patience_seconds=120.0,
      ),
      transport=transports.Config(kind=kind),
    )

    def crash(batch):
      if batch == 2:
        raise ZeroDivisionError("the trainer of this life")

    with pytest.raises(ZeroDivisionError):
      train.run(config, Watch(crash))
    answers = []

    def ask_all_and_kill_one(batch):
      if batch == 3:
        answers.extend(asyncio.run(ask(one, version=3)) for one in processes)
        processes[next(iter(processes))].kill()

    # From checkpoint 1; generators have version 2 of the life before.
    figures = train.run(config, Watch(ask_all_and_kill_one))
    assert [p.poll() for p in processes.values()] == [-9, None]

  here = dataclasses.replace(config, remote=roster.Config())
  expected = answers_here(here, 3)
  assert len(answers) == 2
  for answer in answers:
    for one, want in zip(answer, expected, strict=True):
      np.testing.assert_array_equal(one.tokens, want.tokens)
      np.testing.assert_array_equal(one.logp, want.logp)
      assert set(one.version) == {3}
  assert sorted(trained_prompts(config, BATCHES)) == list(
    range(BATCHES * tiny_run.GROUPS)
  )
  assert figures["batches"] == BATCHES
  assert figures["max_staleness_consumed"] <= 2
  rows = metrics.read_csv(config.run_directory / "metrics.csv")
  trained = [row for row in rows if "reward" in row]
  for row in trained:
    assert row["publish_bytes"] > 0
    assert row["publish_bytes_per_second"] > 0
  assert sum(row["pulls"] for row in trained) >= BATCHES - 1
  assert sum(row.get("pull_bytes", 0) for row in trained) > 0
  evaluations = [row for row in rows if "heldout_failed" in row]
  assert [row["batch"] for row in evaluations] == [0, BATCHES]
  assert not any(row["heldout_failed"] for row in evaluations)


def test_the_trainers_devices_all_train():
  config = tiny_run.get_config(
    pathlib.Path("unused"),
    schedule="async",
    remote=roster.Config(addresses=("somewhere:1",)),
    devices=parts.Devices(trainer=sharding.MeshShape(fsdp=8)),
  )
  trainer, other = parts.meshes(config)
  assert trainer.size == len(jax.devices())
  assert other is trainer
