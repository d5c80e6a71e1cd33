"""One episode: what is stored, what ends it, what it refuses."""

import asyncio
import dataclasses

import numpy as np
import pytest

from rl_tpu.envs import Limits, Step
from rl_tpu.episode import run_episode
from rl_tpu.generation import wire
from rl_tpu.types import (
  Chunk,
  Completion,
  EpisodeError,
  Prompt,
  Sampling,
  Turn,
)


class Player:
  """Plays given turns, (tokens, stop reason), and remembers the requests."""

  def __init__(self, *turns):
    self.turns = list(turns)
    self.requests = []

  async def generate(self, request, progress=None):
    self.requests.append(request)
    tokens, stop_reason = self.turns.pop(0)
    n = len(tokens)
    turn = len(self.requests)
    return Completion(
      tokens=np.array(tokens, np.int32),
      logp=np.full(n, -0.25 * turn, np.float32),
      version=np.full(n, turn, np.int32),
      stop_reason=stop_reason,
    )


class Script:
  """Plays a prompt and given steps, (observation, reward, end)."""

  def __init__(self, prompt, *steps):
    self.prompt = prompt
    self.steps = list(steps)
    self.actions = []

  async def reset(self):
    return np.array(self.prompt, np.int32)

  async def step(self, action, stop_reason):
    self.actions.append((action.tolist(), stop_reason))
    observation, reward, end = self.steps.pop(0)
    return Step(
      observation=np.array(observation, np.int32), reward=reward, end=end
    )


def play(
  player,
  script,
  max_turns=4,
  max_trajectory_tokens=100,
  progress=None,
  limits=None,
  **sampling,
):
  return asyncio.run(
    run_episode(
      player,
      script,
      Prompt(index=7, tokens=np.array(script.prompt, np.int32)),
      member=3,
      sampling=Sampling(**sampling),
      seed=11,
      max_turns=max_turns,
      max_trajectory_tokens=max_trajectory_tokens,
      progress=progress,
      limits=limits,
    )
  )


def test_two_turns_become_one_aligned_stream():
  player = Player(([5, 2], "stop"), ([6, 7, 2], "stop"))
  script = Script([1, 4], ([8, 9], 0.5, False), ([], 2.0, True))
  t = play(player, script, temperature=0.7)
  np.testing.assert_array_equal(t.tokens, [1, 4, 5, 2, 8, 9, 6, 7, 2])
  np.testing.assert_array_equal(t.action_mask, [0, 0, 1, 1, 0, 0, 1, 1, 1])
  np.testing.assert_array_equal(
    t.behavior_logp, [0, 0, -0.25, -0.25, 0, 0, -0.5, -0.5, -0.5]
  )
  np.testing.assert_array_equal(
    t.token_version, [-1, -1, 1, 1, -1, -1, 2, 2, 2]
  )
  np.testing.assert_array_equal(t.rewards, [0, 0, 0, 0.5, 0, 0, 0, 0, 2])
  assert (t.prompt_id, t.group_id, t.member) == (7, 7, 3)
  assert (t.temperature, t.stop_reason) == (0.7, "stop")
  types = [a.dtype for a in (t.tokens, t.behavior_logp, t.token_version)]
  assert types == [np.int32, np.float32, np.int32]
  assert t.rewards.dtype == np.float32 and t.action_mask.dtype == bool


def test_X11_sampled_ids_are_stored_and_shown_as_sampled():
  # Ids 97, 98 would come back as one id for "ab" from decode and encode.
  player = Player(([97, 98], "stop"), ([3], "stop"))
  script = Script([1], ([4], 0.0, False), ([], 1.0, True))
  t = play(player, script)
  assert script.actions[0] == ([97, 98], "stop")
  assert player.requests[1].tokens.tolist() == [1, 97, 98, 4]
  assert t.tokens.tolist() == [1, 97, 98, 4, 3]
  assert t.action_mask.sum() == 3


def test_a_request_carries_the_identity_that_its_sampling_key_needs():
  player = Player(([2], "stop"))
  play(player, Script([1], ([], 0.0, True)))
  (request,) = player.requests
  key = (request.seed, request.prompt_index, request.member)
  assert key == (11, 7, 3)


def test_X20_the_outcome_lies_on_the_last_action_token_of_a_cut_episode():
  player = Player(([5, 6], "length"))
  script = Script([1], ([], 1.0, True))
  t = play(player, script, max_tokens=2)
  assert script.actions == [([5, 6], "length")]
  assert (t.stop_reason, t.rewards.tolist()) == ("length", [0, 0, 1])


def test_an_episode_out_of_turns_is_cut_and_ends_with_its_last_action():
  player = Player(([2], "stop"), ([2], "stop"))
  script = Script([1], ([8], 0.0, False), ([8], 0.25, False))
  t = play(player, script, max_turns=2)
  assert (t.stop_reason, t.tokens.tolist()) == ("length", [1, 2, 8, 2])
  assert t.rewards.tolist() == [0, 0, 0, 0.25]


def test_an_observation_that_leaves_no_room_for_an_action_cuts_the_episode():
  player = Player(([2], "stop"))
  script = Script([1], ([8, 8, 8], 0.0, False))
  t = play(player, script, max_trajectory_tokens=5)
  assert (t.stop_reason, t.tokens.tolist()) == ("length", [1, 2])


def test_the_budget_of_a_turn_is_what_the_trajectory_has_left():
  player = Player(([5, 2], "stop"), ([6], "length"))
  script = Script([1, 1], ([8], 0.0, False), ([], 0.0, True))
  play(player, script, max_trajectory_tokens=6, max_tokens=3)
  budgets = [r.sampling.max_tokens for r in player.requests]
  assert budgets == [3, 1]


def test_an_environment_may_go_on_after_a_cut_turn():
  player = Player(([5], "length"), ([2], "stop"))
  script = Script([1], ([8], 0.0, False), ([], 1.0, True))
  assert play(player, script).stop_reason == "stop"


def test_a_prompt_without_room_for_an_action_is_refused_with_both_numbers():
  with pytest.raises(ValueError, match=r"has 4 tokens.*at most 3"):
    play(Player(), Script([1, 1, 1, 1]), max_trajectory_tokens=4)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_an_error_not_a_reward(reward):
  with pytest.raises(EpisodeError, match="reward_not_finite.*reward is"):
    play(Player(([2], "stop")), Script([1], ([], reward, True)))


@pytest.mark.parametrize(
  ("turn", "message"),
  [
    (([], "stop"), "0 tokens"),
    (([5, 6, 7], "stop"), "3 tokens; it must be 1 to 2"),
    (([5], "error"), "'error'"),
  ],
)
def test_a_completion_that_breaks_the_contract_is_an_error(turn, message):
  with pytest.raises(ValueError, match=message):
    play(Player(turn), Script([1], ([], 0.0, True)), max_tokens=2)


@pytest.mark.parametrize("verb", ["reset", "step"])
def test_an_environment_cannot_end_the_process(verb, monkeypatch):
  async def leave(*arguments):
    raise SystemExit(0)

  script = Script([5], ([], 1.0, True))
  monkeypatch.setattr(script, verb, leave)
  with pytest.raises(EpisodeError, match="exit: the environment called exit"):
    play(Player(([1], "stop")), script)


class HeadPlayer(Player):
  """Adds to each turn a head of the next of `sizes`; None adds none."""

  def __init__(self, *turns, sizes):
    super().__init__(*turns)
    self.sizes = list(sizes)

  async def generate(self, request, progress=None):
    completion = await super().generate(request)
    size = self.sizes.pop(0)
    if size is None:
      return completion
    tokens = np.repeat(completion.tokens[:, None], size, axis=1)
    return dataclasses.replace(
      completion,
      topk_ids=tokens + np.arange(size, dtype=np.int32),
      topk_logp=-tokens.astype(np.float32),
    )


def test_the_samplers_head_lies_on_the_actions_of_every_turn_and_nowhere_else():
  turns = ([5, 2], "stop"), ([6], "stop")
  script = Script([1, 4], ([8], 0.0, False), ([], 1.0, True))
  t = play(HeadPlayer(*turns, sizes=(3, 3)), script)
  off = [-1, -1, -1]
  assert t.tokens.tolist() == [1, 4, 5, 2, 8, 6]
  assert t.behavior_topk_ids.tolist() == [
    *(off, off, [5, 6, 7], [2, 3, 4], off, [6, 7, 8])
  ]
  expected = np.where(t.action_mask, -t.tokens, -np.inf)[:, None]
  np.testing.assert_array_equal(t.behavior_topk_logp, expected.repeat(3, 1))
  assert t.behavior_topk_ids.dtype == np.int32
  assert t.behavior_topk_logp.dtype == np.float32


@pytest.mark.parametrize("sizes", [(3, 2), (3, None), (None, 3)])
def test_turns_whose_heads_differ_in_size_are_refused(sizes):
  turns = ([5], "stop"), ([6], "stop")
  script = Script([1], ([8], 0.0, False), ([], 1.0, True))
  with pytest.raises(ValueError, match="of one size"):
    play(HeadPlayer(*turns, sizes=sizes), script)


def test_a_head_that_is_not_of_every_token_is_refused():
  class Short(HeadPlayer):
    async def generate(self, request, progress=None):
      completion = await super().generate(request)
      return dataclasses.replace(completion, topk_logp=completion.topk_logp[1:])

  script = Script([1], ([], 1.0, True))
  with pytest.raises(ValueError, match=r"\(2, 3\).*\(1, 3\).*\(2, K\)"):
    play(Short(([5, 6], "stop"), sizes=(3,)), script)


class Recorder:
  """Samples what is left of given turns, a token a chunk; breaks when told."""

  def __init__(self, *turns, breaks_after=None):
    self.turns = list(turns)
    self.breaks_after = breaks_after
    self.sampled = []

  async def generate(self, request, progress):
    turn = self.turns.pop(0)
    for at in range(len(progress), len(turn)):
      if len(self.sampled) == self.breaks_after:
        raise OSError("cut")
      last = at == len(turn) - 1
      chunk = Chunk(
        tokens=np.array([turn[at]], np.int32),
        logp=np.array([-turn[at] / 8], np.float32),
        version=len(self.sampled),
        stop_reason="stop" if last else None,
      )
      self.sampled.append(turn[at])
      progress.append(chunk)
    return wire.join(progress)


TURNS = [5, 2], [6, 7, 2], [9, 2]


def steps():
  return ([8], 0.5, False), ([3, 4], 0.0, False), ([], 2.0, True)


@pytest.mark.parametrize("cut", range(7))
def test_an_episode_goes_on_from_its_tokens_wherever_it_was_cut(cut):
  whole = play(Recorder(*TURNS), Script([1, 4], *steps()))
  progress = []
  first = Recorder(*TURNS, breaks_after=cut)
  with pytest.raises(OSError, match="cut"):
    play(first, Script([1, 4], *steps()), progress=progress)
  second = Recorder(*TURNS)
  script = Script([1, 4], *steps())
  t = play(second, script, progress=progress)
  assert first.sampled + second.sampled == [5, 2, 6, 7, 2, 9, 2]
  assert [action for action, _ in script.actions] == [*TURNS]
  for name in ("tokens", "action_mask", "behavior_logp", "rewards"):
    np.testing.assert_array_equal(getattr(t, name), getattr(whole, name))
  versions = [*range(cut), *range(7 - cut)]
  assert t.token_version[t.action_mask].tolist() == versions
  assert t.stop_reason == whole.stop_reason


def test_what_followed_an_observation_that_is_another_now_does_not_count():
  progress = [
    Turn(observation=np.array([1, 4])),
    Turn(observation=np.array([8])),
    Turn(observation=np.array([3, 4])),
  ]
  asyncio.run(Recorder(TURNS[0]).generate(None, progress[0].chunks))
  asyncio.run(Recorder(TURNS[1]).generate(None, progress[1].chunks))
  player = Recorder(TURNS[0], [7, 7, 2])
  script = Script([1, 4], ([9], 0.0, False), ([], 2.0, True))
  t = play(player, script, progress=progress)
  assert player.sampled == [7, 7, 2]
  assert t.tokens.tolist() == [1, 4, 5, 2, 9, 7, 7, 2]
  assert [turn.observation.tolist() for turn in progress] == [[1, 4], [9]]


def refused(player, script, **kwargs):
  with pytest.raises(EpisodeError) as caught:
    play(player, script, **kwargs)
  return caught.value.kind


class Odd(Script):
  """Answers what `does` returns, or raises what it raises."""

  def __init__(self, does):
    super().__init__([1])
    self.does = does

  async def step(self, action, stop_reason):
    return await self.does()


async def hang():
  await asyncio.Event().wait()


async def fail():
  raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


async def own_time_out():
  raise TimeoutError("the judge's own")


@pytest.mark.parametrize(
  ("does", "kind"),
  [(hang, "timeout"), (fail, "raised"), (own_time_out, "raised")],
)
def test_an_environment_that_hangs_or_raises_has_a_name(does, kind):
  limits = Limits(step_seconds=0.01 if does is hang else 60)
  assert refused(Player(([2], "stop")), Odd(does), limits=limits) == kind


@pytest.mark.parametrize(
  ("observation", "kind"),
  [
    ([], "observation_empty"),
    (np.ones(100_000, np.int32), "observation_too_long"),
    (np.array([0.5]), "observation_not_ids"),
    (np.array([[3]]), "observation_not_ids"),
    (np.array([-1]), "observation_not_ids"),
  ],
)
def test_an_observation_that_cannot_be_used_has_a_name(observation, kind):
  async def does():
    return Step(observation=np.asarray(observation), reward=0.0, end=False)

  limits = Limits(observation_tokens=99_999)
  player = Player(([2], "stop"), ([2], "stop"))
  assert refused(player, Odd(does), limits=limits) == kind
  assert len(player.requests) == 1


def test_an_observation_at_the_limit_and_an_allowed_empty_one_are_taken():
  script = Script([1], ([8, 8], 0, False), ([], 0, False), ([], 1, True))
  player = Player(*[([2], "stop")] * 3)
  limits = Limits(observation_tokens=2, empty_observations=True)
  t = play(player, script, limits=limits)
  assert t.tokens.tolist() == [1, 2, 8, 8, 2, 2]


def test_what_an_environment_counts_is_summed_over_its_turns():
  class Counting(Script):
    async def step(self, action, stop_reason):
      step = await super().step(action, stop_reason)
      return dataclasses.replace(step, metrics={"calls": 1.0, "errors": 0.0})

  script = Counting([1], ([8], 0.0, False), ([], 1.0, True))
  t = play(Player(([2], "stop"), ([2], "stop")), script)
  assert t.metrics == {"calls": 2.0, "errors": 0.0}


@pytest.mark.parametrize("field", ["step_seconds", "observation_tokens"])
def test_limits_that_let_nothing_through_are_refused(field):
  with pytest.raises(ValueError, match=rf"limits.{field} is 0; it must be > 0"):
    Limits(**{field: 0})
