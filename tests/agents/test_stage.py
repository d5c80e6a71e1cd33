"""Agents with the official client, against a generator that plays a script."""

import asyncio
import json
import threading

import aiohttp
import chat_agents
import numpy as np
import openai
import pytest

from rl_tpu.agents import Stage
from rl_tpu.envs import Limits
from rl_tpu.envs import agent as agents
from rl_tpu.models.tokenizer import ByteTokenizer
from rl_tpu.types import Completion, EpisodeError, Prompt, Sampling

BYTES = ByteTokenizer()
CALL = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'


class Scripted:
  """Answers by what the conversation ends with."""

  def __init__(self, **says):
    self.says, self.requests = says, []

  async def generate(self, request, progress=None):
    self.requests.append(request)
    last = BYTES.decode(request.tokens).removesuffix("assistant\n")
    text = next((t for end, t in self.says.items() if last.endswith(end)), "a")
    if isinstance(text, Exception):
      raise text
    tokens = np.append(BYTES.encode(text), BYTES.eos_id).astype(np.int32)
    return Completion(
      tokens=tokens,
      logp=np.full(len(tokens), -0.5, np.float32),
      version=np.zeros(len(tokens), np.int32),
      stop_reason="stop",
    )


def environment(act, row=None):
  return agents.Actor(BYTES, act, row or {"question": "q"})


async def play(act, generator=None, *, stage=None, seconds=60.0, **settings):
  settings = {"max_turns": 8, "max_trajectory_tokens": 1000} | settings
  return await (stage or Stage()).play(
    generator or Scripted(),
    environment(act),
    Prompt(index=3, tokens=np.ones(1, np.int32)),
    member=0,
    sampling=Sampling(max_tokens=400, stop_ids=(BYTES.eos_id,)),
    seed=0,
    limits=Limits(step_seconds=seconds),
    **settings,
  )


def sampled(trajectory):
  return BYTES.decode(trajectory.tokens[trajectory.action_mask])


def test_several_turns_tools_and_parallel_calls_become_two_trajectories():
  generator = Scripted(
    **{"\nq": CALL, "on": "plan", "\nl": "left", "\nr": "right"}
  )

  async def unlimited(endpoint, messages, **settings):
    settings.pop("max_tokens", None)
    return await asked(endpoint, messages, **settings)

  asked = chat_agents.ask
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(chat_agents, "ask", unlimited)
    played = asyncio.run(play(chat_agents.planner, generator))
  one, other = played.trajectories
  said = {sampled(one), sampled(other)}
  assert said in ({f"{CALL}planleft", "right"}, {f"{CALL}planright", "left"})
  text = BYTES.decode(one.tokens)
  assert "You may call tools" in text
  assert "<tool_response>\n3\n</tool_response>" in text
  assert one.outcome == other.outcome == float(played.answer)
  assert one.metrics["agent_calls"] == 4
  assert one.metrics["letters"] == 9
  for request in generator.requests:
    n = len(request.tokens)
    assert any(
      np.array_equal(t.tokens[:n], request.tokens) for t in (one, other)
    )


def test_a_blocking_client_acts_in_a_thread_of_its_own():
  played = asyncio.run(play(chat_agents.blocking))
  assert [sampled(t) for t in played.trajectories] == ["a"]


@pytest.mark.parametrize(
  ("act", "kind"),
  [
    (chat_agents.silent, "agent_silent"),
    (chat_agents.crashing, "raised"),
    (chat_agents.hanging, "timeout"),
    (chat_agents.undecided, "reward_not_finite"),
  ],
)
def test_an_agent_that_goes_wrong_has_a_name(act, kind):
  with pytest.raises(EpisodeError) as caught:
    asyncio.run(play(act, seconds=0.3 if kind == "timeout" else 60.0))
  assert caught.value.kind == kind


def test_the_clock_stands_still_while_the_policy_speaks():
  class Slow(Scripted):
    async def generate(self, request, progress=None):
      await asyncio.sleep(0.5)
      return await super().generate(request)

  played = asyncio.run(play(chat_agents.loner, Slow(), seconds=0.3))
  assert played.trajectories[0].outcome == 1.0


def test_an_agent_that_a_budget_stops_is_cut_and_earns_nothing():
  played = asyncio.run(play(chat_agents.endless, max_turns=3))
  (trajectory,) = played.trajectories
  assert trajectory.stop_reason == "length"
  assert (trajectory.outcome, trajectory.metrics["agent_calls"]) == (0.0, 3)


def test_what_ends_the_generator_ends_the_episode_with_its_error():
  generator = Scripted(q=OSError("device lost"))
  with pytest.raises(OSError, match="device lost"):
    asyncio.run(play(chat_agents.loner, generator))


def test_episodes_share_a_server_that_ends_with_the_last_of_them():
  stage = Stage()

  async def many():
    played = await asyncio.gather(
      *(play(chat_agents.loner, stage=stage) for _ in range(5))
    )
    assert stage._runner is None
    again = await play(chat_agents.loner, stage=stage)
    return [len(one.trajectories) for one in [*played, again]]

  assert asyncio.run(many()) == [1] * 6


def test_an_address_serves_its_episode_and_nobody_else():
  seen = []

  async def curious(endpoint, row):
    async with chat_agents.client(endpoint) as api:
      listed = await api.models.list()
      seen.append(listed.data[0].id == endpoint.model)
    url = endpoint.base_url.replace(endpoint.api_key, "guess")
    async with (
      aiohttp.ClientSession() as session,
      session.post(f"{url}/chat/completions", json={}) as response,
    ):
      seen.append(response.status)
    return await chat_agents.loner(endpoint, row)

  played = asyncio.run(play(curious))
  assert seen == [True, 404]
  assert played.trajectories[0].metrics["agent_calls"] == 1


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"stream": True}, "stream is True"),
    ({"n": 2}, "n is 2"),
    ({"logprobs": True}, "logprobs"),
    ({"stop": [3]}, "stop must be"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"messages": [{"role": "judge", "content": ""}]}, "judge"),
    ({"service_tier": "auto"}, "service_tier"),
  ],
)
def test_what_is_not_offered_is_refused_by_name(settings, message):
  async def asking(endpoint, row):
    url = f"{endpoint.base_url}/chat/completions"
    body = {"messages": [{"role": "user", "content": "q"}]} | settings
    async with (
      aiohttp.ClientSession() as session,
      session.post(url, json=body) as response,
    ):
      refused.append((response.status, json.loads(await response.text())))
    return await chat_agents.loner(endpoint, row)

  refused = []
  asyncio.run(play(asking))
  status, body = refused[0]
  assert status == 400 and message in body["error"]["message"]


def test_sampling_is_the_runs_and_what_is_asked_otherwise_is_counted():
  async def cold(endpoint, row):
    await chat_agents.ask(
      endpoint,
      [{"role": "user", "content": "q"}],
      temperature=0.1,
      top_p=1.0,
      seed=4,
    )
    return 0.0

  generator = Scripted()
  played = asyncio.run(play(cold, generator))
  assert generator.requests[0].sampling.temperature == 1.0
  assert played.trajectories[0].metrics["agent_overridden"] == 2


def test_a_refused_call_tells_the_client_why():
  async def wordy(endpoint, row):
    with pytest.raises(openai.BadRequestError, match="must have at most"):
      await chat_agents.ask(endpoint, [{"role": "user", "content": "x" * 2000}])
    return await chat_agents.loner(endpoint, row)

  played = asyncio.run(play(wordy))
  assert played.trajectories[0].stop_reason == "length"


def test_an_agent_that_blocks_costs_its_episode_and_a_thread():
  released = threading.Event()

  def blocked(endpoint, row):
    released.wait()
    return 0.0

  async def both():
    stage = Stage()
    stuck = asyncio.ensure_future(play(blocked, stage=stage, seconds=0.3))
    other = await play(chat_agents.loner, stage=stage)
    with pytest.raises(EpisodeError, match="timeout"):
      await stuck
    return other

  try:
    assert asyncio.run(both()).trajectories[0].outcome == 1.0
  finally:
    released.set()
