r"""SAO, a one-policy loss: ratio r = target/behavior, one trajectory a prompt.

    loss = - sum_t sg(f(r_t)) A_t log target(a_t | s_t)
             / number of action tokens
    f(r) = r  where  1 - epsilon_low < r < 1 + epsilon_high,  else 0

arXiv:2607.07508, equations 1 to 3 ("DIS"). The behavior policy is the one that
sampled each token, so a trajectory may span versions and one ratio absorbs
staleness and engine mismatch alike. The mask is hard and two-sided: it does
not depend on the sign of A, inside the band the ratio stays as weight, and a
masked token still counts in the denominator.

The paper does not say that f(r) is a constant. It has to be: without the stop
gradient the loss pushes log target the wrong way wherever it is below -1. The
same gradient comes from -f(r) A with r alive. No KL term, entropy bonus or
group: the baseline is a critic V, and with n(t) the next action token

    A_t = r_t + gamma V_n(t) - V_t + gamma lambda A_n(t)       (equations 4, 5)
    lambda = 1 - 1 / (lambda_alpha l),     l the trajectory's action tokens

over the action tokens alone, so observations cost nothing (`ops.gae`). The
critic learns the return with lambda_critic = 1, `critic_updates` times a batch,
with its attention frozen: by squared error or, which is not in the paper, by
classification (`ops.hl_gauss`). Its state is that before a token; the end of a
trajectory has value 0.

`level` holds the paper's rejected variants (appendix A.1, table 5), where a
turn is one decision: its value is the mean over its tokens or that of its last
one, l counts turns, and one advantage serves all tokens of the turn.

**Centering** (arXiv:2609.20807) composes with the mask: f weighs every token of
the sampler's head as it weighs the token taken, and the loss gains
A_t sum_v sg(c_v) log target(v | s_t); see `ops.centering`. The paper's
"clip ratio" is `clip_fraction` here, as in every loss.
"""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl_tpu import ops
from rl_tpu.types import Batch, Estimate, PolicyOutputs

REQUIRES = frozenset({"values", "target_topk_logp"})
_BANDS = {"math": (0.3, 5.0), "coding": (0.8, 3.0)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ops.ValueLossConfig):
  """What SAO may be varied in; defaults where the paper is silent are ours."""

  epsilon_low: float = 0.3
  """Ratios at or below 1 - epsilon_low are masked; an offset from 1, in
  (0, 1]. Paper: 0.3 for math, 0.8 for coding."""
  epsilon_high: float = 5.0
  """Ratios at or above 1 + epsilon_high are masked; an offset from 1, > 0.
  Paper: 5 for math, 3 for coding."""
  band: Literal["math", "coding", None] = None
  """The paper's band by name, in place of the epsilons: `math` keeps ratios in
  (0.7, 6), `coding` in (0.2, 4)."""
  closed_band: bool = False
  """Keep the ends of the band as well. The paper's prose does, its equation 3,
  followed here, does not."""
  denominator: Literal["action_tokens", "kept_tokens", "trajectories"] = (
    "action_tokens"
  )
  """What the sum is divided by: all action tokens, those not masked, or, with
  a mean over each trajectory's tokens first, trajectories. Not in the paper."""
  gamma: float = 1.0
  """Discount per action token, in (0, 1]. Not in the paper."""
  lambda_alpha: float = 1.5
  """lambda = 1 - 1 / (lambda_alpha l), > 0; infinite: lambda 1."""
  lambda_length: Literal["action", "response"] = "action"
  """What l counts: the trajectory's action tokens, or all its tokens from the
  first of them on. The paper does not define l."""
  lambda_critic: float = 1.0
  """Lambda of the critic's targets, in [0, 1]; 1: the return itself."""
  whiten: bool = False
  """Advantages to mean 0 and deviation 1 over the batch's action tokens. Not
  in the paper."""
  level: Literal["token", "step_average", "step_last"] = "token"
  """What is one decision: a token, or a turn whose value is the mean over its
  tokens or that of its last token, which alone trains the critic."""
  truncated: Literal["terminal", "mask"] = "terminal"
  """What the budget ended: an end like another, with its reward, or no part of
  the policy's loss. Not in the paper."""
  critic_updates: int = 2
  """Optimizer steps of the critic per batch, >= 1."""
  freeze: Literal["attention", "none"] = "attention"
  """Which weights of the critic are not trained after its pretraining. The
  paper is silent on norms, embeddings and head, which are trained here."""
  values: Literal["pre", "post"] = "pre"
  """Whether advantages use the critic as it was before the last of this
  batch's updates or after it. After, a trajectory's own return leaks into its
  baseline. Not in the paper."""
  centering: bool = False
  """Take the drift of the masked score out; needs the sampler's head."""
  top_k: int = 128
  """Size of that head, >= 0; 0: it is the whole support, centering exact."""

  def __post_init__(self):
    set_apart = (self.epsilon_low, self.epsilon_high) != _BANDS["math"]
    ops.check_choices(self)
    super().__post_init__()
    ops.check_fields(
      self,
      ("epsilon_low", 0 < self.epsilon_low <= 1, "in (0, 1]"),
      ("epsilon_high", self.epsilon_high > 0, "> 0"),
      (
        "band",
        self.band is None or not set_apart,
        "None where epsilon_low or epsilon_high is set",
      ),
      ("gamma", 0 < self.gamma <= 1, "in (0, 1]"),
      ("lambda_alpha", self.lambda_alpha > 0, "> 0"),
      ("lambda_critic", 0 <= self.lambda_critic <= 1, "in [0, 1]"),
      ("critic_updates", self.critic_updates >= 1, ">= 1"),
      ("top_k", self.top_k >= 0, ">= 0"),
    )

  @property
  def bounds(self) -> tuple[float, float]:
    """The ratios between which a token is kept."""
    low, high = self.epsilon_low, self.epsilon_high
    if self.band is not None:
      low, high = _BANDS[self.band]
    return 1.0 - low, 1.0 + high


def requires(config: Config) -> frozenset[str]:
  """The critic's values and, for centering, the head under the target."""
  return REQUIRES if config.centering else frozenset({"values"})


def advantages(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """GAE over action tokens, or over turns, with the length-adaptive lambda."""
  ops.check_shapes(batch, outputs)
  mask, ids = batch.action_mask, batch.trajectory_ids
  values = ops.required(outputs.values, "outputs.values")
  values = jnp.where(mask, values, 0.0)
  rewards = jnp.where(mask, batch.rewards, 0.0)
  turns = ops.turn_ids(mask, ids)
  decides = mask if config.level == "token" else ops.turn_ends(turns)
  if config.level != "token":
    rewards = ops.span_total(rewards, turns)
  if config.level == "step_average":
    size = ops.span_total(jnp.where(mask, 1.0, 0.0), turns)
    values = ops.divide_or_zero(ops.span_total(values, turns), size)
  counted = decides
  if config.lambda_length == "response":
    counted = ops.so_far(jnp.where(mask, 1.0, 0.0), ids) > 0
  lam = ops.length_adaptive_lambda(counted, ids, config.lambda_alpha)
  result = ops.gae(rewards, values, decides, ids, config.gamma, lam)
  if config.level != "token":
    result = jnp.where(mask, ops.span_total(result, turns), 0.0)
  if config.truncated == "mask":
    result = ops.drop_truncated(result, batch)
  return ops.whiten(result, mask) if config.whiten else result


def returns(
  batch: Batch, outputs: PolicyOutputs, config: Config
) -> Float[Array, "R T"]:
  """What the critic is to predict at each action token; 0 elsewhere."""
  ops.check_shapes(batch, outputs)
  return ops.lambda_returns(
    batch.rewards,
    ops.required(outputs.values, "outputs.values"),
    batch.action_mask,
    batch.trajectory_ids,
    config.gamma,
    config.lambda_critic,
  )


def loss(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> tuple[Estimate, dict[str, Estimate]]:
  """Minus advantage times the masked, and maybe centered, score."""
  ops.check_shapes(batch, outputs)
  mask = batch.action_mask
  signed = ops.action_advantages(batch)
  target_logp = jnp.where(mask, outputs.target_logp, 0.0)
  behavior_logp = ops.known_logp(batch.behavior_logp, target_logp)
  log_ratio = ops.log_ratio(target_logp, behavior_logp, mask)
  weigh = functools.partial(_weight, config=config)
  weight = jax.lax.stop_gradient(weigh(target_logp, behavior_logp))
  score = weight * target_logp
  metrics = {
    "ratio": ops.estimate(ops.ratio(log_ratio), mask),
    "clip_fraction": ops.estimate(weight == 0, mask),
    **ops.behavior_metrics(outputs, batch),
  }
  if config.centering:
    centered = ops.center(
      ops.required(outputs.target_topk_logp, "outputs.target_topk_logp"),
      ops.required(batch.behavior_topk_logp, "batch.behavior_topk_logp"),
      ops.head_slots(batch),
      weigh,
      exact=config.top_k == 0,
    )
    score = score - centered.term
    metrics |= ops.centering_metrics(centered, weight, target_logp, batch)
  return _divided(-signed * score, weight > 0, batch, config), metrics


def value_loss(
  outputs: PolicyOutputs, batch: Batch, config: Config
) -> tuple[Estimate, dict[str, Estimate]]:
  """Error of the critic, at the tokens whose value is used."""
  mask = batch.action_mask
  if config.level == "step_last":
    mask = ops.turn_ends(ops.turn_ids(mask, batch.trajectory_ids))
  support = config.value_support
  if support is not None:
    return ops.hl_gauss_loss(outputs, batch, mask, support)
  return ops.value_loss(outputs, batch, mask, config.value_clip)


def _weight(
  target_logp: Float[Array, "*S"],
  behavior_logp: Float[Array, "*S"],
  config: Config,
) -> Float[Array, "*S"]:
  """F of the ratio, compared in log space."""
  log_ratio = target_logp - behavior_logp
  low, high = config.bounds
  log_low = math.log(low) if low > 0 else -math.inf
  keep = (log_ratio > log_low) & (log_ratio < math.log(high))
  if config.closed_band:
    keep = (log_ratio >= log_low) & (log_ratio <= math.log(high))
  return jnp.where(keep, ops.ratio(log_ratio), 0.0)


def _divided(
  loss: Float[Array, "R T"],
  kept: Bool[Array, "R T"],
  batch: Batch,
  config: Config,
) -> Estimate:
  """The sum with the denominator that the config names."""
  mask = batch.action_mask
  if config.denominator == "action_tokens":
    return ops.estimate(loss, mask)
  if config.denominator == "kept_tokens":
    return Estimate(
      total=ops.estimate(loss, mask).total, count=ops.estimate(kept, mask).total
    )
  length = ops.action_count(batch)
  return Estimate(
    total=jnp.sum(
      ops.divide_or_zero(
        jnp.where(mask, loss, 0.0), ops.per_token(length, batch.trajectory_ids)
      )
    ),
    count=jnp.sum(length > 0, dtype=length.dtype),
  )
