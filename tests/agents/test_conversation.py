import json
import pathlib

import numpy as np
import pytest

from rl_tpu.agents import conversation
from rl_tpu.agents.conversation import Call, MalformedError
from rl_tpu.models import huggingface
from rl_tpu.models.tokenizer import ByteTokenizer

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "huggingface"
TOKENIZERS = {
  "bytes": ByteTokenizer,
  "qwen": lambda: huggingface.load_tokenizer(GOLDEN / "qwen2_tied_sharded"),
  "llama": lambda: huggingface.load_tokenizer(GOLDEN / "llama_untied_llama3"),
}
CHAT = (
  ("system", "be brief"),
  ("user", "hello"),
  ("assistant", "yes, what"),
  ("user", "again"),
  ("assistant", "no"),
  ("user", "last"),
)


def ended(tokenizer, text):
  """A turn as the policy samples it, where it says what a tokenizer would."""
  return [*tokenizer.encode(text).tolist(), stop_of(tokenizer)]


def stop_of(tokenizer):
  """What the template ends an assistant's message with."""
  one = conversation.encode(tokenizer, [("user", "a"), ("assistant", "x")])
  (stop,) = {int(t) for t in one[-12:]} & {int(t) for t in tokenizer.eos_ids}
  return stop


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_conversation_goes_on_as_its_template_writes_it(name):
  """Where the policy says what encodes as it does, both ways agree."""
  tokenizer = TOKENIZERS[name]()
  tokens = conversation.encode(tokenizer, CHAT[:2]).tolist()
  for said in (3, 5):
    tokens += ended(tokenizer, CHAT[said - 1][1])
    added = conversation.continuation(
      tokenizer, CHAT[: said + 1], said, tokens[-1]
    )
    tokens += added.tolist()
    whole = conversation.encode(tokenizer, CHAT[: said + 1]).tolist()
    assert whole[-len(added) :] == added.tolist()
    # The template of this one writes otherwise what is no longer the last.
    assert name == "qwen" or tokens == whole


@pytest.mark.parametrize("name", TOKENIZERS)
def test_X10_the_end_of_a_turn_that_was_not_sampled_is_written(name):
  tokenizer = TOKENIZERS[name]()
  stopped = conversation.continuation(
    tokenizer, CHAT[:4], 3, stop_of(tokenizer)
  )
  cut = conversation.continuation(
    tokenizer, CHAT[:4], 3, int(tokenizer.encode("x")[-1])
  )
  assert cut.tolist() == [stop_of(tokenizer), *stopped.tolist()]


def test_X10_a_role_marker_that_ends_a_turn_is_sampled_once():
  """A template in which the next marker ends a turn: it is an action's last."""
  user, assistant = 300, 301

  class Markers(ByteTokenizer):
    eos_ids = (1, user, assistant)

    def apply_chat_template(self, messages):
      ids = []
      for message in messages:
        ids.append(user if message["role"] == "user" else assistant)
        ids += self.encode(message["content"]).tolist()
      return [*ids, assistant]

  tokenizer = Markers()
  tokens = conversation.encode(tokenizer, CHAT[1:2]).tolist()
  tokens += [*tokenizer.encode(CHAT[2][1]).tolist(), user]
  added = conversation.continuation(tokenizer, CHAT[1:4], 2, user)
  whole = conversation.encode(tokenizer, CHAT[1:4]).tolist()
  assert tokens + added.tolist() == whole
  # Where the policy ended otherwise, the marker is still there.
  otherwise = conversation.continuation(tokenizer, CHAT[1:4], 2, 1)
  assert otherwise.tolist() == [user, *added.tolist()]


def test_tools_calls_and_results_become_plain_text():
  tools = [{"type": "function", "function": {"name": "add"}}]
  call = {
    "id": "1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"x": 1}'},
  }
  messages = [
    {"role": "developer", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "q"}]},
    {"role": "assistant", "content": None, "tool_calls": [call, call]},
    {"role": "tool", "tool_call_id": "1", "content": "2"},
    {"role": "tool", "tool_call_id": "2", "content": "3"},
    {"role": "user", "content": "then?"},
  ]
  plain = conversation.plain(messages, tools)
  assert [role for role, _ in plain] == [
    *("system", "user", "assistant", "user", "user")
  ]
  assert plain[0][1].startswith("s\nYou may call tools")
  assert plain[0][1].endswith('{"name": "add"}')
  block = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
  assert plain[2][1] == block * 2
  assert plain[3][1] == (
    "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
  )


def test_without_a_system_message_tools_get_one():
  tools = [{"type": "function", "function": {"name": "add"}}]
  plain = conversation.plain([{"role": "user", "content": "q"}], tools)
  assert [role for role, _ in plain] == ["system", "user"]


def test_calls_are_told_from_text_and_written_back_the_same():
  text = (
    'so <tool_call> {"name": "f", "arguments": {"x": [1]}} </tool_call>'
    '<tool_call>{"name": "g"}</tool_call>'
  )
  content, calls = conversation.parse(text)
  assert content == "so "
  assert calls == [
    Call(name="f", arguments='{"x": [1]}'),
    Call(name="g", arguments="{}"),
  ]
  again = conversation.parse(conversation.written(content, calls))
  assert again == (content, calls)


@pytest.mark.parametrize(
  "inside",
  ['{"x": 1,', "[1]", '{"name": 3}', '{"name": "f", "arguments": [1]}', ""],
)
def test_H20_a_malformed_call_stays_in_the_text(inside):
  good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
  content, calls = conversation.parse(f"<tool_call>{inside}</tool_call>{good}")
  assert content == f"<tool_call>{inside}</tool_call>"
  assert [call.name for call in calls] == ["f"]


@pytest.mark.parametrize(
  "messages",
  [
    None,
    [],
    ["hello"],
    [{"role": "judge", "content": "x"}],
    [{"role": "user", "content": 3}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
  ],
)
def test_what_is_no_chat_is_refused(messages):
  with pytest.raises(MalformedError):
    conversation.plain(json.loads(json.dumps(messages)), None)


def test_what_a_template_refuses_is_refused():
  class Strict(ByteTokenizer):
    def apply_chat_template(self, messages):
      raise RuntimeError("roles must alternate")

  with pytest.raises(MalformedError, match="must alternate"):
    conversation.encode(Strict(), CHAT)


def test_a_template_that_strips_thinking_changes_nothing_that_was_said():
  """X12: the row begins with the ids that the engine was given."""

  class Forgetful(ByteTokenizer):
    def apply_chat_template(self, messages):
      said = [
        (m["role"], m["content"].rpartition("</think>")[2]) for m in messages
      ]
      return conversation.encode(ByteTokenizer(), said)

  tokenizer = Forgetful()
  chat = (("user", "q"), ("assistant", "<think>a</think>b"), ("user", "r"))
  added = conversation.continuation(tokenizer, chat, 2, tokenizer.eos_id)
  assert np.array_equal(
    added,
    conversation.continuation(ByteTokenizer(), chat, 2, tokenizer.eos_id),
  )
