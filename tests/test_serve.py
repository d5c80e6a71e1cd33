"""The command, in a process of its own."""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import jax
import numpy as np
import pytest
import tiny_run

from rl_tpu import __main__ as command_line
from rl_tpu import checkpoint, parts, serve
from rl_tpu.config import ConfigError
from rl_tpu.generation import server as servers
from rl_tpu.generation.client import GenerationClient
from rl_tpu.models import transformer
from rl_tpu.models.tokenizer import ByteTokenizer
from rl_tpu.types import Request, Sampling
from rl_tpu.view import View

ROOT = pathlib.Path(__file__).parent.parent
CONFIG_FILE = """
import pathlib, sys
sys.path.insert(0, {tests!r})
import tiny_run
from rl_tpu import config

def get_config():
  tiny = tiny_run.get_config(pathlib.Path({below!r}))
  return config.to_config_dict(tiny)
"""


@pytest.fixture
def config(tmp_path):
  return tiny_run.get_config(tmp_path / "runs")


@pytest.fixture
def config_file(tmp_path, config):
  path = tmp_path / "tiny.py"
  below = str(tmp_path / "runs")
  path.write_text(CONFIG_FILE.format(tests=str(ROOT / "tests"), below=below))
  return path


def save_checkpoint(config, version):
  """One as training leaves it, of random weights."""
  params = jax.jit(transformer.Policy(config.model).init)(jax.random.key(7))
  saver = checkpoint.Checkpointer(config.run_directory / "checkpoints")
  state = {"params": params, "optimizer": {"mu": np.zeros(3)}}
  saver.save(version, state, {"x": np.zeros(1)}, {})
  saver.close()


@contextlib.contextmanager
def command(config_file, *flags):
  """Runs the command; gives it, and where it listens, when it does."""
  arguments = ["serve", f"--config={config_file}", "--port=0", *flags]
  with subprocess.Popen(
    [sys.executable, "-m", "rl_tpu", *arguments],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    said = []
    for line in process.stderr:
      said.append(line)
      if "is served on" in line:
        break
    else:
      raise AssertionError("".join(said))
    try:
      yield process, line
    finally:
      process.kill()


REQUEST = Request(
  prompt_index=0,
  member=0,
  tokens=np.array([5, 6], np.int32),
  sampling=Sampling(max_tokens=5),
)


def signalled(address, process, number, then_resume):
  """A request that is open when the signal comes."""

  async def status(client, **wanted):
    async with asyncio.timeout(60):
      while True:
        now = await client.status()
        if all(now[name] == value for name, value in wanted.items()):
          return
        await asyncio.sleep(0.01)

  async def main():
    async with GenerationClient(address) as client:
      await client.pause()
      task = asyncio.ensure_future(client.generate(REQUEST))
      await status(client, open_requests=1)
      process.send_signal(number)
      if then_resume:
        await status(client, draining=True)
        await client.resume()
      return await task

  return asyncio.run(main())


async def ask(address):
  async with GenerationClient(address) as client:
    return await client.generate(REQUEST)


@pytest.mark.slow
def test_sigterm_lets_open_requests_end_and_then_the_command(
  config, config_file
):
  save_checkpoint(config, 3)
  with command(config_file, "--config.serve.http_port=0") as (process, said):
    address, http = re.findall(r"127\.0\.0\.1:\d+", said)
    with urllib.request.urlopen(f"http://{http}/v1/models") as answer:
      assert json.load(answer)["data"][0]["id"] == "tiny"
    done = signalled(address, process, signal.SIGTERM, then_resume=True)
    out, err = process.communicate(timeout=120)
  assert done.version.tolist() == [3] * len(done.tokens)
  assert process.returncode == 0, err
  assert "serving the weights of" in out
  figures = json.loads(out.splitlines()[-1])
  assert figures.pop("seconds") > 0
  assert figures == {"requests": 1, "tokens": len(done.tokens), "version": 3}


@pytest.mark.slow
def test_without_a_checkpoint_the_start_of_training_is_served(config_file):
  flag = "--config.serve.grace_seconds=0"
  with command(config_file, flag) as (process, said):
    (address,) = re.findall(r"127\.0\.0\.1:\d+", said)
    with pytest.raises(RuntimeError, match="driver was stopped"):
      signalled(address, process, signal.SIGINT, then_resume=False)
    out, err = process.communicate(timeout=120)
  assert process.returncode == 0, err
  assert "has no checkpoint" in out
  assert json.loads(out.splitlines()[-1])["version"] == 0


def test_a_broken_generator_ends_the_command_with_its_error(
  config, monkeypatch
):
  """In this process: its thread is not the main one's business."""
  save_checkpoint(config, 1)
  asked = []

  def fail(*_):
    raise ZeroDivisionError("a fault that the test asked for")

  def say(text):
    address = re.search(r"127\.0\.0\.1:\d+", text)
    if address:
      asyncio.get_running_loop().run_in_executor(None, attempt, address[0])

  def attempt(address):
    try:
      asyncio.run(ask(address))
    except RuntimeError as error:
      asked.append(str(error))

  monkeypatch.setattr(serve, "_say", say)
  monkeypatch.setattr(
    servers.GenerationServer, "start", breaking(servers, monkeypatch, fail)
  )
  local = dataclasses.replace(config, serve=servers.Config(port=0))
  with pytest.raises(ZeroDivisionError, match="the test asked for"):
    serve.run(local, View(0))
  assert len(asked) == 1 and "the test asked for" in asked[0]


def breaking(servers, monkeypatch, fail):
  """The method, after which the engine does not work any more."""
  start = servers.GenerationServer.start

  async def started(server):
    await start(server)
    monkeypatch.setattr(server.driver.engine, "generate", fail)

  return started


def test_an_open_address_is_refused_before_devices_are_taken(
  config, monkeypatch
):
  monkeypatch.delenv(servers.TOKEN_VARIABLE, raising=False)
  exposed = servers.Config(host="0.0.0.0")
  with pytest.raises(ConfigError, match=r"config\.serve: host is '0\.0\.0\.0'"):
    serve.run(dataclasses.replace(config, serve=exposed), View(0))


def test_http_asks_for_the_admin_token_where_others_reach_it(
  config, monkeypatch
):
  """The server stands on this machine; only its config says otherwise."""
  save_checkpoint(config, 1)
  token = "a token of some length"
  monkeypatch.setenv(servers.TOKEN_VARIABLE, token)
  monkeypatch.delenv(servers.KEY_VARIABLE, raising=False)
  monkeypatch.setattr(servers.Config, "local", False)
  answers = []

  def status(url, **headers):
    request = urllib.request.Request(url, headers=headers)
    try:
      with urllib.request.urlopen(request) as answer:
        return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
      with error:
        return error.code, json.load(error)

  def attempt(url):
    answers.append(status(url))
    answers.append(status(url, Authorization=f"Bearer {token}"))
    signal.raise_signal(signal.SIGTERM)

  def say(text):
    http = re.search(r"http on (127\.0\.0\.1:\d+)", text)
    if http:
      url = f"http://{http[1]}/v1/models"
      asyncio.get_running_loop().run_in_executor(None, attempt, url)

  monkeypatch.setattr(serve, "_say", say)
  served = servers.Config(port=0, http_port=0)
  serve.run(dataclasses.replace(config, serve=served), View(0))
  (refused, why), (accepted, models) = answers
  assert (refused, accepted) == (401, 200)
  assert why["error"]["code"] == "invalid_api_key"
  assert models["object"] == "list"


def test_more_eos_ids_than_stop_ids_are_refused_before_devices_are_taken(
  config, monkeypatch
):
  class Talkative(ByteTokenizer):
    eos_ids = (1, 2, 3, 4, 5)

  monkeypatch.setattr(parts, "make_tokenizer", lambda _: Talkative())
  with pytest.raises(
    ConfigError,
    match=r"config\.engine\.max_stop_ids is 4; it must be >= 5.*\(1, 2, 3",
  ):
    serve.run(config, View(0))


@pytest.mark.filterwarnings("ignore:the load_module")
def test_the_port_has_a_short_flag(config_file):
  flag = f"--config={config_file}"
  for port in ("--port=17", "--config.serve.port=17"):
    assert command_line._read_config(["rl_tpu", flag, port]).serve.port == 17
  with pytest.raises(ConfigError, match="port is 70000"):
    command_line._read_config(["rl_tpu", flag, "--port=70000"])
