"""A generator that does not fit its trainer is named, with what is wrong."""

import contextlib
import dataclasses
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest
import tiny_run
from test_here import preflight

from rl_tpu import identity, parts, sharding, topology
from rl_tpu import transport as transports
from rl_tpu.generation import roster
from rl_tpu.preflight import servers
from rl_tpu.preflight.findings import NotChecked

ROOT = pathlib.Path(__file__).parent.parent.parent
TOKEN = "a token of some length"
CONFIG_FILE = """
import pathlib, sys
sys.path.insert(0, {tests!r})
import tiny_run
from rl_tpu import config

def get_config():
  tiny = tiny_run.get_config(pathlib.Path({below!r}), schedule="async")
  return config.to_config_dict(tiny)
"""
CHECKS = (
  "generators answer",
  "generators reach the trainer",
  "generators' config",
  "generators' topology",
  "versions",
  "clocks",
)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
  """Of a real generator, in a process of its own, with an admin token."""
  below = tmp_path_factory.mktemp("served")
  file = below / "tiny.py"
  file.write_text(
    CONFIG_FILE.format(tests=str(ROOT / "tests"), below=str(below / "runs"))
  )
  command = [sys.executable, "-m", "rl_tpu", "serve", f"--config={file}"]
  with subprocess.Popen(
    [*command, "--port=0", "--config.serve.weights=awaited"],
    cwd=ROOT,
    env={**os.environ, "RL_TPU_ADMIN_TOKEN": TOKEN},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    try:
      said = []
      for line in process.stderr:
        said.append(line)
        if match := re.search(r"is served on (127\.0\.0\.1:\d+)", line):
          yield match[1]
          return
      raise AssertionError("".join(said))
    finally:
      process.kill()


@pytest.fixture(autouse=True)
def token(monkeypatch):
  monkeypatch.setenv("RL_TPU_ADMIN_TOKEN", TOKEN)


def with_generators(tmp_path, *addresses, **changes):
  return tiny_run.get_config(
    tmp_path / "runs",
    schedule="async",
    remote=roster.Config(addresses=addresses, timeout_seconds=5.0),
    **changes,
  )


def assert_fails(config, *names):
  verdict, said = preflight(config)
  assert verdict["failed"] == list(names), said
  return [said[name][1] for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transfer", "orbax"])
def test_a_generator_of_the_same_config_passes(tmp_path, address, kind):
  config = with_generators(
    tmp_path, address, transport=transports.Config(kind=kind)
  )
  verdict, said = preflight(config)
  assert verdict["failed"] == [], said
  assert [said[name][0] for name in CHECKS] == ["ok"] * len(CHECKS)
  assert not config.run_directory.exists()


@pytest.mark.slow
def test_sizes_of_an_engine_may_differ_and_what_it_samples_may_not(
  tmp_path, address
):
  config = with_generators(tmp_path, address)
  wider = dataclasses.replace(config.model, d_ff=64)
  noisy = dataclasses.replace(
    config.engine,
    slots=4,
    mismatch=dataclasses.replace(config.engine.mismatch, weights="int8"),
  )
  broken = dataclasses.replace(
    config,
    model=wider,
    engine=noisy,
    devices=parts.Devices(generator=sharding.MeshShape(data=2)),
  )
  (text,) = assert_fails(broken, "generators' config")
  assert f"{address}: " in text
  assert "config.model.d_ff: it has 32, this config 64" in text
  assert "config.engine.mismatch.weights: it has 'none'" in text
  assert "config.devices.generator.data: it has 1, this config 2" in text
  assert "slots" not in text


@pytest.mark.slow
def test_a_generator_of_other_versions_is_refused(
  tmp_path, address, monkeypatch
):
  config = with_generators(tmp_path, address)
  ours = {**identity.of_code(), "jaxlib": "0.0.1", "rl_tpu source": "edited"}
  monkeypatch.setattr(identity, "of_code", lambda: ours)
  (text,) = assert_fails(config, "versions")
  assert "jaxlib is" in text and "here 0.0.1" in text
  assert "rl_tpu source is" in text
  assert "python" not in text


@pytest.mark.slow
def test_a_clock_that_is_wrong_is_found(tmp_path, address, monkeypatch):
  clock = servers.time.time
  monkeypatch.setattr(servers.time, "time", lambda: clock() + 60)
  (text,) = assert_fails(with_generators(tmp_path, address), "clocks")
  assert re.search(r"its clock is -(59|60)\.\d s", text)


@pytest.mark.slow
def test_chips_of_another_kind_than_the_topology_are_refused(tmp_path, address):
  config = with_generators(
    tmp_path, address, compile=topology.Config(topology="v5e:1x1")
  )
  _, said = preflight(config)
  state, text = said["generators' topology"]
  assert state == "failed"
  assert "it is on 'cpu'" in text and "v5e:1x1" in text


@pytest.mark.slow
def test_another_token_does_not_find_the_way_back(
  tmp_path, address, monkeypatch
):
  monkeypatch.setenv("RL_TPU_ADMIN_TOKEN", "another token of some length")
  (text,) = assert_fails(
    with_generators(tmp_path, address), "generators reach the trainer"
  )
  assert "admin calls need" in text


@pytest.mark.slow
def test_a_trainer_port_that_is_taken_is_found(tmp_path, address):
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    config = with_generators(
      tmp_path, address, transport=transports.Config(port=port)
    )
    (text,) = assert_fails(config, "generators reach the trainer")
  assert "the trainer cannot offer weights" in text


@pytest.mark.slow
def test_what_stands_at_the_way_back_must_be_the_trainer(
  tmp_path, address, monkeypatch
):
  """Somebody else's port, or a directory of the same name elsewhere."""

  @contextlib.asynccontextmanager
  async def another(config, token, word):
    (tmp_path / "file").write_text("another word")
    yield {"address": "", "path": str(tmp_path / "file")}

  monkeypatch.setattr(servers, "_trainer", another)
  (text,) = assert_fails(
    with_generators(tmp_path, address), "generators reach the trainer"
  )
  assert "file is another file" in text


@pytest.mark.slow
def test_one_generator_that_is_not_there_hides_no_other(tmp_path, address):
  with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as closed:
    gone = f"127.0.0.1:{closed.getsockname()[1]}"
  file = tmp_path / "addresses"
  file.write_text(f"{gone}  # not started\n")
  config = with_generators(tmp_path, address)
  remote = dataclasses.replace(config.remote, addresses_file=str(file))
  verdict, said = preflight(dataclasses.replace(config, remote=remote))
  assert verdict["failed"] == ["generators answer"]
  assert gone in said["generators answer"][1]
  assert address not in said["generators answer"][1]
  assert said["versions"][0] == "ok"


def test_generators_that_hang_are_not_waited_for(tmp_path):
  with socket.create_server(("127.0.0.1", 0)) as silent:
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    config = with_generators(tmp_path, address)
    remote = dataclasses.replace(config.remote, timeout_seconds=0.2)
    verdict, said = preflight(dataclasses.replace(config, remote=remote))
  assert verdict["failed"] == ["generators answer"]
  assert "does not answer within 0.2 s" in said["generators answer"][1]
  assert {said[name][0] for name in CHECKS[1:]} == {"not checked"}


def test_an_addresses_file_that_is_missing_is_named(tmp_path):
  config = with_generators(tmp_path)
  remote = dataclasses.replace(
    config.remote, addresses_file=str(tmp_path / "missing")
  )
  verdict, said = preflight(dataclasses.replace(config, remote=remote))
  assert "generators answer" in verdict["failed"]
  assert "missing" in said["generators answer"][1]


def test_a_judge_without_an_answer_has_checked_nothing():
  with pytest.raises(NotChecked):
    servers._every([], lambda answer: "fine")
