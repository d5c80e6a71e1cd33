"""Environments behind OpenEnv's protocol: one that a test plays, or its own."""

import asyncio
import contextlib
import os
import pathlib
import subprocess

import numpy as np
import pytest
from aiohttp import WSMsgType, web
from attempt import TOKENIZER, ids, rows

from rl_tpu.agents import Stage
from rl_tpu.envs import Limits
from rl_tpu.envs.openenv import Config, Task
from rl_tpu.types import Completion, EpisodeError, Sampling

OPENENV = os.environ.get("RL_TPU_OPENENV")
"""A Python that has openenv-core."""


class Server:
  """Counts up to its seed; the action's field `say` is echoed."""

  def __init__(self, places=8):
    self.places, self.open, self.refused = places, 0, 0

  async def handle(self, request):
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    if self.open >= self.places:
      self.refused += 1
      error = {"message": "full", "code": "CAPACITY_REACHED"}
      await socket.send_json({"type": "error", "data": error})
      await socket.close()
      return socket
    self.open += 1
    try:
      async for message in socket:
        if message.type == WSMsgType.TEXT:
          await socket.send_json(self.answer(message.json()))
    finally:
      self.open -= 1
    return socket

  def answer(self, message):
    data = message["data"]
    if message["type"] == "reset":
      said, reward, done = f"begin {data['seed']}", None, False
    elif "say" not in data:
      error = {"message": "Invalid message", "code": "VALIDATION_ERROR"}
      return {"type": "error", "data": error}
    elif data["say"] == "crash":
      error = {"message": "boom", "code": "EXECUTION_ERROR"}
      return {"type": "error", "data": error}
    else:
      said, done = f"you said {data['say']}", data["say"] == "end"
      reward = float(done)
    observation = {"text": said, "extra": 1}
    return {
      "type": "observation",
      "data": {"observation": observation, "reward": reward, "done": done},
    }


@contextlib.asynccontextmanager
async def serving(server):
  app = web.Application()
  app.router.add_get("/ws", server.handle)
  runner = web.AppRunner(app)
  await runner.setup()
  await web.TCPSite(runner, "127.0.0.1", 0).start()
  try:
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
  finally:
    await runner.cleanup()


class Player:
  """Plays texts in turn."""

  def __init__(self, *texts):
    self.texts = list(texts)

  async def generate(self, request, progress=None):
    tokens = ids(self.texts.pop(0)).astype(np.int32)
    return Completion(
      tokens=tokens,
      logp=np.full(len(tokens), -1.0, np.float32),
      version=np.zeros(len(tokens), np.int32),
      stop_reason="stop",
    )


async def play(url, *texts, seed=7, turns=8, **fields):
  fields = {"action_field": "say", "observation_field": "text"} | fields
  task = Task(Config(url=url, wait_seconds=0.01, **fields), TOKENIZER)
  prompt = task.prompt({"seed": seed}, 0)
  played = await Stage().play(
    Player(*texts),
    task.environment(prompt),
    prompt,
    member=0,
    sampling=Sampling(max_tokens=64),
    seed=0,
    max_turns=turns,
    max_trajectory_tokens=1000,
    limits=Limits(step_seconds=20),
  )
  return played.trajectories[0]


def run(server, *texts, **settings):
  async def main():
    async with serving(server) as url:
      return await play(url, *texts, **settings)

  return asyncio.run(main())


def test_an_episode_is_the_servers_observations_and_the_policys_actions():
  server = Server()
  trajectory = run(server, "hello", "end")
  text = TOKENIZER.decode(trajectory.tokens)
  assert text == "begin 7\nhello\nyou said hello\nend"
  said = TOKENIZER.decode(trajectory.tokens[trajectory.action_mask])
  assert said == "helloend"
  assert trajectory.outcome == 1.0 and trajectory.stop_reason == "stop"


def test_without_fields_action_and_observation_are_json():
  trajectory = run(
    Server(),
    '{"say": "é"}',
    '{"say": "end"}',
    action_field=None,
    observation_field=None,
  )
  text = TOKENIZER.decode(trajectory.tokens)
  assert '{"text": "you said é", "extra": 1}' in text


def test_H20_a_malformed_action_is_told_so_and_the_episode_goes_on():
  trajectory = run(
    Server(), "{", "[1]", '{"x": 1}', '{"say": "end"}', action_field=None
  )
  text = TOKENIZER.decode(trajectory.tokens)
  assert text.count("error: ") == 3
  assert trajectory.outcome == 1.0
  assert trajectory.metrics == {"malformed_actions": 3.0}


def test_an_environment_that_raises_is_an_error_and_its_place_is_freed():
  server = Server()
  with pytest.raises(EpisodeError, match="openenv_error.*boom"):
    run(server, "crash")
  assert server.open == 0


def test_a_cut_episode_frees_its_place():
  server = Server()
  assert run(server, "a", "b", turns=2).stop_reason == "length"
  assert server.open == 0


def test_a_full_server_is_asked_again():
  async def main():
    async with serving(server) as url:
      texts = [*["x"] * 5, "end"]
      return await asyncio.gather(*(play(url, *texts) for _ in range(3)))

  server = Server(places=1)
  assert [t.outcome for t in asyncio.run(main())] == [1.0] * 3
  assert server.refused >= 1 and server.open == 0


def test_a_server_that_is_away_is_an_error():
  with pytest.raises(EpisodeError, match="openenv_away"):
    asyncio.run(play("http://127.0.0.1:1", "x"))


def test_a_field_that_observations_lack_is_named():
  with pytest.raises(EpisodeError, match="no field 'words'"):
    run(Server(), "x", observation_field="words")


def test_a_seed_is_for_training_or_held_out():
  task = Task(Config(url="http://x", size=50), TOKENIZER)
  seeds = [{r["seed"] for r in rows(task, s)} for s in ("train", "heldout")]
  assert seeds[0] | seeds[1] == set(range(50)) and not seeds[0] & seeds[1]


APP = """
import sys
from openenv.core.env_server import Action, Environment, Observation, State
from openenv.core.env_server.http_server import create_app
import uvicorn

class Say(Action):
  say: str

class Heard(Observation):
  text: str

class Echo(Environment):
  SUPPORTS_CONCURRENT_SESSIONS = True
  def __init__(self):
    super().__init__()
  def reset(self, seed=None, episode_id=None, **kwargs):
    return Heard(text=f"begin {seed}")
  def step(self, action, timeout_s=None, **kwargs):
    end = action.say == "end"
    return Heard(text=f"you said {action.say}", reward=float(end), done=end)
  @property
  def state(self):
    return State()

app = create_app(Echo, Say, Heard, env_name="echo", max_concurrent_envs=4)
config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")
server = uvicorn.Server(config)
startup = server.startup
async def announced(sockets=None):
  await startup(sockets)
  print(server.servers[0].sockets[0].getsockname()[1], flush=True)
server.startup = announced
server.run()
"""


@pytest.mark.slow
@pytest.mark.skipif(OPENENV is None, reason="RL_TPU_OPENENV names no Python")
def test_a_server_of_openenv_itself_serves_episodes(tmp_path):
  path = pathlib.Path(tmp_path / "app.py")
  path.write_text(APP)
  server = subprocess.Popen(
    [str(OPENENV), str(path)], stdout=subprocess.PIPE, text=True
  )
  try:
    url = f"http://127.0.0.1:{server.stdout.readline().strip()}"

    async def main():
      return await asyncio.gather(
        *(play(url, "hello", "end", seed=seed) for seed in range(6))
      )

    texts = [TOKENIZER.decode(t.tokens) for t in asyncio.run(main())]
    assert texts == [
      f"begin {seed}\nhello\nyou said hello\nend" for seed in range(6)
    ]
    malformed = asyncio.run(
      play(url, '{"x": 1}', '{"say": "end"}', action_field=None)
    )
    assert malformed.metrics == {"malformed_actions": 1.0}
  finally:
    server.kill()
    with server:
      pass
