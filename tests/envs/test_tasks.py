"""What every task keeps, and what text environments share."""

import asyncio
import json
import threading

import numpy as np
import pytest
from attempt import TOKENIZER, attempt, ids, rows

from rl_tpu import envs
from rl_tpu.envs import (
  SPLITS,
  Reply,
  TextEnvironment,
  encode_question,
)
from rl_tpu.models.tokenizer import ByteTokenizer
from rl_tpu.rewards import judge
from rl_tpu.types import EpisodeError, Prompt

CONFIGS = {
  "calculator": {"size": 400},
  "countdown": {"size": 400, "numbers": 3},
  "guess_number": {"least": 20, "largest": 30},
  "judged": {},
  "math": {},
  "python_tool": {},
  "reasoning_gym": {"size": 200},
  "scored": {"processes": 1},
  "style_bandit": {"size": 400},
}


def make(name, tmp_path, **changes):
  settings = CONFIGS[name] | changes
  if name in ("math", "judged", "scored"):
    path = tmp_path / "questions.jsonl"
    lines = [{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(100)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings["path"] = str(path)
  if name == "scored":
    code = tmp_path / "rewards.py"
    code.write_text("def score(answer, row):\n  return 0\n")
    settings["reward"] = f"{code}:score"
  if name == "judged":
    settings["judge"] = judge.Config(url="http://x", model="m", criteria="c")
  if name == "python_tool":
    inner = envs.get("reasoning_gym").Config(size=200)
    settings["questions"] = inner
  module = envs.get(name)
  try:
    return module.Task(module.Config(**settings), TOKENIZER)
  except ValueError as error:
    if "sandbox" in str(error):
      pytest.skip(str(error))
    raise


def test_every_task_is_looked_at_here():
  # Others say what these do: an agent (tests/agents), a server.
  assert set(CONFIGS) | {"agent", "openenv"} == set(envs.names())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_task_keeps_the_contract(name, tmp_path):
  task = make(name, tmp_path)
  splits = {split: rows(task, split, 10_000) for split in SPLITS}
  for some in splits.values():
    assert some and all(set(row) == set(task.fields) for row in some)
    kinds = {type(row[f]) is task.fields[f] for row in some for f in row}
    assert kinds == {True}
  texts = {
    split: {json.dumps(row, sort_keys=True) for row in some}
    for split, some in splits.items()
  }
  assert not texts["train"] & texts["heldout"]
  assert rows(make(name, tmp_path), "train", 20) == splits["train"][:20]
  prompt = task.prompt(splits["train"][0], 7)
  assert prompt.index == 7 and prompt.tokens[0] == TOKENIZER.bos_id
  json.dumps(dict(prompt.metadata))  # a checkpoint keeps it as JSON
  assert isinstance(task.fingerprint, str) and task.name.islower()
  _, step, _ = attempt(task, splits["train"][0], "x", stop_reason="length")
  assert step.end and step.reward == 0.0


@pytest.mark.parametrize("name", CONFIGS)
def test_an_environment_serves_one_attempt(name, tmp_path):
  task = make(name, tmp_path)
  row = rows(task, "train", 1)[0]
  with pytest.raises(RuntimeError, match="one attempt"):
    attempt(task, row, "1", "1", stop_reason="length")


class Parrot(TextEnvironment):
  def __init__(self, say):
    super().__init__(TOKENIZER, Prompt(index=0, tokens=np.ones(1, np.int32)))
    self._say = say

  async def answer(self, text):
    return Reply(text=self._say)


def test_a_lone_surrogate_is_no_observation_and_says_so():
  with pytest.raises(EpisodeError) as caught:
    asyncio.run(Parrot("caf\udce9").step(ids("x"), "stop"))
  assert caught.value.kind == "observation_not_text"


def test_an_environment_of_plain_functions_has_a_thread_for_each():
  threads = []

  class Plain(TextEnvironment):
    def answer(self, text):
      threads.append(threading.current_thread())
      return Reply(text=f"{text}!")

  plain = Plain(TOKENIZER, Prompt(index=0, tokens=np.ones(1, np.int32)))
  step = asyncio.run(plain.step(ids("x"), "stop"))
  assert TOKENIZER.decode(step.observation) == "x!"
  assert threads[0] is not threading.main_thread()


def test_an_action_that_is_no_utf8_reaches_the_environment_as_text():
  heard = []

  class Ear(Parrot):
    async def answer(self, text):
      heard.append(text)
      return Reply(end=True)

  action = np.array([0xFF + 3, 65 + 3, TOKENIZER.eos_id])
  asyncio.run(Ear("").step(action, "stop"))
  assert heard == ["\ufffdA"]


def test_X10_the_sampled_stop_token_is_no_text_and_stays_in_the_action():
  heard = []

  class Ear(Parrot):
    async def answer(self, text):
      heard.append(text)
      return Reply(text="more")

  action = TOKENIZER.encode("hi\n")  # sampled with a stop id that is text
  before = action.copy()
  step = asyncio.run(Ear("").step(action, "stop"))
  assert heard == ["hi"] and action.tolist() == before.tolist()
  assert step.observation.tolist() == TOKENIZER.encode("more").tolist()


class Templated(ByteTokenizer):
  """Its template writes BOS itself."""

  def apply_chat_template(self, messages):
    text = "".join(m["content"] for m in messages)
    return [self.bos_id, self.bos_id, *self.encode(text)]


@pytest.mark.parametrize("chat", [False, True])
def test_H05_a_question_has_one_bos_however_it_is_put(chat):
  tokens = encode_question(Templated(), "hi", chat)
  assert tokens.tolist() == [2, *TOKENIZER.encode("hi")]


def test_members_are_built_alone_or_together():
  class Alone:
    name = "alone"

    def environment(self, prompt):
      return object()

  class Together(Alone):
    def group(self, prompt, size):
      return [object()] * (size if prompt else 1)

  assert len(set(envs.group(Alone(), None, 3))) == 3
  assert len(set(envs.group(Together(), True, 3))) == 1
  with pytest.raises(ValueError, match="built 1 environments; it must build 3"):
    envs.group(Together(), None, 3)
