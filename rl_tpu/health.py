"""What a run's figures say about its health, as rules.

AReaL's own: both importance weights average near 1; with one minibatch the
ratio is exactly 1; more than 5% of trajectories without a stop token is a
warning; usual staleness limits are 2 to 8. From its users' complaints: updates
that were not finite, staleness beyond the limit, generator and learner that
disagree where nothing is stale, failed episodes, a reward that collapsed.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_tpu.metrics import Row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warning:
  """A rule that a run breaks."""

  rule: str
  """Its short name."""
  batches: int
  """In how many batches; 0 where it is about the whole run."""
  first: int
  """The first of them."""
  worst: float
  """The value farthest from what is allowed."""
  text: str
  """What is allowed, and where to look."""

  @property
  def said(self) -> str:
    """All of it in a sentence; a text that begins with "of" has a share."""
    if self.text.startswith("of "):
      what = f"{self.worst:.0%} {self.text}"
    else:
      what = f"{self.worst:.4g} at worst: {self.text}"
    if not self.batches:
      return f"{what}."
    return f"{what}. In {self.batches} batches, first in {self.first}."


@dataclasses.dataclass(frozen=True)
class _Rule:
  metric: str
  low: float
  high: float
  text: str
  applies: Callable[[Mapping[str, Any]], bool] = lambda config: True


_INF = float("inf")
_GAP = 0.3
"""Of training reward and held-out accuracy."""
_RULES = (
  _Rule(
    "behavior_weight",
    0.9,
    1.1,
    "should average near 1 (0.9 to 1.1): lower max_staleness or the learning "
    "rate, or look at engine mismatch",
  ),
  _Rule(
    "ratio",
    0.9,
    1.1,
    "should average near 1 (0.9 to 1.1): fewer minibatches or a lower learning "
    "rate",
  ),
  _Rule(
    "ratio",
    0.999,
    1.001,
    "must be 1 with one minibatch and a recomputed proximal policy: the two "
    "forward passes of the learner disagree",
    lambda config: (
      _of(config, "learner", "minibatches") == 1
      and _of(config, "algorithm", "proximal") == "recompute"
    ),
  ),
  _Rule(
    "truncated",
    -_INF,
    0.05,
    "of trajectories end without a stop token (at most 5%): raise "
    "sampling.max_tokens, or reward shorter answers",
  ),
  _Rule(
    "trajectories_masked",
    -_INF,
    0.5,
    "of the batch's trajectories do not train, their behavior weights are out "
    "of bounds (at most half)",
  ),
  _Rule(
    "zero_advantage",
    -_INF,
    0.9,
    "of tokens have advantage 0 (at most 90%): groups are all solved or all "
    "failed, so harder or easier questions; or answers are all alike (entropy "
    "near 0), so less of a warm start",
  ),
  _Rule(
    "clip_fraction",
    -_INF,
    0.3,
    "of tokens are clipped (at most 30%): the update is larger than its trust "
    "region",
  ),
  _Rule("nonfinite_updates", -_INF, 0.0, "updates skipped, not finite (0)"),
  _Rule("nonfinite_logp", -_INF, 0.0, "sampled tokens with a NaN logp (0)"),
  _Rule("failed_groups", -_INF, 0.0, "groups dropped, an episode failed (0)"),
)


def warnings(rows: Sequence[Row], config: Mapping[str, Any]) -> list[Warning]:
  """The rules that a run breaks, those broken most often first."""
  found = [
    warning
    for rule in _RULES
    if rule.applies(config) and (warning := _check(rule, rows)) is not None
  ]
  found += _of_staleness(rows, config) + _of_engines(rows, config)
  found += _of_collapse(rows) + _of_memory(rows)
  return sorted(found, key=lambda warning: -warning.batches)


def _of(config: Mapping[str, Any], *path: str) -> Any:
  value: Any = config
  for name in path:
    value = value.get(name) if isinstance(value, Mapping) else None
  return value


def _check(rule: _Rule, rows: Sequence[Row]) -> Warning | None:
  beyond = [
    (row["batch"], row[rule.metric])
    for row in rows
    if rule.metric in row and not rule.low <= row[rule.metric] <= rule.high
  ]
  if not beyond:
    return None
  off = lambda value: max(rule.low - value, value - rule.high)  # noqa: E731
  return Warning(
    rule=rule.metric,
    batches=len(beyond),
    first=int(beyond[0][0]),
    worst=max((value for _, value in beyond), key=off),
    text=rule.text,
  )


def _of_staleness(
  rows: Sequence[Row], config: Mapping[str, Any]
) -> list[Warning]:
  limit = config["max_staleness"]
  found = []
  if config["schedule"] != "async":
    return found
  if limit is None or limit > 8:
    found.append(
      Warning(
        rule="max_staleness",
        batches=0,
        first=0,
        worst=float("inf") if limit is None else limit,
        text="is beyond the usual 2 to 8: compare with a run at 4",
      )
    )
  if limit is not None:
    text = f"consumed tokens lag more than config.max_staleness = {limit}"
    over = _check(_Rule("staleness_max", -_INF, limit, text), rows)
    found += [over] if over else []
  return found


def _of_engines(
  rows: Sequence[Row], config: Mapping[str, Any]
) -> list[Warning]:
  """At staleness 0 behavior and proximal are the same weights."""
  mismatch = _of(config, "engine", "mismatch") or {}
  grids = {mismatch.get(name, "none") for name in ("weights", "kv")}
  if grids != {"none"} or mismatch.get("weight_noise"):
    return []
  fresh = [row for row in rows if row.get("staleness_max") == 0.0]
  text = (
    "in a batch without staleness generator and learner should agree (within "
    "0.01): temperature, precision, or a cache kept over new weights"
  )
  found = _check(_Rule("behavior_proximal_kl", -0.01, 0.01, text), fresh)
  return [found] if found else []


def _of_collapse(rows: Sequence[Row]) -> list[Warning]:
  """The mean reward of the last tenth against the best tenth before it."""
  trained = [row for row in rows if "reward" in row]
  tenth = max(len(trained) // 10, 5)
  if len(trained) < 2 * tenth:
    return []
  means = [
    sum(row["reward"] for row in trained[i : i + tenth]) / tenth
    for i in range(0, len(trained) - tenth + 1, tenth)
  ]
  last = sum(row["reward"] for row in trained[-tenth:]) / tenth
  best = max(means)
  low = min(min(means), 0.0)
  if last - low >= 0.5 * (best - low):
    return []
  return [
    Warning(
      rule="reward",
      batches=tenth,
      first=int(trained[-tenth]["batch"]),
      worst=last,
      text=f"fell to less than half of the best stretch's {best:.3g}",
    )
  ]


def _of_memory(rows: Sequence[Row]) -> list[Warning]:
  """The last held-out accuracy against the rewards since the one before it.

  Only where rewards, before any shaping, are from 0 to 1 as accuracies are.
  """
  evaluated = [row for row in rows if "heldout_accuracy" in row]
  rewards = {
    row["batch"]: row.get("env_unshaped_reward", row["reward"])
    for row in rows
    if "reward" in row
  }
  if len(evaluated) < 2 or not all(0 <= r <= 1 for r in rewards.values()):
    return []
  first, last = (row["batch"] for row in evaluated[-2:])
  recent = [r for batch, r in rewards.items() if first < batch <= last]
  heldout = evaluated[-1]["heldout_accuracy"]
  gap = sum(recent) / max(len(recent), 1) - heldout
  if gap <= _GAP:
    return []
  return [
    Warning(
      rule="heldout_accuracy",
      batches=0,
      first=0,
      worst=gap,
      text="is how far held-out accuracy is below the reward of training (at "
      f"most {_GAP}): the policy knows the training questions by heart, so "
      "bring more of them or train less",
    )
  ]
