import asyncio
import contextlib
import dataclasses
import pathlib
import shutil
import subprocess

import grpc
import jax
import numpy as np
import pytest
from bigram import CONFIG, ask, make_engine, one_device_mesh, script, uniform
from grpc._cython import cygrpc
from tiny import INIT, POLICY, full_forward_logp

from rl_tpu import checkpoint
from rl_tpu.generation import client as clients
from rl_tpu.generation import connection, engine, policies, server, wire
from rl_tpu.generation import driver as drivers
from rl_tpu.generation.jetstream import jetstream_pb2, jetstream_pb2_grpc
from rl_tpu.models import transformer

TOKEN = "a token of some length"
COUNTING = script(*range(16), 0)


def table_driver(table=COUNTING, **changes):
  """Steps when the test says so; 0 -> 1 -> ... -> 15 -> 0."""
  served = make_engine(dataclasses.replace(CONFIG, **changes))
  driver = drivers.GenerationDriver(served)
  driver.update(served.load_params(table, 0))
  return driver


def policy_driver():
  config = dataclasses.replace(
    CONFIG, context_length=24, prefill_buckets=(8, 24), behavior_top_k=5
  )
  served = engine.PolicyEngine(POLICY, one_device_mesh(), config)
  return drivers.GenerationDriver(served)


@contextlib.asynccontextmanager
async def serving(driver, token=None, **limits):
  config = server.Config(port=0, **limits)
  served = server.GenerationServer(driver, config, token)
  await served.start()
  address = f"127.0.0.1:{served.port}"
  try:
    async with clients.GenerationClient(address, token=token) as client:
      yield served, client
  finally:
    await served.stop()


async def until(condition, driver=None):
  """Lets the network work, and the driver if it is given, until then."""
  async with asyncio.timeout(30):
    while not condition():
      if driver is not None:
        driver.step()
      await asyncio.sleep(0.001)


async def complete(driver, generator, *requests):
  tasks = [asyncio.ensure_future(generator.generate(r)) for r in requests]
  await until(lambda: all(task.done() for task in tasks), driver)
  return [task.result() for task in tasks]


def assert_equal(one, other):
  for field in dataclasses.fields(one):
    a, b = (np.asarray(getattr(x, field.name)) for x in (one, other))
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


REQUESTS = [
  ask(3, 1, 4, index=0, max_tokens=9),
  ask(1, 5, 9, 2, 6, index=1, max_tokens=8, temperature=0.5),
  ask(5, index=2, max_tokens=10, temperature=1.3, member=3, stop_ids=(0, 7)),
]


async def interrupted(driver, generator, opened):
  """Two turns of version 1, then version 2 to the end."""
  weights = [
    driver.engine.load_params(INIT(jax.random.key(i)), version=i)
    for i in (1, 2)
  ]
  driver.update(weights[0])
  tasks = [asyncio.ensure_future(generator.generate(r)) for r in REQUESTS]
  await until(lambda: opened() == len(REQUESTS))
  driver.step()
  driver.step()
  driver.update(weights[1])
  await until(lambda: all(task.done() for task in tasks), driver)
  return [task.result() for task in tasks]


def test_a_client_gets_what_the_driver_gives_bit_for_bit():
  async def main():
    direct, driver = policy_driver(), policy_driver()
    expected = await interrupted(direct, direct, lambda: direct.waiting)
    async with serving(driver) as (served, client):
      arrived = await interrupted(driver, client, lambda: served.admission.open)
    for one, other in zip(arrived, expected, strict=True):
      assert_equal(one, other)
    assert set(arrived[0].version) == {1, 2}
    assert arrived[0].topk_ids.shape == (9, 5)

  asyncio.run(main())


def test_a_stream_is_one_message_a_dispatch_for_all_its_requests(monkeypatch):
  sizes = []
  pack = wire.pack_answers

  def counted(answers):
    sizes.append(len(answers))
    return pack(answers)

  monkeypatch.setattr(wire, "pack_answers", counted)
  driver = table_driver()

  async def main():
    chunks = {n: [] for n in (5, 6, 7)}

    async def follow(client, n):
      async for chunk in client.stream(ask(1, index=n, max_tokens=n)):
        chunks[n].append(chunk)

    async with serving(driver) as (served, client):
      tasks = [asyncio.ensure_future(follow(client, n)) for n in chunks]
      await until(lambda: served.admission.open == 3)
      for dispatch in range(1, 5):
        driver.step()
        driver._outbox.deliver()
        await until(lambda d=dispatch: len(chunks[7]) == d)
      await until(lambda: all(task.done() for task in tasks))
    return chunks

  chunks = asyncio.run(main())
  assert sizes == [3, 3, 3, 1]
  for n, of_one in chunks.items():
    assert [t for c in of_one for t in c.tokens] == list(range(2, 2 + n))
    assert [c.stop_reason for c in of_one] == [None] * (len(of_one) - 1) + [
      "length"
    ]


def test_H10_cancelling_frees_the_slot_or_the_place_in_the_queue():
  driver = table_driver(slots=1)

  async def main():
    async with serving(driver) as (served, client):
      first, second = (
        asyncio.ensure_future(client.generate(ask(1, index=i, max_tokens=12)))
        for i in range(2)
      )
      await until(lambda: served.admission.open == 2)
      driver.step()
      assert (driver.free_slots, driver.waiting) == (0, 1)
      second.cancel()
      await until(lambda: driver.waiting == 0)
      first.cancel()
      await until(lambda: served.admission.open == 0)
      driver.step()
      assert driver.free_slots == 1
      (done,) = await complete(driver, client, ask(5, max_tokens=2))
      assert done.tokens.tolist() == [6, 7]

  asyncio.run(main())


def test_closing_a_stream_frees_its_slot():
  driver = table_driver()

  async def main():
    async with serving(driver) as (served, client):
      stream = client.stream(ask(1, max_tokens=12))
      first = asyncio.ensure_future(anext(stream))
      await until(first.done, driver)
      await stream.aclose()
      await until(lambda: served.admission.open == 0)
      driver.step()
      assert driver.free_slots == 4

  asyncio.run(main())


def test_H10_a_client_that_vanishes_frees_all_its_slots_and_no_other():
  driver = table_driver()

  async def main():
    async with serving(driver) as (served, client):
      other = clients.GenerationClient(client.address)
      lost = [
        asyncio.ensure_future(other.generate(ask(1, index=i, max_tokens=12)))
        for i in range(3)
      ]
      kept = asyncio.ensure_future(client.generate(ask(1, max_tokens=12)))
      await until(lambda: served.admission.open == 4)
      driver.step()
      assert driver.free_slots == 0
      await other.close()
      for task in lost:
        with pytest.raises(ConnectionError, match="closed here"):
          await task
      await until(lambda: served.admission.open == 1)
      driver.step()
      assert driver.free_slots == 3
      await until(kept.done, driver)
      assert len(kept.result().tokens) == 12

  asyncio.run(main())


def test_requests_over_the_limit_are_refused_and_the_call_goes_on():
  driver = table_driver()

  async def main():
    async with serving(driver, max_requests=2) as (_, client):
      tasks = [
        asyncio.ensure_future(client.generate(ask(1, index=i, max_tokens=4)))
        for i in range(3)
      ]
      await until(tasks[2].done)
      with pytest.raises(clients.OverloadedError, match=r"2 requests.*max_req"):
        tasks[2].result()
      call = client._session
      await until(lambda: all(task.done() for task in tasks), driver)
      assert [t.result().tokens.tolist() for t in tasks[:2]] == [
        [2, 3, 4, 5]
      ] * 2
      (done,) = await complete(driver, client, ask(5, max_tokens=1))
      assert done.tokens.tolist() == [6]
      assert client._session is call

  asyncio.run(main())


def test_H13_a_prompt_too_long_is_refused_naming_both_lengths():
  driver = table_driver()

  async def main():
    async with serving(driver) as (served, client):
      with pytest.raises(ValueError, match=r"17 tokens.*16"):
        await client.generate(ask(*[1] * 17))
      assert served.admission.open == 0
      (done,) = await complete(driver, client, ask(1, max_tokens=1))
      assert done.tokens.tolist() == [2]

  asyncio.run(main())


def test_a_request_larger_than_a_message_is_refused_before_it_is_sent():
  driver = table_driver()

  async def main():
    async with serving(driver) as (_, client):
      client._max_message_bytes = 1024
      with pytest.raises(ValueError, match=r"1000 tokens.*1024"):
        await client.generate(ask(*[1] * 1000))

  asyncio.run(main())


def test_many_large_requests_of_one_turn_fit_the_servers_messages():
  driver = table_driver()
  huge = wire.MAX_MESSAGE_BYTES // 16

  async def main():
    async with serving(driver) as (_, client):
      tasks = [client.generate(ask(*[1] * huge)) for _ in range(9)]
      for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, ValueError)
        assert f"{huge} tokens" in str(error)

  asyncio.run(main())


def test_a_malformed_message_ends_its_call_and_no_other():
  driver = table_driver()

  async def main():
    async with serving(driver) as (served, client):
      task = asyncio.ensure_future(client.generate(ask(1, max_tokens=3)))
      await until(lambda: served.admission.open == 1)
      async with grpc.aio.insecure_channel(client.address) as channel:
        call = channel.stream_stream(f"/{server.SERVICE}/Generate")()
        opening = wire.pack_opening(0, ask(2, max_tokens=3), True)
        await call.write(wire.pack_requests([opening]))
        await until(lambda: served.admission.open == 2)
        await call.write(b"\x00garbage")
        with pytest.raises(grpc.aio.AioRpcError, match="not msgpack") as caught:
          await asyncio.wait_for(call.read(), 30)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
      await until(task.done, driver)
      assert task.result().tokens.tolist() == [2, 3, 4]
      assert (served.admission.open, driver.free_slots) == (0, 4)

  asyncio.run(main())


class StuckContext:
  """A client that reads nothing."""

  async def write(self, message):
    await asyncio.Event().wait()


def test_a_client_that_reads_too_slowly_is_ended_and_its_slots_are_freed():
  driver = table_driver(context_length=64, prefill_buckets=(64,))
  limit = 300

  async def messages():
    openings = [
      wire.pack_opening(i, ask(1, index=i, max_tokens=60), True)
      for i in range(2)
    ]
    yield wire.pack_requests(openings)
    await asyncio.Event().wait()

  async def main():
    admission = connection.Admission(10)
    slow = connection.Connection(driver, admission, limit)
    run = asyncio.ensure_future(slow.run(messages(), StuckContext()))
    await until(run.done, driver)
    failure = run.result()
    assert failure.code == "RESOURCE_EXHAUSTED"
    assert "max_unsent_bytes" in failure.message
    assert admission.open == 0
    driver.step()
    assert driver.free_slots == 4
    assert 4 < driver.counters().tokens < 2 * 60

  asyncio.run(main())


def test_the_default_limit_of_unread_answers_is_twice_all_slots():
  async def main():
    driver = policy_driver()
    async with serving(driver) as (served, _):
      assert served.max_unsent_bytes == 2 * 4 * 24 * (32 + 8 * (1 + 5))

  asyncio.run(main())


def test_answers_larger_than_a_message_come_in_several(monkeypatch):
  limit, sizes = 200, []
  pack = wire.pack_answers

  def counted(answers):
    sizes.append(sum(wire.size(chunk) for _, chunk in answers))
    return pack(answers)

  monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", limit)
  monkeypatch.setattr(wire, "pack_answers", counted)
  driver = table_driver()

  async def main():
    async with serving(driver) as (served, client):
      requests = [ask(1, index=i, max_tokens=12) for i in range(4)]
      tasks = [asyncio.ensure_future(client.generate(r)) for r in requests]
      await until(lambda: served.admission.open == 4)
      await until(lambda: all(task.done() for task in tasks), driver)
      for task in tasks:
        assert task.result().tokens.tolist() == list(range(2, 14))

  asyncio.run(main())
  assert len(sizes) == 4 and max(sizes) <= limit


# Admin.


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu-host"])
def test_an_address_that_others_reach_needs_a_token(host):
  config = server.Config(host=host)
  with pytest.raises(ValueError, match=r"other machines reach.*token_file"):
    server.admin_token(config, {})
  found = server.admin_token(config, {server.TOKEN_VARIABLE: TOKEN})
  assert found == TOKEN


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_needs_none(host):
  assert server.admin_token(server.Config(host=host), {}) is None


@pytest.mark.parametrize(
  "text", ["", "short", "line\nline of some length", "ü" * 20]
)
def test_a_token_that_protects_nothing_is_refused_unseen(text, tmp_path):
  (tmp_path / "token").write_text(text)
  config = server.Config(token_file=str(tmp_path / "token"))
  with pytest.raises(ValueError, match="at least 16") as caught:
    server.admin_token(config, {})
  assert not text or text not in str(caught.value)


def test_http_clients_need_their_key_or_where_others_reach_it_the_token(
  tmp_path,
):
  file = tmp_path / "key"
  file.write_text("a key from a file\n")
  variable = {server.KEY_VARIABLE: "a key of some length"}
  local, exposed = server.Config(), server.Config(host="0.0.0.0")
  named = server.Config(api_key_file=str(file))
  assert server.api_key(local, TOKEN, {}) is None
  assert server.api_key(exposed, TOKEN, {}) == TOKEN
  for config in (local, exposed):
    assert server.api_key(config, TOKEN, variable) == "a key of some length"
  assert server.api_key(named, TOKEN, variable) == "a key from a file"
  with pytest.raises(ValueError, match="RL_TPU_API_KEY must hold at least 16"):
    server.api_key(local, None, {server.KEY_VARIABLE: "short"})


def test_a_token_file_that_is_not_there_is_an_error(tmp_path):
  config = server.Config(token_file=str(tmp_path / "none"))
  with pytest.raises(ValueError, match="none cannot be read"):
    server.admin_token(config, {server.TOKEN_VARIABLE: TOKEN})


@pytest.mark.parametrize(
  "wrong, message",
  [
    ({"port": 2**16}, "port is 65536"),
    ({"http_port": -1}, "http_port is -1"),
    ({"max_requests": 0}, "max_requests is 0"),
    ({"tls_key": "key.pem"}, "tls_key and tls_client_ca"),
  ],
)
def test_a_config_that_cannot_be_served_is_refused(wrong, message):
  with pytest.raises(ValueError, match=message):
    server.Config(**wrong)


def test_admin_calls_need_the_token_and_the_rest_does_not(tmp_path):
  driver = table_driver()

  async def main():
    async with serving(driver, TOKEN) as (_, client):
      for token in (None, TOKEN + "x", "x" + TOKEN[1:]):
        stranger = clients.GenerationClient(client.address, token=token)
        async with stranger:
          for call in (
            stranger.pause(),
            stranger.resume(),
            stranger.update(tmp_path, 1),
          ):
            with pytest.raises(PermissionError, match="Bearer"):
              await call
          assert (await stranger.status())["paused"] is False
          assert await stranger.health()
          await complete(driver, stranger, ask(1, max_tokens=1))
      await client.pause()
      assert (await client.status())["paused"] is True
      assert driver.step() is False
      await client.resume()
      assert (await client.status())["paused"] is False
      await complete(driver, client, ask(1, max_tokens=1))

  asyncio.run(main())


def test_status_tells_the_state_of_the_generator():
  driver = table_driver(slots=2)

  async def main():
    async with serving(driver, max_requests=7) as (served, client):
      assert (await client.status())["version"] is None
      tasks = [
        asyncio.ensure_future(client.generate(ask(1, index=i, max_tokens=3)))
        for i in range(3)
      ]
      await until(lambda: served.admission.open == 3)
      driver.step()
      status = await client.status()
      assert (status["version"], status["slots"]) == (0, 2)
      assert (status["free_slots"], status["waiting"]) == (0, 1)
      assert (status["open_requests"], status["max_requests"]) == (3, 7)
      assert status["counters"]["tokens"] == 4
      assert status["uptime_seconds"] > 0
      await until(lambda: all(task.done() for task in tasks), driver)

  asyncio.run(main())


def test_health_speaks_grpcs_own_protocol():
  driver = table_driver()

  async def main():
    async with serving(driver) as (served, client):
      async with grpc.aio.insecure_channel(client.address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"") == b"\x08\x01"
        driver.stop()
        assert await check(b"") == b"\x08\x02"
      assert not await client.health()
    assert not await clients_health_of_nobody(served.port)

  async def clients_health_of_nobody(port):
    async with clients.GenerationClient(f"127.0.0.1:{port}") as client:
      return await client.health()

  asyncio.run(main())


def other_policy(params):
  shape = dataclasses.replace(POLICY.config, d_ff=64)
  return jax.jit(transformer.Policy(shape).init)(jax.random.key(0))


def not_a_number(params):
  return {**params, "embedding": params["embedding"].at[3, 2].set(np.nan)}


def half_written(directory):
  """Loses the largest file, as a copy that was cut short."""
  files = [path for path in directory.rglob("*") if path.is_file()]
  max(files, key=lambda path: path.stat().st_size).unlink()


def test_weights_are_updated_from_storage_and_what_is_wrong_changes_nothing(
  tmp_path,
):
  driver = policy_driver()
  old, new = (INIT(jax.random.key(seed)) for seed in (1, 2))
  driver.update(driver.engine.load_params(old, 3))
  for name, params in (
    ("new", new),
    ("other", other_policy(new)),
    ("nan", not_a_number(new)),
    ("empty", {"x": new}),
    ("half", new),
  ):
    checkpoint.save_params(tmp_path / name, params)
  half_written(tmp_path / "half")

  async def main():
    async with serving(driver) as (_, client):

      async def check(params, version):
        (done,) = await complete(driver, client, REQUESTS[0])
        assert set(done.version) == {version}
        np.testing.assert_allclose(
          done.logp,
          full_forward_logp(params, REQUESTS[0], done.tokens),
          atol=1e-4,
        )

      for name, version, message in (
        ("none", 4, "not there"),
        ("other", 4, r"is \(2, 64, 16\); it must be \(2, 32, 16\)"),
        ("nan", 4, "not all finite"),
        ("empty", 4, "lacks weight"),
        ("half", 4, "cannot be read"),
        ("new", 3, "must be greater than 3"),
        ("new", 2**31, "version has 2147483648"),
      ):
        with pytest.raises(ValueError, match=message):
          await client.update(tmp_path / name, version)
        await check(old, 3)
      await client.update(tmp_path / "new", 4)
      await check(new, 4)

  asyncio.run(main())


def test_the_weights_of_a_runs_checkpoint_are_found_among_its_parts(tmp_path):
  served = policy_driver().engine
  params = INIT(jax.random.key(1))
  saver = checkpoint.Checkpointer(tmp_path)
  for version in (9, 10):
    state = {"params": params, "optimizer": {"mu": np.zeros(3)}}
    saver.save(version, state, {"x": np.zeros(1)}, {})
  saver.close()
  assert policies.newest(tmp_path / "none") is None
  assert policies.newest(tmp_path) == tmp_path / "10"
  (tmp_path / "11" / "state").mkdir(parents=True)
  assert policies.newest(tmp_path) == tmp_path / "10"
  loaded = policies.load(served, tmp_path / "10", 10)
  served.check_params(loaded.params)
  expected = served.load_params(params).params
  jax.tree.map(np.testing.assert_array_equal, loaded.params, expected)


# The end.


def test_draining_refuses_new_requests_and_finishes_the_open_ones():
  driver = table_driver()

  async def main():
    async with serving(driver) as (served, client):
      first = asyncio.ensure_future(client.generate(ask(1, max_tokens=6)))
      await until(lambda: served.admission.open == 1)
      drained = asyncio.ensure_future(served.drain())
      await until(lambda: served.admission.ended)
      with pytest.raises(RuntimeError, match="about to end"):
        await client.generate(ask(2))
      assert not await client.health()
      assert not drained.done()
      await until(first.done, driver)
      assert first.result().tokens.tolist() == [2, 3, 4, 5, 6, 7]
      await until(drained.done)

  asyncio.run(main())


def test_when_the_server_ends_open_requests_fail_and_the_next_one_too():
  driver = table_driver()

  async def main():
    async with serving(driver) as (served, client):
      task = asyncio.ensure_future(client.generate(ask(1, max_tokens=6)))
      await until(lambda: served.admission.open == 1)
      await served.stop()
      with pytest.raises(ConnectionError, match=r"127.0.0.1.*ended the call"):
        await task
      assert driver.waiting == 0
      with pytest.raises(ConnectionError):
        await client.generate(ask(1))

  asyncio.run(main())


def test_after_a_broken_call_the_next_request_makes_another():
  driver = table_driver()

  async def main():
    async with serving(driver) as (served, client):
      await complete(driver, client, ask(1, max_tokens=1))
      (one,) = served._connections
      one.hang_up()
      await until(lambda: client._session.broken)
      (done,) = await complete(driver, client, ask(3, max_tokens=1))
      assert done.tokens.tolist() == [4]

  asyncio.run(main())


def test_a_failing_driver_tells_its_clients_why(monkeypatch):
  driver = table_driver()

  def fail(*_):
    raise ZeroDivisionError("a fault that the test asked for")

  async def main():
    async with serving(driver) as (served, client):
      task = asyncio.ensure_future(client.generate(ask(1)))
      await until(lambda: served.admission.open == 1)
      monkeypatch.setattr(driver.engine, "generate", fail)
      with pytest.raises(ZeroDivisionError):
        driver.step()
      await until(task.done)
      with pytest.raises(RuntimeError, match=r"failed.*the test asked for"):
        task.result()
      with pytest.raises(RuntimeError, match="failed"):
        await client.generate(ask(1))
      assert (await client.status())["healthy"] is False

  asyncio.run(main())


# JetStream's own clients.


def decode_request(*tokens, max_tokens):
  content = jetstream_pb2.DecodeRequest.TokenContent(token_ids=tokens)
  return jetstream_pb2.DecodeRequest(
    token_content=content, max_tokens=max_tokens
  )


async def decoded(call):
  return [
    token
    async for response in call
    for token in response.stream_content.samples[0].token_ids
  ]


def test_jetstreams_own_clients_get_tokens_from_the_same_port():
  driver = table_driver()

  async def main():
    async with serving(driver, max_requests=1) as (served, client):
      async with grpc.aio.insecure_channel(client.address) as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        health = await stub.HealthCheck(jetstream_pb2.HealthCheckRequest())
        assert health.is_live
        call = stub.Decode(decode_request(4, max_tokens=5))
        task = asyncio.ensure_future(decoded(call))
        await until(lambda: served.admission.open == 1)
        with pytest.raises(grpc.aio.AioRpcError, match="max_requests") as many:
          await decoded(stub.Decode(decode_request(4, max_tokens=5)))
        assert many.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until(task.done, driver)
        assert task.result() == [5, 6, 7, 8, 9]
        await until(lambda: served.admission.open == 0)
        for tokens, most, message in (
          ([1] * 17, 5, "17 tokens"),
          ([4], 0, "max_tokens is 0"),
        ):
          with pytest.raises(grpc.aio.AioRpcError, match=message) as bad:
            await decoded(stub.Decode(decode_request(*tokens, max_tokens=most)))
          assert bad.value.code() is grpc.StatusCode.INVALID_ARGUMENT
          await until(lambda: served.admission.open == 0)

  asyncio.run(main())


def test_a_jetstream_client_that_hangs_up_frees_its_slot():
  driver = table_driver()

  async def main():
    async with serving(driver) as (served, client):
      async with grpc.aio.insecure_channel(client.address) as channel:
        stub = jetstream_pb2_grpc.OrchestratorStub(channel)
        call = stub.Decode(decode_request(1, max_tokens=12))
        first = asyncio.ensure_future(call.read())
        await until(first.done, driver)
        call.cancel()
        await until(lambda: served.admission.open == 0)
      driver.step()
      assert driver.free_slots == 4

  asyncio.run(main())


def test_a_client_may_be_closed_before_its_first_request_left():
  async def main():
    async with serving(table_driver()) as (served, other):
      client = clients.GenerationClient(other.address)
      request = asyncio.ensure_future(client.generate(ask(1, max_tokens=3)))
      for _ in range(2):  # The call is made, and writing waits for it.
        await asyncio.sleep(0)
      async with asyncio.timeout(30):
        await client.close()
      with pytest.raises(ConnectionError, match="closed here"):
        await request
      assert served.admission.open == 0

  asyncio.run(main())


def test_a_call_ends_with_its_status_while_an_answer_is_on_the_way():
  """grpc sends the headers with the first message, and only once."""

  async def main():
    driver = table_driver()
    refused = wire.pack_opening(0, ask(99, max_tokens=3), True)
    async with serving(driver) as (_, client):
      async with grpc.aio.insecure_channel(client.address) as channel:
        for _ in range(100):
          call = channel.stream_stream(f"/{server.SERVICE}/Generate")()
          await call.write(wire.pack_requests([refused]))
          await call.write(b"\x00garbage")
          with pytest.raises(grpc.aio.AioRpcError, match="not msgpack"):
            async with asyncio.timeout(30):
              _ = [data async for data in call]

  asyncio.run(main())


def test_every_option_of_a_channel_is_one_that_grpc_knows():
  """It passes over others in silence: keepalive pings then end calls."""
  known = pathlib.Path(cygrpc.__file__).read_bytes()
  for name, _ in (*server.OPTIONS, *clients.OPTIONS):
    assert name.encode() + b"\0" in known, name


# Certificates.


def certificates(directory):
  """An authority, and what it signed, by openssl."""

  def openssl(*arguments):
    subprocess.run(
      ["openssl", *arguments], cwd=directory, check=True, capture_output=True
    )

  curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
  for name in ("ca", "strange"):
    openssl(
      "req", "-x509", *curve, "-subj", f"/CN={name}", "-days", "2",
      "-keyout", f"{name}.key", "-out", f"{name}.pem",
    )  # fmt: skip
  (directory / "names").write_text("subjectAltName=IP:127.0.0.1")
  openssl(
    "req", *curve, "-subj", "/CN=one", "-keyout", "one.key", "-out", "one.csr"
  )
  openssl(
    "x509", "-req", "-in", "one.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
    "-CAcreateserial", "-days", "2", "-out", "one.pem", "-extfile", "names",
  )  # fmt: skip


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes them")
def test_with_certificates_only_those_of_the_authority_get_in(tmp_path):
  certificates(tmp_path)
  driver = table_driver()

  def credentials(name):
    ca, key, own = (
      (tmp_path / file).read_bytes()
      for file in ("ca.pem", f"{name}.key", f"{name}.pem")
    )
    return grpc.ssl_channel_credentials(ca, key, own)

  files = {
    "tls_certificate": str(tmp_path / "one.pem"),
    "tls_key": str(tmp_path / "one.key"),
    "tls_client_ca": str(tmp_path / "ca.pem"),
  }
  assert server.admin_token(server.Config(host="0.0.0.0", **files), {}) is None

  async def main():
    async with serving(driver, **files) as (served, plain):
      assert not await plain.health()
      for name, welcome in (("one", True), ("strange", False)):
        address = f"127.0.0.1:{served.port}"
        client = clients.GenerationClient(
          address, credentials=credentials(name)
        )
        async with client:
          assert await client.health() == welcome
          if welcome:
            await client.pause()
            await client.resume()
            await complete(driver, client, ask(1, max_tokens=1))

  asyncio.run(main())


def test_a_taken_port_is_an_error():
  async def main():
    async with serving(table_driver(uniform())) as (served, _):
      config = server.Config(port=served.port)
      second = server.GenerationServer(served.driver, config, None)
      with pytest.raises(RuntimeError, match="bind"):
        await second.start()

  asyncio.run(main())
