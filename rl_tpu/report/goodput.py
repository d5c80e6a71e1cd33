"""Where the time of a run went, by part, and how much of it was good.

  goodput = seconds in which the learner trained batches that the run kept
            / seconds of the loop, those of batches lost to a crash included

The learner's seconds are training, waiting for trajectories, handing weights
over, checkpoints, evaluations that hold it up, compiling, and the rest (logs,
samples). `shares` are those of all its seconds, with what restarts lost as
`lost`. What comes before the first batch and after the last is in neither. The
generator's are
generating, prefilling, taking weights (with recomputing interrupted sequences)
and idling. Token goodput is the share of sampled tokens that were trained on.
"""

from collections.abc import Sequence
from typing import Any

from rl_tpu.metrics import Row

Bar = tuple[str, str, float, float]
"""Part, kind, start, end."""


def account(
  rows: Sequence[Row], bars: Sequence[Bar], starts: Sequence[dict[str, Any]]
) -> dict[str, Any]:
  """Seconds by part and kind, and the shares.

  Args:
    rows: of metrics.csv.
    bars: of events.jsonl.
    starts: of starts.jsonl.
  """
  total = max((row["seconds"] for row in rows if "seconds" in row), default=0.0)
  parts: dict[str, dict[str, float]] = {}
  for part, kind, start, end in bars:
    # What came before the first batch was asked for is not the loop's.
    seconds = max(end, 0.0) - max(start, 0.0)
    kinds = parts.setdefault(part, {})
    kinds[kind] = kinds.get(kind, 0.0) + seconds
  for part, kinds in parts.items():
    rest = "other" if part == "learner" else "idle"
    kinds[rest] = max(total - sum(kinds.values()), 0.0)
  lost = sum(start.get("lost_seconds", 0.0) for start in starts)
  whole = total + lost
  learner = parts.get("learner", {})
  trained = learner.get("train", 0.0)
  spent = {**learner, "lost": lost}
  return {
    "seconds": total,
    "lost_seconds": lost,
    "starts": len(starts),
    "parts": parts,
    "shares": {kind: s / whole for kind, s in spent.items()} if whole else {},
    "goodput": trained / whole if whole else None,
    "token_goodput": _tokens(rows),
  }


def _tokens(rows: Sequence[Row]) -> float | None:
  """Trained tokens over sampled ones; evaluations sample some too."""
  trained = sampled = before = 0.0
  for row in rows:
    if "generated_tokens_per_second" in row:
      seconds = row["seconds"] - before
      before = row["seconds"]
      trained += row["action_tokens"]
      sampled += row["generated_tokens_per_second"] * seconds
  return trained / sampled if sampled else None
