import asyncio
import contextlib
import dataclasses

import jax
import numpy as np
import pytest
from bigram import CONFIG, ask, make_engine, one_device_mesh, uniform
from tiny import INIT, POLICY, full_forward_logp

from rl_tpu import checkpoint, sharding
from rl_tpu.generation import client as clients
from rl_tpu.generation import driver as drivers
from rl_tpu.generation import engine, fleet, roster, server
from rl_tpu.types import Chunk

TOKEN = "a token of some length"


def table(seed):
  """Any token may follow any other, each with a chance of its own."""
  shape = uniform()["table"].shape
  logits = np.random.default_rng(seed).normal(size=shape)
  return {"table": logits.astype(np.float32)}


def table_driver(**changes):
  return drivers.GenerationDriver(
    make_engine(dataclasses.replace(CONFIG, **changes))
  )


def policy_driver(devices=None):
  config = dataclasses.replace(
    CONFIG, context_length=24, prefill_buckets=(8, 24)
  )
  mesh = one_device_mesh()
  if devices is not None:
    mesh = sharding.make_mesh(sharding.MeshShape(), devices)
  return drivers.GenerationDriver(engine.PolicyEngine(POLICY, mesh, config))


class Hanging(server.GenerationServer):
  """Stops answering checks when it is told to."""

  answers = True

  async def _status(self, data, context):
    while not self.answers:
      await asyncio.sleep(0.01)
    return await super()._status(data, context)


class Generator:
  """A server in this process; its driver works while a test lets it."""

  def __init__(self, driver=None, **config):
    self.driver = driver or table_driver()
    self.config = config
    self.token = config.pop("token", None)
    self.port = 0

  async def start(self):
    config = server.Config(port=self.port, **self.config)
    self.server = Hanging(self.driver, config, self.token)
    await self.server.start()
    self.port = self.server.port

  @property
  def address(self):
    return f"127.0.0.1:{self.port}"

  @property
  def open(self):
    return self.server.admission.open


@contextlib.asynccontextmanager
async def serving(*generators):
  for generator in generators:
    await generator.start()
  try:
    yield
  finally:
    for generator in generators:
      generator.server.answers = True
      await generator.server.stop()


def quick(generators, **changes):
  """Limits under which a test need not wait for anything."""
  values = {
    "addresses": tuple(g.address for g in generators),
    "health_seconds": 0.02,
    "retry_seconds": 0.02,
    "retry_max_seconds": 0.05,
    "timeout_seconds": 20.0,
    **changes,
  }
  return roster.Config(**values)


def weights(generators, version, params, life="", taken=None):
  """An offer that hands the weights over at once, and notes to whom."""
  by_address = {g.address: g for g in generators}

  async def offer(client):
    driver = by_address[client.address].driver
    driver.update(driver.engine.load_params(params, version), life)
    if taken is not None:
      taken.append((client.address, version))

  return offer


@contextlib.asynccontextmanager
async def fleet_of(*generators, on_served=None, on_failure=None, **changes):
  """A fleet whose generators all serve version 0 of the same table."""
  told = {} if on_served is None else {"on_served": on_served}
  if on_failure is not None:
    told["on_failure"] = on_failure
  async with serving(*generators):
    config = quick(generators, **changes)
    async with fleet.Fleet(config, **told) as made:
      await made.publish(0, weights(generators, 0, table(0)))
      await until(lambda: all(usable(made, g) for g in generators))
      yield made


def usable(made, generator):
  member = made._router.members[generator.address]
  return made._router.usable(member)


async def until(condition, *generators):
  """Lets the network work, and these generators, until then."""
  async with asyncio.timeout(60):
    while not condition():
      for generator in generators:
        if generator.driver.live:
          generator.driver.step()
      await asyncio.sleep(0.001)


async def dispatches(generator, chunks, count):
  """Has a generator sample so many chunks for its one request, and no more."""
  await until(lambda: generator.open == 1)
  for _ in range(count):
    before = len(chunks)
    generator.driver.step()
    await until(lambda b=before: len(chunks) > b)


def begin(made, *requests):
  return [asyncio.ensure_future(made.generate(r)) for r in requests]


async def ends(tasks, *generators):
  await until(lambda: all(task.done() for task in tasks), *generators)
  return [task.result() for task in tasks]


def unbroken(requests, driver=None, params=None, version=0):
  """What one generator answers that nothing happens to."""
  driver = driver or table_driver()
  driver.update(driver.engine.load_params(params or table(0), version))

  async def main():
    tasks = begin(driver, *requests)
    while not all(task.done() for task in tasks):
      driver.step()
      await asyncio.sleep(0)
    return [task.result() for task in tasks]

  return asyncio.run(main())


def assert_equal(one, other):
  for field in dataclasses.fields(one):
    a, b = (np.asarray(getattr(x, field.name)) for x in (one, other))
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


# The contract of one generator.


def test_a_fleet_answers_what_one_generator_answers_bit_for_bit():
  requests = [
    ask(i % 7, 3, index=i, member=i % 2, max_tokens=4 + i % 9, stop_ids=(5,))
    for i in range(12)
  ]
  first, second = Generator(), Generator()

  async def main():
    async with fleet_of(first, second) as made:
      answers = await ends(begin(made, *requests), first, second)
      return answers, made.counters()

  answers, counters = asyncio.run(main())
  for answer, expected in zip(answers, unbroken(requests), strict=True):
    assert_equal(answer, expected)
  assert counters.completions == 12
  assert counters.tokens == sum(len(answer.tokens) for answer in answers)
  assert (counters.retries, counters.openings) == (0, 0)
  for generator in (first, second):
    assert generator.driver.counters().completions > 2


def test_cancelling_withdraws_what_runs_and_what_waits():
  one = Generator(table_driver(slots=1, prefill_batches=(1,)))

  async def main():
    async with fleet_of(one, requests_per_slot=1.0) as made:
      runs, waits, last = begin(
        made, *(ask(1, index=i, max_tokens=12) for i in range(3))
      )
      await until(lambda: one.open == 1, one)
      assert made.status()["waiting"] == 2
      waits.cancel()
      await until(waits.done)
      runs.cancel()
      await until(lambda: one.driver.counters().cancellations == 1)
      await ends([last], one)
      assert one.driver.counters().completions == 1

  asyncio.run(main())


def test_a_place_given_to_one_who_is_cancelled_that_moment_is_given_back():
  one = Generator(table_driver(slots=1, prefill_batches=(1,)))

  async def main():
    async with fleet_of(one, requests_per_slot=1.0) as made:
      member = made._router.choose(9, 9)
      (waits,) = begin(made, ask(1))
      await until(lambda: made.status()["waiting"] == 1)
      made._router.release(member)
      made._settle()
      assert member.requests == 1
      waits.cancel()
      await until(waits.done)
      assert member.requests == 0

  asyncio.run(main())


def test_a_request_that_cannot_be_served_is_an_error_and_not_tried_again():
  first, second = Generator(), Generator()

  async def main():
    async with fleet_of(first, second) as made:
      with pytest.raises(ValueError, match=r"17 tokens.*16"):
        await made.generate(ask(*[1] * 17))
      assert made.counters().retries == 0
      await ends(begin(made, ask(1)), first, second)

  asyncio.run(main())


def test_a_generator_that_others_filled_is_waited_for_without_a_failure():
  one = Generator(max_requests=1)

  async def main():
    async with fleet_of(one) as made:
      async with clients.GenerationClient(one.address) as other:
        (theirs,) = begin(other, ask(1, max_tokens=4))
        await until(lambda: one.open == 1)
        (ours,) = begin(made, ask(2, max_tokens=4))
        await until(lambda: made._router.members[one.address].full)
        assert not ours.done()
        await ends([theirs, ours], one)
      counters = made.counters()
      assert counters.retries >= 1 and counters.openings == 0

  asyncio.run(main())


# Nothing is lost.

LONG = [
  {"max_tokens": 12},
  {"max_tokens": 12, "temperature": 0.4, "stop_ids": (2, 7), "min_tokens": 9},
  {"max_tokens": 12, "stop_ids": (2, 7, 9), "min_tokens": 5},
]


@pytest.mark.parametrize("sampling", LONG)
def test_a_generator_killed_mid_answer_costs_no_token(sampling):
  request = ask(3, 1, index=4, member=2, seed=9, **sampling)
  first, second = Generator(), Generator()

  async def main():
    async with fleet_of(first, second) as made:
      chunks = []
      task = asyncio.ensure_future(made.generate(request, chunks))
      await dispatches(first, chunks, 2)
      await first.server.stop()
      (answer,) = await ends([task], second)
      assert second.driver.counters().tokens == len(answer.tokens) - 4
      return answer, made.counters()

  answer, counters = asyncio.run(main())
  assert_equal(answer, unbroken([request])[0])
  assert (counters.retries, counters.moved) == (1, 1)
  assert counters.tokens == len(answer.tokens)


def test_a_generator_that_hangs_loses_its_requests_and_may_come_back():
  request = ask(3, 1, index=4, max_tokens=12)
  first, second = Generator(), Generator()

  async def main():
    async with fleet_of(first, second, timeout_seconds=1.0) as made:
      chunks = []
      task = asyncio.ensure_future(made.generate(request, chunks))
      await dispatches(first, chunks, 2)
      first.server.answers = False
      (answer,) = await ends([task], second)
      first.server.answers = True
      await until(lambda: usable(made, first), first, second)
      await until(lambda: first.open == 0)
      before = first.driver.counters().completions
      await ends(
        begin(made, *(ask(2, index=i, max_tokens=3) for i in range(8))),
        first,
        second,
      )
      assert first.driver.counters().completions > before
      return answer, chunks

  answer, chunks = asyncio.run(main())
  assert_equal(answer, unbroken([request])[0])
  assert sum(len(chunk.tokens) for chunk in chunks) == 12


def test_a_request_fails_over_from_one_dead_generator_to_the_next():
  request = ask(3, 1, index=4, max_tokens=12)
  generators = [Generator() for _ in range(3)]

  async def main():
    async with fleet_of(*generators) as made:
      chunks = []
      task = asyncio.ensure_future(made.generate(request, chunks))
      for _ in range(2):
        await until(lambda: any(g.open for g in generators))
        (host,) = [g for g in generators if g.open]
        await dispatches(host, chunks, 1)
        await host.server.stop()
      return (await ends([task], *generators))[0]

  assert_equal(asyncio.run(main()), unbroken([request])[0])


def test_tokens_that_no_prefill_bucket_holds_are_sampled_again():
  small = {"prefill_buckets": (4,)}
  first, second = (
    Generator(
      drivers.GenerationDriver(
        make_engine(dataclasses.replace(CONFIG, **small)), interruption="keep"
      )
    )
    for _ in range(2)
  )
  request = ask(3, 1, index=4, max_tokens=12)

  async def main():
    async with fleet_of(first, second) as made:
      chunks = []
      task = asyncio.ensure_future(made.generate(request, chunks))
      await dispatches(first, chunks, 2)
      await first.server.stop()
      (answer,) = await ends([task], second)
      assert made.counters().restarts == 1
      return answer, chunks

  answer, chunks = asyncio.run(main())
  assert_equal(answer, unbroken([request])[0])
  assert sum(len(chunk.tokens) for chunk in chunks) == 12


def test_an_answer_that_has_ended_is_not_asked_for_again():
  request = ask(3, 1, index=4, max_tokens=12)
  first, second = Generator(), Generator()

  async def main():
    async with fleet_of(first, second) as made:
      chunks = []
      await ends(
        [asyncio.ensure_future(made.generate(request, chunks))], first, second
      )
      answer = await made.generate(request, chunks)
      prompts = [g.driver.counters().prompts for g in (first, second)]
      assert sum(prompts) == 1
      return answer

  assert_equal(asyncio.run(main()), unbroken([request])[0])


@pytest.mark.parametrize("before", [1, 5, 11])
def test_X05_a_resumed_run_goes_on_from_the_tokens_it_has(before):
  request = ask(3, 1, index=4, max_tokens=12)
  (whole,) = unbroken([request])
  known = Chunk(
    tokens=whole.tokens[:before], logp=whole.logp[:before], version=0
  )
  one = Generator()

  async def main():
    async with fleet_of(one) as made:
      chunks = [known]
      (answer,) = await ends(
        [asyncio.ensure_future(made.generate(request, chunks))], one
      )
      assert made.counters().tokens == 12 - before
      assert chunks[0] is known and len(chunks) > 1
      return answer

  assert_equal(asyncio.run(main()), whole)


def test_a_resumed_turn_whose_budget_is_used_up_ends_there():
  request = ask(3, 1, index=4, max_tokens=12)
  (whole,) = unbroken([request])
  known = Chunk(tokens=whole.tokens, logp=whole.logp, version=0)
  one = Generator()

  async def main():
    async with fleet_of(one) as made:
      return await made.generate(request, [known])

  assert_equal(asyncio.run(main()), whole)


# Circuits, and who belongs to it.


def test_a_circuit_opens_when_a_generator_dies_and_closes_when_one_is_back():
  first, second = Generator(), Generator()

  async def main():
    async with fleet_of(first, second) as made:

      def circuit():
        return made.status()["generators"][first.address]["circuit"]

      await first.server.stop()
      await until(lambda: circuit() == "open")
      tasks = begin(made, *(ask(1, index=i, max_tokens=3) for i in range(6)))
      await ends(tasks, second)
      assert made.counters().openings == 1
      first.driver = table_driver()  # Another process, without weights.
      await first.start()
      await until(lambda: usable(made, first))
      assert circuit() == "closed"
      tasks = begin(made, *(ask(1, index=i, max_tokens=3) for i in range(6)))
      await ends(tasks, first, second)
      assert first.driver.counters().completions > 0

  asyncio.run(main())


def test_H14_a_generator_that_comes_late_takes_the_newest_weights_first():
  first, late = Generator(), Generator()

  async def main():
    await late.start()
    await late.server.stop()
    async with serving(first):
      async with fleet.Fleet(quick([first, late])) as made:
        for version in (0, 1, 2):
          taken = []
          offer = weights([first, late], version, table(version), taken=taken)
          await made.publish(version, offer)
          await made.wait_served(version)
        late.driver.update(late.driver.engine.load_params(table(7), 0))
        async with serving(late):
          tasks = begin(
            made, *(ask(1, index=i, max_tokens=8) for i in range(8))
          )
          await until(lambda: usable(made, late))
          answers = await ends(tasks, first, late)
          assert (late.address, 2) in taken
          assert late.driver.counters().completions > 0
          assert {v for a in answers for v in a.version} == {2}

  asyncio.run(main())


def test_generators_join_and_leave_as_the_file_says(tmp_path):
  first, second = Generator(), Generator()
  file = tmp_path / "generators"
  request = ask(3, 1, index=4, max_tokens=12)

  async def main():
    async with serving(first, second):
      config = quick([], addresses_file=str(file))
      async with fleet.Fleet(config) as made:
        await made.publish(0, weights([first, second], 0, table(0)))
        await until(lambda: "cannot be used" in made._unread)
        chunks = []
        task = asyncio.ensure_future(made.generate(request, chunks))
        file.write_text(f"# those we have\n\n{first.address}\n")
        await dispatches(first, chunks, 2)
        file.write_text(f"{second.address}  # instead\n")
        (answer,) = await ends([task], second)
        await until(lambda: [*made.status()["generators"]] == [second.address])
        await until(lambda: first.open == 0)
        for text, message in (("\n", "names no"), ("host\n", "host:port")):
          file.write_text(text)
          await until(lambda m=message: m in made._unread)
          assert [*made.status()["generators"]] == [second.address]
        return answer

  assert_equal(asyncio.run(main()), unbroken([request])[0])


def test_requests_wait_for_a_generator_and_then_fail_with_every_address():
  one = Generator()

  async def main():
    failures = []
    await one.start()
    await one.server.stop()
    config = quick([one], patience_seconds=0.5, addresses_file="/none")
    made = fleet.Fleet(config, on_failure=failures.append)
    async with made:
      tasks = begin(made, ask(1), ask(2))
      await made.publish(0, weights([one], 0, table(0)))
      await until(lambda: all(task.done() for task in tasks))
      for task in tasks:
        with pytest.raises(RuntimeError, match="no generator could be used"):
          task.result()
      with pytest.raises(RuntimeError, match="asked any more"):
        await made.generate(ask(1))
      with pytest.raises(RuntimeError, match="asked any more"):
        await made.wait_served(0)
    (failure,) = failures
    assert made.failure is failure
    for part in (one.address, "UNAVAILABLE", "addresses_file cannot be used"):
      assert part in str(failure)

  asyncio.run(main())


def test_closing_fails_what_runs_and_what_waits():
  one = Generator(table_driver(slots=1, prefill_batches=(1,)))

  async def main():
    async with fleet_of(one, requests_per_slot=1.0) as made:
      tasks = begin(made, ask(1, index=0), ask(1, index=1))
      await until(lambda: one.open == 1)
      await made.close()
      await until(lambda: all(task.done() for task in tasks))
      for task in tasks:
        with pytest.raises(RuntimeError, match="the fleet was closed"):
          task.result()
      await until(lambda: one.open == 0)

  asyncio.run(main())


def test_a_part_of_the_fleet_that_breaks_ends_it():
  one, failures = Generator(), []

  def fault(version):
    raise ZeroDivisionError("a fault that the test asked for")

  async def main():
    async with serving(one):
      made = fleet.Fleet(
        quick([one]), on_served=fault, on_failure=failures.append
      )
      async with made:
        await made.publish(0, weights([one], 0, table(0)))
        await until(lambda: failures)
        with pytest.raises(RuntimeError, match="the test asked for"):
          await made.generate(ask(1))

  asyncio.run(main())
  assert isinstance(failures[0], ZeroDivisionError)


# Weights.


def test_a_slow_generator_skips_versions_and_gets_no_new_requests_meanwhile():
  fast, slow = Generator(), Generator()

  async def main():
    served, taken = [], []
    gate = asyncio.Event()

    def gated(version):
      offer = weights([fast, slow], version, table(version), taken=taken)

      async def wait(client):
        if client.address == slow.address:
          await gate.wait()
        await offer(client)

      return wait

    async with fleet_of(fast, slow, on_served=served.append) as made:
      for version in (1, 2, 3, 4):
        await made.publish(version, gated(version))
        await made.wait_served(version)
      requests = [ask(1, index=i, max_tokens=6) for i in range(9)]
      answers = await ends(begin(made, *requests), fast, slow)
      assert {v for answer in answers for v in answer.version} == {4}
      assert slow.driver.counters().prompts == 0
      gate.set()
      await until(lambda: usable(made, slow), slow)
      await ends(begin(made, *requests), fast, slow)
      assert slow.driver.counters().prompts > 0
      assert made.counters().publishes == 2 + 4 + 2
      assert set(made.counters().publish_seconds) == {
        fast.address,
        slow.address,
      }
    versions = {a: [v for b, v in taken if a == b] for a, _ in taken}
    assert versions == {fast.address: [1, 2, 3, 4], slow.address: [1, 4]}
    assert served == [0, 1, 2, 3, 4]

  asyncio.run(main())


def test_a_generator_that_cannot_take_weights_serves_on_and_is_tried_again():
  one = Generator()

  async def main():
    faults = [OSError("disk full"), RuntimeError("torn"), ValueError("NaN")]
    async with fleet_of(one) as made:
      good = weights([one], 1, table(1))

      async def offer(client):
        if faults:
          raise faults.pop(0)
        (answer,) = await ends(begin(made, ask(1, max_tokens=3)), one)
        assert set(answer.version) == {0}
        await good(client)

      await made.publish(1, offer)
      await made.wait_served(1)
      assert made.counters().failed_publishes == 3
      (answer,) = await ends(begin(made, ask(1, max_tokens=3)), one)
      assert set(answer.version) == {1}

  asyncio.run(main())


def test_H15_an_offer_that_changed_nothing_is_no_success():
  one = Generator()

  async def nothing(client):
    pass

  async def main():
    failures = []
    async with fleet_of(
      one, patience_seconds=1.0, on_failure=failures.append
    ) as made:
      await made.publish(1, nothing)
      await until(lambda: failures)
      assert made.served == 0
      assert made.counters().publishes == 1
    assert "said that it took version 1, but has 0" in str(failures[0])

  asyncio.run(main())


def test_H15_after_each_publish_every_generator_has_the_trainers_weights(
  tmp_path,
):
  generators = [Generator(token=TOKEN), Generator(token=TOKEN)]
  token_file = tmp_path / "token"
  token_file.write_text(TOKEN)

  def fingerprint(params):
    leaves = jax.tree.leaves(params)
    return [np.asarray(leaf, np.float64).sum() for leaf in leaves]

  def on_disk(version, path):
    async def offer(client):
      await client.update(path, version, "this run")

    return offer

  async def main():
    async with serving(*generators):
      config = quick(generators, token_file=str(token_file))
      async with fleet.Fleet(config, life="this run") as made:
        seen = []
        for version in range(3):
          params = table(version)
          path = tmp_path / str(version)
          checkpoint.save_params(path, params)
          await made.publish(version, on_disk(version, path))
          await until(
            lambda v=version: all(g.driver.version == v for g in generators),
            *generators,
          )
          for generator in generators:
            held = generator.driver._weights.params
            assert fingerprint(held) == fingerprint(params)
            np.testing.assert_array_equal(held["table"], params["table"])
          seen.append(fingerprint(params))
        assert len({tuple(s) for s in seen}) == 3

  asyncio.run(main())


def test_X06_publishing_depends_on_the_version_and_nothing_else():
  """Nobody samples, reads figures or logs meanwhile."""
  one, served = Generator(), []

  async def main():
    async with fleet_of(one, on_served=served.append) as made:
      for version in range(1, 8):
        await made.publish(version, weights([one], version, table(version)))
        await until(lambda v=version: served[-1] == v)

  asyncio.run(main())
  assert served == list(range(8))


def test_H14_an_answer_over_an_update_and_a_move_has_each_tokens_own_logp():
  old, new = (INIT(jax.random.key(seed)) for seed in (1, 2))
  first, second = Generator(policy_driver()), Generator(policy_driver())
  request = ask(3, 1, 4, index=6, max_tokens=12)

  async def main():
    async with serving(first, second):
      async with fleet.Fleet(quick([first, second])) as made:
        everyone = [first, second]
        await made.publish(1, weights(everyone, 1, old))
        await until(lambda: all(usable(made, g) for g in everyone))
        chunks = []
        task = asyncio.ensure_future(made.generate(request, chunks))
        await dispatches(first, chunks, 2)

        async def for_the_second(client):
          if client.address == first.address:
            raise OSError("the test lets it have none")
          await weights([second], 2, new)(client)

        await made.publish(2, for_the_second)
        await until(lambda: usable(made, second))
        await first.server.stop()
        return (await ends([task], second))[0]

  answer = asyncio.run(main())
  assert answer.version.tolist() == [1] * 4 + [2] * 8
  for params, part in ((old, slice(0, 4)), (new, slice(4, 12))):
    expected = full_forward_logp(params, request, answer.tokens)
    np.testing.assert_allclose(answer.logp[part], expected[part], atol=1e-5)


def test_X09_after_a_publish_weights_are_on_the_generators_devices(tmp_path):
  trainer, *others = jax.devices()
  generators = [Generator(policy_driver([device])) for device in others[:2]]
  params = jax.device_put(INIT(jax.random.key(0)), trainer)
  checkpoint.save_params(tmp_path / "0", params)

  async def offer(client):
    await client.update(tmp_path / "0", 0)

  async def main():
    async with serving(*generators):
      async with fleet.Fleet(quick(generators)) as made:
        await made.publish(0, offer)
        await until(
          lambda: all(g.driver.version == 0 for g in generators), *generators
        )

  asyncio.run(main())
  for generator, device in zip(generators, others, strict=False):
    for leaf in jax.tree.leaves(generator.driver._weights.params):
      assert leaf.devices() == {device}


@pytest.mark.parametrize("first", [5, 7, 8])
def test_weights_of_a_life_before_are_replaced_whatever_their_version(first):
  one = Generator()
  one.driver.update(one.driver.engine.load_params(table(9), 7), "life 1")

  async def main():
    async with serving(one):
      async with fleet.Fleet(quick([one]), life="life 2") as made:
        for version in (first, first + 1):
          offer = weights([one], version, table(version), "life 2")
          await made.publish(version, offer)
          await made.wait_served(version)
          request = ask(1, index=version, max_tokens=6)
          (answer,) = await ends(begin(made, request), one)
          assert set(answer.version) == {version}
          np.testing.assert_allclose(
            answer.logp[0],
            jax.nn.log_softmax(table(version)["table"][1])[answer.tokens[0]],
            atol=1e-5,
          )

  asyncio.run(main())


# What it is told.


@pytest.mark.parametrize(
  "wrong, message",
  [
    ({"addresses": ("host",)}, "'host'; it must be host:port"),
    ({"addresses": (":80",)}, "':80'; it must be host:port"),
    ({"addresses": ("h:65536",)}, "it must be host:port"),
    ({"addresses": ("h:1", "h:1")}, "each generator once"),
    ({"timeout_seconds": 0}, "timeout_seconds is 0; it must be > 0"),
    ({"update_seconds": -1}, "update_seconds is -1; it must be > 0"),
    ({"tls_key": "k"}, "all set or all left out"),
    ({"failures_to_open": 0}, "failures_to_open is 0"),
  ],
)
def test_a_config_that_names_no_fleet_is_refused(wrong, message):
  with pytest.raises(ValueError, match=message):
    roster.Config(**{"addresses": ("h:1",), **wrong})


def test_a_fleet_of_nobody_is_refused():
  assert not roster.Config().names_any
  with pytest.raises(ValueError, match="must name a generator"):
    fleet.Fleet(roster.Config())


def test_secrets_that_are_not_there_are_found_missing_at_once(tmp_path):
  config = roster.Config(addresses=("h:1",), token_file=str(tmp_path / "no"))
  with pytest.raises(ValueError, match="token_file .*cannot be read"):
    fleet.Fleet(config)
  tls = dict.fromkeys(
    ("tls_certificate", "tls_key", "tls_server_ca"), str(tmp_path / "no")
  )
  with pytest.raises(ValueError, match="tls file cannot be read"):
    fleet.Fleet(roster.Config(addresses=("h:1",), **tls))


def test_a_status_of_another_release_is_said_to_be_one():
  with pytest.raises(RuntimeError, match="another release: KeyError"):
    roster.read_report({"version": 1}, "")
