"""Dispatches that begin before the last one's result is read."""

import asyncio
import dataclasses
import itertools
import threading

import jax
import numpy as np
import pytest
from bigram import CONFIG, ask, make_engine, one_device_mesh, script, uniform
from tiny import INIT, POLICY, full_forward_logp

from rl_tpu.generation import driver as drivers
from rl_tpu.generation import engine

AHEAD = dataclasses.replace(CONFIG, dispatch_ahead=True)


def make_driver(table=None, **changes):
  interruption = changes.pop("interruption", "recompute")
  served = make_engine(dataclasses.replace(AHEAD, **changes))
  driver = drivers.GenerationDriver(served, interruption=interruption)
  table = script(*range(16), 0) if table is None else table
  driver.update(served.load_params(table, 0))
  log_order(driver)
  return driver


def log_order(driver):
  """Notes in `driver.order` what is enqueued and what is waited for."""
  driver.order = []
  generate, admit = driver.engine.generate, driver.engine.admit

  class Waited:
    def __init__(self, result):
      self.result = result

    def convert_to_numpy(self):
      driver.order.append("read")
      return self.result.convert_to_numpy()

  def generating(*arguments):
    driver.order.append("decode")
    state, result = generate(*arguments)
    return state, Waited(result)

  def admitting(*arguments):
    driver.order.append("prefill")
    return admit(*arguments)

  driver.engine.generate, driver.engine.admit = generating, admitting


def start(driver, *requests):
  return [asyncio.ensure_future(driver.generate(r)) for r in requests]


async def turn(driver):
  for _ in range(5):
    await asyncio.sleep(0)
  worked = driver.step()
  for _ in range(5):
    await asyncio.sleep(0)
  return worked


async def finish(driver, *tasks):
  while await turn(driver):
    pass
  return [task.result() for task in tasks]


def test_the_next_dispatch_is_enqueued_before_the_last_result_is_read():
  driver = make_driver()

  async def main():
    first = start(driver, ask(1, max_tokens=6))
    await turn(driver)
    assert driver.order == ["prefill", "decode"]
    assert driver.counters().tokens == 0
    second = start(driver, ask(2, index=1, max_tokens=4))
    await turn(driver)
    assert driver.order[2:] == ["prefill", "decode", "read"]
    return await finish(driver, *first, *second)

  one, two = asyncio.run(main())
  assert one.tokens.tolist() == [2, 3, 4, 5, 6, 7]
  assert two.tokens.tolist() == [3, 4, 5, 6]


def test_what_surely_ends_is_neither_decoded_on_nor_kept_from_those_who_wait():
  driver = make_driver(slots=1)

  async def main():
    tasks = start(driver, *(ask(i, index=i, max_tokens=4) for i in range(3)))
    return await finish(driver, *tasks)

  for index, done in enumerate(asyncio.run(main())):
    assert done.tokens.tolist() == [index + n for n in (1, 2, 3, 4)]
  # Two dispatches of two steps each; none of them is in vain.
  assert driver.order.count("decode") == 6


def test_a_slot_that_surely_becomes_free_is_filled_without_a_dispatch_between():
  driver = make_driver(slots=2)

  async def main():
    short = (ask(i, index=i, max_tokens=4) for i in range(1, 4))
    tasks = start(driver, ask(0, max_tokens=12), *short)
    return await finish(driver, *tasks)

  assert [len(d.tokens) for d in asyncio.run(main())] == [12, 4, 4, 4]
  # Beside the six of the long one, two for each of the others.
  assert driver.order.count("decode") == 6


def test_a_stop_seen_one_dispatch_late_delivers_no_token_too_many():
  driver = make_driver(slots=1)

  async def main():
    stops = ask(1, max_tokens=14, stop_ids=(3,))
    tasks = start(driver, stops, ask(5, index=1, max_tokens=2))
    return await finish(driver, *tasks)

  stopped, late = asyncio.run(main())
  assert (stopped.tokens.tolist(), stopped.stop_reason) == ([2, 3], "stop")
  assert late.tokens.tolist() == [6, 7]
  assert driver.order.count("decode") == 3
  assert driver.counters().tokens == 4


def test_H10a_a_cancelled_slot_is_used_at_once_and_its_late_tokens_dropped():
  driver = make_driver(slots=1)

  async def main():
    (gone,) = start(driver, ask(1, max_tokens=14))
    await turn(driver)
    gone.cancel()
    (task,) = start(driver, ask(8, index=1, max_tokens=4))
    await turn(driver)
    assert (driver.free_slots, driver.waiting) == (0, 0)
    return await finish(driver, task)

  (done,) = asyncio.run(main())
  assert done.tokens.tolist() == [9, 10, 11, 12]
  assert driver.counters().tokens == 4
  assert driver.counters().cancellations == 1


def test_streams_get_every_token_once_and_nothing_of_a_slots_last_tenant():
  driver = make_driver(slots=1)

  async def chunks(request):
    got = [chunk async for chunk in driver.stream(request)]
    return [chunk.tokens.tolist() for chunk in got]

  async def main():
    (gone,) = start(driver, ask(1, max_tokens=14))
    await turn(driver)
    gone.cancel()
    task = asyncio.ensure_future(chunks(ask(8, index=1, max_tokens=5)))
    return await finish(driver, task)

  assert asyncio.run(main()) == [[[9, 10], [11, 12], [13]]]


@pytest.mark.parametrize("interruption", drivers.INTERRUPTIONS)
def test_H14_new_weights_meet_sequences_with_all_their_tokens(interruption):
  config = dataclasses.replace(AHEAD, context_length=24, prefill_buckets=(24,))
  served = engine.PolicyEngine(POLICY, one_device_mesh(), config)
  driver = drivers.GenerationDriver(served, interruption=interruption)
  params = {v: INIT(jax.random.key(v)) for v in (1, 2)}
  request = ask(3, 1, 4, max_tokens=9)

  async def main():
    driver.update(served.load_params(params[1], 1))
    tasks = start(driver, request)
    await turn(driver)
    await turn(driver)
    assert driver.counters().tokens == 2  # Two more are under way.
    driver.update(served.load_params(params[2], 2))
    return await finish(driver, *tasks)

  (done,) = asyncio.run(main())
  news = 0 if interruption == "drain" else 5
  assert done.version.tolist() == [1] * (9 - news) + [2] * news
  for version in (1, 2):
    of = done.version == version
    expected = full_forward_logp(params[version], request, done.tokens)
    if version == 1 or interruption == "recompute":
      np.testing.assert_allclose(done.logp[of], expected[of], atol=1e-5)
  assert driver.version == 2


def test_a_pause_reads_what_is_under_way_and_begins_nothing():
  driver = make_driver()

  async def main():
    tasks = start(driver, ask(1, max_tokens=6))
    await turn(driver)
    driver.pause()
    assert await turn(driver)
    assert not await turn(driver)
    assert driver.order == ["prefill", "decode", "read"]
    driver.resume()
    return await finish(driver, *tasks)

  assert asyncio.run(main())[0].tokens.tolist() == [2, 3, 4, 5, 6, 7]


def test_a_threaded_loop_pauses_at_rest_and_serves_what_a_turned_one_serves():
  requests = [ask(1 + i % 9, index=i, max_tokens=1 + i % 6) for i in range(100)]
  turned, threaded = make_driver(uniform()), make_driver(uniform())

  async def all_of(driver, run):
    tasks = start(driver, *requests)
    return await run(driver, *tasks)

  async def gather(driver, *tasks):
    return await asyncio.gather(*tasks)

  expected = asyncio.run(all_of(turned, finish))
  threaded.start()
  stop = threading.Event()

  def interfere():
    while not stop.is_set():
      threaded.pause()
      assert threaded.order.count("decode") == threaded.order.count("read")
      threaded.resume()

  other = threading.Thread(target=interfere)
  other.start()
  done = asyncio.run(all_of(threaded, gather))
  stop.set()
  other.join()
  threaded.stop()
  assert [d.tokens.tolist() for d in done] == [
    e.tokens.tolist() for e in expected
  ]
  assert threaded.failure is None


def test_an_event_counts_no_moment_twice():
  ticks = iter(range(1000))
  driver = drivers.GenerationDriver(
    make_engine(AHEAD), clock=lambda: float(next(ticks))
  )
  driver.update(driver.engine.load_params(script(*range(16), 0), 0))

  async def main():
    return await finish(driver, *start(driver, ask(1, max_tokens=8)))

  asyncio.run(main())
  events = driver.take_events()
  assert [kind for _, _, kind in events] == ["weights"] + ["generate"] * 4
  for (_, end, _), (begin, _, _) in itertools.pairwise(events):
    assert begin >= end
