"""Python as a tool: calls run contained, answers are judged."""

import json

import pytest
from attempt import TOKENIZER, attempt, rows

from rl_tpu.envs import python_tool, reasoning_gym
from rl_tpu.envs.python_tool import Config, Task
from rl_tpu.tools.sandbox import Limits, SandboxError

QUESTIONS = reasoning_gym.Config(generator="chain_sum", size=30)


@pytest.fixture(scope="module")
def task():
  try:
    return Task(
      Config(questions=QUESTIONS, sandbox=Limits(seconds=30)), TOKENIZER
    )
  except ValueError as error:
    pytest.skip(str(error))


def call(name, **arguments):
  inside = json.dumps({"name": name, "arguments": arguments})
  return f"<tool_call>{inside}</tool_call>"


def test_a_program_runs_and_the_right_answer_earns_1(task):
  row = rows(task, count=1)[0]
  code = f"print({row['answer']})"
  said, step, counted = attempt(
    task,
    row,
    "I compute. " + call("python", code=code),
    f"<answer>{row['answer']}</answer>",
  )
  response = f"<tool_response>\n{row['answer']}\n\n</tool_response>"
  assert said == [f"\n{response}\n"]
  assert step.reward == 1.0
  assert counted == {"tool_calls": 1.0, "tool_errors": 0.0}


def test_H20_one_bad_call_of_three_spoils_nothing(task):
  row = rows(task, count=1)[0]
  text = (
    call("calculator", expression="6*7")
    + call("python", code="1/0")
    + '<tool_call>{"name": "python", "arg'
  )
  (said,), _, counted = attempt(task, row, text)
  assert counted == {"tool_calls": 3.0, "tool_errors": 2.0}
  assert "\n42\n" in said and "ZeroDivisionError" in said and "no JSON" in said


def test_an_answer_without_tags_earns_nothing(task):
  row = rows(task, count=1)[0]
  _, step, _ = attempt(task, row, row["answer"])
  assert (step.reward, step.end) == (0.0, True)


def test_the_prompt_names_the_tools(task):
  text = TOKENIZER.decode(task.prompt(rows(task, count=1)[0], 0).tokens)
  assert '"name": "python"' in text and '"name": "calculator"' in text


def test_a_machine_without_a_sandbox_is_refused(monkeypatch):
  def refuse(limits):
    raise SandboxError("unshare: Operation not permitted")

  monkeypatch.setattr(python_tool, "Sandbox", refuse)
  with pytest.raises(ValueError, match="needs a sandbox: unshare"):
    Task(Config(questions=QUESTIONS), TOKENIZER)


def test_values_out_of_range_are_refused():
  with pytest.raises(ValueError, match="python_tool.Config.programs is 0"):
    Config(programs=0)
