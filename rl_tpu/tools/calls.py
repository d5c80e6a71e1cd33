"""Tool calls in a policy's text, and the answers to them.

The form is that of Hermes and Qwen (https://huggingface.co/NousResearch, Qwen
Team 2025, arXiv:2505.09388): any number of

    <tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call>

in a turn, answered in their order by <tool_response>...</tool_response>. Calls
of one turn run side by side. What a policy writes is hostile input: JSON that
is cut short, an unknown tool, a missing, unknown or wrong argument, a tool that
raises or takes too long each become an answer that says so, and the other calls
run all the same. The episode goes on; only a tool that is broken itself, which
raises EpisodeError, ends it.
"""

import asyncio
import dataclasses
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rl_tpu.types import EpisodeError

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_TAG = re.compile(r"</?tool_(?:call|response)>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tool:
  """Something that a policy may call."""

  name: str
  """As it is called."""
  description: str
  """For the prompt."""
  parameters: Mapping[str, type]
  """Its arguments, all of them required: str, int, float or bool."""
  run: Callable[..., Awaitable[str]]
  """Takes the arguments by name; what it raises becomes an error answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  """What one call came to."""

  text: str
  error: bool


class Toolbox:
  """Some tools, with limits on each call."""

  def __init__(
    self,
    tools: Sequence[Tool],
    *,
    seconds: float = 10.0,
    characters: int = 4096,
    calls: int = 8,
  ):
    """Keeps the tools by name.

    Args:
      tools: no two of one name.
      seconds: of each call, > 0.
      characters: of each answer; what is longer loses its middle.
      calls: of one turn, >= 1; the ones after are refused.
    """
    self.tools = {tool.name: tool for tool in tools}
    if len(self.tools) < len(tools):
      raise ValueError(
        f"tools are named {[tool.name for tool in tools]}; no two may share a "
        "name"
      )
    self._seconds, self._characters, self._calls = seconds, characters, calls

  def describe(self) -> str:
    """Returns what a prompt says of the tools: a JSON object each."""
    kinds = {str: "string", int: "integer", float: "number", bool: "boolean"}
    return "\n".join(
      json.dumps(
        {
          "name": tool.name,
          "description": tool.description,
          "parameters": {n: kinds[k] for n, k in tool.parameters.items()},
        }
      )
      for tool in self.tools.values()
    )

  async def answer(self, text: str) -> list[Answer]:
    """Runs all calls in a text; [] where there are none."""
    calls = _CALL.findall(text)
    return await asyncio.gather(
      *(self._one(number, call) for number, call in enumerate(calls))
    )

  async def _one(self, number: int, call: str) -> Answer:
    try:
      if number >= self._calls:
        raise _Malformed(f"at most {self._calls} calls a turn are run")
      tool, arguments = self._parse(call)
      async with asyncio.timeout(self._seconds):
        text = await tool.run(**arguments)
    except EpisodeError:
      raise
    except TimeoutError:
      return self._error(f"it took more than {self._seconds} s")
    except Exception as error:  # The policy is told, and may try again.
      return self._error(str(error) or type(error).__name__)
    return Answer(text=self._clean(text), error=False)

  def _parse(self, call: str) -> tuple[Tool, dict[str, Any]]:
    try:
      found = json.loads(call)
    except (json.JSONDecodeError, RecursionError) as error:
      raise _Malformed(f"the call is no JSON: {error}") from error
    if not isinstance(found, dict) or "name" not in found:
      raise _Malformed('the call must be {"name": ..., "arguments": {...}}')
    name, arguments = found["name"], found.get("arguments", {})
    tool = self.tools.get(name) if isinstance(name, str) else None
    if tool is None:
      raise _Malformed(f"no tool {name!r}; there are {sorted(self.tools)}")
    if not isinstance(arguments, dict):
      raise _Malformed("arguments must be an object")
    if set(arguments) != set(tool.parameters):
      raise _Malformed(
        f"{name} takes the arguments {sorted(tool.parameters)}; the call has "
        f"{sorted(arguments)}"
      )
    for key, kind in tool.parameters.items():
      if type(arguments[key]) is not kind:
        raise _Malformed(f"argument {key!r} must be of type {kind.__name__}")
    return tool, arguments

  def _error(self, why: str) -> Answer:
    return Answer(text=self._clean(f"error: {why}"), error=True)

  def _clean(self, text: str) -> str:
    """Text that is short, is Unicode, and does not pose as another answer."""
    text = text.encode("utf-8", errors="replace").decode("utf-8")
    if len(text) > self._characters:
      half = self._characters // 2
      text = f"{text[:half]}\n... {len(text)} characters ...\n{text[-half:]}"
    return _TAG.sub("", text)


def render(answers: Sequence[Answer]) -> str:
  """Returns the answers of a turn as one text."""
  return "\n".join(
    f"<tool_response>\n{answer.text}\n</tool_response>" for answer in answers
  )


class _Malformed(ValueError):
  """A call that is not to be run."""
