"""The actor under scripted generators: books, failures, endings, resume."""

import asyncio
import collections
import gc
import json
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_tpu.actor import Actor, Config
from rl_tpu.buffer import Buffer, Closed
from rl_tpu.envs import Limits, Step, encode_observation
from rl_tpu.models.tokenizer import ByteTokenizer
from rl_tpu.rewards.shaping import Config as Shaping
from rl_tpu.staleness import Admission
from rl_tpu.types import Chunk, Completion, Prompt, Sampling

BYTES = ByteTokenizer()


class Scripted:
  """Answers when told to; every sample spans request to answer.

  Its two tokens carry the versions at both ends, as an interrupted generation
  would. With `answer_at_once` it only yields to the loop once.
  """

  def __init__(self, answer_at_once=False):
    self.version = 0
    self.answer_at_once = answer_at_once
    self.pending = {}  # prompt index -> member -> future
    self.started = []
    self.cancelled = 0

  async def generate(self, request, progress):
    index, member, born = request.prompt_index, request.member, self.version
    self.started.append((index, member))
    if self.answer_at_once:
      await asyncio.sleep(0)
    else:
      future = asyncio.get_running_loop().create_future()
      self.pending.setdefault(index, {})[member] = future
      try:
        await future
      except asyncio.CancelledError:
        self.cancelled += 1
        raise
    return Completion(
      tokens=np.array([5, 2], np.int32),
      logp=np.array([-0.5, -0.5], np.float32),
      version=np.array([born, self.version], np.int32),
      stop_reason="stop",
    )

  def finish(self, index):
    for future in self.pending.pop(index).values():
      future.set_result(None)

  def fail(self, index, error, member=0):
    self.pending.pop(index)[member].set_exception(error)


class OneTurn:
  """An environment of one turn; the reward is the prompt's index."""

  def __init__(self, prompt):
    self.prompt = prompt

  async def reset(self):
    return self.prompt.tokens

  async def step(self, action, stop_reason):
    empty = np.zeros(0, np.int32)
    return Step(observation=empty, reward=float(self.prompt.index), end=True)


def alone(environment):
  """Builds members that know nothing of each other."""
  return lambda prompt, size: [environment(prompt) for _ in range(size)]


def prompts(index):
  return Prompt(
    index=index, tokens=np.ones(1, np.int32), metadata={"row": index % 6}
  )


class Rig:
  """An actor with its parts; the test is its learner."""

  def __init__(
    self,
    generator=None,
    *,
    groups_per_batch=1,
    max_staleness=0,
    max_running=None,
    on_stale="refuse",
    group_size=2,
    total_groups=64,
    max_failures_in_a_row=8,
    state=None,
    environment=OneTurn,
    limits=None,
    shaping=None,
    **parts,
  ):
    self.generator = generator or Scripted()
    self.buffer = Buffer(
      groups_per_batch=groups_per_batch,
      max_staleness=max_staleness,
      on_stale=on_stale,
    )
    self.admission = Admission(
      groups_per_batch=groups_per_batch,
      max_staleness=max_staleness,
      max_running=max_running,
    )
    self.actor = Actor(
      Config(
        sampling=Sampling(max_tokens=2),
        group_size=group_size,
        total_groups=total_groups,
        max_trajectory_tokens=8,
        max_failures_in_a_row=max_failures_in_a_row,
        limits=limits or Limits(),
        shaping=shaping or Shaping(),
      ),
      generator=self.generator,
      admission=self.admission,
      buffer=self.buffer,
      **(
        {
          "make_group": lambda prompt, n: [
            environment(prompt) for _ in range(n)
          ],
          "prompts": prompts,
        }
        | parts
      ),
    )
    if state is not None:
      self.actor.restore(state)
      self.generator.version = self.actor.version

  def learn(self):
    """Consumes one batch, publishes the next version; returns the indices."""
    version = self.actor.version
    groups = self.buffer.take(version, timeout=0)
    self.generator.version = version + 1
    self.actor.set_version(version + 1)
    return [group.prompt.index for group in groups]


def go(main):
  """Runs a test's coroutine; one that hangs fails instead."""

  async def bounded():
    async with asyncio.timeout(30):
      return await main

  return asyncio.run(bounded())


async def quiet():
  """Runs the loop until every task waits for something outside of it."""
  loop = asyncio.get_running_loop()
  await asyncio.sleep(0)
  while loop._ready:
    await asyncio.sleep(0)


async def cancel(task):
  task.cancel()
  await asyncio.wait([task])
  assert task.cancelled()


async def stop(task):
  """Cancels what may have ended by itself."""
  task.cancel()
  await asyncio.wait([task])
  if not task.cancelled():
    await task


def drive(rig, script):
  """Runs the coroutine function `script(rig)` beside the running actor."""

  async def main():
    loop_errors = []
    asyncio.get_running_loop().set_exception_handler(
      lambda loop, context: loop_errors.append(context)
    )
    rig.run = asyncio.create_task(rig.actor.run())
    await quiet()
    try:
      await script(rig)
    finally:
      await stop(rig.run)
    gc.collect()  # a task whose error nobody looked at complains now
    await quiet()
    assert loop_errors == []
    assert asyncio.all_tasks() == {asyncio.current_task()}

  go(main())


# Admission meets episodes.


def test_a_group_has_all_its_members_in_order_and_shares_a_group_id():
  async def script(rig):
    for member in (2, 0, 1):  # they finish out of order
      rig.generator.pending[0][member].set_result(None)
      await quiet()
    (group,) = rig.buffer.take(0, timeout=0)
    assert [t.member for t in group.trajectories] == [0, 1, 2]
    assert {t.group_id for t in group.trajectories} == {0}

  drive(Rig(group_size=3), script)


def test_a_group_is_in_the_buffer_only_when_its_last_member_is_done():
  async def script(rig):
    rig.generator.pending[0][0].set_result(None)
    await quiet()
    assert len(rig.buffer) == 0
    rig.generator.pending[0][1].set_result(None)
    await quiet()
    assert len(rig.buffer) == 1

  drive(Rig(), script)


def test_H07_work_starts_at_the_new_version_and_the_group_on_the_way_lags_one():
  async def script(rig):
    assert sorted(rig.generator.pending) == [0, 1]  # (1 + 0 + 1) * 1
    rig.generator.finish(0)
    await quiet()
    assert sorted(rig.generator.pending) == [1]
    assert rig.learn() == [0]
    await quiet()
    assert sorted(rig.generator.pending) == [1, 2]
    rig.generator.finish(1)  # sampled over the update: versions 0 and 1
    await quiet()
    (group,) = rig.buffer.take(1, timeout=0)
    assert group.trajectories[0].token_version.tolist() == [-1, 0, 1]
    assert group.staleness(1) == 1

  drive(Rig(max_staleness=1), script)


def test_max_running_bounds_groups_in_flight():
  async def script(rig):
    assert sorted(rig.generator.pending) == [0, 1, 2]
    rig.generator.finish(1)
    await quiet()
    assert sorted(rig.generator.pending) == [0, 2, 3]

  drive(Rig(max_staleness=None, max_running=3), script)


def test_no_more_groups_start_than_the_run_wants():
  async def script(rig):
    assert sorted(rig.generator.pending) == [0, 1, 2, 3]

  drive(Rig(max_staleness=None, total_groups=4, groups_per_batch=2), script)


def test_a_stale_group_is_attempted_again_before_anything_else():
  async def script(rig):
    rig.generator.finish(1)  # overtakes the straggler 0
    await quiet()
    assert rig.learn() == [1]
    await quiet()
    rig.generator.finish(2)
    await quiet()
    assert rig.learn() == [2]
    rig.generator.finish(0)  # its first token is of version 0
    await quiet()
    with pytest.raises(TimeoutError):
      rig.buffer.take(2, timeout=0)
    rig.generator.started.clear()
    await quiet()
    assert rig.generator.started[0] == (0, 0)
    assert rig.admission.given_back == {"stale": 1}
    rig.generator.finish(0)
    await quiet()
    assert rig.learn() == [0]

  drive(Rig(max_staleness=1), script)


def test_a_filtered_group_is_dropped_and_another_prompt_attempted():
  async def script(rig):
    rig.generator.finish(0)
    await quiet()
    assert (len(rig.buffer), sorted(rig.generator.pending)) == (0, [1])
    assert rig.actor.snapshot()["dropped"] == [[0, "rejected"]]
    rig.generator.finish(1)
    await quiet()
    assert rig.learn() == [1]

  drive(Rig(keep=lambda group: group.trajectories[0].outcome > 0), script)


# Failures.


def test_a_failed_member_cancels_its_group_and_drops_the_prompt():
  async def script(rig):
    rig.generator.fail(0, ValueError("bad tool"), member=1)
    await quiet()
    assert rig.generator.cancelled == 2  # the other members
    assert sorted(rig.generator.pending) == [1]  # the place was given back
    assert len(rig.buffer) == 0
    state = rig.actor.snapshot()
    assert state["dropped"] == [[0, "failed: ValueError('bad tool')"]]
    assert state["admission"] == {"given_back": {"failed": 1}}

  drive(Rig(group_size=3), script)


def test_an_environment_that_raises_never_becomes_a_reward():
  class Broken(OneTurn):
    async def step(self, action, stop_reason):
      raise TimeoutError("judge")

  async def script(rig):
    rig.generator.finish(0)
    await quiet()
    assert len(rig.buffer) == 0
    (dropped,) = rig.actor.snapshot()["dropped"]
    assert dropped[0] == 0 and "raised TimeoutError('judge')" in dropped[1]
    assert rig.actor.failures == {"raised": 1}

  drive(Rig(environment=Broken), script)


def test_failures_are_counted_by_kind_and_a_resumed_run_goes_on_counting():
  class Broken(OneTurn):
    async def step(self, action, stop_reason):
      if self.prompt.index == 0:
        return Step(observation=action[:0], reward=float("nan"), end=True)
      return Step(observation=action[:0], reward=0.0, end=False)

  async def first(rig):
    for index in range(3):
      rig.generator.finish(index)
      await quiet()
    states.append(rig.actor.snapshot())

  states = []
  counted = {"reward_not_finite": 1, "observation_empty": 2}
  drive(Rig(environment=Broken), first)
  assert states[0]["failures"] == counted

  async def second(rig):
    rig.generator.fail(3, OSError("gone"))
    await quiet()
    assert rig.actor.failures == counted | {"OSError": 1}

  state = json.loads(json.dumps(states[0] | {"progress": {}}))
  drive(Rig(state=state), second)


async def hang():
  await asyncio.Event().wait()


def block(released):
  """A plain function of an environment that does not return."""
  released.wait()


def test_the_run_goes_on_whatever_an_environment_does(caplog):
  """One odd environment of each kind, then good ones; each is named."""
  empty = np.zeros(0, np.int32)
  released = threading.Event()
  odd = {
    0: ("raised", lambda: 1 // 0),
    1: ("timeout", hang),
    2: ("reward_not_finite", (empty, float("nan"), True)),
    3: ("observation_empty", (empty, 0.0, False)),
    4: ("observation_too_long", (np.ones(100_000, np.int32), 0.0, False)),
    5: ("observation_not_text", lambda: encode_observation(BYTES, "\udcff")),
    6: ("exit", exit),
    7: ("timeout", lambda: block(released)),
    8: ("raised", lambda: b"\xff".decode("utf-8")),
    9: ("raised", lambda: next(iter(()))),
    10: ("exit", exit),
  }

  def say(does):
    observation, reward, end = does() if callable(does) else does
    return Step(observation=observation, reward=reward, end=end)

  class Odd(OneTurn):
    async def step(self, action, stop_reason):
      if self.prompt.index not in odd:
        return await super().step(action, stop_reason)
      _, does = odd[self.prompt.index]
      if does is hang:
        await hang()
      return say(does)

  class Plain(OneTurn):
    """The same without a coroutine."""

    def step(self, action, stop_reason):
      return say(odd[self.prompt.index][1])

  def environment(prompt):
    return (Plain if prompt.index in (7, 8, 9, 10) else Odd)(prompt)

  rig = Rig(
    Scripted(answer_at_once=True),
    environment=environment,
    total_groups=4,
    max_staleness=8,
    max_failures_in_a_row=20,
    limits=Limits(step_seconds=0.2),
  )
  try:
    go(rig.actor.run())
  finally:
    released.set()
  counted = collections.Counter(kind for kind, _ in odd.values())
  assert rig.actor.failures == counted
  consumed = [rig.buffer.take(v, timeout=0) for v in range(4)]
  assert [g.prompt.index for (g,) in consumed] == [11, 12, 13, 14]
  # A timeout is a timeout, an exit an exit: their like is counted.
  again = {7, 10}
  for index, (kind, _) in odd.items():
    told = f"prompt {index} failed ({kind}) and is dropped" in caplog.text
    assert told == (index not in again)
  assert caplog.text.count("the same 1 more times") == len(again)
  assert "lambda: 1 // 0" in caplog.text


def test_rewards_are_shaped_before_they_are_trained_on():
  async def script(rig):
    rig.generator.finish(0)
    await quiet()
    (group,) = rig.buffer.take(0, timeout=0)
    assert [t.rewards.tolist() for t in group.trajectories] == [[0, 0, 2]] * 2
    assert group.trajectories[0].metrics == {"unshaped_reward": 0.0}

  drive(Rig(shaping=Shaping(bias=1.0, scale=2.0)), script)


def test_members_that_are_built_together_attempt_one_prompt():
  built = []

  def make_group(prompt, size):
    if prompt.index == 0:
      raise OSError("no table free")
    built.append([OneTurn(prompt) for _ in range(size)])
    return built[-1]

  async def script(rig):
    await quiet()
    assert rig.actor.failures == {"OSError": 1}
    assert sorted(rig.generator.pending[1]) == [0, 1, 2]
    assert len(built) == 1 and len(built[0]) == 3

  drive(Rig(group_size=3, make_group=make_group), script)


def test_a_request_cancelled_by_the_generator_fails_its_group():
  async def script(rig):
    first, second = rig.generator.pending.pop(0).values()
    first.cancel()
    second.set_result(None)
    await quiet()
    ((index, reason),) = rig.actor.snapshot()["dropped"]
    assert index == 0 and "cancelled from outside" in reason
    assert sorted(rig.generator.pending) == [1]

  drive(Rig(), script)


def test_failures_in_a_row_end_the_run_and_reach_the_learner():
  async def main():
    rig = Rig(max_failures_in_a_row=3)
    run = asyncio.create_task(rig.actor.run())
    drain = asyncio.create_task(rig.actor.drain())
    await quiet()
    errors = [OSError(f"boom {index}") for index in range(3)]
    for index, error in enumerate(errors):
      rig.generator.fail(index, error)
      await quiet()
    with pytest.raises(RuntimeError, match="3 groups failed") as caught:
      await run
    assert caught.value.__cause__ is errors[2]
    with pytest.raises(Closed, match="boom 2"):
      rig.buffer.take(0, timeout=0)
    with pytest.raises(RuntimeError, match="stopped before"):
      await drain

  go(main())


def test_a_group_that_succeeds_forgets_earlier_failures():
  async def script(rig):
    for index in range(6):
      if index % 2:
        rig.generator.finish(index)
        await quiet()
        rig.learn()
      else:
        rig.generator.fail(index, OSError("boom"))
      await quiet()
    assert sorted(rig.generator.pending) == [6]

  drive(Rig(max_failures_in_a_row=2), script)


@pytest.mark.parametrize("part", ["prompts", "keep"])
def test_an_error_outside_the_episodes_ends_the_run_at_once(part):
  def broken(argument):
    raise KeyError("shard 3")

  async def main():
    rig = Rig(Scripted(answer_at_once=True), **{part: broken})
    with pytest.raises(KeyError, match="shard 3"):
      await rig.actor.run()
    with pytest.raises(Closed, match="shard 3"):
      rig.buffer.take(0, timeout=0)
    assert rig.actor.snapshot()["unfinished"] == [0]

  go(main())


# Endings.


def test_H07_cancelling_everything_in_flight_at_once_leaves_nothing_behind():
  async def script(rig):
    assert len(rig.generator.pending) == 32
    await cancel(rig.run)
    assert rig.generator.cancelled == 32 * 4
    assert rig.actor.snapshot()["unfinished"] == list(range(32))
    assert rig.admission.running == 0
    with pytest.raises(Closed):
      rig.buffer.take(0, timeout=0)

  drive(Rig(max_staleness=31, group_size=4), script)


def test_a_generator_that_raises_when_cancelled_does_not_cost_the_prompt():
  class Rude(Scripted):
    async def generate(self, request, progress):
      try:
        return await super().generate(request, progress)
      except asyncio.CancelledError:
        raise OSError("connection reset") from None

  async def main():
    rig = Rig(Rude(), max_failures_in_a_row=1)
    run = asyncio.create_task(rig.actor.run())
    await quiet()
    await cancel(run)
    state = rig.actor.snapshot()
    assert (state["unfinished"], state["dropped"]) == ([0], [])

  go(main())


def test_the_run_ends_once_all_groups_are_accepted_and_none_can_be_refused():
  async def main():
    rig = Rig(Scripted(answer_at_once=True), max_staleness=3, total_groups=4)
    await rig.actor.run()
    assert [rig.learn() for _ in range(4)] == [[0], [1], [2], [3]]
    with pytest.raises(Closed):
      rig.buffer.take(4, timeout=0)

  go(main())


def test_the_run_goes_on_while_a_group_could_still_be_refused():
  async def main():
    rig = Rig(max_staleness=1, total_groups=3)
    run = asyncio.create_task(rig.actor.run())
    await quiet()
    for index in (1, 2):
      rig.generator.finish(index)
      await quiet()
      assert rig.learn() == [index]
      await quiet()
    rig.generator.finish(0)
    await quiet()
    assert rig.admission.accepted == 3 and not run.done()
    with pytest.raises(TimeoutError):
      rig.buffer.take(2, timeout=0)  # refused: three accepted became two
    await quiet()
    rig.generator.finish(0)
    await run
    assert rig.learn() == [0]

  go(main())


# Lockstep.


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_lockstep_trains_every_batch_at_exactly_its_lag(lag):
  async def main():
    rig = Rig(
      Scripted(answer_at_once=True),
      groups_per_batch=2,
      max_staleness=lag,
      total_groups=12,
    )
    run = asyncio.create_task(rig.actor.run())
    lags, order = [], []
    for version in range(6):
      await rig.actor.drain()
      groups = rig.buffer.take(version, timeout=0)
      order += [group.prompt.index for group in groups]
      lags.append({group.staleness(version) for group in groups})
      rig.generator.version = version + 1
      rig.actor.set_version(version + 1)
    await run
    assert order == list(range(12))
    assert lags == [{min(version, lag)} for version in range(6)]

  go(main())


# Resume.


def through_json(state):
  """As a checkpoint would bring it back."""
  arrays = {key: state[key] for key in ("groups", "progress")}
  plain = {key: state[key] for key in state.keys() - arrays.keys()}
  return json.loads(json.dumps(plain)) | arrays


@pytest.mark.parametrize("rows", [6, 7])
def test_H08_a_run_cut_at_an_epochs_end_trains_the_second_epoch(rows):
  # Batches of 2 over two epochs; with 7 rows a batch spans both epochs.
  used, steps = [], []

  async def life(state, stop_at):
    rig = Rig(
      Scripted(answer_at_once=True),
      groups_per_batch=2,
      total_groups=2 * rows,
      max_staleness=1,
      state=state,
      prompts=lambda index: Prompt(
        index=index,
        tokens=np.ones(1, np.int32),
        metadata={"row": index % rows},
      ),
    )
    run = asyncio.create_task(rig.actor.run())
    while rig.actor.version < stop_at:
      await rig.actor.drain()
      groups = rig.buffer.take(rig.actor.version, timeout=0)
      used.extend(group.prompt.metadata["row"] for group in groups)
      steps.append(rig.actor.version + 1)
      rig.generator.version += 1
      rig.actor.set_version(rig.actor.version + 1)
    state = rig.actor.snapshot()
    await stop(run)
    return through_json(state)

  state = go(life(None, 3))
  assert steps == [1, 2, 3]
  go(life(state, rows))
  assert steps == list(range(1, rows + 1))
  assert sorted(used) == sorted(2 * list(range(rows)))


def test_X03_the_cursor_passes_dropped_prompts_and_never_replays_them():
  state = None

  async def first(rig):
    nonlocal state
    rig.generator.fail(0, OSError("boom"))
    rig.generator.finish(1)
    await quiet()
    assert rig.learn() == [1]
    await quiet()
    state = rig.actor.snapshot()

  drive(Rig(max_staleness=1), first)
  assert state["dropped"] == [[0, "failed: OSError('boom')"]]

  async def second(rig):
    assert sorted(rig.generator.pending) == [2, 3]
    assert rig.actor.snapshot() == state

  drive(Rig(max_staleness=1, state=through_json(state)), second)


def test_an_unfinished_episode_is_saved_with_its_tokens_and_goes_on_from_them():
  """A refused group, and one that failed, begin anew."""

  class Chunked(Scripted):
    """A token is there at once, the rest when told to."""

    def __init__(self):
      super().__init__()
      self.had = {}

    async def generate(self, request, progress):
      key = request.prompt_index, request.member
      self.had.setdefault(key, []).append(len(progress))
      one = np.array([request.prompt_index], np.int32)
      logp = np.array([-0.5], np.float32)
      progress.append(Chunk(tokens=one, logp=logp, version=self.version))
      return await super().generate(request, progress)

  states = []

  async def first(rig):
    states.append(rig.actor.snapshot())
    rig.generator.pending[1][0].set_result(None)
    await quiet()
    rig.generator.finish(0)
    await quiet()
    states.append(rig.actor.snapshot())
    rig.generator.fail(1, OSError("boom"), member=1)
    await quiet()
    states.append(rig.actor.snapshot())

  rig = Rig(Chunked(), max_staleness=1)
  drive(rig, first)
  early, later, failed = states
  assert sorted(early["progress"]) == [0, 1]
  assert sorted(later["progress"]) == [1]
  assert sorted(failed["progress"]) == [2]  # dispatched when 1 failed
  for members in early["progress"].values():
    assert [len(turn.chunks) for (turn,) in members] == [1, 1]

  async def second(rig):
    assert rig.generator.had == {(1, 0): [1], (1, 1): [1]}

  drive(Rig(Chunked(), max_staleness=1, state=through_json(later)), second)


def test_X04_a_restored_full_batch_is_trained_at_once_and_the_next_one_starts():
  state = None

  async def first(rig):
    nonlocal state
    for index in (0, 1):
      rig.generator.finish(index)
    await quiet()
    state = rig.actor.snapshot()

  drive(Rig(groups_per_batch=2), first)

  async def second(rig):
    assert rig.generator.pending == {}  # the limit is 0: nothing to do yet
    assert rig.learn() == [0, 1]
    await quiet()
    assert sorted(rig.generator.pending) == [2, 3]

  drive(Rig(groups_per_batch=2, state=through_json(state)), second)


@pytest.mark.parametrize("with_groups", [True, False])
def test_X05_what_was_in_flight_or_buffered_is_neither_lost_nor_repeated(
  with_groups,
):
  state = None

  async def first(rig):
    nonlocal state
    for index in (1, 2):
      rig.generator.finish(index)
      await quiet()
    assert rig.learn() == [1]
    await quiet()
    state = rig.actor.snapshot(with_groups=with_groups)
    assert state["next_index"] == 4

  drive(Rig(max_staleness=2, max_running=2), first)
  buffered = [group.prompt.index for group in state["groups"]]
  assert buffered == ([2] if with_groups else [])
  assert state["unfinished"] == ([0, 3] if with_groups else [0, 2, 3])

  async def second(rig):
    assert sorted(rig.generator.pending) == state["unfinished"][:2]

  drive(Rig(max_staleness=2, max_running=2, state=through_json(state)), second)


def test_a_snapshot_between_taking_and_publishing_is_refused():
  async def script(rig):
    rig.generator.finish(0)
    await quiet()
    rig.buffer.take(0, timeout=0)
    with pytest.raises(RuntimeError, match="1 groups were taken"):
      rig.actor.snapshot()
    rig.actor.set_version(1)
    assert rig.actor.snapshot()["version"] == 1

  drive(Rig(), script)


def test_a_snapshot_of_another_batch_size_is_refused():
  async def script(rig):
    rig.generator.finish(0)
    await quiet()
    rig.learn()
    state = rig.actor.snapshot()
    with pytest.raises(ValueError, match="groups_per_batch 2 it must be 2"):
      Rig(groups_per_batch=2, state=state)

  drive(Rig(), script)


# Accounting over random schedules.

OPERATIONS = st.lists(
  st.one_of(
    st.tuples(
      st.sampled_from(["finish", "reject", "fail"]), st.integers(0, 20)
    ),
    st.tuples(st.just("learn"), st.just(0)),
    st.tuples(st.just("resume"), st.booleans()),
  ),
  max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(
  operations=OPERATIONS,
  groups_per_batch=st.integers(1, 3),
  max_staleness=st.integers(0, 2),
  max_running=st.none() | st.integers(1, 4),
  on_stale=st.sampled_from(["refuse", "mask_tokens", "allow"]),
)
def test_X05_every_prompt_is_in_exactly_one_place_whatever_happens(
  operations, groups_per_batch, max_staleness, max_running, on_stale
):
  total_groups = 4 * groups_per_batch
  rejected, consumed = set(), []

  def rig_from(state):
    return Rig(
      groups_per_batch=groups_per_batch,
      max_staleness=max_staleness,
      max_running=max_running,
      on_stale=on_stale,
      total_groups=total_groups,
      max_failures_in_a_row=10**6,
      keep=lambda group: group.prompt.index not in rejected,
      state=state,
    )

  def check(rig):
    state = rig.actor.snapshot()
    places = [
      *consumed,
      *(group.prompt.index for group in state["groups"]),
      *state["unfinished"],
      *(index for index, _ in state["dropped"]),
    ]
    assert sorted(places) == list(range(state["next_index"]))
    assert set(rig.generator.pending) <= set(state["unfinished"])
    assert rig.admission.running == len(rig.generator.pending)
    assert rig.admission.running <= (max_running or total_groups)
    assert rig.admission.accepted == len(consumed) + len(state["groups"])
    return state

  def learn(rig):
    version = rig.actor.version
    try:
      groups = rig.buffer.take(version, timeout=0)
    except (TimeoutError, Closed):
      return
    assert len(groups) == groups_per_batch
    indices = [group.prompt.index for group in groups]
    assert indices == sorted(indices)
    if on_stale != "allow":
      assert max(g.staleness(version) for g in groups) <= max_staleness
    consumed.extend(indices)
    rig.generator.version = version + 1
    rig.actor.set_version(version + 1)

  async def main():
    rig = rig_from(None)
    run = asyncio.create_task(rig.actor.run())
    await quiet()
    for operation, argument in operations:
      pending = sorted(rig.generator.pending)
      if operation == "learn":
        learn(rig)
      elif operation == "resume":
        state = rig.actor.snapshot(with_groups=argument)
        await stop(run)
        rig = rig_from(through_json(state))
        run = asyncio.create_task(rig.actor.run())
      elif pending:
        index = pending[argument % len(pending)]
        if operation == "fail":
          rig.generator.fail(index, OSError("boom"))
        else:
          if operation == "reject":
            rejected.add(index)
          rig.generator.finish(index)
      await quiet()
      check(rig)
    for _ in range(20 * total_groups):
      if len(consumed) == total_groups:
        break
      for index in sorted(rig.generator.pending):
        rig.generator.finish(index)
      await quiet()
      learn(rig)
      await quiet()
      check(rig)
    await run
    assert len(set(consumed)) == len(consumed) == total_groups
    assert check(rig)["unfinished"] == []

  go(main())


def test_a_learner_in_its_own_thread_sees_whole_moments_and_every_prompt_once():
  total_groups, groups_per_batch = 120, 4
  rig = Rig(
    Scripted(answer_at_once=True),
    groups_per_batch=groups_per_batch,
    max_staleness=1,
    total_groups=total_groups,
  )
  consumed, snapshots = [], []

  def learn():
    for version in range(total_groups // groups_per_batch):
      groups = rig.buffer.take(version)
      assert max(group.staleness(version) for group in groups) <= 1
      consumed.extend(group.prompt.index for group in groups)
      rig.generator.version = version + 1
      rig.actor.set_version(version + 1)
      snapshots.append((list(consumed), rig.actor.snapshot()))

  async def main():
    async with asyncio.TaskGroup() as parts:
      parts.create_task(rig.actor.run())
      parts.create_task(asyncio.to_thread(learn))

  go(main())
  assert sorted(consumed) == list(range(total_groups))
  for seen, state in snapshots:
    places = [
      *seen,
      *(group.prompt.index for group in state["groups"]),
      *state["unfinished"],
    ]
    assert sorted(places) == list(range(state["next_index"]))


# Wiring.


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("group_size", 0),
    ("total_groups", 0),
    ("max_failures_in_a_row", 0),
  ],
)
def test_a_wrong_number_is_named_with_its_value(field, value):
  with pytest.raises(ValueError, match=rf"Config.{field} is {value}"):
    Rig(**{field: value})


def test_a_run_that_does_not_end_with_a_whole_batch_is_refused():
  with pytest.raises(ValueError, match=r"total_groups is 7.*multiple"):
    Rig(total_groups=7, groups_per_batch=2)


def test_prompts_must_give_the_prompt_asked_for():
  async def main():
    rig = Rig(prompts=lambda index: prompts(index + 1))
    with pytest.raises(ValueError, match=r"prompts\(0\) returned prompt 1"):
      await rig.actor.run()

  go(main())


# Generators that lag.


@settings(deadline=None, max_examples=150)
@given(
  operations=st.lists(
    st.sampled_from(["finish", "learn", "publish", "serve"]), max_size=80
  ),
  groups_per_batch=st.integers(1, 3),
  max_staleness=st.integers(0, 3),
  refresh_period=st.integers(1, 4),
)
def test_nothing_is_too_stale_however_late_generators_take_weights(
  operations, groups_per_batch, max_staleness, refresh_period
):
  """Groups that end in the order of dispatch are trained, none refused.

  And when generators serve what they were given last, the run goes on.
  """
  lag = refresh_period - 1
  max_staleness += lag
  batches = 6

  async def main():
    rig = Rig(
      groups_per_batch=groups_per_batch,
      max_staleness=max_staleness,
      total_groups=batches * groups_per_batch,
    )
    rig.admission.max_staleness -= lag
    rig.actor.set_served(lag)
    published = 0
    run = asyncio.create_task(rig.actor.run())
    await quiet()

    def learn():
      version = rig.actor.version
      try:
        groups = rig.buffer.take(version, timeout=0)
      except (TimeoutError, Closed):
        return
      assert max(g.staleness(version) for g in groups) <= max_staleness
      rig.actor.set_version(version + 1)

    def serve():
      rig.generator.version = published
      rig.actor.set_served(published + lag)

    for operation in operations + ["publish", "serve", "finish", "learn"] * 99:
      if operation == "finish" and rig.generator.pending:
        rig.generator.finish(min(rig.generator.pending))
      elif operation == "learn":
        learn()
      elif operation == "publish":
        published = rig.actor.version // refresh_period * refresh_period
      elif operation == "serve":
        serve()
      await quiet()
    assert rig.buffer.counts["groups_refused"] == 0
    assert rig.actor.version == batches
    await run

  go(main())
