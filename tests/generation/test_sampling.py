import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu.generation import sampling

SAMPLE = jax.jit(sampling.sample)
HEADS = jax.jit(sampling.sample, static_argnums=5)
P = [0.5, 0.3, 0.15, 0.05]


def settings(slots, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  rows = lambda value, dtype: jnp.broadcast_to(  # noqa: E731
    jnp.asarray(value, dtype), (slots,)
  )
  return sampling.Settings(
    temperature=rows(temperature, jnp.float32),
    top_k=rows(top_k, jnp.int32),
    top_p=rows(top_p, jnp.float32),
    min_p=rows(min_p, jnp.float32),
  )


def keys(slots, seed=0, prompt_index=0, member=None):
  if member is None:
    member = jnp.arange(slots)
  columns = (
    jnp.broadcast_to(jnp.asarray(x, jnp.uint32), (slots,))
    for x in (seed, prompt_index, member)
  )
  return sampling.identity_keys(*columns)


def draw(logits, how, position=5, **identity):
  slots = logits.shape[0]
  token, logp, head = SAMPLE(
    logits,
    keys(slots, **identity),
    jnp.full(slots, position),
    how,
    jnp.ones(slots, bool),
  )
  assert head is None
  return np.asarray(token), np.asarray(logp)


def rows_of(probabilities, slots):
  logits = jnp.log(jnp.asarray(probabilities, jnp.float32))
  return jnp.broadcast_to(logits, (slots, len(probabilities)))


@pytest.mark.parametrize(
  ("how", "kept"),
  [
    ({"top_p": 0.8}, 2),
    ({"top_k": 2}, 2),
    ({"min_p": 0.5}, 2),
    ({"top_p": 0.81}, 3),
    ({"min_p": 0.09}, 4),
    ({"top_k": 3, "top_p": 0.8}, 2),
    ({"top_k": 2, "top_p": 0.6}, 1),
    ({"top_p": 1e-9}, 1),
  ],
)
def test_H01_logp_is_of_the_truncated_distribution(how, kept):
  token, logp = draw(rows_of(P, 256), settings(256, **how))
  mass = sum(P[:kept])
  assert set(token) == set(range(kept))
  expected = np.log(np.asarray(P)[token] / mass)
  np.testing.assert_allclose(logp, expected, atol=1e-5)


def test_H01_token_0_under_top_p_08_has_log_0625():
  token, logp = draw(rows_of(P, 256), settings(256, top_p=0.8))
  np.testing.assert_allclose(logp[token == 0], math.log(0.625), atol=1e-6)


def test_H01_top_p_of_exactly_k_tokens_keeps_k_whatever_float32_sums_to():
  k = np.arange(256) % 11 + 1
  how = settings(256, top_p=k / 12)
  _, logp = draw(rows_of([1 / 12] * 12, 256), how)
  np.testing.assert_allclose(logp, -np.log(k), atol=1e-5)


@pytest.mark.parametrize("off", [0, -1])
def test_X13_top_k_off_draws_all_of_4_equal_tokens(off):
  token, logp = draw(rows_of([0.25] * 4, 256), settings(256, top_k=off))
  assert set(token) == {0, 1, 2, 3}
  np.testing.assert_allclose(logp, math.log(0.25), atol=1e-6)


def test_X13_each_row_keeps_its_own_temperature_and_filters():
  how = settings(
    4,
    temperature=[1.0, 0.5, 0.0, 2.0],
    top_k=[0, 0, 0, 1],
    top_p=[1.0, 0.9, 1.0, 1.0],
  )
  logits = rows_of(P, 4)
  token, logp = draw(logits, how)
  sharp = np.asarray(P) ** 2 / np.sum(np.asarray(P) ** 2)
  kept = sharp[:2].sum()  # 0.685 + 0.247 >= 0.9
  np.testing.assert_allclose(logp[0], np.log(P[token[0]]), atol=1e-5)
  np.testing.assert_allclose(logp[1], np.log(sharp[token[1]] / kept), atol=1e-5)
  assert (token[2], logp[2]) == (0, 0.0)
  assert (token[3], logp[3]) == (0, 0.0)


def test_frequencies_follow_the_distribution():
  token, _ = draw(rows_of(P, 20_000), settings(20_000))
  share = np.bincount(token, minlength=4) / len(token)
  error = 4 * np.sqrt(np.asarray(P) * (1 - np.asarray(P)) / len(token))
  assert (np.abs(share - P) < error).all()


def test_neighbouring_places_of_one_sequence_draw_independently():
  slots = 4_000
  logits = rows_of([0.5, 0.5], slots)
  first, _ = draw(logits, settings(slots), position=5)
  second, _ = draw(logits, settings(slots), position=6)
  agree = (first == second).mean()
  assert abs(agree - 0.5) < 4 * 0.5 / math.sqrt(slots)


def test_a_draw_depends_on_identity_and_place_not_on_the_row():
  logits = jax.random.normal(jax.random.key(0), (1, 50))
  logits = jnp.broadcast_to(logits, (8, 50))
  token, logp = draw(logits, settings(8), member=jnp.arange(8))
  turned, turned_logp = draw(logits, settings(8), member=jnp.arange(8)[::-1])
  np.testing.assert_array_equal(token, turned[::-1])
  np.testing.assert_array_equal(logp, turned_logp[::-1])
  for changed in ({"seed": 1}, {"prompt_index": 1}, {"position": 6}):
    other, _ = draw(logits, settings(8), **changed)
    assert (other != token).any(), changed


def test_the_vocabulary_is_not_sorted_for_slots_that_are_free():
  live = jnp.arange(256) == 0
  how = settings(256, top_k=jnp.where(live, 0, 1))
  args = rows_of(P, 256), keys(256), jnp.full(256, 5), how
  token, logp, _ = SAMPLE(*args, live)
  np.testing.assert_allclose(logp, np.log(np.asarray(P)[token]), atol=1e-5)
  _, filtered, _ = SAMPLE(*args, ~live)
  np.testing.assert_array_equal(filtered[1:], 0.0)


def test_a_tie_at_the_k_th_place_keeps_k_tokens():
  token, logp = draw(rows_of([0.25] * 4, 256), settings(256, top_k=3))
  assert set(token) == {0, 1, 2}
  np.testing.assert_allclose(logp, math.log(1 / 3), atol=1e-6)


def head_of(probabilities, size, **how):
  """(token, logp, ids, head logp) of one slot's draw."""
  token, logp, (ids, head_logp) = HEADS(
    rows_of(probabilities, 1),
    keys(1),
    jnp.full(1, 5),
    settings(1, **how),
    jnp.ones(1, bool),
    size,
  )
  return int(token[0]), float(logp[0]), np.asarray(ids[0]), head_logp[0]


def test_the_head_is_of_the_distribution_after_temperature():
  token, logp, ids, head_logp = head_of(P, 3, temperature=0.5)
  sharp = np.asarray(P) ** 2 / np.sum(np.asarray(P) ** 2)
  assert ids.tolist() == [0, 1, 2]
  np.testing.assert_allclose(head_logp, np.log(sharp[:3]), atol=1e-5)
  assert logp == head_logp[ids.tolist().index(token)]


def test_a_head_of_the_whole_vocabulary_holds_all_the_mass_in_order():
  _, _, ids, head_logp = head_of(P[::-1], 4)
  assert ids.tolist() == [3, 2, 1, 0]
  np.testing.assert_allclose(np.exp(head_logp).sum(), 1.0, atol=1e-6)


def test_slots_of_the_head_outside_a_filtered_support_are_unused():
  token, logp, ids, head_logp = head_of(P, 4, top_p=0.8)
  assert ids.tolist() == [0, 1, -1, -1]
  np.testing.assert_allclose(
    head_logp, [math.log(0.625), math.log(0.375), -np.inf, -np.inf], atol=1e-5
  )
  assert logp == head_logp[token]


def test_a_greedy_head_is_its_one_certain_token():
  token, logp, ids, head_logp = head_of([0.2, 0.3, 0.3, 0.2], 3, temperature=0)
  assert (token, logp) == (1, 0.0)
  assert ids.tolist() == [1, -1, -1]
  assert head_logp.tolist() == [0.0, -np.inf, -np.inf]
