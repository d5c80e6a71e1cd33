"""What earlier trajectories earned: the running means of critic-free baselines.

    b_n = mean of the last `window` outcomes in n's scope before n's batch

The scope is a prompt, or the whole run. A batch is compared with what was
consumed before it and joins the history afterwards, so that no baseline depends
on the actions it judges, nor on which trajectory of a batch comes first.

A prompt is known by a digest of its tokens: an epoch brings the same text under
another index. Memory is linear in the distinct prompts consumed, about 350
bytes each at a window of 8. Nothing is forgotten, because epochs visit prompts
in turn: the one seen longest ago is as likely as any to come back next.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from rl_tpu.types import Group, Prompt

_KEY_BYTES = 16


class History:
  """The last outcomes of every prompt, or of the run; part of a checkpoint."""

  def __init__(self, *, scope: Literal["prompt", "global"], window: int):
    """Nothing is known yet; `window` >= 1 outcomes are remembered a scope."""
    self._per_prompt = scope == "prompt"
    self._window = window
    self._outcomes: dict[bytes, np.ndarray] = {}

  def consume(self, groups: Sequence[Group]) -> Float[np.ndarray, " N"]:
    """The baselines of a batch, which then joins the history; call it once.

    Returns:
      One number per trajectory, group after group; NaN where the scope has no
      outcome yet.
    """
    baselines = np.repeat(
      [self._mean(group.prompt) for group in groups],
      [len(group.trajectories) for group in groups],
    )
    for group in groups:
      key = self._key(group.prompt)
      latest = [np.float32(t.outcome) for t in group.trajectories]
      known = self._outcomes.get(key, [])
      outcomes = [*known, *latest][-self._window :]
      self._outcomes[key] = np.asarray(outcomes, np.float32)
    return baselines.astype(np.float32)

  def state(self) -> dict[str, np.ndarray]:
    """Everything in it as flat arrays, none empty once a batch was consumed."""
    keys = np.frombuffer(b"".join(self._outcomes), np.uint8)
    counts = [len(outcomes) for outcomes in self._outcomes.values()]
    return {
      "history_keys": keys,
      "history_counts": np.asarray(counts, np.int32),
      "history_outcomes": np.concatenate(
        [np.zeros(0, np.float32), *self._outcomes.values()]
      ),
    }

  def restore(self, state: dict[str, np.ndarray]) -> None:
    """Takes over from `state`, which may hold other arrays too."""
    digests = np.asarray(state["history_keys"]).reshape(-1, _KEY_BYTES)
    ends = np.cumsum(state["history_counts"])
    outcomes = np.split(np.asarray(state["history_outcomes"]), ends[:-1])
    self._outcomes = {
      digest.tobytes(): known
      for digest, known in zip(digests, outcomes, strict=True)
    }

  def _mean(self, prompt: Prompt) -> float:
    known = self._outcomes.get(self._key(prompt))
    return np.nan if known is None else float(np.mean(known, dtype=np.float64))

  def _key(self, prompt: Prompt) -> bytes:
    """A digest of what has a window of its own."""
    tokens = np.asarray(prompt.tokens, np.int32).tobytes()
    told_apart = tokens if self._per_prompt else b""
    return hashlib.blake2b(told_apart, digest_size=_KEY_BYTES).digest()
