"""Prompts in, groups of finished episodes out: one coroutine per episode.

The actor starts a group whenever admission (`staleness.py`, AReaL Eq. 3) has
room, attempts its prompt in `group_size` episodes side by side, and puts the
finished group into the buffer. Prompts come by index from an endless stream;
the index is the prompt's identity and the order of dispatch.

Its books: every index below the cursor is in exactly one place,

    consumed | in the buffer | running | waiting | dropped, with a reason

where `waiting` holds what must be attempted again (refused as stale), or goes
on from the tokens that it has (in flight when the run was cut); it goes
first. All moves happen under the
buffer's lock, so a snapshot sees one moment and a resumed run neither skips a
prompt nor trains one twice.

An episode that raises fails its group: the other members are cancelled and
the prompt is dropped. It never becomes a reward. Several failed groups in a
row mean that something is broken, and end the run.
"""

import asyncio
import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from rl_tpu.agents import Stage
from rl_tpu.buffer import Buffer
from rl_tpu.envs import Agent, Environment, Limits
from rl_tpu.episode import Generator
from rl_tpu.failures import EpisodesFailed, Failures, words
from rl_tpu.rewards import shaping as shapes
from rl_tpu.staleness import Admission
from rl_tpu.types import (
  EpisodeError,
  Group,
  Prompt,
  Sampling,
  Trajectory,
  Turn,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The actor's numbers."""

  sampling: Sampling
  """How every turn is drawn; `max_tokens` is the budget of one turn."""
  group_size: int
  """G, episodes per prompt, >= 1."""
  total_groups: int
  """To be accepted over the whole run, earlier lives included, >= 1; a
  multiple of `groups_per_batch`."""
  max_trajectory_tokens: int
  """Prompt, actions and observations together, >= 2."""
  max_turns: int = 1
  """Most actions of one episode, >= 1."""
  seed: int = 0
  """Of all sampling keys."""
  max_failures_in_a_row: int = 8
  """Failed groups, none finished between them, that end the run, >= 1."""
  limits: Limits = dataclasses.field(default_factory=Limits)
  """What is taken from an environment."""
  shaping: shapes.Config = dataclasses.field(default_factory=shapes.Config)
  """What is done to rewards before they are trained on."""

  def __post_init__(self):
    for name, least in (
      ("group_size", 1),
      ("total_groups", 1),
      ("max_trajectory_tokens", 2),
      ("max_turns", 1),
      ("max_failures_in_a_row", 1),
    ):
      value = getattr(self, name)
      if value < least:
        raise ValueError(f"Config.{name} is {value!r}; it must be >= {least}")


class Actor:
  """Keeps as many groups in flight as admission allows.

  `run`, and everything the episodes do, lives on one event loop;
  `set_version`, `set_served` and `snapshot` may be called from any thread, with
  or without a running loop.
  """

  def __init__(
    self,
    config: Config,
    *,
    generator: Generator,
    make_group: Callable[[Prompt, int], Sequence[Environment | Agent]],
    prompts: Callable[[int], Prompt],
    admission: Admission,
    buffer: Buffer,
    keep: Callable[[Group], bool] | None = None,
  ):
    """Wires an actor that has not started yet.

    Args:
      config: its numbers.
      generator: samples the actions.
      make_group: builds the environments of a prompt's episodes, called once
        per group with their number.
      prompts: the stream of prompts, by index.
      admission: says when a group may start; the actor's from now on.
      buffer: takes finished groups; its `on_refused` is set here.
      keep: a filter on finished groups; where it is false the prompt is
        dropped as "rejected" and another one attempted.
    """
    if admission.groups_per_batch != buffer.groups_per_batch:
      raise ValueError(
        f"groups_per_batch is {admission.groups_per_batch} for admission and "
        f"{buffer.groups_per_batch} for the buffer; they must be equal"
      )
    if config.total_groups % admission.groups_per_batch:
      raise ValueError(
        f"Config.total_groups is {config.total_groups}; it must be a multiple "
        f"of groups_per_batch, {admission.groups_per_batch}: the learner "
        "would wait for ever for the rest of the last batch"
      )
    self._config = config
    self._generator = generator
    self._make_group = make_group
    self._prompts = prompts
    self._admission = admission
    self._buffer = buffer
    self._keep = keep
    self._stage = Stage()

    self._version = 0
    self._served: float = math.inf
    self._cursor = 0
    self._waiting: list[int] = []  # a heap
    self._running: set[int] = set()
    self._progress: dict[int, list[list[Turn]]] = {}  # by index and member
    self._dropped: dict[int, str] = {}
    self._failures: collections.Counter[str] = collections.Counter()
    self._failures_in_a_row = 0
    self._told = Failures()

    self._loop: asyncio.AbstractEventLoop | None = None
    self._tasks: set[asyncio.Task[None]] = set()
    self._wake = asyncio.Event()
    self._moved = asyncio.Event()
    self._ended = False
    self._error: BaseException | None = None
    buffer.on_refused = self._on_refused

  @property
  def version(self) -> int:
    """Batches consumed."""
    return self._version

  @property
  def idle(self) -> bool:
    """Whether nothing runs and nothing may start at this version."""
    with self._buffer.lock:
      return not self._running and self._capacity() <= 0

  @property
  def failures(self) -> dict[str, int]:
    """Failed groups of the whole run by the kind of their first error."""
    with self._buffer.lock:
      return dict(self._failures)

  async def run(self) -> None:
    """Attempts prompts until `total_groups` are accepted for good.

    It goes on while a group in the buffer could still be refused by the last
    version. When it returns, raises or is cancelled, no episode is left
    running and the buffer is closed; an error is handed to the buffer too.

    Raises:
      EpisodesFailed: too many groups failed in a row; the last error is the
        cause. Errors of `prompts` and `keep` come through as they are.
    """
    assert self._loop is None and not self._ended, "an actor runs once"
    self._loop = asyncio.get_running_loop()
    try:
      while not self._finished():
        self._dispatch()
        self._moved.set()
        await self._wake.wait()
        self._wake.clear()
        if self._error is not None:
          raise self._error
    except Exception as error:
      self._buffer.fail(error)
      raise
    finally:
      await self._stop()

  async def drain(self) -> None:
    """Waits until nothing runs and nothing may start: lockstep's barrier.

    Raises:
      RuntimeError: the run ended before that.
    """
    while not self._ended and not self.idle:
      self._moved.clear()
      await self._moved.wait()
    if not self.idle:
      why = f": {self._error!r}" if self._error else ""
      raise RuntimeError(
        f"the actor stopped before its work was done{why}"
      ) from self._error

  def set_version(self, version: int) -> None:
    """Says that `version` batches are consumed, the last one taken included.

    Call it after each batch, once the generator has the weights: called
    earlier, groups would start on weights one version too old. Where
    generators take them in their own time, `set_served` says when they have.
    """
    with self._buffer.lock:
      if version < self._version:
        raise ValueError(
          f"version is {version}; it must be >= the present {self._version}"
        )
      self._version = version
      self._notify()

  def set_served(self, version: int) -> None:
    """Says that what starts from now on samples from `version` or newer.

    Generators that have processes of their own may lag behind what is
    trained. A group must not start that would exceed the limit by its batch,
    so admission counts from the lesser of both: with v' <= v served, group
    number k < (n + v' + 1) * B is consumed at floor(k / B) <= n + v'.
    """
    with self._buffer.lock:
      self._served = version
      self._notify()

  def snapshot(self, *, with_groups: bool = True) -> dict[str, Any]:
    """Everything a resumed run needs, of one moment.

    Plain values, but for `groups`, the buffer's groups, and `progress`: of
    each unfinished prompt for which something was sampled, the turns of each
    member. With `with_groups` false the groups are left out and their prompts
    will be attempted again.

    Raises:
      RuntimeError: a batch was taken and `set_version` has not followed; its
        prompts would be lost.
    """
    with self._buffer.lock:
      groups = self._buffer.snapshot()
      unfinished = [*self._waiting, *self._running]
      consumed = self._cursor - len(unfinished) - len(self._dropped)
      consumed -= len(groups)
      if consumed != self._version * self._admission.groups_per_batch:
        raise RuntimeError(
          f"{consumed} groups were taken but version {self._version} has "
          f"consumed {self._version * self._admission.groups_per_batch}; call "
          "set_version for the batch taken, then snapshot"
        )
      if not with_groups:
        unfinished += [group.prompt.index for group in groups]
        groups = []
      return {
        "version": self._version,
        "next_index": self._cursor,
        "unfinished": sorted(unfinished),
        "dropped": sorted([i, why] for i, why in self._dropped.items()),
        "failures": dict(self._failures),
        "admission": self._admission.snapshot(),
        "stale": dict(self._buffer.counts),
        "groups": groups,
        "progress": self._copy_of_progress(),
      }

  def restore(self, state: dict[str, Any]) -> None:
    """Takes over from a snapshot; before `run`.

    Raises:
      ValueError: the numbers do not add up, which another `groups_per_batch`
        would cause.
    """
    assert self._loop is None and not self._ended, "restore comes before run"
    version, groups = state["version"], state["groups"]
    consumed = state["next_index"] - len(state["unfinished"])
    consumed -= len(state["dropped"]) + len(groups)
    if consumed != version * self._admission.groups_per_batch:
      raise ValueError(
        f"the snapshot consumed {consumed} groups up to version {version}; "
        f"with groups_per_batch {self._admission.groups_per_batch} it must be "
        f"{version * self._admission.groups_per_batch}"
      )
    with self._buffer.lock:
      self._version = version
      self._cursor = state["next_index"]
      self._waiting = sorted(state["unfinished"])
      self._progress = dict(state["progress"])
      self._dropped = dict(state["dropped"])
      self._failures = collections.Counter(state["failures"])
      self._admission.resume(version, len(groups), state["admission"])
      self._buffer.counts = collections.Counter(state["stale"])
      self._buffer.restore(groups)

  def _capacity(self) -> float:
    admission = self._admission
    left = self._config.total_groups - admission.accepted - admission.running
    return min(admission.capacity(self._sampled_version), left)

  @property
  def _sampled_version(self) -> int:
    """The oldest that a group may sample from which starts now."""
    return int(min(self._version, self._served))

  def _copy_of_progress(self) -> dict[int, list[list[Turn]]]:
    """Episodes go on adding to theirs while this one is saved."""
    copies = {
      index: [
        [dataclasses.replace(turn, chunks=[*turn.chunks]) for turn in turns]
        for turns in members
      ]
      for index, members in self._progress.items()
    }
    return {
      index: members
      for index, members in sorted(copies.items())
      if any(turn.chunks for turns in members for turn in turns)
    }

  def _finished(self) -> bool:
    last = self._config.total_groups // self._admission.groups_per_batch - 1
    with self._buffer.lock:
      return (
        self._admission.accepted >= self._config.total_groups
        and not self._running
        and not self._buffer.may_refuse(last)
      )

  def _dispatch(self) -> None:
    """Starts groups while there is room, those waiting first."""
    with self._buffer.lock:
      while self._capacity() > 0:
        self._admission.dispatch(self._sampled_version)
        if self._waiting:
          index = heapq.heappop(self._waiting)
        else:
          index, self._cursor = self._cursor, self._cursor + 1
        self._running.add(index)
        self._progress.setdefault(
          index, [[] for _ in range(self._config.group_size)]
        )
        task = asyncio.create_task(self._run_group(index))
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

  async def _run_group(self, index: int) -> None:
    prompt = self._prompts(index)
    if prompt.index != index:
      raise ValueError(f"prompts({index}) returned prompt {prompt.index}")
    try:
      environments = self._make_group(prompt, self._config.group_size)
    except Exception as error:
      self._fail(index, error)
      return
    try:
      async with asyncio.TaskGroup() as members:
        episodes = [
          members.create_task(self._run_member(prompt, member, environment))
          for member, environment in enumerate(environments)
        ]
    except ExceptionGroup as errors:
      self._fail(index, errors.exceptions[0])
      return
    if any(episode.cancelled() for episode in episodes):
      self._fail(index, RuntimeError("an episode was cancelled from outside"))
      return
    trajectories = itertools.chain(*(one.result() for one in episodes))
    self._complete(Group(prompt=prompt, trajectories=tuple(trajectories)))

  async def _run_member(
    self, prompt: Prompt, member: int, environment: Environment | Agent
  ) -> list[Trajectory]:
    played = await self._stage.play(
      self._generator,
      environment,
      prompt,
      member=member,
      sampling=self._config.sampling,
      seed=self._config.seed,
      max_turns=self._config.max_turns,
      max_trajectory_tokens=self._config.max_trajectory_tokens,
      progress=self._progress[prompt.index][member],
      limits=self._config.limits,
    )
    return [
      shapes.shape(trajectory, self._config.shaping)
      for trajectory in played.trajectories
    ]

  def _complete(self, group: Group) -> None:
    """A running group goes to the buffer, or is dropped by the filter."""
    kept = self._keep is None or self._keep(group)
    index = group.prompt.index
    with self._buffer.lock:
      if self._ended:
        return
      self._failures_in_a_row = 0
      self._running.remove(index)
      del self._progress[index]
      if kept:
        self._admission.accept()
        self._buffer.put(group)
      else:
        self._admission.give_back("rejected")
        self._dropped[index] = "rejected"

  def _fail(self, index: int, error: Exception) -> None:
    """A running group is dropped; raises when that happened too often."""
    with self._buffer.lock:
      if self._ended:
        return
      named = isinstance(error, EpisodeError)
      kind = error.kind if named else type(error).__name__
      self._failures[kind] += 1
      self._failures_in_a_row += 1
      self._running.remove(index)
      del self._progress[index]
      self._admission.give_back("failed")
      self._dropped[index] = f"failed: {error!r}"
      self._told.add(f"prompt {index} failed ({kind}) and is dropped", error)
      if self._failures_in_a_row >= self._config.max_failures_in_a_row:
        raise EpisodesFailed(
          f"{self._failures_in_a_row} groups failed in a row; the last was "
          f"prompt {index}: {words(error)}"
        ) from error

  def _on_refused(self, group: Group) -> None:
    """An accepted group waits again; in the learner's thread, lock held."""
    self._admission.refuse()
    heapq.heappush(self._waiting, group.prompt.index)
    self._notify()

  def _on_task_done(self, task: asyncio.Task[None]) -> None:
    self._tasks.discard(task)
    if not task.cancelled():
      self._error = self._error or task.exception()
    self._wake.set()

  def _notify(self) -> None:
    """Wakes the dispatch loop from any thread; lock held."""
    if self._loop is not None:
      self._loop.call_soon_threadsafe(self._wake.set)

  async def _stop(self) -> None:
    """Cancels what runs; its prompts wait again, as a snapshot would say."""
    with self._buffer.lock:
      self._ended = True
      self._loop = None
      while self._running:
        self._admission.give_back("cancelled")
        heapq.heappush(self._waiting, self._running.pop())
      self._buffer.close()
    self._moved.set()
    tasks = list(self._tasks)
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    self._told.close()
