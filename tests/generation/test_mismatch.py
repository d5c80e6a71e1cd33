"""Engines that hold the learner's policy rounded, noisy, or old."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest
from bigram import CONFIG, ask, one_device_mesh
from tiny import INIT, POLICY, full_forward_logp

from rl_tpu.generation import driver as drivers
from rl_tpu.generation import engine
from rl_tpu.models import quantization

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
