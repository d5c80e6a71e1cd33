r"""Rotary positions, and how they are stretched to longer contexts.

Position p turns the pair (i, i + h/2) of a head by the angle p * f_i, with

  f_i = theta^(-2i/h)                            (RoFormer, arXiv:2104.09864)

A model trained on n positions reads longer texts when slow pairs, which make
few turns within n, are slowed by a factor s and fast ones left alone:

  f_i' = f_i * (k_i + (1 - k_i) / s),            k_i in [0, 1]

With r_i = n f_i / 2 pi, the turns within n, k_i is 0 below `low` turns and 1
above `high`. In between Llama 3.1 goes linearly in r_i, and YaRN
(arXiv:2309.00071) in i as its public implementations do, which also multiplies
sine and cosine by an attention factor.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rl_tpu import sharding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
  """How the rotary frequencies of a longer context differ."""

  kind: Literal["llama3", "yarn"]
  """What k_i is linear in between `low` and `high`."""
  factor: float
  """s, > 1 for longer contexts, > 0."""
  original_length: int
  """n, positions that the model was first trained on, >= 1."""
  low: float = 1.0
  """Turns within n below which a pair is slowed by all of s, > 0 (llama3:
  low_freq_factor; yarn: beta_slow)."""
  high: float
  """Turns above which it is left alone, > low (llama3: high_freq_factor, 4;
  yarn: beta_fast, 32)."""
  attention_factor: float = 1.0
  """Multiplies sine and cosine, > 0 (yarn: 0.1 ln s + 1; llama3: 1)."""
  whole_pairs: bool = True
  """Of yarn: the ramp begins and ends at whole pairs."""

  def __post_init__(self):
    for name, good, allowed in (
      ("kind", self.kind in ("llama3", "yarn"), "'llama3' or 'yarn'"),
      ("factor", self.factor > 0, "> 0"),
      ("original_length", self.original_length >= 1, ">= 1"),
      ("low", self.low > 0, "> 0"),
      ("high", self.high > self.low, f"> low, {self.low}"),
      ("attention_factor", self.attention_factor > 0, "> 0"),
    ):
      if not good:
        raise ValueError(
          f"rope_scaling.{name} is {getattr(self, name)!r}; "
          f"it must be {allowed}"
        )


def frequencies(
  half: int, theta: float, scaling: Scaling | None = None
) -> Float[Array, " half"]:
  """Radians that each pair of a head of size 2 * half turns in a position."""
  plain = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  if scaling is None:
    return plain
  if scaling.kind == "llama3":
    turns = scaling.original_length * plain / (2 * math.pi)
    kept = (turns - scaling.low) / (scaling.high - scaling.low)
  else:
    kept = 1.0 - _yarn_ramp(half, theta, scaling)
  kept = jnp.clip(kept, 0.0, 1.0)
  return plain * (kept + (1.0 - kept) / scaling.factor)


def _yarn_ramp(
  half: int, theta: float, scaling: Scaling
) -> Float[Array, " half"]:
  """Rises by pair, through 0 at `high` turns and through 1 at `low`."""

  def pair(turns: float) -> float:
    wavelengths = scaling.original_length / (2 * math.pi * turns)
    return half * math.log(wavelengths) / math.log(theta)

  first, last = pair(scaling.high), pair(scaling.low)
  if scaling.whole_pairs:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, 2 * half - 1)
  if first == last:
    last += 0.001  # A step: as in the public implementations.
  return (jnp.arange(half, dtype=jnp.float32) - first) / (last - first)


Turns = tuple[Float[Array, "... 1 half"], Float[Array, "... 1 half"]]
"""Sine and cosine of every pair's angle at some positions."""


def turns(
  positions: Int[Array, "..."],
  half: int,
  theta: float,
  scaling: Scaling | None = None,
) -> Turns:
  """By what heads of size 2 * half are turned, the same in every layer."""
  frequency = frequencies(half, theta, scaling)
  angle = positions[..., None, None].astype(jnp.float32) * frequency
  sin, cos = jnp.sin(angle), jnp.cos(angle)
  if scaling is not None and scaling.attention_factor != 1.0:
    sin, cos = sin * scaling.attention_factor, cos * scaling.attention_factor
  # Else a CPU computes them again for each head of each layer.
  return jax.lax.optimization_barrier((sin, cos))


def rotary(
  x: Float[Array, "... heads h"], by: Turns
) -> Float[Array, "... heads h"]:
  """Rotates each pair (i, i + h/2) of `x`, in float32."""
  half, (sin, cos) = x.shape[-1] // 2, by
  if sharding.on_tpu():
    return _turned_by_product(x, sin, cos)
  # Halves are reversed, not joined: a CPU joins an element at a time.
  halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, half)
  signed = jnp.array([-1.0, 1.0])[:, None] * sin[..., None, :]
  turned = halves * cos[..., None, :] + jnp.flip(halves, -2) * signed
  return turned.reshape(x.shape).astype(x.dtype)


def _turned_by_product(x, sin, cos):
  """The same where halves of a head are dear to take apart.

  A TPU holds a head in the lanes of a register. Its matrix unit swaps the
  halves on the way, exactly: each product has one term, x times 1.
  """
  swap = jnp.roll(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape[-1] // 2, 1)
  exact = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
  swapped = jnp.matmul(
    x, swap, precision=exact, preferred_element_type=jnp.float32
  )
  sin = jnp.concatenate([-sin, sin], axis=-1)
  cos = jnp.concatenate([cos, cos], axis=-1)
  return (x.astype(jnp.float32) * cos + swapped * sin).astype(x.dtype)
