r"""A chat as tokens: what the API's messages say to the policy.

Chat templates differ in what they know of tools, so a conversation is first put
into plain messages of the roles system, user and assistant, in the form of
Hermes and Qwen (arXiv:2505.09388; `tools.calls` has the same):

    tools           in the system message, a JSON object each
    a call          <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    its result      a user's message of <tool_response>...</tool_response>

What was said before is never rendered again: a conversation that goes on is the
tokens that it has, then what its template writes after the assistant's message.
These are the ids at the end that two renderings share which differ in that
message alone, less the end of the turn, which the policy sampled itself.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from rl_tpu.models.tokenizer import Tokenizer, encode_chat

Message = tuple[str, str]
"""Role and text."""

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_TOOLS = (
  "You may call tools, each as <tool_call>"
  '{"name": ..., "arguments": {...}}</tool_call>:\n'
)


class MalformedError(ValueError):
  """Messages or tools that cannot be put to a policy; says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """A tool call as the API has it."""

  name: str
  arguments: str
  """JSON, as text."""


def plain(messages: Any, tools: Any) -> tuple[Message, ...]:
  """The API's messages as plain ones.

  Raises:
    MalformedError: they are not as the API has them, or hold more than text.
  """
  if not isinstance(messages, list) or not messages:
    raise MalformedError("messages must be a list, and not empty")
  made: list[Message] = []
  described = _described(tools)
  after_tool = False
  for message in messages:
    role, text = _text(message)
    if role == "tool":
      text = f"<tool_response>\n{text}\n</tool_response>"
      if after_tool:
        text = f"{made.pop()[1]}\n{text}"
      made.append(("user", text))
    else:
      made.append((role, text))
    after_tool = role == "tool"
  if described:
    system = ""
    if made[0][0] == "system":
      system = made.pop(0)[1] + "\n"
    made.insert(0, ("system", system + described))
  return tuple(made)


def _text(message: Any) -> Message:
  if not isinstance(message, dict):
    raise MalformedError(f"a message is {message!r:.80}; it must be an object")
  role = message.get("role")
  role = "system" if role == "developer" else role
  if role not in ("system", "user", "assistant", "tool"):
    raise MalformedError(
      f"a role is {role!r}; it must be system, user, assistant or tool"
    )
  content = message.get("content") or ""
  if isinstance(content, list):
    parts = [part for part in content if isinstance(part, dict)]
    if parts != content or {part.get("type") for part in parts} - {"text"}:
      raise MalformedError("content must be text, whole or in parts")
    content = "".join(str(part.get("text", "")) for part in parts)
  if not isinstance(content, str):
    raise MalformedError(f"content is {content!r:.80}; it must be text")
  calls = message.get("tool_calls") or []
  try:
    calls = [
      Call(
        name=call["function"]["name"], arguments=call["function"]["arguments"]
      )
      for call in calls
    ]
  except (LookupError, TypeError) as error:
    raise MalformedError(
      f"tool_calls is {calls!r:.80}; each must have a function with name and "
      "arguments"
    ) from error
  return role, written(content, calls)


def written(content: str, calls: Sequence[Call]) -> str:
  """What an assistant's message says, its calls included."""
  blocks = [
    f'<tool_call>{{"name": {json.dumps(call.name)}, "arguments": '
    f"{call.arguments}}}</tool_call>"
    for call in calls
  ]
  return content + "".join(blocks)


def _described(tools: Any) -> str:
  """What a system message says of the tools."""
  if not tools:
    return ""
  try:
    lines = [json.dumps(tool["function"]) for tool in tools]
  except (LookupError, TypeError) as error:
    raise MalformedError(
      f"tools is {tools!r:.80}; each must have a function"
    ) from error
  return _TOOLS + "\n".join(lines)


def parse(text: str) -> tuple[str, list[Call]]:
  """The content of a message of the policy, and its well-formed calls.

  A call that is no JSON object with a name and arguments stays in the content:
  whoever reads it may tell the policy.
  """
  calls: list[Call] = []

  def take(match: re.Match[str]) -> str:
    try:
      found = json.loads(match[1])
    except (ValueError, RecursionError):
      return match[0]
    good = isinstance(found, dict) and isinstance(found.get("name"), str)
    arguments = found.get("arguments", {}) if good else None
    if not isinstance(arguments, Mapping):
      return match[0]
    calls.append(Call(name=found["name"], arguments=json.dumps(arguments)))
    return ""

  return _CALL.sub(take, text), calls


def encode(
  tokenizer: Tokenizer, messages: Sequence[Message]
) -> Int[np.ndarray, " P"]:
  """The prompt of a conversation that begins.

  Raises:
    MalformedError: the tokenizer's template refuses it.
  """
  try:
    return encode_chat(
      tokenizer, [{"role": role, "content": text} for role, text in messages]
    )
  except Exception as error:  # A template raises whatever it likes.
    raise MalformedError(f"the chat template refuses it: {error}") from error


def continuation(
  tokenizer: Tokenizer,
  messages: Sequence[Message],
  said: int,
  last_token: int,
) -> Int[np.ndarray, " n"]:
  """What comes after the tokens of the first `said` messages.

  Args:
    tokenizer: with its template.
    messages: of the whole conversation; number `said - 1` is the policy's.
    said: messages that have tokens already.
    last_token: the last of them; a stop id, if the policy ended its turn.
  """

  def rendered(text: str) -> np.ndarray:
    role, _ = messages[said - 1]
    changed = [*messages[: said - 1], (role, text), *messages[said:]]
    return encode(tokenizer, changed)

  ids = _common_end(rendered("0"), rendered("1"))
  ended = last_token in tokenizer.eos_ids
  return ids[1:] if ended and ids[:1] == last_token else ids


def _common_end(one: np.ndarray, other: np.ndarray) -> np.ndarray:
  length = min(len(one), len(other))
  same = one[len(one) - length :] == other[len(other) - length :]
  return one[len(one) - int(np.cumprod(same[::-1]).sum()) :]
