"""Decoding with the cache of TPUs, interpreted, against the plain one."""

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from rl_tpu import sharding
from rl_tpu.generation import decoding
from rl_tpu.models import transformer
from rl_tpu.types import Request, Sampling

POLICY = transformer.Policy(
  transformer.Config(
    vocab_size=64,
    d_model=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    d_ff=64,
    compute_dtype="bfloat16",
  )
)
SLOTS, STEPS, STOP_IDS = 3, 3, 1


def admission(slot, length, budget, **shared):
  tokens = np.arange(length, dtype=np.int32) * 7 % 64
  request = Request(
    prompt_index=slot,
    member=0,
    tokens=tokens,
    sampling=Sampling(max_tokens=budget, temperature=0.7),
  )
  return decoding.Admission(
    slot=slot, tokens=tokens, budget=budget, request=request, **shared
  )


def packed(*admissions, bucket):
  return decoding.pack(
    admissions,
    rows=len(admissions),
    bucket=bucket,
    slots=SLOTS,
    max_stop_ids=STOP_IDS,
  )


def play():
  """Two dispatches: slots end, and one takes another's first entries."""
  params = jax.jit(POLICY.init)(jax.random.key(0))
  run = jax.jit(lambda state: decoding.decode(POLICY, params, state, STEPS, 0))
  state = decoding.empty_state(POLICY, SLOTS, 140, STOP_IDS)
  first = packed(admission(0, 126, 9), admission(1, 9, 2), bucket=126)
  tokens = decoding.padded_tokens(first, STOP_IDS)
  state = decoding.insert(state, POLICY.prefill(params, tokens), first)
  state, one = run(state)
  again = packed(admission(2, 110, 9, source=0, shared=100), bucket=16)
  state, two = run(decoding.extend(POLICY, params, state, again))
  results = [
    decoding.Result.of(data, STEPS, 0, (0, 0), 0) for data in (one, two)
  ]
  assert [result.counts.tolist() for result in results] == [
    [3, 2, 0],
    [3, 0, 3],
  ]
  valid = [np.arange(STEPS) < result.counts[:, None] for result in results]
  return [
    (result.tokens[mask], result.logp[mask])
    for result, mask in zip(results, valid, strict=True)
  ], state.rows


@pytest.mark.slow
def test_a_paged_cache_samples_what_a_plain_one_does(monkeypatch):
  expected, rows = play()
  monkeypatch.setattr(sharding, "on_tpu", lambda: True)
  with pltpu.force_tpu_interpret_mode():
    got, paged_rows = play()
  for (tokens, logp), (plain, plain_logp) in zip(got, expected, strict=True):
    np.testing.assert_array_equal(tokens, plain)
    # Sums in bfloat16, in two orders; test_paged sees a single entry left out.
    np.testing.assert_allclose(logp, plain_logp, atol=0.06)
  np.testing.assert_array_equal(paged_rows, rows)
