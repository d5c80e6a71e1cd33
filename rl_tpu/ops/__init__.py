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

from rl_tpu.ops.centering import (
  CORRECTIONS,
  Centering,
  center,
  centering_metrics,
  centering_term,
  correction_weight,
  head_slots,
  with_tail,
)
from rl_tpu.ops.checks import (
  check_choices,
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
from rl_tpu.ops.gae import (
  gae,
  lambda_returns,
  length_adaptive_lambda,
  so_far,
  span_total,
  turn_ends,
  turn_ids,
  value_error,
  value_loss,
  whiten,
)
from rl_tpu.ops.hl_gauss import (
  Support,
  ValueLossConfig,
  gaussian_mass,
  histogram_mean,
  hl_gauss_loss,
)
from rl_tpu.ops.kl import (
  KL_ESTIMATORS,
  behavior_reference_kl,
  target_reference_kl,
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
from rl_tpu.ops.trajectories import (
  action_count,
  action_mean,
  action_sum,
  drop_truncated,
  masked_trajectories,
)

__all__ = [
  "BASELINES",
  "CORRECTIONS",
  "KL_ESTIMATORS",
  "MAX_LOG_RATIO",
  "WEIGHT_MODES",
  "Centering",
  "Support",
  "ValueLossConfig",
  "action_advantages",
  "action_count",
  "action_mean",
  "action_sum",
  "behavior_metrics",
  "behavior_reference_kl",
  "center",
  "centering_metrics",
  "centering_term",
  "check_choices",
  "check_fields",
  "check_shapes",
  "clipped_surrogate",
  "correction_weight",
  "divide_or_zero",
  "drop_truncated",
  "estimate",
  "gae",
  "gaussian_mass",
  "group_baseline",
  "group_std",
  "head_slots",
  "histogram_mean",
  "hl_gauss_loss",
  "importance_weight",
  "known_logp",
  "label_logp",
  "lambda_returns",
  "length_adaptive_lambda",
  "log_ratio",
  "masked_mean_std",
  "masked_trajectories",
  "next_tokens",
  "outcome_advantages",
  "per_token",
  "ratio",
  "required",
  "return_to_go",
  "reverse_accumulate",
  "shift_to_logits",
  "shift_to_tokens",
  "so_far",
  "span_total",
  "target_reference_kl",
  "token_logp",
  "trajectory_sum",
  "turn_ends",
  "turn_ids",
  "value_error",
  "value_loss",
  "whiten",
  "with_tail",
]
