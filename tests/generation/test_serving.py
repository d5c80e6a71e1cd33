"""Many random requests: each exact, whatever ran beside it."""

import asyncio
import dataclasses
import random

import jax
import numpy as np
import pytest
from bigram import CONFIG, ask, one_device_mesh
from tiny import INIT, POLICY, full_forward_head, full_forward_logp

from rl_tpu.generation import driver as drivers
from rl_tpu.generation import engine

CONTEXT = 24


def make_driver(slots, least=0, steps=2, **changes):
  config = dataclasses.replace(
    CONFIG,
    slots=slots,
    context_length=CONTEXT,
    prefill_buckets=(8, 24),
    prefill_batches=(8,),
    steps_per_dispatch=steps,
    min_shared_prefix=least,
    **changes,
  )
  served = engine.PolicyEngine(POLICY, one_device_mesh(), config)
  return drivers.GenerationDriver(served)


def random_requests(count, seed):
  """Mixed prompts (half begin alike), budgets and stop ids; half are greedy."""
  chance = random.Random(seed)
  common = [chance.randrange(64) for _ in range(8)]
  made = []
  for index in range(count):
    own = [chance.randrange(64) for _ in range(chance.randint(1, 8))]
    prompt = common[: chance.randint(2, 8)] + own if index % 2 else own
    made.append(
      ask(
        *prompt,
        index=index,
        max_tokens=chance.randint(1, CONTEXT - len(prompt)),
        temperature=chance.choice([0.0, 0.7, 1.0]),
        stop_ids=(chance.randrange(64),),
      )
    )
  return made


def check(params, request, completion):
  """Against a plain forward of the whole sequence."""
  if request.sampling.temperature == 0.0:
    warm = dataclasses.replace(request.sampling, temperature=1.0)
    likely = dataclasses.replace(request, sampling=warm)
    ids, _ = full_forward_head(params, likely, completion.tokens, 1)
    assert completion.tokens.tolist() == ids[:, 0].tolist()
    assert not completion.logp.any()
  else:
    expected = full_forward_logp(params, request, completion.tokens)
    np.testing.assert_allclose(completion.logp, expected, atol=1e-5)
  stopped = completion.tokens[-1] in request.sampling.stop_ids
  assert completion.stop_reason == ("stop" if stopped else "length")
  if not stopped:
    assert len(completion.tokens) == request.sampling.max_tokens


@pytest.mark.parametrize("least", [0, 2], ids=["no sharing", "shared prefixes"])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "dispatched ahead"])
def test_200_requests_with_cancellations_and_updates_are_exact(least, ahead):
  """Each token under the weights of the version that it names."""
  driver = make_driver(8, least, dispatch_ahead=ahead)
  versions = {v: INIT(jax.random.key(v)) for v in range(3)}
  driver.update(driver.engine.load_params(versions[0], 0))
  wanted = random_requests(200, seed=1)
  cancelled = set(range(0, 200, 9))
  done = {}

  async def ask_for(index, request):
    try:
      done[index] = await driver.generate(request)
    except asyncio.CancelledError:
      assert index in cancelled

  async def main():
    tasks = []
    turns = 0
    while len(done) + len(cancelled) < 200 or driver.free_slots < 8:
      for _ in range(4):
        if len(tasks) < 200:
          index = len(tasks)
          task = asyncio.ensure_future(ask_for(index, wanted[index]))
          tasks.append(task)
      await asyncio.sleep(0)
      driver.step()
      turns += 1
      for index in cancelled:
        if index < len(tasks) - 6:
          tasks[index].cancel()
      if turns in (20, 45):
        version = driver.version + 1
        driver.update(driver.engine.load_params(versions[version], version))
    await asyncio.gather(*tasks)

  asyncio.run(main())
  assert driver.version == 2
  assert driver.waiting == 0
  assert len(done) >= 200 - len(cancelled)
  assert (driver.counters().shared_tokens > 0) == (least > 0)
  seen = set()
  for index, completion in done.items():
    by = sorted(set(completion.version.tolist()))
    seen.update(by)
    if len(by) == 1:
      check(versions[by[0]], wanted[index], completion)
    elif wanted[index].sampling.temperature > 0:
      # Interrupted: each part under its own weights, on all that came before.
      for version in by:
        of = completion.version == version
        expected = full_forward_logp(
          versions[version], wanted[index], completion.tokens
        )
        np.testing.assert_allclose(completion.logp[of], expected[of], atol=1e-5)
  assert seen == {0, 1, 2}


def test_64_requests_give_the_same_tokens_in_any_number_of_slots():
  wanted = random_requests(64, seed=2)
  params = INIT(jax.random.key(0))

  def tokens(slots, least, steps, **changes):
    driver = make_driver(slots, least, steps, **changes)
    driver.update(driver.engine.load_params(params, 0))

    async def main():
      tasks = [asyncio.ensure_future(driver.generate(r)) for r in wanted]
      while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        driver.step()
      return [task.result().tokens.tolist() for task in tasks]

    return asyncio.run(main())

  expected = tokens(1, 0, 1)
  for slots, least, steps in ((3, 2, 2), (8, 0, 4), (32, 2, 1)):
    assert tokens(slots, least, steps) == expected
  changes = {"dispatch_ahead": True, "prompts_per_row": 4}
  assert tokens(16, 2, 3, **changes) == expected
