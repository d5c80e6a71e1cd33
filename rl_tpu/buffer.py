"""Finished groups on their way from the actor to the learner, oldest first.

Age is the prompt's index, which is the order of dispatch. `take` looks at
staleness once more, because admission (`staleness.py`) bounds it only for
groups that are consumed in that order and stragglers are not. A token's
staleness is `version - token_version`; what exceeds the limit is

    refuse        handed back: its prompt is attempted again
    mask_tokens   no longer an action token; a group with a trajectory that
                  has no other tokens is refused
    allow         trained all the same

and counted in every case.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterable
from typing import Literal, get_args

import numpy as np

from rl_tpu.staleness import staleness_bound
from rl_tpu.types import Group, Trajectory

OnStale = Literal["refuse", "mask_tokens", "allow"]


class Closed(RuntimeError):
  """No batch will come any more."""


class Buffer:
  """Groups between one actor and one learner, in two threads or in one.

  `lock` guards everything in it. The actor joins its own books to the same
  lock, so that a snapshot of both is one moment.
  """

  def __init__(
    self,
    *,
    groups_per_batch: int,
    max_staleness: int | None,
    on_stale: OnStale = "refuse",
  ):
    if groups_per_batch < 1:
      raise ValueError(
        f"Buffer.groups_per_batch is {groups_per_batch!r}; it must be >= 1"
      )
    if on_stale not in get_args(OnStale):
      raise ValueError(
        f"Buffer.on_stale is {on_stale!r}; it must be one of "
        f"{get_args(OnStale)}"
      )
    self.groups_per_batch = groups_per_batch
    self.on_stale: OnStale = on_stale
    self.lock = threading.RLock()
    self.on_refused: Callable[[Group], None] = lambda group: None
    """Called with each refused group, `lock` held; the actor sets it."""
    self.counts: collections.Counter[str] = collections.Counter()
    """Over the whole run: groups_refused, groups_allowed, tokens_masked."""
    self._limit = staleness_bound(max_staleness)
    self._changed = threading.Condition(self.lock)
    self._groups: dict[int, Group] = {}
    self._error: BaseException | None = None
    self._closed = False

  def __len__(self) -> int:
    """Groups in it."""
    return len(self._groups)

  def put(self, group: Group) -> None:
    """Adds a finished group; its prompt must not be in the buffer yet."""
    with self.lock:
      if self._closed:
        raise Closed("a group was put into a closed buffer") from self._error
      index = group.prompt.index
      assert index not in self._groups, f"prompt {index} is in the buffer"
      self._groups[index] = group
      self._changed.notify_all()

  def take(self, version: int, timeout: float | None = None) -> list[Group]:
    """Removes the oldest batch that `version` may train on; waits for it.

    Args:
      version: of the weights that will be trained.
      timeout: seconds to wait at most; 0 where nobody else could put a group,
        as on the actor's own event loop.

    Returns:
      `groups_per_batch` groups by ascending prompt index.

    Raises:
      TimeoutError: no full batch in time.
      Closed: it was closed without a full batch, or another part failed,
        whose error is the cause.
    """
    with self.lock:
      if not self._changed.wait_for(lambda: self._ready(version), timeout):
        raise TimeoutError(
          f"{len(self)} of {self.groups_per_batch} groups were there for "
          f"version {version} after {timeout} s"
        )
      oldest = sorted(self._groups)[: self.groups_per_batch]
      return [self._release(self._groups.pop(i), version) for i in oldest]

  def may_refuse(self, version: int) -> bool:
    """Whether a group in it would be refused at `version`."""
    with self.lock:
      return any(self._unfit(g, version) for g in self._groups.values())

  def fail(self, error: BaseException) -> None:
    """Makes every `take`, waiting or to come, raise because of `error`."""
    with self.lock:
      self._error = error
      self.close()

  def close(self) -> None:
    """Nothing will be put any more; full batches can still be taken."""
    with self.lock:
      self._closed = True
      self._changed.notify_all()

  def snapshot(self) -> list[Group]:
    """Its groups, oldest first."""
    with self.lock:
      return [self._groups[index] for index in sorted(self._groups)]

  def restore(self, groups: Iterable[Group]) -> None:
    """Holds exactly `groups` from now on."""
    with self.lock:
      self._groups = {}
      for group in groups:
        self.put(group)

  def _ready(self, version: int) -> bool:
    """Refuses what is unfit, then says whether a batch is there."""
    if self._error is not None:
      raise Closed(f"no batch will come: {self._error!r}") from self._error
    for group in self.snapshot():
      if self._unfit(group, version):
        del self._groups[group.prompt.index]
        self.counts["groups_refused"] += 1
        self.on_refused(group)
    if len(self) >= self.groups_per_batch:
      return True
    if self._closed:
      raise Closed(
        f"the buffer was closed with {len(self)} of {self.groups_per_batch} "
        "groups of a batch"
      )
    return False

  def _unfit(self, group: Group, version: int) -> bool:
    """Whether `version` must not train on the group at all."""
    if self.on_stale == "allow":
      return False
    if self.on_stale == "refuse":
      return group.staleness(version) > self._limit
    return any(
      version - int(t.token_version[t.action_mask].max()) > self._limit
      for t in group.trajectories
    )

  def _release(self, group: Group, version: int) -> Group:
    """The group as the learner gets it."""
    if group.staleness(version) <= self._limit:
      return group
    if self.on_stale == "allow":
      self.counts["groups_allowed"] += 1
      return group
    masked = [_mask(t, version, self._limit) for t in group.trajectories]
    self.counts["tokens_masked"] += sum(
      int(whole.action_mask.sum() - part.action_mask.sum())
      for whole, part in zip(group.trajectories, masked, strict=True)
    )
    return dataclasses.replace(group, trajectories=tuple(masked))


def _mask(trajectory: Trajectory, version: int, limit: float) -> Trajectory:
  """Makes tokens staler than `limit` context.

  A reward on one of them moves to the next action token that is left (or the
  last): the outcome stays whole, and rewards stay on action tokens.
  """
  fresh = trajectory.action_mask & (version - trajectory.token_version <= limit)
  ids, logp = trajectory.behavior_topk_ids, trajectory.behavior_topk_logp
  if ids is not None and logp is not None:
    ids = np.where(fresh[:, None], ids, np.int32(-1))
    logp = np.where(fresh[:, None], logp, np.float32(-np.inf))
  left = np.flatnonzero(fresh)
  after = np.searchsorted(left, np.arange(len(trajectory)))
  rewards = np.zeros_like(trajectory.rewards)
  np.add.at(rewards, left[np.minimum(after, len(left) - 1)], trajectory.rewards)
  zero = np.float32(0)
  return dataclasses.replace(
    trajectory,
    action_mask=fresh,
    behavior_logp=np.where(fresh, trajectory.behavior_logp, zero),
    token_version=np.where(fresh, trajectory.token_version, np.int32(-1)),
    rewards=rewards,
    behavior_topk_ids=ids,
    behavior_topk_logp=logp,
  )
