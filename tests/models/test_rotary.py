import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu import sharding
from rl_tpu.models.rotary import Scaling, frequencies, turns
from rl_tpu.models.rotary import rotary as rotate


def rotary(x, positions, theta, scaling=None):
  return rotate(x, turns(positions, x.shape[-1] // 2, theta, scaling))


LLAMA3 = Scaling(
  kind="llama3", factor=32.0, original_length=8192, low=1.0, high=4.0
)


def kept(half, theta, scaling):
  """How much of its plain frequency each pair keeps."""
  return np.asarray(frequencies(half, theta, scaling)) / np.asarray(
    frequencies(half, theta)
  )


def test_H17_llama3_scaling_keeps_the_fast_and_divides_the_slow_pairs():
  plain, scaled = frequencies(32, 5e5), frequencies(32, 5e5, LLAMA3)
  np.testing.assert_array_equal(scaled[:15], plain[:15])
  np.testing.assert_allclose(scaled[18:], plain[18:] / 32, rtol=1e-6)
  np.testing.assert_allclose(
    plain[15:18], [0.00213111954, 0.00141421356, 0.000938473870], rtol=1e-5
  )
  np.testing.assert_allclose(
    scaled[15:18],
    [0.00129054793, 0.000429556797, 0.0000970828780],
    rtol=1e-5,
  )


def test_H17_heads_of_128_have_29_pairs_kept_6_blended_29_divided():
  share = kept(64, 5e5, dataclasses.replace(LLAMA3, factor=8.0))
  assert (share == 1).sum() == 29
  assert np.isclose(share, 1 / 8, rtol=1e-6).sum() == 29
  assert ((share < 1) & (share > 0.1251)).sum() == 6


def yarn(**changes):
  return Scaling(
    **{
      "kind": "yarn",
      "factor": 4.0,
      "original_length": 32_768,
      "high": 32.0,
      **changes,
    }
  )


@pytest.mark.parametrize(
  ("whole_pairs", "pair_24", "pair_30", "pair_39"),
  [
    (True, 5.3753215e-3, 1.0643609e-3, 6.4903943e-5),
    (False, 5.5172704e-3, 1.0792377e-3, 6.1878076e-5),
  ],
)
def test_yarn_equals_transformers_for_the_sizes_of_qwen(
  whole_pairs, pair_24, pair_30, pair_39
):
  # 5.24 with heads of 128, theta 1e6: pairs 23.6 and 39.7 make 32 turns and 1.
  scaled = frequencies(64, 1e6, yarn(whole_pairs=whole_pairs))
  plain = frequencies(64, 1e6)
  np.testing.assert_array_equal(scaled[:23], plain[:23])
  np.testing.assert_allclose(scaled[41:], plain[41:] / 4, rtol=1e-6)
  np.testing.assert_allclose(
    scaled[np.array([24, 30, 39])], [pair_24, pair_30, pair_39], rtol=1e-6
  )


def test_the_attention_factor_scales_queries_and_keys_each():
  x = jnp.ones((1, 1, 8))
  plain = rotary(x, jnp.array([3]), 1e4, yarn(factor=1.0))
  scaled = rotary(
    x, jnp.array([3]), 1e4, yarn(factor=1.0, attention_factor=1.25)
  )
  np.testing.assert_allclose(scaled, 1.25 * plain, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_tpus_way_to_turn_a_head_gives_the_same_numbers(dtype, monkeypatch):
  keys = jax.random.split(jax.random.key(0), 2)
  x, weights = (jax.random.normal(k, (2, 5, 3, 8)).astype(dtype) for k in keys)
  positions = jnp.arange(10).reshape(2, 5) * 7

  def turned(x):
    scaling = yarn(attention_factor=1.25)
    return rotary(x, positions, 1e4, scaling)

  def both(x):
    y, back = jax.vjp(turned, x)
    return y, back(weights)[0]

  plain = both(x)
  monkeypatch.setattr(sharding, "on_tpu", lambda: True)
  for one, other in zip(both(x), plain, strict=True):
    assert one.dtype == other.dtype == dtype
    tolerance = 1e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(
      one.astype(jnp.float32),
      other.astype(jnp.float32),
      rtol=tolerance,
      atol=tolerance,
    )


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("kind", "linear"),
    ("factor", 0.0),
    ("original_length", 0),
    ("low", 0.0),
    ("high", 1.0),
    ("attention_factor", 0.0),
  ],
)
def test_impossible_scaling_names_its_field(field, value):
  with pytest.raises(ValueError, match=f"rope_scaling.{field} is {value!r}"):
    dataclasses.replace(LLAMA3, **{field: value})
