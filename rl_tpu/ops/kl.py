r"""KL divergence to a reference policy, estimated at the tokens taken.

With d = log reference - log p at a token drawn from p, each of these estimates
KL(p || reference) (Schulman 2020, "Approximating KL divergence"):

| estimator | value | |
|---|---|---|
| k1 | -d | unbiased, either sign |
| k2 | d^2 / 2 | biased, least variance; its gradient is unbiased |
| k3 | exp(d) - 1 - d | unbiased, never negative |

For p = target that holds where the target policy sampled: stale tokens come
from another one, and nothing here reweighs them. As losses their gradients
differ: that of k1 is the score itself, whose mean is 0 on-policy, so k1 belongs
into a reward, where p = behavior.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl_tpu.ops.logp import known_logp
from rl_tpu.ops.ratios import log_ratio

KL_ESTIMATORS = ("k1", "k2", "k3")
KL_CAP = 10.0
"""d is clipped to +-10 nats before anything is made of it; beyond, the
gradient is 0."""


def target_reference_kl(
  target_logp: Float[Array, "R T"],
  reference_logp: Float[Array, "R T"],
  mask: Bool[Array, "R T"],
  estimator: str,
  cap: float = KL_CAP,
) -> Float[Array, "R T"]:
  """KL(target || reference) per token, by one of `KL_ESTIMATORS`; 0 off mask.

  Raises:
    ValueError: for another estimator.
  """
  return _estimate(log_ratio(reference_logp, target_logp, mask), estimator, cap)


def behavior_reference_kl(
  behavior_logp: Float[Array, "R T"],
  reference_logp: Float[Array, "R T"],
  mask: Bool[Array, "R T"],
  estimator: str,
  cap: float = KL_CAP,
) -> Float[Array, "R T"]:
  """KL(behavior || reference) per token: a penalty for a reward.

  0 off the mask, and where the behavior logp is no number.

  Raises:
    ValueError: for another estimator.
  """
  known = known_logp(behavior_logp, reference_logp)
  return _estimate(log_ratio(reference_logp, known, mask), estimator, cap)


def _estimate(
  d: Float[Array, "R T"], estimator: str, cap: float
) -> Float[Array, "R T"]:
  d = jnp.clip(d, -cap, cap)
  match estimator:
    case "k1":
      return -d
    case "k2":
      return 0.5 * d * d
    case "k3":
      return jnp.expm1(d) - d
  raise ValueError(
    f"KL estimator is {estimator!r}; it must be one of {KL_ESTIMATORS}"
  )
