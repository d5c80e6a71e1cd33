r"""How far the weights that sample may fall behind the weights that learn.

Version v = batches consumed. With B groups in a batch and a limit of n
versions, a new group may start while (AReaL, arXiv 2505.24298, Eq. 3)

    accepted + running < (n + v + 1) * B.

Why it bounds staleness: the group that starts as number k (from 0) has
k < (n + v + 1) * B; consumed in the order of dispatch it is in batch
floor(k / B), trained at version floor(k / B) <= n + v. Groups that never reach
the learner (failed, rejected by a filter, refused as stale) give their place
back, so that they cannot starve it.

The bound needs consumption in the order of dispatch. A straggler breaks that
order, which is why the buffer looks at staleness a second time.
"""

import collections
import dataclasses
import math
from typing import Any


def staleness_bound(max_staleness: int | None) -> float:
  """The limit as a number: infinity for None; ValueError below 0."""
  if max_staleness is None:
    return math.inf
  if max_staleness < 0:
    raise ValueError(
      f"max_staleness is {max_staleness!r}; it must be >= 0, or None for no "
      "limit"
    )
  return max_staleness


@dataclasses.dataclass(kw_only=True)
class Admission:
  """Counts groups and says whether one more may start.

  A pure state machine: no locks, clocks or I/O; whoever owns it serialises the
  calls. A transition that its counts do not allow is an AssertionError.
  """

  groups_per_batch: int
  """B, groups that one version consumes, >= 1."""
  max_staleness: int | None
  """n, versions that a group may lag, >= 0; 0 is synchronous, None no limit."""
  max_running: int | None = None
  """Most groups in flight at once, >= 1; None is no limit."""
  accepted: int = 0
  """Groups handed to the buffer over the whole run, the refused ones off."""
  running: int = 0
  """Groups in flight."""
  given_back: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  """Places given back over the whole run, by reason."""

  def __post_init__(self):
    staleness_bound(self.max_staleness)
    for name in ("groups_per_batch", "max_running"):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ValueError(f"Admission.{name} is {value!r}; it must be >= 1")

  def capacity(self, version: int) -> float:
    """Groups that may start now, >= 0; infinite where nothing limits them."""
    bound = staleness_bound(self.max_staleness)
    room = (bound + version + 1) * self.groups_per_batch - self.accepted
    if self.max_running is not None:
      room = min(room, self.max_running)
    return max(room - self.running, 0)

  def dispatch(self, version: int) -> None:
    """One group starts."""
    assert self.capacity(version) > 0, f"no capacity at version {version}"
    self.running += 1

  def accept(self) -> None:
    """One running group goes to the buffer."""
    self._leave()
    self.accepted += 1

  def give_back(self, reason: str) -> None:
    """One running group ends without reaching the buffer."""
    self._leave()
    self.given_back[reason] += 1

  def refuse(self) -> None:
    """One accepted group turned out too stale when it was to be consumed."""
    assert self.accepted > 0, "no group was accepted"
    self.accepted -= 1
    self.given_back["stale"] += 1

  def snapshot(self) -> dict[str, Any]:
    """What `resume` cannot derive, as plain values."""
    return {"given_back": dict(self.given_back)}

  def resume(self, version: int, buffered: int, state: dict[str, Any]) -> None:
    """Continues at `version` with `buffered` groups in the buffer.

    `accepted` must count what earlier lives of the run consumed; from 0 the
    capacity would be too large by `version * groups_per_batch`.
    """
    self.accepted = version * self.groups_per_batch + buffered
    self.running = 0
    self.given_back = collections.Counter(state["given_back"])

  def _leave(self) -> None:
    assert self.running > 0, "no group is running"
    self.running -= 1
