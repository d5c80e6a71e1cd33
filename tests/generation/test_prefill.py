"""Rows that hold several prompts."""

import asyncio
import dataclasses
import random

import jax
import numpy as np
import pytest
from bigram import CONFIG, ask, one_device_mesh
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_prefixes import assert_exact, play
from tiny import INIT, POLICY, full_forward_logp

from rl_tpu import sharding
from rl_tpu.generation import driver as drivers
from rl_tpu.generation import engine, prefill


def make_driver(most, mesh=None, **changes):
  sizes = {
    "slots": 6,
    "context_length": 24,
    "prefill_buckets": (8, 24),
    "prefill_batches": (1, 2),
  }
  config = dataclasses.replace(
    CONFIG, prompts_per_row=most, **{**sizes, **changes}
  )
  served = engine.PolicyEngine(POLICY, mesh or one_device_mesh(), config)
  driver = drivers.GenerationDriver(served)
  params = INIT(jax.random.key(0))
  driver.update(served.load_params(params, 0))
  return driver, params


def mixed(*lengths):
  chance = random.Random(0)
  return [
    ask(*(chance.randrange(64) for _ in range(n)), index=i, max_tokens=5)
    for i, n in enumerate(lengths)
  ]


@pytest.mark.parametrize("most", [2, 3, 6])
def test_packed_prompts_sample_what_padded_ones_sample(most):
  wanted = mixed(3, 7, 1, 12, 5, 2)
  driver, params = make_driver(most)
  alone, _ = make_driver(1)
  answers = zip(
    wanted, play(driver, *wanted), play(alone, *wanted), strict=True
  )
  for request, done, same in answers:
    assert_exact(params, request, done)
    assert done.tokens.tolist() == same.tokens.tolist()
  counters, other = driver.counters(), alone.counters()
  assert counters.missing_tokens == other.missing_tokens == 30
  assert other.prefilled_tokens > counters.prefilled_tokens >= 30


def test_a_2x2_mesh_prefills_packed_rows():
  mesh = sharding.make_mesh(sharding.MeshShape(fsdp=2, tensor=2), jax.devices())
  driver, params = make_driver(3, mesh, prefill_batches=(2,))
  wanted = mixed(3, 7, 1, 12, 5, 2)
  for request, done in zip(wanted, play(driver, *wanted), strict=True):
    assert_exact(params, request, done)


def test_members_of_a_group_share_a_prompt_that_was_packed():
  driver, params = make_driver(3, min_shared_prefix=2)
  first, second = mixed(5, 3)
  group = [dataclasses.replace(first, member=m) for m in range(3)]
  wanted = [*group, second]
  for request, done in zip(wanted, play(driver, *wanted), strict=True):
    assert_exact(params, request, done)
  counters = driver.counters()
  assert counters.shared_tokens == 2 * (5 - 1)
  assert counters.missing_tokens == counters.prefilled_tokens == 8


def test_interrupted_sequences_are_packed_anew():
  driver, _ = make_driver(3)
  wanted = mixed(2, 3, 1)
  news = INIT(jax.random.key(1))

  async def main():
    tasks = [asyncio.ensure_future(driver.generate(r)) for r in wanted]
    await asyncio.sleep(0)
    driver.step()
    driver.update(driver.engine.load_params(news, 1))
    while not all(task.done() for task in tasks):
      driver.step()
      await asyncio.sleep(0)
    return [task.result() for task in tasks]

  for request, done in zip(wanted, asyncio.run(main()), strict=True):
    assert done.version.tolist() == [0] * 2 + [1] * 3
    expected = full_forward_logp(news, request, done.tokens)
    np.testing.assert_allclose(done.logp[2:], expected[2:], atol=1e-5)
  # One row of 8 for 6 tokens, then two of them for 12.
  assert driver.counters().prefilled_tokens == 24
  assert driver.counters().missing_tokens == 18


@pytest.mark.parametrize(
  ("lengths", "most", "rows"),
  [
    ((3, 5, 2), 1, [(4, 1), (4, 1), (8, 1)]),
    ((3, 5, 2), 4, [(4, 1), (8, 2)]),
    ((3, 5, 2, 2), 4, [(4, 2), (8, 2)]),
    ((1, 1, 1, 1), 2, [(4, 2), (4, 2)]),
    ((16, 1), 4, [(4, 1), (16, 1)]),
    ((9, 6), 4, [(16, 2)]),
  ],
)
def test_rows_hold_what_leaves_little_padding(lengths, most, rows):
  splits = prefill.cheapest_splits(len(lengths), (1,))
  planned = prefill.batches(lengths, (4, 8, 16), most, splits)
  assert [(b, len(row)) for b, _, (row,) in planned] == rows


def test_unused_rows_of_a_batch_count_as_padding():
  """Two rows of 4 would be computed as 4 of them."""
  splits = prefill.cheapest_splits(2, (4,))
  planned = prefill.batches((3, 3), (4, 8), 2, splits)
  assert planned == [(4, 4, [[0], [1]])]
  splits = prefill.cheapest_splits(2, (1, 4))
  planned = prefill.batches((3, 3), (4, 8), 2, splits)
  assert planned == [(8, 1, [[0, 1]])]


@settings(deadline=None, max_examples=200)
@given(
  lengths=st.lists(st.integers(1, 64), max_size=30), most=st.integers(1, 8)
)
@example(lengths=[1, 8, 9, 24], most=2)
def test_each_sequence_is_in_one_row_that_holds_it(lengths, most):
  buckets, sizes = (8, 32, 64), (1, 4)
  splits = prefill.cheapest_splits(30, sizes)
  alone = prefill.batches(lengths, buckets, 1, splits)
  planned = prefill.batches(lengths, buckets, most, splits)
  seen = []
  for bucket, size, rows in planned:
    assert size in sizes
    assert len(rows) <= size
    for row in rows:
      assert 1 <= len(row) <= most
      assert sum(lengths[i] for i in row) <= bucket
      seen += row
  assert sorted(seen) == list(range(len(lengths)))
  computed, unpacked = (
    sum(bucket * size for bucket, size, _ in plan) for plan in (planned, alone)
  )
  assert computed <= unpacked


def test_packed_rows_name_each_sequence_and_its_place():
  requests = mixed(3, 2, 4)
  admissions = [
    engine.Admission(slot=s, tokens=r.tokens, budget=5, request=r)
    for s, r in zip((4, 0, 2), requests, strict=True)
  ]
  packed = prefill.pack(
    [admissions[:2], admissions[2:]],
    size=3,
    bucket=8,
    most_in_row=2,
    slots=6,
    max_stop_ids=1,
  )
  tokens, positions, ids = packed.rows
  assert tokens[0, :5].tolist() == [*requests[0].tokens, *requests[1].tokens]
  assert positions[0].tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
  assert ids.tolist() == [
    [0, 0, 0, 1, 1, -1, -1, -1],
    [0, 0, 0, 0, -1, -1, -1, -1],
    [-1] * 8,
  ]
  assert packed.places[:3].tolist() == [[0, 0], [0, 3], [1, 0]]
  assert np.asarray(packed.headers)[:, 0].tolist() == [4, 0, 2, 6, 6, 6]
  assert packed.count == 3
