"""Any environment of OpenEnv, unchanged, from the server that it runs in.

OpenEnv (https://github.com/meta-pytorch/OpenEnv) puts environments behind a
server. A session is a WebSocket at URL/ws, JSON both ways:

    {"type": "reset", "data": {"seed": 7}}
    {"type": "step", "data": {...the action's fields}}
    -> {"type": "observation", "data": {"observation": {...}, "reward", "done"}}
    -> {"type": "error", "data": {"message", "code"}}

Only this protocol is needed here, none of OpenEnv's packages. What the policy
says becomes one field of the action, or, without such a field, is the action as
a JSON object; a field of the observation, or all of it as JSON, is what the
policy reads. An action that the server finds malformed is told so; a server
that is away, or an environment that raises, is an error of the episode.

The questions are seeds: each resets the environment with its own, and a seed is
for training or held out. An environment that takes no seed draws by itself.
"""

import asyncio
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
import numpy as np

from rl_tpu.envs import (
  Reply,
  Split,
  TextEnvironment,
  encode_question,
  of_split,
)
from rl_tpu.models.tokenizer import Tokenizer
from rl_tpu.ops import check_fields
from rl_tpu.types import EpisodeError, Prompt

_MALFORMED = ("VALIDATION_ERROR", "INVALID_JSON")
_FULL = "CAPACITY_REACHED"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Which server, and how text becomes actions and observations text."""

  url: str
  """Of the server: http://localhost:8000."""
  action_field: str | None = None
  """Of the action: what the policy says; None: it says the action in JSON."""
  observation_field: str | None = None
  """Of the observation: what the policy reads; None: all of it, as JSON."""
  prompt: str = "{observation}\n"
  """The first thing that the policy reads; names `observation`."""
  reply: str = "\n{observation}\n"
  """The same after each of its actions."""
  chat: bool = False
  """Put the prompt as a user's message, through the tokenizer's template."""
  size: int = 1000
  """Seeds, from 0 on, >= 2."""
  heldout_fraction: float = 0.1
  """Share of the seeds kept for evaluation, in (0, 1)."""
  message_bytes: int = 2**24
  """Largest message of the server, >= 1024."""
  wait_seconds: float = 0.5
  """Before a full server is asked again, > 0; limits.step_seconds ends it."""

  def __post_init__(self):
    check_fields(
      self,
      ("url", self.url.startswith(("http://", "https://")), "an http(s) URL"),
      (
        "prompt",
        "{observation}" in self.prompt,
        "a text with {observation}",
      ),
      ("reply", "{observation}" in self.reply, "a text with {observation}"),
      ("size", self.size >= 2, ">= 2"),
      ("heldout_fraction", 0 < self.heldout_fraction < 1, "in (0, 1)"),
      ("message_bytes", self.message_bytes >= 1024, ">= 1024"),
      ("wait_seconds", self.wait_seconds > 0, "> 0"),
    )


class Task:
  """The seeds of one environment; see `rl_tpu.envs.Task`."""

  name = "openenv"
  fields: Mapping[str, type] = {"seed": int}

  def __init__(self, config: Config, tokenizer: Tokenizer):
    self.config = config
    self.tokenizer = tokenizer

  @property
  def fingerprint(self) -> str:
    """What the seeds depend on."""
    config = self.config
    return json.dumps([config.size, config.heldout_fraction])

  def records(self, split: Split) -> Iterator[Mapping[str, Any]]:
    """Yields each seed of the split once."""
    rows = ((f"seed {i}", {"seed": i}) for i in range(self.config.size))
    return of_split(rows, split, self.config.heldout_fraction)

  def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
    """Stands for what the environment says first, which is known later."""
    return Prompt(
      index=index,
      tokens=encode_question(self.tokenizer, f"seed {row['seed']}", False),
      metadata={"seed": int(row["seed"])},
    )

  def environment(self, prompt: Prompt) -> "Environment":
    """Starts an attempt at a prompt which `prompt` made."""
    return Environment(self, prompt)

  def demonstration(
    self, row: Mapping[str, Any], rng: np.random.Generator, wrong: float = 0.0
  ) -> tuple[np.ndarray, np.ndarray]:
    """Refused: only the server knows what is right."""
    raise ValueError(
      "openenv has no demonstrations; start from a pretrained policy, with "
      "warm_start.batches 0"
    )


class Environment(TextEnvironment):
  """One session of the server."""

  def __init__(self, task: Task, prompt: Prompt):
    super().__init__(task.tokenizer, prompt)
    self._config = task.config
    self._session: aiohttp.ClientSession | None = None
    self._socket: aiohttp.ClientWebSocketResponse | None = None

  async def reset(self) -> np.ndarray:
    """Opens the session; returns what the environment says first, i32[P]."""
    url = f"{self._config.url.rstrip('/')}/ws"
    message = {"type": "reset", "data": {"seed": self.prompt.metadata["seed"]}}
    while True:
      self._session = aiohttp.ClientSession()
      try:
        self._socket = await self._session.ws_connect(
          url, max_msg_size=self._config.message_bytes
        )
      except aiohttp.ClientError as error:
        raise EpisodeError("openenv_away", f"{url}: {error}") from error
      answer = await self._ask(message)
      if answer["type"] != "error":
        break
      if answer["data"].get("code") != _FULL:
        raise _failed(answer)
      await self.close()
      await asyncio.sleep(self._config.wait_seconds)
    shown = self._config.prompt.format(observation=self._read(answer["data"]))
    return encode_question(self._tokenizer, shown, self._config.chat)

  async def answer(self, text: str) -> Reply:
    """Sends an action; tells the policy what came of it."""
    try:
      action = self._action(text)
    except ValueError as error:
      return self._malformed(str(error))
    answer = await self._ask({"type": "step", "data": action})
    if answer["type"] == "error":
      if answer["data"].get("code") in _MALFORMED:
        return self._malformed(answer["data"].get("message", ""))
      raise _failed(answer)
    data = answer["data"]
    reward = 0.0 if data.get("reward") is None else float(data["reward"])
    metrics = {"malformed_actions": 0.0}
    if data.get("done"):
      return Reply(reward=reward, end=True, metrics=metrics)
    shown = self._config.reply.format(observation=self._read(data))
    return Reply(text=shown, reward=reward, metrics=metrics)

  async def close(self) -> None:
    """Ends the session; the server frees its place."""
    if self._socket is not None:
      await self._socket.close()
      self._socket = None
    if self._session is not None:
      await self._session.close()
      self._session = None

  def _action(self, text: str) -> dict[str, Any]:
    if self._config.action_field is not None:
      return {self._config.action_field: text}
    action = json.loads(text)
    if not isinstance(action, dict):
      raise ValueError("an action must be a JSON object")
    return action

  def _malformed(self, why: str) -> Reply:
    shown = self._config.reply.format(observation=f"error: {why}")
    return Reply(text=shown, metrics={"malformed_actions": 1.0})

  def _read(self, data: Mapping[str, Any]) -> str:
    observation, field = data["observation"], self._config.observation_field
    if field is None:
      return json.dumps(observation, ensure_ascii=False)
    try:
      return str(observation[field])
    except KeyError as error:
      raise EpisodeError(
        "openenv_observation",
        f"the observation has no field {error}; it has {sorted(observation)}",
      ) from error

  async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
    """Sends a message and returns the answer to it."""
    assert self._socket is not None, "reset comes first"
    try:
      await self._socket.send_json(message)
      answer = await self._socket.receive_json()
    except (aiohttp.ClientError, OSError, TypeError, ValueError) as error:
      raise EpisodeError(
        "openenv_away", f"{self._config.url} hung up: {error}"
      ) from error
    return answer


def _failed(answer: Mapping[str, Any]) -> EpisodeError:
  return EpisodeError("openenv_error", str(answer["data"]))
