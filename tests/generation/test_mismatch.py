"""Engines that hold the learner's policy rounded, noisy, or old."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bigram import CONFIG, ask, one_device_mesh
from tiny import INIT, POLICY, full_forward_logp

from rl_tpu import sharding
from rl_tpu.generation import driver as drivers
from rl_tpu.generation import engine
from rl_tpu.models import attention, quantization
from rl_tpu.types import VersionedParams

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
VARIANTS = [
  *({"weights": grid} for grid in ("int8", "int4", "fp8")),
  *({"kv": grid} for grid in ("int8", "int4", "fp8")),
  {"weights": "int4", "group_size": 8},
  {"weight_noise": 0.02},
  {"weights": "int8", "kv": "int4", "weight_noise": 0.01},
]
GRIDS = ("int8", "int4", "fp8")


def mismatched(mesh=None, sizes=None, **mismatch):
  config = dataclasses.replace(
    CONFIG,
    context_length=24,
    prefill_buckets=(8, 24),
    prefill_batches=(1, 4),
    mismatch=quantization.Config(**mismatch),
    **{"min_shared_prefix": 0} | (sizes or {}),
  )
  return engine.PolicyEngine(POLICY, mesh or one_device_mesh(), config)


def initial(version=0):
  return INIT(jax.random.key(version))


def make_driver(served, **arguments):
  served.set_starting_params(initial())
  driver = drivers.GenerationDriver(served, **arguments)
  driver.update(served.load_params(initial(), version=0))
  return driver


def play(driver, *requests, update_after=None):
  """Completions; new weights, version 1, come after so many turns."""

  async def main():
    tasks = [asyncio.ensure_future(driver.generate(r)) for r in requests]
    turns = 0
    while not all(task.done() for task in tasks):
      await asyncio.sleep(0)
      driver.step()
      turns += 1
      if turns == update_after:
        driver.update(driver.engine.load_params(initial(1), version=1))
    return [task.result() for task in tasks]

  return asyncio.run(main())


def gap(served, request):
  """How far the engine's logp is from the learner's, on what it sampled."""
  (done,) = play(make_driver(served), request)
  clean = full_forward_logp(initial(), request, done.tokens)
  return np.abs(done.logp - clean)


def leaves(tree):
  return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def equal(one, other):
  return all(map(np.array_equal, leaves(one), leaves(other)))


@pytest.mark.parametrize("mismatch", VARIANTS, ids=str)
def test_each_variant_samples_from_another_policy_than_the_learners(mismatch):
  request = ask(*PROMPT, max_tokens=12)
  assert gap(mismatched(), request).max() < 1e-5
  assert 1e-4 < gap(mismatched(**mismatch), request).mean() < 1


def one_stack(params):
  """Served weights in the learner's layout."""
  layers = params["layers"]
  if isinstance(layers, list):
    layers = jax.tree.map(lambda *parts: jnp.concatenate(parts), *layers)
  return {**params, "layers": layers}


@pytest.mark.parametrize(
  "mismatch",
  [{"weights": "int8"}, {"weights": "int4", "group_size": 8}],
  ids=str,
)
def test_served_weights_are_snapped_and_the_learners_stay_clean(mismatch):
  config = quantization.Config(**mismatch)
  served = mismatched(**mismatch)
  params = initial(1)
  before = leaves(params)
  held = one_stack(served.load_params(params, version=1).params)
  assert equal(held, quantization.snap_weights(params, config))
  assert not equal(held, params)
  assert all(map(np.array_equal, leaves(params), before))


def test_the_noise_is_that_of_the_run_whatever_the_version_and_the_mesh():
  mesh = sharding.make_mesh(sharding.MeshShape(fsdp=2, tensor=2), jax.devices())
  drawn = []
  for where in (None, None, mesh):  # A run, the run resumed, and spread out.
    served = mismatched(where, weight_noise=0.1)
    served.set_starting_params(initial())
    for version in (0, 1):
      held = served.load_params(initial(version), version)
      drawn.append(
        jax.tree.map(jnp.subtract, one_stack(held.params), initial(version))
      )
  relative = [np.abs(x).max() for x in leaves(drawn[0])]
  assert min(relative) > 0
  for noise in drawn[1:]:
    for one, other in zip(leaves(drawn[0]), leaves(noise), strict=True):
      np.testing.assert_allclose(one, other, atol=1e-6)


def test_without_the_starting_weights_noisy_ones_cannot_be_served():
  served = mismatched(weight_noise=0.1)
  with pytest.raises(RuntimeError, match="weight_noise is 0.1.*set_starting"):
    served.serve(VersionedParams(version=0, params=initial()))


def test_groups_that_do_not_divide_are_refused_by_the_engine():
  with pytest.raises(ValueError, match=r"group_size is 5; it must divide"):
    mismatched(weights="int4", group_size=5)


@pytest.mark.parametrize("grid", GRIDS)
def test_every_path_attends_to_the_same_rounded_entries(grid):
  """Prefill, extension and decoding, each token by token the same logits."""
  policy = dataclasses.replace(POLICY, kv_grid=grid)
  params = initial()
  tokens = jax.random.randint(jax.random.key(2), (1, 9), 0, 64)
  positions, ids = jnp.arange(9)[None], jnp.zeros((1, 9), jnp.int32)
  hidden = policy.hidden(params, tokens, positions, ids)
  expected = policy.logits(params, hidden)[0]
  ((keys, values),) = policy.prefill(params, tokens)
  for entries in (keys, values):
    assert np.array_equal(quantization.snap_cache(entries, grid), entries)
  cache = [attention.as_cache(keys, values)]
  at, source = jnp.array([4]), jnp.array([0])
  one = policy.extend(params, tokens[:, 4:], at, cache, source)
  for whole, rest in zip((keys, values), one[0], strict=True):
    np.testing.assert_allclose(whole[:, :, 4:], rest, atol=1e-5)
  for position in (0, 4, 8):
    seen = jnp.arange(9)[None] < position
    at = jnp.array([position])
    got, *_ = policy.decode(params, tokens[:, position], at, [(cache, seen)])
    np.testing.assert_allclose(got[0], expected[position], atol=1e-5)
  clean = POLICY.logits(params, POLICY.hidden(params, tokens, positions, ids))
  assert np.abs(clean[0] - expected).max() > 1e-3


def alike(completions, others):
  for one, other in zip(completions, others, strict=True):
    assert one.tokens.tolist() == other.tokens.tolist()
    np.testing.assert_allclose(one.logp, other.logp, atol=1e-5)


@pytest.mark.parametrize("grid", GRIDS)
def test_rounded_caches_are_shared_by_prefix_as_if_computed_anew(grid):
  group = [ask(*PROMPT, member=m, max_tokens=6) for m in range(4)]
  sharing = make_driver(mismatched(sizes={"min_shared_prefix": 2}, kv=grid))
  apart = make_driver(mismatched(kv=grid))
  first = play(sharing, *group)
  alike(first, play(apart, *group))
  assert sharing.counters().shared_tokens == 3 * (len(PROMPT) - 1)
  turn = ask(*PROMPT, *first[0].tokens.tolist(), 7, max_tokens=4)
  alike(play(sharing, turn), play(apart, turn))  # What was decoded is shared.
  assert sharing.counters().shared_tokens == 4 * (len(PROMPT) - 1) + 6
  assert apart.counters().shared_tokens == 0


@pytest.mark.parametrize("update_after", [None, 2])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_sequence_goes_on_as_a_prefill_of_it_would(grid, update_after):
  """Decoded entries, and those computed again from the tokens, are the same.

  The latter by the driver after an update, and here.
  """
  request = ask(*PROMPT, max_tokens=8)
  driver = make_driver(mismatched(kv=grid))
  (done,) = play(driver, request, update_after=update_after)
  last, count = int(done.version[-1]), 4
  if update_after:
    assert driver.counters().interruptions == last == 1
    count = int(np.sum(done.version == 0))
  assert 0 < count < 8
  fresh = mismatched(kv=grid)
  weights = fresh.load_params(initial(last), last)
  state = fresh.admit(
    weights,
    fresh.init_decode_state(),
    [
      engine.Admission(
        slot=0,
        tokens=np.asarray([*PROMPT, *done.tokens[:count]], np.int32),
        budget=8 - count,
        request=request,
      )
    ],
  )
  tokens, logp = [], []
  while len(tokens) < 8 - count:
    state, result = fresh.generate(weights, state)
    new = int(result.counts[0])
    tokens += result.tokens[0, :new].tolist()
    logp += result.logp[0, :new].tolist()
  assert tokens == done.tokens[count:].tolist()
  np.testing.assert_allclose(logp, done.logp[count:], atol=1e-5)


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_the_size_of_a_dispatch_does_not_change_what_is_sampled(kv):
  """Entries of this dispatch and those already in the cache round alike."""
  request = ask(*PROMPT, max_tokens=9)
  one, three = (
    make_driver(mismatched(sizes={"steps_per_dispatch": n}, kv=kv))
    for n in (1, 3)
  )
  alike(play(one, request), play(three, request))
