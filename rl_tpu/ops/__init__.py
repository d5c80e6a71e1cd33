r"""Pure sequence maths: the only place that shifts, masks and exponentiates.

Everything here is a function of arrays. Losses are written with it, so that
each of the following is decided once:

* Alignment. Entry t of a per-token array speaks of `tokens[t]`; the logits at
  t - 1 predict it. Only `shift_to_logits` and `shift_to_tokens` move anything.
* Packing. A row holds several trajectories; nothing crosses the border of
  `trajectory_ids`.
* Masks. `where` comes before `exp` and before any product, so that NaN or
  infinity off the action mask reaches neither a value nor a gradient.
* Ratios. `exp` of a log ratio is bounded by `MAX_LOG_RATIO`.
* Denominators. A sum travels with its count; no epsilon anywhere: what has no
  spread or no members is 0 by name.
"""

from rl_tpu.ops.checks import (
  check_fields,
  check_shapes,
  required,
)
from rl_tpu.ops.credit import (
  BASELINES,
  action_advantages,
  group_baseline,
  group_std,
  outcome_advantages,
  return_to_go,
)
from rl_tpu.ops.logp import (
  known_logp,
  label_logp,
  next_tokens,
  token_logp,
)
from rl_tpu.ops.ratios import (
  MAX_LOG_RATIO,
  WEIGHT_MODES,
  behavior_metrics,
  clipped_surrogate,
  importance_weight,
  log_ratio,
  ratio,
)
from rl_tpu.ops.rows import (
  per_token,
  reverse_accumulate,
  shift_to_logits,
  shift_to_tokens,
  trajectory_sum,
)
from rl_tpu.ops.sums import (
  divide_or_zero,
  estimate,
  masked_mean_std,
)

__all__ = [
  "BASELINES",
  "MAX_LOG_RATIO",
  "WEIGHT_MODES",
  "action_advantages",
  "behavior_metrics",
  "check_fields",
  "check_shapes",
  "clipped_surrogate",
  "divide_or_zero",
  "estimate",
  "group_baseline",
  "group_std",
  "importance_weight",
  "known_logp",
  "label_logp",
  "log_ratio",
  "masked_mean_std",
  "next_tokens",
  "outcome_advantages",
  "per_token",
  "ratio",
  "required",
  "return_to_go",
  "reverse_accumulate",
  "shift_to_logits",
  "shift_to_tokens",
  "token_logp",
  "trajectory_sum",
]
