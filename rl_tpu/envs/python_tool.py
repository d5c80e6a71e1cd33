r"""Questions that a program can answer: Python and a calculator as tools.

The policy writes `<tool_call>` blocks (`tools.calls`), each answered by what
the program printed or by an error; a turn without a call is its final answer,
in the form asked for. Programs run in `tools.sandbox`; on a machine that cannot
contain them this task is refused, with what the machine lacks.

The questions are reasoning-gym's, with its scorer of the final answer, so any
generator of it becomes a task with tools.
"""

import asyncio
import concurrent.futures
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rl_tpu.envs import (
  Reply,
  Split,
  TextEnvironment,
  encode_question,
  reasoning_gym,
)
from rl_tpu.models.tokenizer import Tokenizer
from rl_tpu.ops import check_choices, check_fields
from rl_tpu.rewards.answers import Form, extract
from rl_tpu.tools import calculator
from rl_tpu.tools.calls import Tool, Toolbox, render
from rl_tpu.tools.sandbox import Limits, Result, Sandbox, SandboxError
from rl_tpu.types import EpisodeError, Prompt

TEMPLATE = (
  "You may call tools, each as <tool_call>"
  '{{"name": ..., "arguments": {{...}}}}</tool_call>:\n{tools}\n'
  "Without a call, give the final answer between <answer> and </answer>.\n"
  "{question}\n"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Which questions, and what the tools may use."""

  questions: reasoning_gym.Config = dataclasses.field(
    default_factory=reasoning_gym.Config
  )
  """The generator, its settings and splits; `template` of it is the question
  that the template below is given."""
  template: str = TEMPLATE
  """The prompt; names `question` and `tools`. Other braces are doubled."""
  chat: bool = False
  """Put the prompt as a user's message, through the tokenizer's template."""
  observation: str = "\n{answers}\n"
  """What stands around the tools' answers, such as a chat template's marks of a
  user's message and of the assistant's next one; names `answers`."""
  form: Form = "tags"
  """Where the final answer stands: `tags`, `boxed` or `whole`."""
  sandbox: Limits = dataclasses.field(default_factory=Limits)
  """What one program may use."""
  programs: int = 2
  """Run at once, >= 1; others wait for their turn."""
  wait_seconds: float = 120.0
  """Longest wait for a program's end, its turn included, > 0."""
  answer_characters: int = 4096
  """Of one tool's answer, >= 16; what is longer loses its middle."""
  calls: int = 4
  """Most of one turn, >= 1."""

  def __post_init__(self):
    check_choices(self)
    check_fields(
      self,
      ("template", "{question}" in self.template, "a text with {question}"),
      (
        "observation",
        "{answers}" in self.observation,
        "a text with {answers}",
      ),
      ("programs", self.programs >= 1, ">= 1"),
      ("wait_seconds", self.wait_seconds > 0, "> 0"),
      ("answer_characters", self.answer_characters >= 16, ">= 16"),
      ("calls", self.calls >= 1, ">= 1"),
    )


class Task:
  """Questions of reasoning-gym, with tools; see `rl_tpu.envs.Task`."""

  fields = reasoning_gym.Task.fields

  def __init__(self, config: Config, tokenizer: Tokenizer):
    """Makes the sandbox; raises ValueError where the machine gives none."""
    self.config = config
    self.tokenizer = tokenizer
    self.questions = reasoning_gym.Task(config.questions, tokenizer)
    self.name = f"python_tool_{config.questions.generator}"
    try:
      self._sandbox = Sandbox(config.sandbox)
    except SandboxError as error:
      raise ValueError(f"python_tool needs a sandbox: {error}") from error
    self._threads = concurrent.futures.ThreadPoolExecutor(
      config.programs, thread_name_prefix="sandbox"
    )
    self.toolbox = Toolbox(
      [
        Tool(
          name="python",
          description="Runs a program and returns what it prints.",
          parameters={"code": str},
          run=self._python,
        ),
        Tool(
          name="calculator",
          description="Computes an expression of + - * / ^ exactly.",
          parameters={"expression": str},
          run=_calculate,
        ),
      ],
      seconds=config.wait_seconds,
      characters=config.answer_characters,
      calls=config.calls,
    )

  @property
  def fingerprint(self) -> str:
    """That of the questions: rows hold nothing else."""
    return self.questions.fingerprint

  def records(self, split: Split) -> Iterator[Mapping[str, Any]]:
    """Yields each question of the split once."""
    return self.questions.records(split)

  def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
    """Renders a row's question, and the tools."""
    text = self.config.template.format(
      question=row["question"], tools=self.toolbox.describe()
    )
    return Prompt(
      index=index,
      tokens=encode_question(self.tokenizer, text, self.config.chat),
      metadata=self.questions.prompt(row, index).metadata,
    )

  def environment(self, prompt: Prompt) -> "Environment":
    """Starts an attempt at a prompt which `prompt` made."""
    return Environment(self, prompt)

  def demonstration(
    self, row: Mapping[str, Any], rng: np.random.Generator, wrong: float = 0.0
  ) -> tuple[np.ndarray, np.ndarray]:
    """Refused: how a program finds an answer is not known here."""
    raise ValueError(
      "python_tool has no demonstrations; start from a pretrained policy, with "
      "warm_start.batches 0"
    )

  async def _python(self, code: str) -> str:
    run = self._threads.submit(self._sandbox.run, code)
    try:
      result = await asyncio.wrap_future(run)
    except SandboxError as error:
      raise EpisodeError("sandbox", str(error)) from error
    return _describe(result, self.config.sandbox)


class Environment(TextEnvironment):
  """Turns with calls, then a final answer."""

  def __init__(self, task: Task, prompt: Prompt):
    super().__init__(task.tokenizer, prompt)
    self._task = task

  async def answer(self, text: str) -> Reply:
    """Runs the calls of a turn, or judges the answer."""
    found = await self._task.toolbox.answer(text)
    errors = float(sum(answer.error for answer in found))
    metrics = {"tool_calls": float(len(found)), "tool_errors": errors}
    if found:
      answers = render(found)
      shown = self._task.config.observation.format(answers=answers)
      return Reply(text=shown, metrics=metrics)
    final = extract(text, self._task.config.form)
    reward = 0.0
    if final is not None:
      reward = self._task.questions.score(self.prompt.metadata, final)
    return Reply(reward=reward, end=True, metrics=metrics, answer=final)

  def cut(self) -> Reply:
    """An action without an end is worth nothing, and calls nothing."""
    return Reply(end=True, metrics={"tool_calls": 0.0, "tool_errors": 0.0})


async def _calculate(expression: str) -> str:
  return str(calculator.evaluate(expression).value)


def _describe(result: Result, limits: Limits) -> str:
  """What the policy reads; a program that failed is an error."""
  why = {
    "failed": "the program failed",
    "killed": "the program was killed: it crashed or used too much",
    "timeout": f"the program took more than {limits.seconds} s",
    "output": f"the program wrote more than {limits.output_bytes} bytes",
  }.get(result.ending)
  if why is None:
    return result.output
  raise RuntimeError(f"{why}\n{result.output}")
