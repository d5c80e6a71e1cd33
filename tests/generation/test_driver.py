import asyncio
import dataclasses
import threading

import jax
import numpy as np
import pytest
from bigram import CONFIG, ask, make_engine, one_device_mesh, script, uniform
from tiny import INIT, POLICY, full_forward_head, full_forward_logp

from rl_tpu.generation import driver as drivers
from rl_tpu.generation import engine, jetstream
from rl_tpu.types import VersionedParams


def make_driver(table=None, config=CONFIG, version=0, **arguments):
  served = make_engine(config)
  driver = drivers.GenerationDriver(served, **arguments)
  if table is not None:
    driver.update(served.load_params(table, version))
  return driver


def policy_driver(interruption, **changes):
  config = dataclasses.replace(
    CONFIG, context_length=24, prefill_buckets=(8, 24), **changes
  )
  served = engine.PolicyEngine(POLICY, one_device_mesh(), config)
  return drivers.GenerationDriver(served, interruption=interruption)


def weights(driver, seed):
  return driver.engine.load_params(INIT(jax.random.key(seed)), version=seed)


async def steps(driver, count):
  """Lets the clients run, then the driver, `count` times; then the clients."""
  for _ in range(count):
    for _ in range(5):
      await asyncio.sleep(0)
    driver.step()
  for _ in range(5):
    await asyncio.sleep(0)


async def until_done(driver, *tasks):
  for _ in range(500):
    if all(task.done() for task in tasks):
      break
    await steps(driver, 1)
  else:
    raise AssertionError("a request does not end")
  return [await task for task in tasks]


def complete(driver, *requests):
  async def main():
    tasks = [asyncio.ensure_future(driver.generate(r)) for r in requests]
    return await until_done(driver, *tasks)

  return asyncio.run(main())


def long_script():
  """0 -> 1 -> ... -> 15 -> 0."""
  return script(*range(16), 0)


def test_H03_H06_ids_logp_and_reason_arrive_whole():
  driver = make_driver(script(4, 5, 6, 2))
  stopped, cut = complete(
    driver,
    ask(4, max_tokens=9, stop_ids=(7, 2)),
    ask(4, max_tokens=2, stop_ids=(7, 2)),
  )
  assert stopped.tokens.tolist() == [5, 6, 2]
  assert stopped.stop_reason == "stop"
  assert stopped.logp.shape == stopped.version.shape == (3,)
  assert stopped.tokens.dtype == stopped.version.dtype == np.int32
  assert stopped.logp.dtype == np.float32
  assert (cut.tokens.tolist(), cut.stop_reason) == ([5, 6], "length")


def test_H09_tokens_come_in_order_with_their_logp_over_100_repeats():
  table = long_script()["table"] * 1e-4 * 4  # Likely, not certain.
  driver = make_driver({"table": table})
  requests = [ask(i % 16, index=i, max_tokens=3) for i in range(100)]
  logp = np.asarray(jax.nn.log_softmax(table))
  for request, done in zip(requests, complete(driver, *requests), strict=True):
    before = [*request.tokens, *done.tokens[:-1]]
    np.testing.assert_allclose(done.logp, logp[before, done.tokens], atol=1e-5)
  assert driver.free_slots == 4


def test_H09_max_tokens_1_gives_the_first_token_alone():
  driver = make_driver(long_script())
  (done,) = complete(driver, ask(3, max_tokens=1))
  assert (done.tokens.tolist(), done.stop_reason) == ([4], "length")


def test_H10a_cancelled_requests_leave_no_ghosts():
  config = dataclasses.replace(CONFIG, slots=2)
  driver = make_driver(long_script(), config)

  async def main():
    for _ in range(20):
      tasks = [
        asyncio.ensure_future(driver.generate(ask(1, index=i, max_tokens=14)))
        for i in range(2)
      ]
      await steps(driver, 2)
      assert driver.free_slots == 0
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)
    last = [
      asyncio.ensure_future(driver.generate(ask(5, index=i, max_tokens=3)))
      for i in range(2)
    ]
    return await until_done(driver, *last)

  for done in asyncio.run(main()):
    assert done.tokens.tolist() == [6, 7, 8]
  assert (driver.free_slots, driver.waiting) == (2, 0)
  assert driver.counters().cancellations == 40


def test_H10b_cancelling_the_one_that_waits_does_not_stop_the_one_that_runs():
  driver = make_driver(long_script(), dataclasses.replace(CONFIG, slots=1))

  async def main():
    first = asyncio.ensure_future(driver.generate(ask(1, max_tokens=8)))
    second = asyncio.ensure_future(driver.generate(ask(2, max_tokens=8)))
    await steps(driver, 2)
    assert driver.waiting == 1
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert driver.waiting == 0
    (done,) = await until_done(driver, first)
    return done, second.cancelled()

  done, cancelled = asyncio.run(main())
  assert done.tokens.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
  assert cancelled


def test_H10c_cancelling_twice_or_after_the_end_is_harmless():
  driver = make_driver(long_script())

  async def main():
    task = asyncio.ensure_future(driver.generate(ask(1, max_tokens=8)))
    await steps(driver, 1)
    task.cancel()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await steps(driver, 1)
    ended = asyncio.ensure_future(driver.generate(ask(1, max_tokens=1)))
    await until_done(driver, ended)
    assert not ended.cancel()

  asyncio.run(main())
  assert (driver.free_slots, driver.waiting) == (4, 0)


def test_H10c_a_client_whose_loop_is_gone_costs_nothing():
  driver = make_driver(long_script())
  loop = asyncio.new_event_loop()
  task = loop.create_task(driver.generate(ask(1, max_tokens=3)))
  loop.run_until_complete(steps(driver, 1))
  loop.close()
  while driver.step():
    pass
  assert driver.free_slots == 4
  (done,) = complete(driver, ask(5, max_tokens=1))
  assert done.tokens.tolist() == [6]
  task._log_destroy_pending = False  # Its loop was closed on purpose.


def test_requests_beyond_the_free_slots_wait_in_order():
  driver = make_driver(long_script(), dataclasses.replace(CONFIG, slots=1))
  finished = []

  async def main():
    async def one(i):
      await driver.generate(ask(1, index=i, max_tokens=3))
      finished.append(i)

    tasks = [asyncio.ensure_future(one(i)) for i in range(5)]
    await until_done(driver, *tasks)

  asyncio.run(main())
  assert finished == [0, 1, 2, 3, 4]


def test_H13_a_prompt_too_long_is_refused_and_the_next_request_served():
  driver = make_driver(long_script())

  async def main():
    with pytest.raises(ValueError, match=r"17 tokens.*16"):
      await driver.generate(ask(*[1] * 17))

  asyncio.run(main())
  (done,) = complete(driver, ask(1, max_tokens=1))
  assert done.tokens.tolist() == [2]


def test_the_budget_is_cut_to_what_the_context_leaves():
  driver = make_driver(long_script())
  (done,) = complete(driver, ask(*range(13), max_tokens=100))
  assert done.tokens.tolist() == [13, 14, 15]
  assert done.stop_reason == "length"


def test_X11_ids_come_back_as_they_were_sampled():
  driver = make_driver(uniform())
  (done,) = complete(driver, ask(1, max_tokens=9))
  assert done.tokens.shape == done.logp.shape == (9,)
  np.testing.assert_allclose(done.logp, -np.log(16), rtol=1e-6)


def test_X13_each_request_keeps_its_own_temperature_and_filters():
  table = np.tile(np.log(np.asarray([0.5, 0.3, 0.15, 0.05])), (4, 1))
  full = np.full((16, 16), -1e9, np.float32)
  full[:4, :4] = table
  driver = make_driver({"table": full})
  greedy, nucleus, sharp, plain = complete(
    driver,
    ask(1, max_tokens=8, temperature=0.0),
    ask(1, max_tokens=8, top_p=0.8, index=1),
    ask(1, max_tokens=8, temperature=0.5, index=2),
    ask(1, max_tokens=8, top_k=-1, index=3),
  )
  p = np.asarray([0.5, 0.3, 0.15, 0.05])
  assert greedy.tokens.tolist() == [0] * 8
  assert greedy.logp.tolist() == [0.0] * 8
  assert set(nucleus.tokens) <= {0, 1}
  np.testing.assert_allclose(
    nucleus.logp, np.log(p[nucleus.tokens] / 0.8), atol=1e-5
  )
  np.testing.assert_allclose(
    sharp.logp, np.log(p[sharp.tokens] ** 2 / (p**2).sum()), atol=1e-5
  )
  np.testing.assert_allclose(plain.logp, np.log(p[plain.tokens]), atol=1e-5)


def test_X18_members_differ_and_company_does_not_matter():
  requests = [ask(1, member=m, max_tokens=12) for m in range(8)]
  together = complete(make_driver(uniform()), *requests)
  one_slot = dataclasses.replace(CONFIG, slots=1, steps_per_dispatch=3)
  apart = complete(make_driver(uniform(), one_slot), *requests[::-1])[::-1]
  answers = [tuple(done.tokens) for done in together]
  assert answers == [tuple(done.tokens) for done in apart]
  assert len(set(answers)) == 8


REQUESTS = [
  ask(3, 1, 4, index=0, max_tokens=9),
  ask(1, 5, 9, 2, 6, index=1, max_tokens=8, temperature=0.5),
  ask(5, index=2, max_tokens=10, temperature=1.3, member=3),
]


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_request_goes_on_from_what_was_sampled_for_it(cut):
  request = ask(3, 1, max_tokens=12, temperature=1.0)
  driver = make_driver(uniform())
  (whole,) = complete(driver, request)

  async def main():
    other, progress = make_driver(uniform()), []
    first = asyncio.ensure_future(other.generate(request, progress))
    await steps(other, cut)
    first.cancel()
    await asyncio.wait([first])
    had = sum(len(chunk.tokens) for chunk in progress)
    before = other.counters().tokens
    second = asyncio.ensure_future(other.generate(request, progress))
    (done,) = await until_done(other, second)
    return had, other.counters().tokens - before, done

  had, sampled, done = asyncio.run(main())
  assert had == min(2 * cut, 12)
  assert sampled == 12 - had
  np.testing.assert_array_equal(done.tokens, whole.tokens)
  np.testing.assert_array_equal(done.logp, whole.logp)
  assert done.stop_reason == whole.stop_reason == "length"


def test_what_is_too_long_for_a_prompt_begins_anew():
  config = dataclasses.replace(CONFIG, prefill_buckets=(4,))
  driver = make_driver(long_script(), config, interruption="keep")

  async def main():
    progress = []
    first = asyncio.ensure_future(
      driver.generate(ask(1, max_tokens=9), progress)
    )
    await steps(driver, 3)
    first.cancel()
    await asyncio.wait([first])
    assert len(progress) == 3
    again = asyncio.ensure_future(
      driver.generate(ask(1, max_tokens=9), progress)
    )
    return await until_done(driver, again)

  (done,) = asyncio.run(main())
  assert done.tokens.tolist() == [*range(2, 11)]


async def interrupted_twice(driver):
  """Version 1 for two turns, version 2 for one, version 3 to the end."""
  driver.update(weights(driver, 1))
  tasks = [asyncio.ensure_future(driver.generate(r)) for r in REQUESTS]
  await steps(driver, 2)
  driver.update(weights(driver, 2))
  await steps(driver, 1)
  driver.update(weights(driver, 3))
  return await until_done(driver, *tasks)


def test_H14_recompute_logp_is_a_full_forward_of_the_version_that_sampled():
  driver = policy_driver("recompute")
  completions = asyncio.run(interrupted_twice(driver))
  for request, done in zip(REQUESTS, completions, strict=True):
    budget = request.sampling.max_tokens
    assert done.version.tolist() == [1] * 4 + [2] * 2 + [3] * (budget - 6)
    for version in (1, 2, 3):
      expected = full_forward_logp(
        weights(driver, version).params, request, done.tokens
      )
      sampled = done.version == version
      np.testing.assert_allclose(
        done.logp[sampled], expected[sampled], atol=1e-4
      )
  counters = driver.counters()
  assert counters.interruptions == 6
  assert counters.recomputed_tokens == sum(
    2 * len(r.tokens) + 4 + 6 for r in REQUESTS
  )
  assert counters.tokens == 27


@pytest.mark.parametrize("size", [5, 64])
def test_the_head_survives_interruption_with_the_version_that_sampled(size):
  driver = policy_driver("recompute", behavior_top_k=size)
  completions = asyncio.run(interrupted_twice(driver))
  hits = 0
  for request, done in zip(REQUESTS, completions, strict=True):
    assert done.topk_ids.dtype == np.int32
    assert done.topk_logp.dtype == np.float32
    assert done.topk_ids.shape == (len(done.tokens), size)
    for version in (1, 2, 3):
      params = weights(driver, version).params
      ids, logp = full_forward_head(params, request, done.tokens, size)
      now = done.version == version
      np.testing.assert_allclose(done.topk_logp[now], logp[now], atol=1e-4)
      # Neighbours that differ by less than rounding may change places.
      clear = np.diff(logp, prepend=np.inf, append=-np.inf) < -1e-3
      clear = now[:, None] & clear[:, :-1] & clear[:, 1:]
      np.testing.assert_array_equal(done.topk_ids[clear], ids[clear])
    at = done.topk_ids == done.tokens[:, None]
    np.testing.assert_array_equal(done.topk_logp[at], done.logp[at.any(axis=1)])
    hits += at.sum()
  assert hits == 27 if size == 64 else 0 < hits < 27


def test_without_a_head_completions_have_none():
  (done,) = complete(make_driver(long_script()), ask(1, max_tokens=2))
  assert done.topk_ids is None and done.topk_logp is None


def test_keep_goes_on_with_the_old_keys_and_stamps_the_weights_that_sampled():
  driver = policy_driver("keep")
  completions = asyncio.run(interrupted_twice(driver))
  recomputed = asyncio.run(interrupted_twice(policy_driver("recompute")))
  for request, done, other in zip(
    REQUESTS, completions, recomputed, strict=True
  ):
    budget = request.sampling.max_tokens
    assert done.version.tolist() == [1] * 4 + [2] * 2 + [3] * (budget - 6)
    np.testing.assert_array_equal(done.tokens[:4], other.tokens[:4])
    assert abs(done.logp[4] - other.logp[4]) > 1e-3 or (
      done.tokens[4] != other.tokens[4]
    )
  assert driver.counters().interruptions == 0


def test_drain_finishes_under_the_old_weights_before_it_admits_again():
  driver = policy_driver("drain", slots=3)

  async def main():
    driver.update(weights(driver, 1))
    running = [asyncio.ensure_future(driver.generate(r)) for r in REQUESTS]
    await steps(driver, 1)
    driver.update(weights(driver, 2))
    late = asyncio.ensure_future(driver.generate(ask(7, max_tokens=2)))
    await steps(driver, 3)
    assert driver.version == 1
    driver.update(weights(driver, 3))
    return await until_done(driver, *running, late)

  *running, late = asyncio.run(main())
  for done in running:
    assert set(done.version) == {1}
  assert late.version.tolist() == [3, 3]
  assert driver.counters().updates == 2


def test_a_sequence_interrupted_at_its_last_token_is_not_sent_again():
  driver = make_driver(long_script())

  async def main():
    task = asyncio.ensure_future(driver.generate(ask(1, max_tokens=2)))
    await asyncio.sleep(0)
    driver.step()
    driver.update(driver.engine.load_params(long_script(), 1))
    (done,) = await until_done(driver, task)
    return done

  assert asyncio.run(main()).tokens.tolist() == [2, 3]
  assert driver.counters().interruptions == 0
  assert driver.counters().tokens == 2


def test_of_several_updates_before_a_boundary_the_newest_is_used():
  driver = make_driver(long_script())
  for version in (1, 2):
    driver.update(driver.engine.load_params(long_script(), version))
  with pytest.raises(ValueError, match=r"version 1.*greater than 2"):
    driver.update(driver.engine.load_params(long_script(), 1))
  (done,) = complete(driver, ask(1, max_tokens=1))
  assert done.version.tolist() == [2]
  assert driver.counters().updates == 1


def test_versions_rise_within_a_life_and_begin_anew_with_the_next():
  driver = make_driver(long_script())
  for version, life in ((7, "one"), (5, "two")):
    weights = driver.engine.load_params(long_script(), version)
    driver.update(weights, life)
    assert driver.accepted == (life, version)
    (done,) = complete(driver, ask(1, max_tokens=1))
    assert done.version.tolist() == [version]
    with pytest.raises(ValueError, match=f"must be greater than {version}"):
      driver.update(weights, life)


def test_requests_wait_until_there_are_weights():
  driver = make_driver()

  async def main():
    task = asyncio.ensure_future(driver.generate(ask(1, max_tokens=1)))
    await asyncio.sleep(0)
    assert not driver.step()
    driver.update(driver.engine.load_params(long_script(), 5))
    (done,) = await until_done(driver, task)
    return done

  assert asyncio.run(main()).version.tolist() == [5]


def test_X09_an_update_on_other_devices_is_refused():
  driver = make_driver(long_script())
  table = jax.device_put(uniform(), jax.devices()[1])
  with pytest.raises(ValueError, match="load_params"):
    driver.update(VersionedParams(version=1, params=table))


def test_a_paused_driver_does_nothing_until_resumed():
  driver = make_driver(long_script())

  async def main():
    task = asyncio.ensure_future(driver.generate(ask(1, max_tokens=3)))
    await asyncio.sleep(0)
    driver.pause()
    assert not driver.step()
    driver.resume()
    (done,) = await until_done(driver, task)
    return done

  assert asyncio.run(main()).tokens.tolist() == [2, 3, 4]


def test_events_and_counters_follow_the_injected_clock():
  ticks = iter(range(1000))
  driver = make_driver(long_script(), clock=lambda: float(next(ticks)))
  complete(driver, ask(1, max_tokens=3))
  kinds = [kind for _, _, kind in driver.take_events()]
  assert kinds == ["weights", "prefill", "generate", "generate"]
  assert driver.take_events() == []
  counters = driver.counters()
  assert counters.busy_seconds == 4.0
  assert counters.busy_seconds + counters.idle_seconds == 11.0
  assert (counters.prompts, counters.completions, counters.tokens) == (1, 1, 3)


def break_generate(driver, error):
  def broken(*_):
    raise error

  driver.engine.generate = broken


def test_an_engine_failure_fails_every_request_and_the_process_lives():
  told = []
  driver = make_driver(
    long_script(), dataclasses.replace(CONFIG, slots=1), on_failure=told.append
  )
  error = ValueError("device lost")
  break_generate(driver, error)

  async def main():
    tasks = [
      asyncio.ensure_future(driver.generate(ask(1, index=i))) for i in range(3)
    ]
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="device lost"):
      driver.step()
    outcomes = asyncio.gather(*tasks, return_exceptions=True)
    return await asyncio.wait_for(outcomes, timeout=60)

  for outcome in asyncio.run(main()):
    assert isinstance(outcome, RuntimeError)
    assert outcome.__cause__ is error
  assert driver.failure is error
  assert told == [error]
  assert not driver.live
  with pytest.raises(RuntimeError, match="failed"):
    driver.step()
  with pytest.raises(RuntimeError, match="failed"):
    complete(driver, ask(1))


def test_a_failure_in_the_thread_reaches_clients_and_owner(caplog):
  told = threading.Event()
  driver = make_driver(long_script(), on_failure=lambda _: told.set())
  break_generate(driver, ValueError("device lost"))
  driver.start()
  with pytest.raises(RuntimeError, match="failed"):
    asyncio.run(driver.generate(ask(1)))
  assert told.wait(timeout=60)
  driver.stop()
  assert isinstance(driver.failure, ValueError)


def test_stop_fails_open_requests_instead_of_leaving_them_hanging():
  driver = make_driver()  # No weights: the request cannot even start.
  driver.start()

  async def main():
    task = asyncio.ensure_future(driver.generate(ask(1)))
    await asyncio.sleep(0)
    driver.stop()
    driver.stop()
    with pytest.raises(RuntimeError, match="stopped"):
      await asyncio.wait_for(task, timeout=60)

  asyncio.run(main())
  with pytest.raises(RuntimeError, match="stopped"):
    driver.start()


def test_step_is_refused_while_the_thread_runs():
  driver = make_driver(long_script())
  driver.start()
  with pytest.raises(RuntimeError, match="step"):
    driver.step()
  driver.stop()


@pytest.mark.parametrize("interruption", drivers.INTERRUPTIONS)
def test_threaded_loop_serves_300_requests_under_concurrent_updates(
  interruption,
):
  driver = make_driver(uniform(), interruption=interruption)
  expected = complete(
    make_driver(uniform()),
    *(ask(1 + i % 9, index=i, max_tokens=1 + i % 6) for i in range(300)),
  )
  driver.start()
  finished = threading.Event()

  def publish():
    for version in range(1, 40):
      driver.update(driver.engine.load_params(uniform(), version))
      if finished.is_set():
        break

  publisher = threading.Thread(target=publish)

  async def main():
    publisher.start()
    requests = [
      ask(1 + i % 9, index=i, max_tokens=1 + i % 6) for i in range(300)
    ]
    tasks = [asyncio.ensure_future(driver.generate(r)) for r in requests]
    cancelled = [
      asyncio.ensure_future(driver.generate(ask(1, index=1000 + i)))
      for i in range(20)
    ]
    for task in cancelled:
      await asyncio.sleep(0)
      task.cancel()
    return await asyncio.gather(*tasks)

  completions = asyncio.run(main())
  finished.set()
  publisher.join()
  driver.pause()
  assert (driver.free_slots, driver.waiting) == (4, 0)
  driver.stop()
  for done, same in zip(completions, expected, strict=True):
    np.testing.assert_array_equal(done.tokens, same.tokens)
    assert (np.diff(done.version) >= 0).all()
  assert driver.failure is None


def test_clients_of_jetstreams_own_service_are_streamed_tokens():
  driver = make_driver(long_script())
  orchestrator = jetstream.orchestrator.LLMOrchestrator(driver)
  message = jetstream.jetstream_pb2.DecodeRequest(
    token_content=jetstream.jetstream_pb2.DecodeRequest.TokenContent(
      token_ids=[1, 2]
    ),
    max_tokens=5,
  )

  async def decode():
    return [
      token
      async for response in orchestrator.Decode(message)
      for sample in response.stream_content.samples
      for token in sample.token_ids
    ]

  async def main():
    (tokens,) = await until_done(driver, asyncio.ensure_future(decode()))
    text = jetstream.jetstream_pb2.DecodeRequest(
      text_content=jetstream.jetstream_pb2.DecodeRequest.TextContent(text="a"),
      max_tokens=1,
    )
    with pytest.raises(NotImplementedError, match="token ids only"):
      async for _ in orchestrator.Decode(text):
        pass
    return tokens

  assert asyncio.run(main()) == [3, 4, 5, 6, 7]
  assert driver.free_slots == 4


def test_a_client_of_jetstreams_service_that_hangs_up_frees_its_slot():
  driver = make_driver(long_script())

  async def main():
    channel = jetstream.async_multifuture.AsyncMultifuture()
    driver.place_request_on_prefill_queue(
      jetstream.orchestrator.ActiveRequest(
        max_tokens=14, prefill_content=[1], return_channel=channel
      )
    )
    driver.step()
    assert driver.free_slots == 3
    channel.cancel()
    driver.step()

  asyncio.run(main())
  assert driver.free_slots == 4


def test_recompute_needs_buckets_that_reach_the_context():
  config = dataclasses.replace(CONFIG, prefill_buckets=(4, 8))
  with pytest.raises(ValueError, match=r"prefill_buckets.*>= 15"):
    make_driver(None, config)
  make_driver(None, config, interruption="keep")


def test_an_unknown_interruption_is_refused():
  with pytest.raises(ValueError, match=r"'abort'.*recompute"):
    make_driver(None, interruption="abort")
