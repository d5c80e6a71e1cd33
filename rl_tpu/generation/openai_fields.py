"""What clients of the OpenAI API may ask for, and how they are told otherwise.

Nothing is ignored in silence: every field of a request's body is either
understood, or refused with its name, its value and what is allowed. Fields of
the API that this server does not offer pass where they ask for nothing.

Beyond the API's own there are `top_k`, `min_p`, `min_tokens` (`types.Sampling`)
and `return_token_ids`, with which choices also hold `prompt_token_ids`,
`token_ids` and `token_versions`. With `return_token_experts` they hold
`token_experts`: of each token, those that each layer took to give it.
"""

import dataclasses
import itertools
import json
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl_tpu.models.tokenizer import Tokenizer, encode_chat, encode_prompt
from rl_tpu.types import Request, Sampling

_MOST_STOPS = 16
_NEUTRAL: dict[str, tuple[Any, ...]] = {
  "best_of": (),
  "echo": (False,),
  "frequency_penalty": (0,),
  "function_call": (),
  "functions": (),
  "logit_bias": ({},),
  "presence_penalty": (0,),
  "response_format": ({"type": "text"},),
  "suffix": (),
  "tool_choice": (),
  "tools": ([],),
}
"""Fields that are not offered; values beside null that ask for nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What an API serves; the first four are its engine's (engine.Config)."""

  context_length: int
  """Most tokens of one sequence, prompt included, >= 2."""
  max_prompt_length: int
  """Most tokens of a prompt, in [1, context_length)."""
  behavior_top_k: int = 0
  """Most `logprobs` or `top_logprobs` of a request, >= 0."""
  record_experts: bool = False
  """Whether a request may have `return_token_experts`."""
  max_open_requests: int = 1024
  """Sequences that are sampled or wait for it at one time, >= 1; `n` counts
  for each prompt. What comes on top gets status 429."""
  max_body_bytes: int = 2**20
  """Largest body of an HTTP request, >= 1; larger ones get status 413."""
  bearer_token: str | None = dataclasses.field(default=None, repr=False)
  """What clients must send as their API key; None asks for none."""

  def __post_init__(self):
    for name, good, allowed in (
      ("context_length", self.context_length >= 2, ">= 2"),
      (
        "max_prompt_length",
        1 <= self.max_prompt_length < self.context_length,
        f"in [1, context_length = {self.context_length})",
      ),
      ("behavior_top_k", self.behavior_top_k >= 0, ">= 0"),
      ("max_open_requests", self.max_open_requests >= 1, ">= 1"),
      ("max_body_bytes", self.max_body_bytes >= 1, ">= 1"),
    ):
      if not good:
        raise ValueError(
          f"{name} is {getattr(self, name)!r}; it must be {allowed}"
        )
    if self.bearer_token == "":
      raise ValueError("bearer_token is ''; it must be None or not empty")


class ApiError(Exception):
  """An answer other than success, as the API's clients expect it."""

  def __init__(
    self,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    status: int = 400,
    kind: str = "invalid_request_error",
  ):
    super().__init__(message)
    self.param = param
    self.code = code
    self.status = status
    self.kind = kind

  def body(self) -> dict[str, Any]:
    """The JSON object that tells of it."""
    error = {
      "message": str(self),
      "type": self.kind,
      "param": self.param,
      "code": self.code,
    }
    return {"error": error}


def refusal(name: str, value: Any, allowed: str) -> ApiError:
  """What is said of a field that is not as it must be."""
  text = json.dumps(value)
  shown = text if len(text) <= 80 else f"{text[:80]}..."
  return ApiError(f"{name} is {shown}; it must be {allowed}", param=name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
  """One HTTP request, understood."""

  requests: tuple[Request, ...]
  """One for each choice, in the order of their indices: the members of the
  first prompt, then those of the second."""
  prompt_tokens: int
  """Of all prompts, each counted once."""
  stop: tuple[str, ...]
  top: int | None
  """Most likely tokens to tell of at each token; None tells no logp either."""
  stream: bool
  include_usage: bool
  return_token_ids: bool
  return_token_experts: bool


class Fields:
  """A JSON object whose fields are taken one after another."""

  def __init__(self, body: bytes):
    """Reads the body.

    Raises:
      ApiError: it is no JSON object.
    """
    try:
      fields = json.loads(body)
    except (ValueError, RecursionError) as error:
      raise ApiError(f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
      raise ApiError(f"the body is a {type(fields).__name__}, not an object")
    self._fields: dict[str, Any] = fields

  def take(
    self, name: str, default: Any, good: Callable[[Any], bool], allowed: str
  ) -> Any:
    """The value of a field; null is as good as none.

    Raises:
      ApiError: it is not `good`; says what is `allowed`.
    """
    value = self._fields.pop(name, None)
    if value is None:
      return default
    if not good(value):
      raise refusal(name, value, allowed)
    return value

  def flag(self, name: str) -> bool:
    """A boolean, by default false."""
    return self.take(
      name, False, lambda value: isinstance(value, bool), "true or false"
    )

  def integer(
    self, name: str, default: int | None, low: int, high: int, why: str = ""
  ) -> Any:
    """An integer in [low, high]."""
    return self.take(
      name,
      default,
      lambda value: type(value) is int and low <= value <= high,
      f"an integer in [{low}, {high}]{why}",
    )

  def number(
    self, name: str, default: float, good: Callable[[Any], bool], allowed: str
  ) -> float:
    """A number for which `good` bounds what is allowed on both sides."""
    return self.take(
      name,
      default,
      lambda value: type(value) in (int, float) and good(value),
      f"a number {allowed}",
    )

  def finish(self) -> None:
    """Refuses what was not taken.

    Raises:
      ApiError: there is a field that is unknown, or not offered.
    """
    for name, value in self._fields.items():
      if name not in _NEUTRAL:
        raise refusal(name, value, "absent: there is no such field")
      asks_for_nothing = value is None or any(
        value == same and isinstance(value, bool) == isinstance(same, bool)
        for same in _NEUTRAL[name]
      )
      if not asks_for_nothing:
        same = " or ".join(json.dumps(s) for s in (*_NEUTRAL[name], None))
        raise refusal(name, value, f"{same}, as this server does not offer it")


class Reader:
  """Understands the bodies of requests for one model."""

  def __init__(self, tokenizer: Tokenizer, model_name: str, config: Config):
    self._tokenizer = tokenizer
    self._model_name = model_name
    self._config = config

  def completion(self, fields: Fields) -> Ask:
    """Understands a request to /v1/completions.

    Raises:
      ApiError: it cannot be served; says why.
    """
    self._check_model(fields)
    prompts = self._prompts(fields)
    budget = self._budget(fields, "prompt", prompts, 16, "max_tokens")
    top = fields.integer("logprobs", None, 0, self._config.behavior_top_k)
    return self._ask(fields, prompts, budget, top)

  def chat(self, fields: Fields) -> Ask:
    """Understands a request to /v1/chat/completions.

    Raises:
      ApiError: it cannot be served; says why.
    """
    self._check_model(fields)
    messages = fields.take("messages", [], _are_messages, _MESSAGES)
    try:
      prompts = [encode_chat(self._tokenizer, [_plain(m) for m in messages])]
    except ValueError as error:
      raise ApiError(str(error), param="messages") from error
    names = ("max_completion_tokens", "max_tokens")
    whole = self._config.context_length
    budget = self._budget(fields, "messages", prompts, whole, *names)
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", None, 0, self._config.behavior_top_k)
    if top is not None and not wanted:
      raise refusal("top_logprobs", top, "absent where logprobs is not true")
    return self._ask(fields, prompts, budget, (top or 0) if wanted else None)

  def _ask(
    self,
    fields: Fields,
    prompts: Sequence[np.ndarray],
    budget: int,
    top: int | None,
  ) -> Ask:
    """Reads what both ways to ask have in common."""
    sampling = self._sampling(fields, budget)
    most = self._config.max_open_requests
    n = fields.integer("n", 1, 1, most)
    if n * len(prompts) > most:
      raise ApiError(
        f"n is {n} for {len(prompts)} prompts; together they must be at most "
        f"{most}",
        param="n",
      )
    seed = fields.integer("seed", None, 0, 2**32 - 1)
    if seed is None:
      seed = secrets.randbits(32)
    stream = fields.flag("stream")
    experts = fields.flag("return_token_experts")
    if experts and not self._config.record_experts:
      raise refusal(
        "return_token_experts",
        True,
        "false: this generator does not record them (engine.record_experts)",
      )
    members = itertools.product(enumerate(prompts), range(n))
    ask = Ask(
      requests=tuple(
        Request(
          prompt_index=index,
          member=member,
          tokens=prompt,
          sampling=sampling,
          seed=seed,
        )
        for (index, prompt), member in members
      ),
      prompt_tokens=sum(map(len, prompts)),
      stop=_stop(fields),
      top=top,
      stream=stream,
      include_usage=_include_usage(fields, stream),
      return_token_ids=fields.flag("return_token_ids"),
      return_token_experts=experts,
    )
    fields.finish()
    return ask

  def _check_model(self, fields: Fields) -> None:
    name = fields.take("model", None, _is_text, f"{self._model_name!r}")
    if name != self._model_name:
      raise ApiError(
        f"model is {name!r}; it must be {self._model_name!r}",
        param="model",
        code="model_not_found",
        status=404,
      )

  def _prompts(self, fields: Fields) -> list[np.ndarray]:
    """The prompts' ids; those that are ids already stay as they are."""
    prompt = fields.take(
      "prompt",
      [],
      lambda value: isinstance(value, str | list),
      "a string, a list of token ids, or a list of one of those two",
    )
    single = isinstance(prompt, str) or any(type(p) is int for p in prompt)
    prompts = [prompt] if single else prompt
    if not prompts or not (
      all(map(_is_text, prompts)) or all(map(_are_ids, prompts))
    ):
      raise refusal(
        "prompt",
        prompt,
        "a string, a list of token ids in [0, 2**31), or a list of one of "
        "those two, none of them empty",
      )
    try:
      return [
        encode_prompt(self._tokenizer, one)
        if isinstance(one, str)
        else np.asarray(one, np.int32)
        for one in prompts
      ]
    except ValueError as error:
      raise ApiError(str(error), param="prompt") from error

  def _budget(
    self,
    fields: Fields,
    source: str,
    prompts: Sequence[np.ndarray],
    default: int,
    *names: str,
  ) -> int:
    """Most tokens to sample: what a field says, or as much as fits."""
    longest = max(map(len, prompts))
    if longest > self._config.max_prompt_length:
      raise ApiError(
        f"{source} has {longest} tokens; it must have at most "
        f"{self._config.max_prompt_length}",
        param=source,
        code="context_length_exceeded",
      )
    whole = self._config.context_length
    room = whole - longest
    why = f", as {longest} of the context's {whole} tokens are {source}"
    asked = {name: fields.integer(name, None, 1, room, why) for name in names}
    given = {name: most for name, most in asked.items() if most is not None}
    if len(set(given.values())) > 1:
      raise ApiError(f"{' and '.join(given)} must be equal, or one absent")
    return next(iter(given.values()), min(default, room))

  def _sampling(self, fields: Fields, budget: int) -> Sampling:
    return Sampling(
      temperature=fields.number(
        "temperature", 1.0, lambda value: 0 <= value <= 2, "in [0, 2]"
      ),
      max_tokens=budget,
      stop_ids=tuple(self._tokenizer.eos_ids),
      min_tokens=fields.integer("min_tokens", 0, 0, budget),
      top_k=fields.integer("top_k", 0, -1, 2**31 - 1),
      top_p=fields.number(
        "top_p", 1.0, lambda value: 0 < value <= 1, "in (0, 1]"
      ),
      min_p=fields.number(
        "min_p", 0.0, lambda value: 0 <= value < 1, "in [0, 1)"
      ),
    )


def _stop(fields: Fields) -> tuple[str, ...]:
  def good(value):
    stops = value if isinstance(value, list) else [value]
    filled = all(_is_text(stop) and stop for stop in stops)
    return filled and len(stops) <= _MOST_STOPS

  allowed = f"a string or a list of at most {_MOST_STOPS}, none of them empty"
  stop = fields.take("stop", [], good, allowed)
  return (stop,) if isinstance(stop, str) else tuple(stop)


def _include_usage(fields: Fields, stream: bool) -> bool:
  def good(value):
    known = isinstance(value, dict) and set(value) <= {"include_usage"}
    return stream and known and all(type(v) is bool for v in value.values())

  allowed = '{"include_usage": true or false} where stream is true, or absent'
  return fields.take("stream_options", {}, good, allowed).get(
    "include_usage", False
  )


_MESSAGES = (
  'a list of {"role": string, "content": string or list of {"type": "text", '
  '"text": string}}, without other fields'
)


def _are_messages(value: Any) -> bool:
  def good(message):
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
      return False
    content = message["content"]
    text = (
      all(map(_is_part, content))
      if isinstance(content, list)
      else (_is_text(content))
    )
    return text and _is_text(message["role"])

  return isinstance(value, list) and all(map(good, value))


def _is_part(value: Any) -> bool:
  """Whether it is a piece of text of a message."""
  known = isinstance(value, dict) and set(value) == {"type", "text"}
  return known and value["type"] == "text" and _is_text(value["text"])


def _plain(message: dict[str, Any]) -> dict[str, str]:
  """A message whose content is one string."""
  content = message["content"]
  if not isinstance(content, str):
    content = "".join(part["text"] for part in content)
  return {"role": message["role"], "content": content}


def _are_ids(value: Any) -> bool:
  return (
    isinstance(value, list)
    and len(value) > 0
    and all(type(token) is int and 0 <= token < 2**31 for token in value)
  )


def _is_text(value: Any) -> bool:
  """Whether it is a string that UTF-8 can write: no half of a surrogate."""
  if not isinstance(value, str):
    return False
  try:
    value.encode()
  except UnicodeEncodeError:
    return False
  return True
