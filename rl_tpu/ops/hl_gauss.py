r"""HL-Gauss: a value learnt by classification, in place of squared error.

The support [low, high] is cut into B bins of width w with centres c_b. The
critic gives logits z_b, its value is the mean of their histogram, and a return
R is learnt as the histogram of a Gaussian around it:

    V      = sum_b softmax(z)_b c_b
    m_b(R) = (Phi((e_{b+1} - R) / s) - Phi((e_b - R) / s)) / Z(R)
    loss   = - sum_b m_b(R) log softmax(z)_b

with edges e_b, s = sigma w, Phi(x) = (1 + erf(x / sqrt 2)) / 2 the normal
distribution function and Z what makes sum_b m_b = 1. Farebrother et al. 2024,
arXiv:2403.03950 ("Stop Regressing", section 3.1), after Imani & White 2018;
sigma = 0.75 is theirs. The slope by a logit is at most 1 however wrong V is.

Choices: R outside the support is clipped to it, and counted. The mean of m is R
within 1e-5 w for sigma = 0.75, but where an end cuts the Gaussian it leans
inward, by 0.7 w at the end itself (0.014 for the defaults); a support that is
wider than the returns avoids that. The least loss is the entropy of m, not 0.

Axes: R rows, T tokens, B bins.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rl_tpu.ops.checks import check_fields, check_shapes, required
from rl_tpu.ops.sums import estimate
from rl_tpu.types import Batch, Estimate, PolicyOutputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Support:
  """Where returns may lie, in `bins` equal parts."""

  low: float
  high: float
  bins: int
  sigma: float
  """Deviation of a return's Gaussian, in widths of a bin."""

  @property
  def width(self) -> float:
    """Of a bin."""
    return (self.high - self.low) / self.bins

  @property
  def edges(self) -> Float[Array, " B+1"]:
    """Of the bins, `low` and `high` among them."""
    return jnp.linspace(self.low, self.high, self.bins + 1)

  @property
  def centers(self) -> Float[Array, " B"]:
    """Of the bins."""
    return (self.edges[1:] + self.edges[:-1]) / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueLossConfig:
  """What the critic's loss may be varied in; a Config with a critic extends it.

  A subclass checks its choices before it calls `__post_init__`.
  """

  value_loss: Literal["mse", "hl_gauss"] = "mse"
  """Squared error of a number, or cross-entropy of a histogram (HL-Gauss)."""
  value_clip: float | None = None
  """Hold values within this of those before the batch's updates, > 0; None:
  plain squared error (SAO, VAPO). None with hl_gauss."""
  value_low: float = 0.0
  """Least return of hl_gauss's histogram, < value_high; those outside are
  clipped to it."""
  value_high: float = 1.0
  """Largest return of hl_gauss's histogram."""
  value_bins: int = 51
  """Parts of hl_gauss's histogram, >= 2."""
  value_sigma: float = 0.75
  """Deviation of hl_gauss's targets in widths of a bin, in (0, value_bins];
  0.75 reaches about six bins (Farebrother et al. 2024)."""

  def __post_init__(self):
    clip = self.value_clip
    check_fields(
      self,
      ("value_clip", clip is None or clip > 0, "> 0 or None"),
      (
        "value_clip",
        clip is None or self.value_loss == "mse",
        f"None where value_loss is {self.value_loss!r}",
      ),
      ("value_high", math.isfinite(self.value_high), "finite"),
      (
        "value_low",
        -math.inf < self.value_low < self.value_high,
        f"finite and < value_high, which is {self.value_high}",
      ),
      ("value_bins", self.value_bins >= 2, ">= 2"),
      (
        "value_sigma",
        0 < self.value_sigma <= self.value_bins,
        f"in (0, value_bins], which is {self.value_bins}",
      ),
    )

  @property
  def value_support(self) -> Support | None:
    """Of the critic's histogram; None where its value is one number."""
    if self.value_loss == "mse":
      return None
    return Support(
      low=self.value_low,
      high=self.value_high,
      bins=self.value_bins,
      sigma=self.value_sigma,
    )


def gaussian_mass(
  target: Float[Array, "*S"], support: Support
) -> Float[Array, "*S B"]:
  """Share of each bin in a Gaussian around the clipped target; sums to 1."""
  inside = jnp.clip(target, support.low, support.high)
  scale = math.sqrt(2.0) * support.sigma * support.width
  distance = (support.edges - inside[..., None]) / scale
  # What lies beyond an edge: erfc has digits where erf is 1.
  beyond = jax.scipy.special.erfc(jnp.abs(distance)) / 2
  left, right = beyond[..., :-1], beyond[..., 1:]
  around = (distance[..., :-1] < 0) & (distance[..., 1:] > 0)
  mass = jnp.where(around, 1.0 - left - right, jnp.abs(right - left))
  return mass / jnp.sum(mass, axis=-1, keepdims=True)


def histogram_mean(
  logits: Float[Array, "*S B"], support: Support
) -> Float[Array, "*S"]:
  """The value that logits of the bins stand for."""
  return jnp.sum(jax.nn.softmax(logits) * support.centers, axis=-1)


def hl_gauss_loss(
  outputs: PolicyOutputs,
  batch: Batch,
  mask: Bool[Array, "R T"],
  support: Support,
) -> tuple[Estimate, dict[str, Estimate]]:
  """Mean cross-entropy, in nats, of the histograms to `batch.returns`.

  `return_clip_fraction`: share of returns outside the support.

  Raises:
    ValueError: if values, their logits or returns are missing, or the logits
      are not of the support's bins.
  """
  check_shapes(batch, outputs)
  values = required(outputs.values, "outputs.values")
  logits = required(outputs.value_logits, "outputs.value_logits")
  returns = required(batch.returns, "batch.returns")
  if logits.shape[-1] != support.bins:
    raise ValueError(
      f"outputs.value_logits has shape {logits.shape}; it must be [R,T,B] with "
      f"B = {support.bins}, the support's bins"
    )
  logits = jnp.where(mask[..., None], logits, 0.0)
  returns = jnp.where(mask, returns, support.low)
  mass = gaussian_mass(returns, support)
  cross_entropy = -jnp.sum(mass * jax.nn.log_softmax(logits), axis=-1)
  outside = (returns < support.low) | (returns > support.high)
  metrics = {
    "value": estimate(values, mask),
    "return": estimate(returns, mask),
    "return_clip_fraction": estimate(outside, mask),
  }
  return estimate(cross_entropy, mask), metrics
