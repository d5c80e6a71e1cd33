"""Trajectories that a run keeps for people to read.

All of them would be more than the weights. A run keeps those of at most 60 of
its batches, evenly spaced, at most four of each and 1,024 tokens of each: the
one with most versions, the lowest and the highest reward, and the longest. They
are chosen to be looked at, and say nothing about averages.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from rl_tpu.models.tokenizer import Tokenizer
from rl_tpu.types import Batch, Group, Trajectory

BATCHES = 60
TOKENS = 1024


def due(version: int, batches: int) -> bool:
  """Whether the batch that made this version is one to keep some of."""
  return (version - 1) % -(-batches // BATCHES) == 0


def describe(
  groups: Sequence[Group],
  batch: Batch,
  seen: Mapping[str, Float[np.ndarray, "R T"]],
  tokenizer: Tokenizer,
) -> list[dict[str, Any]]:
  """What JSON keeps of the chosen trajectories of a batch.

  Args:
    groups: that `batch` was packed from, in the same order.
    batch: on the host.
    seen: what the learner found for each of its tokens; NaN is unknown.
    tokenizer: says what a token looks like.
  """
  trajectories = [t for group in groups for t in group.trajectories]
  ids = np.asarray(batch.trajectory_ids)
  return [
    _describe(trajectories[n], tokenizer)
    | {
      name: _rounded(values[ids == n][:TOKENS]) for name, values in seen.items()
    }
    for n in _chosen(trajectories)
  ]


def _chosen(trajectories: Sequence[Trajectory]) -> list[int]:
  """Places of the few to keep, each once."""
  places = range(len(trajectories))
  outcome = lambda n: trajectories[n].outcome  # noqa: E731
  first = (
    max(places, key=lambda n: len(_versions(trajectories[n]))),
    min(places, key=outcome),
    max(places, key=outcome),
    max(places, key=lambda n: len(trajectories[n])),
  )
  return list(dict.fromkeys(first))


def _versions(trajectory: Trajectory) -> np.ndarray:
  return np.unique(trajectory.token_version[trajectory.action_mask])


def _describe(trajectory: Trajectory, tokenizer: Tokenizer) -> dict[str, Any]:
  tokens = trajectory.tokens[:TOKENS].tolist()
  return {
    "prompt": trajectory.prompt_id,
    "member": trajectory.member,
    "reward": round(trajectory.outcome, 4),
    "stop_reason": trajectory.stop_reason,
    "length": len(trajectory),
    "tokens": tokens,
    "text": [tokenizer.decode([token]) for token in tokens],
    "action": trajectory.action_mask[:TOKENS].astype(int).tolist(),
    "version": trajectory.token_version[:TOKENS].tolist(),
    "behavior_logp": _rounded(trajectory.behavior_logp[:TOKENS]),
  }


def _rounded(values: np.ndarray) -> list[float | None]:
  return [round(float(v), 4) if np.isfinite(v) else None for v in values]
