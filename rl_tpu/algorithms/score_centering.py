r"""Score centering, a one-policy loss: ratio r = target/behavior.

    loss = - sum_t A_t [ sg(w_t) log target(a_t | s_t) - term_t ]
             / number of action tokens
    term = sum_v sg(c_v) log target(v | s_t),   E_behavior[w s] = grad term

with w = f(r) of the token taken and c_v from the same f, over the sampler's
head and a tail in proportion to the target: `ops.centering`. Marek and Ryabinin
2026, arXiv:2609.20807. A constant reward then moves nothing in expectation,
whatever f is; what is left is the covariance of reward and score under the
behavior policy. That makes no off-policy correction by itself: where data is
stale the paper composes it with `truncate` or `mask`.

`correction` is f, with `centering=False` the baseline of the same name:

| correction | f(r) | known as | band |
|---|---|---|---|
| none | 1 | policy gradient | |
| is | r | importance sampling; its term is 0 | |
| truncate | r held in [low, high] | TIS, CISPO | [0, 2] |
| mask | r in [low, high], else 0 | MIS, IcePop elsewhere | [0.5, 5] |
| mask_unit | 1 in [low, high], else 0 | the authors' IcePop | [0.5, 5] |
| ppo | r where PPO's clip does not bind, else 0 | PPO | [0.8, 1.2] |
| dapo | the same, clip-higher | DAPO | [0.8, 1.28] |

The band is the paper's (`mask_unit` has none there and takes mask's). A token
whose weight is 0 still counts in the denominator and still receives its term.
f must be a function of r and of what does not depend on the token taken (the
advantage's sign, with one centering for each sign): weights of a whole
sequence (GSPO, TOPR), and masks on |target - behavior| (DPPO), which vary
inside the tail, are other files and take no centering.

The paper's rewards are +-1: with `group_mean` that doubles the advantages of
0 and 1; here the environment decides. A filtered sampler (top-k, top-p) is
centered exactly on its support if the head holds all of it and the target is
normalised over it too; set `top_k=0` then.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_tpu import ops
from rl_tpu.types import Batch, Estimate, PolicyOutputs

REQUIRES = frozenset({"target_topk_logp"})
_BANDS = {
  "none": (0.0, math.inf),
  "is": (0.0, math.inf),
  "truncate": (0.0, 2.0),
  "mask": (0.5, 5.0),
  "mask_unit": (0.5, 5.0),
  "ppo": (0.8, 1.2),
  "dapo": (0.8, 1.28),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What score centering may be varied in."""

  correction: Literal[
    "none", "is", "truncate", "mask", "mask_unit", "ppo", "dapo"
  ] = "none"
  """The weight f of the ratio target/behavior, by name."""
  low: float | None = None
  """Lower end of its band, >= 0 and at most 1; None: the paper's."""
  high: float | None = None
  """Upper end of its band, >= 1; None: the paper's."""
  dual_clip: float | None = 3.0
  """Of ppo and dapo: a token with A < 0 has weight 0 above this ratio, > 1;
  None: no such bound."""
  centering: bool = True
  """Subtract the score's mean; off, the correction is a baseline."""
  top_k: int = 128
  """Size of the sampler's head, >= 0; 0: the head is the whole support and
  centering exact. 32 gave the paper's results as well."""
  baseline: Literal["none", "group_mean", "leave_one_out", "group", "batch"] = (
    "group_mean"
  )
  """How rewards become advantages; see `ops.outcome_advantages`. The paper
  subtracts the mean of the group, itself included, and divides by nothing."""

  def __post_init__(self):
    names, dual = tuple(_BANDS), self.dual_clip
    ops.check_fields(
      self,
      (
        "correction",
        self.correction in names,
        f"one of {names}: functions of target/behavior at one token; masks on "
        "|target - behavior| (tv, DPPO) and sequence weights have no centering",
      ),
    )
    low, high = self.band
    fixed = self.correction in ("none", "is")
    band = "None, for this correction has no band" if fixed else None
    ops.check_fields(
      self,
      (
        "low",
        self.low is None or (not fixed and 0 <= low <= 1),
        band or "in [0, 1] or None",
      ),
      (
        "high",
        self.high is None or (not fixed and high >= 1),
        band or ">= 1 or None",
      ),
      ("dual_clip", dual is None or dual > 1, "> 1 or None"),
      ("top_k", self.top_k >= 0, ">= 0"),
      ("baseline", self.baseline in ops.BASELINES, f"one of {ops.BASELINES}"),
    )

  @property
  def band(self) -> tuple[float, float]:
    """(low, high), the paper's where nothing else was said."""
    low, high = _BANDS[self.correction]
    return (
      low if self.low is None else self.low,
      high if self.high is None else self.high,
    )


def requires(config: Config) -> frozenset[str]:
  """The head under the target policy, only where scores are centered."""
  return REQUIRES if config.centering else frozenset()


def advantages(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """Rewards made into advantages by the recipe named in the config."""
  return ops.outcome_advantages(batch, config.baseline)


def loss(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> tuple[Estimate, dict[str, Estimate]]:
  """Minus advantage times the weighted, centered score."""
  ops.check_shapes(batch, outputs)
  mask = batch.action_mask
  advantage = ops.action_advantages(batch)
  target_logp = jnp.where(mask, outputs.target_logp, 0.0)
  behavior_logp = ops.known_logp(batch.behavior_logp, target_logp)
  log_ratio = ops.log_ratio(target_logp, behavior_logp, mask)
  weigh = functools.partial(_weight, config=config)
  weight = jax.lax.stop_gradient(weigh(target_logp, behavior_logp, advantage))
  score = weight * target_logp
  metrics = {
    "ratio": ops.estimate(ops.ratio(log_ratio), mask),
    "weight": ops.estimate(weight, mask),
    "weight_masked": ops.estimate(weight == 0, mask),
    **ops.behavior_metrics(outputs, batch),
  }
  if config.centering:
    centered = ops.center(
      ops.required(outputs.target_topk_logp, "outputs.target_topk_logp"),
      ops.required(batch.behavior_topk_logp, "batch.behavior_topk_logp"),
      ops.head_slots(batch),
      functools.partial(weigh, advantage=advantage[..., None]),
      exact=config.top_k == 0,
    )
    score = score - centered.term
    metrics |= ops.centering_metrics(centered, weight, target_logp, batch)
  return ops.estimate(-advantage * score, mask), metrics


def _weight(
  target_logp: Float[Array, "*S"],
  behavior_logp: Float[Array, "*S"],
  advantage: Float[Array, "*#S"],
  config: Config,
) -> Float[Array, "*S"]:
  """Of the token taken and, for its mean, of every other."""
  mode = "ppo" if config.correction == "dapo" else config.correction
  return ops.correction_weight(
    target_logp, behavior_logp, mode, *config.band, advantage, config.dual_clip
  )
