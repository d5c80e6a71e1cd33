"""Requests whose tokens are handed over as they are sampled."""

import asyncio
import threading

import numpy as np
import pytest
from bigram import CONFIG, ask, make_engine, script, uniform

from rl_tpu.generation import driver as drivers
from rl_tpu.generation import requests


def make_driver(table, **changes):
  served = make_engine(CONFIG)
  driver = drivers.GenerationDriver(served, **changes)
  driver.update(served.load_params(table, 0))
  return driver


@pytest.fixture
def running():
  """A driver in its own thread, whose script is 0 -> 1 -> ... -> 15 -> 0."""
  driver = make_driver(script(*range(16), 0))
  driver.start()
  yield driver
  driver.stop()


def test_chunks_joined_are_the_completion():
  request = ask(3, max_tokens=7)

  async def main():
    driver = make_driver(uniform())
    driver.start()
    try:
      chunks = [chunk async for chunk in driver.stream(request)]
      return chunks, await driver.generate(request)
    finally:
      driver.stop()

  chunks, whole = asyncio.run(main())
  assert [len(chunk.tokens) for chunk in chunks] == [2, 2, 2, 1]
  reasons = [chunk.stop_reason for chunk in chunks]
  assert reasons == [None, None, None, "length"]
  for field in ("tokens", "logp"):
    joined = np.concatenate([getattr(chunk, field) for chunk in chunks])
    np.testing.assert_array_equal(joined, getattr(whole, field))
  assert {chunk.version for chunk in chunks} == {0}
  assert chunks[0].topk_ids is None


def test_a_streamed_request_costs_no_completion(running, monkeypatch):
  built = []
  table, completion = requests.SlotTable, requests.SlotTable.completion

  def counted(self, opened, result):
    built.append(opened.request.prompt_index)
    return completion(self, opened, result)

  monkeypatch.setattr(table, "completion", counted)

  async def main():
    async for _ in running.stream(ask(3, index=1, max_tokens=7)):
      pass
    await running.generate(ask(3, index=2, max_tokens=7))

  asyncio.run(main())
  assert built == [2]


def test_each_chunk_names_the_weights_that_sampled_it():
  driver = make_driver(uniform(), interruption="keep")

  async def main():
    stream = driver.stream(ask(3, max_tokens=4))
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    driver.step()
    driver.update(driver.engine.load_params(uniform(), 5))
    driver.step()
    driver.step()
    return [await first, *[chunk async for chunk in stream]]

  assert [chunk.version for chunk in asyncio.run(main())] == [0, 5]


def test_closing_a_stream_frees_its_slot():
  driver = make_driver(script(*range(16), 0))

  async def main():
    stream = driver.stream(ask(1, max_tokens=14))
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    driver.step()
    chunk = await first
    await stream.aclose()
    assert driver.step()
    return chunk

  assert asyncio.run(main()).tokens.tolist() == [2, 3]
  assert driver.free_slots == CONFIG.slots
  assert driver.counters().cancellations == 1
  assert not driver.step()


def test_a_stream_ends_with_what_ended_the_driver(running):
  async def main():
    running.pause()
    stream = running.stream(ask(1, max_tokens=14))
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await asyncio.to_thread(running.stop)
    await waiting

  with pytest.raises(RuntimeError, match="the generation driver was stopped"):
    asyncio.run(main())


def test_streams_and_whole_completions_run_side_by_side(running):
  async def stream(request):
    return [t async for c in running.stream(request) for t in c.tokens.tolist()]

  async def main():
    return await asyncio.gather(
      stream(ask(1, max_tokens=5)),
      running.generate(ask(7, max_tokens=3)),
      stream(ask(4, max_tokens=1)),
    )

  first, whole, last = asyncio.run(main())
  assert first == [2, 3, 4, 5, 6]
  assert whole.tokens.tolist() == [8, 9, 10]
  assert last == [5]


def test_a_client_in_another_thread_may_open_and_cancel(running):
  """As a server does: it hears nothing after its loop handled the cancel."""
  heard = []

  def client():
    async def main():
      loop = asyncio.get_running_loop()
      begun = asyncio.Event()

      def receive(outcome):
        heard.append(outcome)
        begun.set()

      opened = running.open(
        ask(1, max_tokens=14),
        drivers.Client(loop=loop, receive=receive, streams=True),
      )
      await begun.wait()
      running.cancel(opened)
      running.cancel(opened)

    asyncio.run(main())

  thread = threading.Thread(target=client)
  thread.start()
  thread.join()
  assert heard
  assert not isinstance(heard[0], Exception)


def test_stop_ids_wait_for_the_least_number_of_tokens():
  """Token 5 follows everything, and would stop it: 6 is the next likely."""
  table = np.zeros((16, 16), np.float32)
  table[:, 5], table[:, 6] = 1e4, 1e3
  driver = make_driver({"table": table})
  request = ask(1, max_tokens=9, min_tokens=3, stop_ids=(5, 7))

  async def main():
    task = asyncio.ensure_future(driver.generate(request))
    while not task.done():
      await asyncio.sleep(0)
      driver.step()
    return task.result()

  done = asyncio.run(main())
  assert done.tokens.tolist() == [6, 6, 6, 5]
  assert done.stop_reason == "stop"
  np.testing.assert_allclose(done.logp, 0.0, atol=1e-5)


def test_barred_stop_ids_leave_the_rest_its_distribution():
  driver = make_driver(uniform())
  request = ask(1, max_tokens=2, min_tokens=2, stop_ids=(5, 7, 9))

  async def main():
    task = asyncio.ensure_future(driver.generate(request))
    while not task.done():
      await asyncio.sleep(0)
      driver.step()
    return task.result()

  done = asyncio.run(main())
  np.testing.assert_allclose(done.logp, np.log(1 / 13), atol=1e-5)
  assert request.sampling.filtered


@pytest.mark.parametrize("least", [-1, 4])
def test_the_least_number_of_tokens_lies_within_the_most(least):
  with pytest.raises(ValueError, match="min_tokens.*must be in"):
    ask(1, max_tokens=3, min_tokens=least)
