"""Where agents act: a chat API of their own in front of the generator.

An agent is whatever calls an OpenAI-compatible chat API. Each episode has an
address at which it reaches the policy that is trained:

    POST {base_url}/chat/completions      answered, and recorded
    GET  {base_url}/models

on the loop of the actor, on this machine only. The address holds a secret, so
that no episode writes into another's record. `play` gives any environment an
episode: an agent as above, others as in `episode`.
"""

import asyncio
import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from rl_tpu.agents import conversation
from rl_tpu.agents.recorder import Answer, Budget, OverBudgetError, Recorder
from rl_tpu.envs import (
  Agent,
  Endpoint,
  Environment,
  Limits,
  Outcome,
  answered,
)
from rl_tpu.episode import Generator, run_episode
from rl_tpu.generation.openai_fields import ApiError
from rl_tpu.types import EpisodeError, Prompt, Sampling, Trajectory, Turn

MODEL = "policy"
"""What it is called here; an agent may call it anything."""
_OVERRIDDEN = {
  "frequency_penalty": (0,),
  "logit_bias": ({},),
  "min_p": (0,),
  "min_tokens": (0,),
  "presence_penalty": (0,),
  "seed": (),
  "temperature": (),
  "top_k": (0, -1),
  "top_p": (1,),
}
"""Settings of sampling, which is the run's; values that ask for nothing."""
_PASSED_OVER = ("metadata", "model", "parallel_tool_calls", "store", "user")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  "logprobs": (False,),
  "n": (1,),
  "response_format": ({"type": "text"},),
  "stream": (False,),
  "tool_choice": ("auto",),
}
"""What is not offered to agents; values that ask for nothing."""
_LARGEST_BODY = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
  """What came of an episode."""

  trajectories: tuple[Trajectory, ...]
  """One, or for an agent one for each branch of its conversations."""
  answer: str | None
  """What it came to, where the environment says so."""


class Stage:
  """Serves agents on one event loop while any of them is at work."""

  def __init__(self):
    self._open: dict[str, _Episode] = {}
    self._runner: web.AppRunner | None = None
    self._starting = asyncio.Lock()

  async def play(
    self,
    generator: Generator,
    environment: Environment | Agent,
    prompt: Prompt,
    *,
    member: int,
    sampling: Sampling,
    seed: int,
    max_turns: int,
    max_trajectory_tokens: int,
    progress: list[Turn] | None = None,
    limits: Limits | None = None,
  ) -> Played:
    """Plays one episode, of an environment or an agent.

    An agent may call `max_turns` times, and has no progress: cut, it begins
    anew. The rest is as in `episode.run_episode`.

    Raises:
      EpisodeError: the agent raised, took too long between two calls, or
        never called.
    """
    limits = limits or Limits()
    if not isinstance(environment, Agent):
      heard = _Heard(environment)
      async with heard.closing(limits):
        trajectory = await run_episode(
          generator,
          heard,
          prompt,
          member=member,
          sampling=sampling,
          seed=seed,
          max_turns=max_turns,
          max_trajectory_tokens=max_trajectory_tokens,
          progress=progress,
          limits=limits,
        )
      return Played(trajectories=(trajectory,), answer=heard.answer)
    recorder = Recorder(
      generator,
      environment.tokenizer,
      prompt,
      member,
      seed,
      Budget(
        sampling=sampling,
        calls=max_turns,
        trajectory_tokens=max_trajectory_tokens,
      ),
    )
    episode = _Episode(recorder, limits.step_seconds)
    async with self._served(episode) as endpoint:
      outcome = await episode.run(environment, endpoint)
    return Played(
      trajectories=recorder.trajectories(outcome.reward, outcome.metrics),
      answer=outcome.answer,
    )

  @contextlib.asynccontextmanager
  async def _served(self, episode: "_Episode") -> AsyncGenerator[Endpoint]:
    """The episode's address; the server ends with the last of them."""
    key = secrets.token_urlsafe(16)
    self._open[key] = episode
    try:
      async with self._starting:
        if self._runner is None:
          self._runner = await self._start()
      host, port = self._runner.addresses[0][:2]
      yield Endpoint(
        base_url=f"http://{host}:{port}/{key}/v1", api_key=key, model=MODEL
      )
    finally:
      del self._open[key]
      if not self._open and self._runner is not None:
        runner, self._runner = self._runner, None
        await runner.cleanup()

  async def _start(self) -> web.AppRunner:
    app = web.Application(client_max_size=_LARGEST_BODY)
    app.add_routes(
      [
        web.get("/{key}/v1/models", self._models),
        web.post("/{key}/v1/chat/completions", self._chat),
      ]
    )
    runner = web.AppRunner(
      app, handler_cancellation=True, shutdown_timeout=0.0, access_log=None
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner

  async def _models(self, request: web.Request) -> web.Response:
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rl_tpu"}
    return web.json_response({"object": "list", "data": [model]})

  async def _chat(self, request: web.Request) -> web.Response:
    episode = self._open.get(request.match_info["key"])
    try:
      if episode is None:
        raise ApiError("there is no such episode, or it is over", status=404)
      body = await request.json()
      if not isinstance(body, dict):
        raise ApiError("the body is no JSON object")
      return web.json_response(_body(await episode.answer(body)))
    except json.JSONDecodeError as error:
      return _refused(ApiError(f"the body is no JSON: {error}"))
    except ApiError as error:
      return _refused(error)


class _Heard:
  """An environment that remembers what its last step came to."""

  def __init__(self, environment: Environment):
    self.reset, self._step = environment.reset, environment.step
    self._close = getattr(environment, "close", None)
    self.answer: str | None = None

  @contextlib.asynccontextmanager
  async def closing(self, limits: Limits) -> AsyncGenerator[None]:
    """Closes the environment at the end, if it can be."""
    try:
      yield
    finally:
      if self._close is not None:
        async with asyncio.timeout(limits.step_seconds):
          await answered(self._close)

  async def step(self, action, stop_reason):
    step = await answered(self._step, action, stop_reason)
    self.answer = step.answer
    return step


class _Episode:
  """One agent at work: its calls, its clock, and what goes wrong."""

  def __init__(self, recorder: Recorder, seconds: float):
    self._recorder, self._seconds = recorder, seconds
    self._broken: asyncio.Future[None] = (
      asyncio.get_running_loop().create_future()
    )
    self._clock: asyncio.Timeout | None = None
    self._calls = 0

  async def run(self, agent: Agent, endpoint: Endpoint) -> Outcome:
    """Lets the agent act to its end.

    Raises:
      EpisodeError: it raised, or neither called nor ended for too long.
      Exception: what ended the generator.
    """
    acting = asyncio.ensure_future(self._act(agent, endpoint))
    try:
      await asyncio.wait(
        (acting, self._broken), return_when=asyncio.FIRST_COMPLETED
      )
    finally:
      over = acting.done()
      acting.cancel()
      if not over:
        await asyncio.gather(acting, return_exceptions=True)
    if self._broken.done():
      if acting.done() and not acting.cancelled():
        acting.exception()  # It is not the cause.
      self._broken.result()
    self._broken.cancel()
    return acting.result()

  async def _act(self, agent: Agent, endpoint: Endpoint) -> Outcome:
    try:
      async with asyncio.timeout(self._seconds) as self._clock:
        outcome = await answered(agent.run, endpoint)
    except EpisodeError:
      raise
    except (Exception, SystemExit) as error:
      if self._clock is not None and self._clock.expired():
        raise EpisodeError(
          "timeout",
          f"the agent neither called nor ended within {self._seconds} s",
        ) from error
      if self._recorder.exhausted:  # It could not go on; that is no fault.
        return Outcome(reward=0.0)
      raise EpisodeError("raised", f"the agent raised {error!r}") from error
    return _checked(outcome)

  async def answer(self, body: dict[str, Any]) -> Answer:
    """One call; the clock stands still meanwhile.

    Raises:
      ApiError: it cannot be answered.
    """
    ask = _understand(body, self._recorder)
    self._calls += 1
    self._set_clock()
    try:
      return await self._recorder.call(**ask)
    except OverBudgetError as error:
      raise ApiError(str(error), code="context_length_exceeded") from error
    except conversation.MalformedError as error:
      raise ApiError(str(error), param="messages") from error
    except Exception as error:
      if not self._broken.done():
        self._broken.set_exception(error)
      raise ApiError(
        f"the generator failed: {error!r}", status=503, kind="server_error"
      ) from error
    finally:
      self._calls -= 1
      self._set_clock()

  def _set_clock(self) -> None:
    if self._clock is not None and not self._clock.expired():
      now = asyncio.get_running_loop().time()
      self._clock.reschedule(None if self._calls else now + self._seconds)


def _checked(outcome: Any) -> Outcome:
  """What an agent came to; a bare number is its reward."""
  if isinstance(outcome, (int, float)):
    outcome = Outcome(reward=float(outcome))
  if not isinstance(outcome, Outcome):
    raise EpisodeError(
      "agent_outcome",
      f"the agent returned {outcome!r:.80}; it must be an Outcome or a number",
    )
  if not abs(outcome.reward) < float("inf"):  # NaN is not
    raise EpisodeError(
      "reward_not_finite", f"the agent's reward is {outcome.reward!r}"
    )
  return outcome


def _understand(body: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
  """The arguments of `Recorder.call`; refuses what would be passed over."""
  body = {name: value for name, value in body.items() if value is not None}
  tools = body.pop("tools", None)
  try:
    messages = conversation.plain(body.pop("messages", None), tools)
  except conversation.MalformedError as error:
    raise ApiError(str(error), param="messages") from error
  stop = body.pop("stop", [])
  stop = [stop] if isinstance(stop, str) else stop
  if not isinstance(stop, list) or not all(
    isinstance(s, str) and s for s in stop
  ):
    raise ApiError("stop must be a string or a list of them", param="stop")
  limits = [
    body.pop(name)
    for name in ("max_tokens", "max_completion_tokens")
    if name in body
  ]
  if not all(type(most) is int and most >= 1 for most in limits):
    raise ApiError(f"max_tokens is {limits[0]!r}; it must be an integer >= 1")
  for name, value in body.items():
    if name in _OVERRIDDEN:
      recorder.counted["agent_overridden"] += value not in _OVERRIDDEN[name]
    elif name not in _PASSED_OVER and value not in _NEUTRAL.get(name, ()):
      raise ApiError(
        f"{name} is {value!r:.80}; agents that are trained are not offered it",
        param=name,
      )
  return {
    "messages": messages,
    "max_tokens": min(limits, default=None),
    "stop": stop,
    "with_tools": bool(tools),
  }


def _body(answer: Answer) -> dict[str, Any]:
  content = answer.content
  message: dict[str, Any] = {
    "role": "assistant",
    "content": (content or None) if answer.calls else content,
    "refusal": None,
  }
  if answer.calls:
    message["tool_calls"] = [
      {
        "id": f"call_{secrets.token_hex(8)}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
      }
      for call in answer.calls
    ]
  choice = {
    "index": 0,
    "message": message,
    "finish_reason": answer.finish_reason,
    "logprobs": None,
  }
  return {
    "id": f"chatcmpl-{secrets.token_hex(12)}",
    "object": "chat.completion",
    "created": int(time.time()),
    "model": MODEL,
    "choices": [choice],
    "usage": {
      "prompt_tokens": answer.prompt_tokens,
      "completion_tokens": answer.completion_tokens,
      "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    },
  }


def _refused(error: ApiError) -> web.Response:
  return web.json_response(error.body(), status=error.status)
