"""Sequences that take the cache of another slot over."""

import asyncio
import dataclasses
import random

import jax
import numpy as np
import pytest
from bigram import CONFIG, ask, one_device_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import INIT, POLICY, full_forward_logp

from rl_tpu import sharding
from rl_tpu.generation import driver as drivers
from rl_tpu.generation import engine, requests

LEAST = 2


def make_driver(slots=4, mesh=None, least=LEAST, **arguments):
  config = dataclasses.replace(
    CONFIG,
    slots=slots,
    context_length=24,
    prefill_buckets=(8, 24),
    prefill_batches=(1, 4),
    min_shared_prefix=least,
  )
  served = engine.PolicyEngine(POLICY, mesh or one_device_mesh(), config)
  return drivers.GenerationDriver(served, **arguments)


def update(driver, version):
  params = INIT(jax.random.key(version))
  driver.update(driver.engine.load_params(params, version))
  return params


def play(driver, *requests_):
  """Completions of requests that arrive together."""

  async def main():
    tasks = [asyncio.ensure_future(driver.generate(r)) for r in requests_]
    while not all(task.done() for task in tasks):
      await asyncio.sleep(0)
      driver.step()
    return [task.result() for task in tasks]

  return asyncio.run(main())


def assert_exact(params, request, completion):
  expected = full_forward_logp(params, request, completion.tokens)
  np.testing.assert_allclose(completion.logp, expected, atol=1e-5)


PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)


def test_the_members_of_a_group_prefill_their_prompt_once():
  driver = make_driver()
  params = update(driver, 0)
  group = [ask(*PROMPT, member=m, max_tokens=6) for m in range(4)]
  done = play(driver, *group)
  assert driver.counters().shared_tokens == 3 * (len(PROMPT) - 1)
  for request, completion in zip(group, done, strict=True):
    assert_exact(params, request, completion)
  apart = make_driver(least=0)
  update(apart, 0)
  for one, other in zip(done, play(apart, *group), strict=True):
    assert one.tokens.tolist() == other.tokens.tolist()
    np.testing.assert_allclose(one.logp, other.logp, atol=1e-5)
  assert apart.counters().shared_tokens == 0


def test_the_next_turn_of_a_conversation_prefills_only_what_is_new():
  driver = make_driver()
  params = update(driver, 0)
  tokens, known = PROMPT, 0
  for _ in range(3):
    turn = ask(*tokens, max_tokens=3)
    before = driver.counters().shared_tokens
    (done,) = play(driver, turn)
    assert_exact(params, turn, done)
    assert driver.counters().shared_tokens - before == known
    # The entry of an answer's last token was never computed.
    known = len(tokens) + len(done.tokens) - 1
    tokens = (*tokens, *done.tokens.tolist(), 7)


def test_H14_a_shared_prefix_is_of_the_weights_in_service():
  driver = make_driver()
  request = ask(*PROMPT, max_tokens=5)
  for version in range(3):
    params = update(driver, version)
    for _ in range(2):
      (done,) = play(driver, request)
      assert set(done.version) == {version}
      assert_exact(params, request, done)
  assert driver.counters().shared_tokens == 3 * (len(PROMPT) - 1)


@pytest.mark.parametrize("interruption", ["recompute", "keep"])
def test_H14_a_request_in_flight_over_an_update_shares_only_what_is_new(
  interruption,
):
  """Under `keep` its cache mixes two weights: nobody else may have it."""
  driver = make_driver(interruption=interruption)
  update(driver, 0)
  first, second = (ask(*PROMPT, index=i, max_tokens=8) for i in range(2))

  async def main():
    running = asyncio.ensure_future(driver.generate(first))
    await asyncio.sleep(0)
    driver.step()
    params = update(driver, 1)
    late = asyncio.ensure_future(driver.generate(second))
    while not (running.done() and late.done()):
      await asyncio.sleep(0)
      driver.step()
    return params, running.result(), late.result()

  params, mixed, late = asyncio.run(main())
  assert set(mixed.version) == {0, 1}
  assert set(late.version) == {1}
  assert_exact(params, second, late)
  shared = len(PROMPT) - 1 if interruption == "recompute" else 0
  assert driver.counters().shared_tokens == shared


def test_a_2x2_mesh_shares_prefixes_across_its_shards():
  mesh = sharding.make_mesh(sharding.MeshShape(fsdp=2, tensor=2), jax.devices())
  driver = make_driver(mesh=mesh)
  params = update(driver, 0)
  group = [ask(*PROMPT, member=m, max_tokens=3) for m in range(4)]
  for request, completion in zip(group, play(driver, *group), strict=True):
    assert_exact(jax.device_get(params), request, completion)
  assert driver.counters().shared_tokens > 0


class Caches:
  """What an engine's cache holds: each entry, the tokens it was made from."""

  def __init__(self, slots, chance):
    self.entries = [{} for _ in range(slots)]
    self.chance = chance

  def admit(self, admissions, version):
    """As the engine: shared ones last, in any order, one by one."""
    self.chance.shuffle(admissions)
    for admission in sorted(admissions, key=lambda a: a.shared > 0):
      tokens, shared = admission.tokens.tolist(), admission.shared
      source = dict(self.entries[admission.source])
      entries = {t: source.get(t) for t in range(shared)}
      for t in range(shared, len(tokens)):
        entries[t] = (version, tuple(tokens[: t + 1]))
      self.entries[admission.slot] = entries

  def check(self, slot, tokens, version):
    for t in range(len(tokens) - 1):
      assert self.entries[slot][t] == (version, tuple(tokens[: t + 1]))


def opened(tokens):
  request = ask(*tokens, max_tokens=4)
  return requests.OpenRequest(
    request=request, max_tokens=4, client=None, return_channel=None
  )


def answer(table, chance, slots):
  """Records one random token in each running slot, as a dispatch would."""

  class Result:
    counts = np.ones(slots, np.int64)
    tokens = np.array([[chance.randrange(2)] for _ in range(slots)], np.int32)
    logp = np.zeros((slots, 1), np.float32)
    version = 0
    topk_ids = np.zeros((slots, 1, 0), np.int32)
    topk_logp = np.zeros((slots, 1, 0), np.float32)

  table.record(Result)


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32), slots=st.integers(1, 5))
def test_whatever_happens_an_entry_is_of_its_tokens_and_weights(seed, slots):
  """Random arrivals, answers, ends and updates; two tokens, so that sequences
  often begin alike; the engine's order is the worst it may be."""
  chance = random.Random(seed)
  table = requests.SlotTable(slots, 12, 0, min_shared_prefix=1)
  caches, version, shared = Caches(slots, chance), 0, 0
  for _ in range(40):
    for one in table.running:
      if len(table.tokens_so_far(one)) > 10 or chance.random() < 0.3:
        table.free(one)
    if chance.random() < 0.15:
      version += 1
      table.forget_caches()
      caches.admit(table.admit(table.running), version)
    arrivals = [
      opened([chance.randrange(2) for _ in range(chance.randint(1, 6))])
      for _ in range(chance.randint(0, table.free_slots))
    ]
    admissions = table.admit(arrivals)
    shared += sum(a.shared for a in admissions)
    caches.admit(list(admissions), version)
    for one in table.running:
      caches.check(one.slot, table.tokens_so_far(one).tolist(), version)
    answer(table, chance, slots)
    for one in table.running:
      tokens = tuple(table.tokens_so_far(one).tolist())
      caches.entries[one.slot][len(tokens) - 2] = (version, tokens[:-1])
