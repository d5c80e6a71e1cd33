"""Calls as trajectories, under a generator that plays a script."""

import asyncio

import numpy as np
import pytest

from rl_tpu.agents.recorder import Budget, OverBudgetError, Recorder
from rl_tpu.models.tokenizer import ByteTokenizer, encode_chat
from rl_tpu.types import Completion, EpisodeError, Prompt, Sampling

BYTES = ByteTokenizer()


class Scripted:
  """Says the next text of its list; a star leaves out the end of the turn."""

  def __init__(self, *texts):
    self.texts, self.requests, self.version = list(texts), [], 0

  async def generate(self, request, progress=None):
    self.requests.append(request)
    text = self.texts.pop(0)
    await asyncio.sleep(0)
    tokens = BYTES.encode(text.removesuffix("*"))
    if not text.endswith("*"):
      tokens = np.append(tokens, BYTES.eos_id)
    tokens = tokens.astype(np.int32)
    n, self.version = len(tokens), self.version + 1
    return Completion(
      tokens=tokens,
      logp=-np.arange(1, n + 1, dtype=np.float32) - 10 * self.version,
      version=np.full(n, self.version, np.int32),
      stop_reason="length" if text.endswith("*") else "stop",
    )


def make(*texts, calls=16, trajectory_tokens=200, max_tokens=32):
  generator = Scripted(*texts)
  recorder = Recorder(
    generator,
    BYTES,
    Prompt(index=5, tokens=np.ones(1, np.int32)),
    member=2,
    seed=9,
    budget=Budget(
      sampling=Sampling(max_tokens=max_tokens, stop_ids=(BYTES.eos_id,)),
      calls=calls,
      trajectory_tokens=trajectory_tokens,
    ),
  )
  return generator, recorder


def chat(*texts):
  """User and assistant in turn."""
  roles = ("user", "assistant")
  return tuple((roles[i % 2], text) for i, text in enumerate(texts))


def encoded(messages):
  return encode_chat(
    BYTES, [{"role": role, "content": text} for role, text in messages]
  )


def sampled(trajectory):
  """The runs of sampled tokens, as text with $ for the end of a turn."""
  runs, last = [], False
  for token, mask in zip(
    trajectory.tokens.tolist(), trajectory.action_mask, strict=True
  ):
    if mask:
      runs[-1:] = [runs[-1] + [token]] if last else [*runs[-1:], [token]]
    last = mask
  return [
    "".join("$" if t == BYTES.eos_id else BYTES.decode([t]) for t in run)
    for run in runs
  ]


@pytest.mark.parametrize("turns", [1, 2, 3, 10])
def test_turns_are_one_trajectory_and_each_is_asked_with_the_stored_prefix(
  turns,
):
  said = [f"a{i}" for i in range(turns)]
  generator, recorder = make(*said, trajectory_tokens=2000)

  async def act():
    texts = ["q"]
    for _ in range(turns):
      answer = await recorder.call(chat(*texts))
      texts += [answer.content, "on"]

  asyncio.run(act())
  (trajectory,) = recorder.trajectories(0.5, {"x": 1.0})
  assert sampled(trajectory) == [f"{text}$" for text in said]
  mask = trajectory.action_mask
  for request in generator.requests:
    n = len(request.tokens)
    assert np.array_equal(request.tokens, trajectory.tokens[:n])
    assert mask[n] and not mask[n - 1]
  logp = [
    -np.arange(1, len(s) + 2) - 10.0 * (i + 1) for i, s in enumerate(said)
  ]
  assert np.array_equal(trajectory.behavior_logp[mask], np.concatenate(logp))
  assert not trajectory.behavior_logp[~mask].any()
  versions = np.repeat(np.arange(turns) + 1, [len(s) + 1 for s in said])
  assert np.array_equal(trajectory.token_version[mask], versions)
  assert (trajectory.token_version[~mask] == -1).all()
  assert trajectory.rewards[-1] == 0.5 == trajectory.outcome
  assert (trajectory.group_id, trajectory.member) == (5, 2)
  assert trajectory.metrics == {
    "agent_calls": turns,
    "agent_overridden": 0,
    "x": 1,
  }
  # And these are the ids that the template writes.
  texts = ["q"]
  for text in said:
    texts += [text, "on"]
  whole = encoded(chat(*texts))
  assert np.array_equal(whole[: len(trajectory)], trajectory.tokens)


def test_X11_ids_that_encode_otherwise_go_on_as_they_were_sampled():
  """The generator says é as two ids that are no text by themselves."""

  class Odd(Scripted):
    async def generate(self, request, progress=None):
      self.requests.append(request)
      tokens = np.array([0xFF + 3, 0x41 + 3, BYTES.eos_id], np.int32)
      return Completion(
        tokens=tokens,
        logp=np.zeros(3, np.float32),
        version=np.zeros(3, np.int32),
        stop_reason="stop",
      )

  _, recorder = make()
  recorder._generator = odd = Odd()

  async def act():
    answer = await recorder.call(chat("q"))
    assert answer.content == "\ufffdA"
    await recorder.call(chat("q", answer.content, "r"))

  asyncio.run(act())
  (trajectory,) = recorder.trajectories(1.0, {})
  prefix = odd.requests[1].tokens
  assert np.array_equal(prefix, trajectory.tokens[: len(prefix)])
  assert 0xFF + 3 in prefix


def test_parallel_calls_from_one_place_are_branches_that_share_the_reward():
  _, recorder = make("plan", "left", "right", "end")

  async def act():
    await recorder.call(chat("q"))
    await asyncio.gather(
      recorder.call(chat("q", "plan", "l")),
      recorder.call(chat("q", "plan", "r")),
    )
    await recorder.call(chat("q", "plan", "r", "right", "z"))

  asyncio.run(act())
  left, right = recorder.trajectories(0.25, {"x": 1.0})
  # What was sampled is trained once; the second branch reads the plan.
  assert sampled(left) == ["plan$", "left$"]
  assert sampled(right) == ["right$", "end$"]
  assert np.array_equal(
    right.tokens,
    encoded(chat("q", "plan", "r", "right", "z", "end", ""))[: len(right)],
  )
  assert [t.outcome for t in (left, right)] == [0.25, 0.25]
  assert left.metrics["agent_calls"] == 4 and right.metrics == {}


def test_a_rewritten_context_is_a_trajectory_of_its_own():
  _, recorder = make("long story", "short", "end")

  async def act():
    await recorder.call(chat("q"))
    await recorder.call(chat("q", "a summary", "on"))
    await recorder.call(chat("q", "a summary", "on", "short", "z"))

  asyncio.run(act())
  first, second = recorder.trajectories(1.0, {})
  assert sampled(first) == ["long story$"]
  assert sampled(second) == ["short$", "end$"]


def test_a_call_that_was_given_up_leaves_its_place():
  _, recorder = make("plan", "x", "end")

  async def act():
    await recorder.call(chat("q"))
    call = asyncio.ensure_future(recorder.call(chat("q", "plan", "l")))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await recorder.call(chat("q", "plan", "l"))

  asyncio.run(act())
  (trajectory,) = recorder.trajectories(1.0, {})
  assert sampled(trajectory) == ["plan$", "end$"]


def test_equal_calls_are_sampled_with_keys_of_their_own():
  generator, recorder = make("a", "b", "c")

  async def act():
    for _ in range(2):
      await recorder.call(chat("q"))
    await recorder.call(chat("r"))

  asyncio.run(act())
  assert len({request.seed for request in generator.requests}) == 3
  assert {r.prompt_index for r in generator.requests} == {5}
  assert len(recorder.trajectories(1.0, {})) == 3


def test_a_turn_that_was_cut_is_closed_by_the_template_not_by_the_policy():
  _, recorder = make("half*", "rest")

  async def act():
    answer = await recorder.call(chat("q"), max_tokens=4)
    assert answer.finish_reason == "length"
    await recorder.call(chat("q", answer.content, "on"))

  asyncio.run(act())
  (trajectory,) = recorder.trajectories(1.0, {})
  assert sampled(trajectory) == ["half", "rest$"]
  after = len(encoded(chat("q"))) + 4
  assert trajectory.tokens[after] == BYTES.eos_id
  assert not trajectory.action_mask[after]
  assert trajectory.stop_reason == "stop"


def test_a_stop_string_ends_a_turn_with_the_token_that_completed_it():
  _, recorder = make("one. two. three.")

  async def act():
    return await recorder.call(chat("q"), stop=[". "])

  answer = asyncio.run(act())
  (trajectory,) = recorder.trajectories(1.0, {})
  assert (answer.content, answer.finish_reason) == ("one", "stop")
  assert sampled(trajectory) == ["one. "]


def test_calls_of_tools_are_told_apart_only_where_there_are_tools():
  call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

  async def act(**settings):
    _, recorder = make(call, max_tokens=64)
    return await recorder.call(chat("q"), **settings)

  answer = asyncio.run(act(with_tools=True))
  assert [c.name for c in answer.calls] == ["f"]
  assert (answer.content, answer.finish_reason) == ("", "tool_calls")
  assert asyncio.run(act()).content == call


@pytest.mark.parametrize(
  "budget", [{"calls": 1}, {"trajectory_tokens": 40, "max_tokens": 16}]
)
def test_beyond_a_budget_a_call_is_refused_and_the_episode_counts_as_cut(
  budget,
):
  _, recorder = make("x" * 10, "y", **budget)

  async def act():
    answer = await recorder.call(chat("q"))
    with pytest.raises(OverBudgetError):
      await recorder.call(chat("q", answer.content, "on and on"))

  asyncio.run(act())
  assert recorder.exhausted
  (trajectory,) = recorder.trajectories(0.0, {})
  assert trajectory.stop_reason == "length"
  assert sampled(trajectory) == ["x" * 10 + "$"]


def test_the_answer_has_at_most_what_run_agent_and_room_allow():
  generator, recorder = make("a", "b", "c", trajectory_tokens=40, max_tokens=9)

  async def act():
    await recorder.call(chat("q"))
    await recorder.call(chat("q"), max_tokens=3)
    await recorder.call(chat("qqqqqqqqqqqqqqq"))

  asyncio.run(act())
  room = 40 - len(encoded(chat("qqqqqqqqqqqqqqq")))
  asked = [request.sampling.max_tokens for request in generator.requests]
  assert asked == [9, 3, min(9, room)] and room < 9


def test_an_agent_that_never_calls_is_an_error():
  _, recorder = make()
  with pytest.raises(EpisodeError, match="agent_silent"):
    recorder.trajectories(1.0, {})
