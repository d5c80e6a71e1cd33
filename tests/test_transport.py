import asyncio
import contextlib
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transfer_processes
import two_processes
from transfer_processes import POLICY, TOKEN, random_params

from rl_tpu import sharding, transport
from rl_tpu.generation import client as clients
from rl_tpu.generation import driver as drivers
from rl_tpu.generation import engine, server
from rl_tpu.transfer import publisher

ENGINE = engine.Config(
  slots=2,
  context_length=8,
  prefill_buckets=(8,),
  prefill_batches=(2,),
  min_shared_prefix=0,
)


def make_driver(first_device=0, **shape):
  """A driver, and the weights that it was given, which it has at version 0."""
  devices = jax.devices()[first_device:]
  mesh = sharding.make_mesh(sharding.MeshShape(**shape), devices)
  driver = drivers.GenerationDriver(engine.PolicyEngine(POLICY, mesh, ENGINE))
  driver.update(driver.engine.load_params(random_params(0), 0))
  update, given = driver.update, []

  def recorded(weights, life=""):
    update(weights, life)
    given.append(weights)

  driver.update = recorded
  return driver, given


@contextlib.asynccontextmanager
async def serving(driver, token=TOKEN):
  served = server.GenerationServer(driver, server.Config(port=0), token)
  await served.start()
  try:
    yield f"127.0.0.1:{served.port}"
  finally:
    await served.stop()


def assert_serves(driver, weights, version, params):
  """As if they had never left the process, and on the driver's devices."""
  want = driver.engine.load_params(params, version)
  assert weights.version == version
  jax.tree.map(np.testing.assert_array_equal, weights.params, want.params)
  for array in jax.tree.leaves(weights.params):
    assert array.sharding.device_set == set(driver.engine.mesh.devices.flat)


# Processes.


def test_X08_X09_two_trainer_processes_reach_two_generators_bit_for_bit(
  tmp_path,
):
  """By transfer, by Orbax, and by transfer in bfloat16."""
  split, given_split = make_driver(tensor=2)
  whole, given_whole = make_driver(first_device=2)
  port = str(two_processes.free_port())

  async def main():
    async with serving(split) as one, serving(whole) as other:
      command = [sys.executable, transfer_processes.__file__, port]
      trainers = [
        await asyncio.create_subprocess_exec(
          *[*command, str(index), str(tmp_path / "weights"), one, other],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
        )
        for index in range(2)
      ]
      try:
        figures = []
        while line := await trainers[0].stdout.readline():
          if line.startswith(b"{"):  # Gloo has its say too.
            figures.append(json.loads(line))
          if len(figures) == 3:
            break
        else:
          pytest.fail("the first trainer process ended")
        for trainer in trainers:
          trainer.stdin.close()
        assert [await trainer.wait() for trainer in trainers] == [0, 0]
      finally:
        for trainer in trainers:
          if trainer.returncode is None:
            trainer.kill()
      return figures

  figures = asyncio.run(main())
  rounded = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16).astype(np.float32), random_params(3)
  )
  expected = [random_params(1), random_params(2), rounded]
  for driver, given in ((split, given_split), (whole, given_whole)):
    for version, want in enumerate(expected, 1):
      assert_serves(driver, given[version - 1], version, want)
  size = sum(x.nbytes for x in jax.tree.leaves(random_params(1)))
  by_transfer, by_orbax, in_bfloat16 = figures
  for row in figures:
    assert row["pulls"] == 2
    assert row["pull_bytes_per_second"] > 0
    assert row["publish_bytes_per_second"] > 0
  assert by_transfer["pull_bytes"] == 2 * size
  assert in_bfloat16["pull_bytes"] == size
  assert by_orbax["pull_bytes"] > 2 * size  # With what Orbax says of them.
  assert {p.name for p in (tmp_path / "weights").iterdir()} == {"2"}


# PullWeights.


def source_of(params, version, **settings):
  source = publisher.Publisher(token=TOKEN, **settings)
  source.publish(jax.device_put(params), version)
  return source


def test_a_generator_pulls_and_goes_on_with_what_it_has_where_that_fails():
  driver, given = make_driver()
  source = source_of(random_params(1), 1)
  broken = random_params(2)
  broken["embedding"][0, 0] = np.inf

  async def main():
    async with serving(driver) as address:
      stranger = clients.GenerationClient(address)
      with pytest.raises(PermissionError):
        await stranger.pull(1, [source.address])
      await stranger.close()
      async with clients.GenerationClient(address, token=TOKEN) as client:
        answer = await client.pull(1, [source.address])
        assert answer["version"] == 1
        assert answer["bytes"] == source.counters()["published_bytes"]
        source.publish(jax.device_put(broken), 2)
        with pytest.raises(ValueError, match=r"\['embedding'\] .* not finite"):
          await client.pull(2, [source.address])
        with pytest.raises(TimeoutError, match="not published version 9"):
          await client.pull(9, [source.address], timeout_seconds=1.0)
        nobody = f"127.0.0.1:{two_processes.free_port()}"
        with pytest.raises(RuntimeError, match=nobody):
          await client.pull(2, [source.address, nobody])
        for wrong in ([], [7]):
          with pytest.raises(ValueError, match="addresses"):
            await client.pull(2, wrong)
        assert driver.accepted == ("", 1)
        source.publish(jax.device_put(random_params(3)), 3)
        again = await client.pull(3, [source.address])
        assert again["version"] == 3
        pulled = (await client.status())["pulled"]
        assert (pulled["pulls"], pulled["failed"]) == (2, 3)
        assert pulled["bytes"] == answer["bytes"] + again["bytes"]

  asyncio.run(main())
  source.close()
  for weights, version in zip(given, (1, 3), strict=True):
    assert_serves(driver, weights, version, random_params(version))


def test_a_slow_generator_skips_versions_and_never_goes_back():
  driver, given = make_driver()
  source = source_of(random_params(4), 4)

  async def main():
    async with (
      serving(driver) as address,
      clients.GenerationClient(address, token=TOKEN) as client,
    ):
      assert (await client.pull(2, [source.address]))["version"] == 4
      earlier = await client.pull(3, [source.address])
      assert (earlier["version"], earlier["bytes"]) == (4, 0)

  asyncio.run(main())
  source.close()
  (weights,) = given
  assert_serves(driver, weights, 4, random_params(4))


@pytest.mark.parametrize("kind", ["transfer", "orbax"])
@pytest.mark.parametrize("version", [5, 7, 8])
def test_a_resumed_trainer_replaces_what_its_earlier_life_gave(
  tmp_path, kind, version
):
  """Version 7 of the earlier life is none of the later one's."""
  driver, given = make_driver()
  driver.update(driver.engine.load_params(random_params(1), 7), "earlier")
  config = transport.Config(kind=kind)
  one = transport.make_transport(config, tmp_path / "w", TOKEN, "later")
  params = random_params(version)
  one.publish(jax.device_put(params), version)

  async def main():
    async with (
      serving(driver) as address,
      clients.GenerationClient(address, token=TOKEN) as client,
    ):
      await one.offer(client)
      await one.offer(client)  # It has it.

  asyncio.run(main())
  one.close()
  assert driver.accepted == ("later", version)
  assert_serves(driver, given[-1], version, params)
  assert len(given) == 2


# Storage.


class Reader:
  """A generator that reads when it is let."""

  address = "nowhere"

  def __init__(self):
    self.may_read = asyncio.Event()
    self.asked = asyncio.Event()
    self.version = 0

  async def status(self):
    return {"life": "", "accepted_version": self.version}

  async def update(self, path, version, life):
    self.asked.set()
    await self.may_read.wait()
    self.version = version


def versions(directory):
  return {path.name for path in directory.iterdir()}


def test_two_versions_stay_on_disk_and_what_is_being_read(tmp_path):
  directory = tmp_path / "weights"
  (directory / "9").mkdir(parents=True)
  stored = transport.OrbaxTransport(
    transport.Config(kind="orbax", timeout_seconds=60.0), directory
  )
  assert versions(directory) == set()  # What an earlier run left is gone.

  async def main():
    slow, quick = Reader(), Reader()
    quick.may_read.set()
    stored.publish({"w": jnp.ones(3)}, 1)
    reading = asyncio.create_task(stored.offer(slow))
    await slow.asked.wait()
    for version in (2, 3, 4):
      stored.publish({"w": jnp.ones(3)}, version)
      await stored.offer(quick)
    assert quick.version == 4
    assert versions(directory) == {"1", "3", "4"}
    slow.may_read.set()
    await reading
    stored.publish({"w": jnp.ones(3)}, 5)
    await stored.offer(quick)
    assert versions(directory) == {"4", "5"}
    await stored.offer(quick)  # It has it.
    metrics = stored.metrics()
    assert metrics["pulls"] == 5
    assert metrics["publish_bytes"] == 5 * 12

  asyncio.run(main())
  with pytest.raises(ValueError, match="version 5; it must be greater than 5"):
    stored.publish({"w": jnp.ones(3)}, 5)
  stored.close()


def test_a_generator_that_does_not_take_a_stored_version_is_named(tmp_path):
  config = transport.Config(kind="orbax", timeout_seconds=0.2)
  stored = transport.OrbaxTransport(config, tmp_path / "weights")
  stored.publish({"w": jnp.ones(3)}, 1)
  stored._checkpointer.wait_until_finished()

  async def main():
    with pytest.raises(TimeoutError, match="nowhere did not take version 1"):
      await stored.offer(Reader())

  asyncio.run(main())
  stored.close()


# Settings.


@pytest.mark.parametrize(
  ("field", "value", "allowed"),
  [
    ("kind", "carrier pigeon", "'transfer' or 'orbax'"),
    ("host", "0.0.0.0", "'auto'"),
    ("port", 70000, r"\[0, 65535\]"),
    ("timeout_seconds", 0.0, "> 0"),
    ("dtype", "float16", "'bfloat16' or None"),
  ],
)
def test_a_wrong_setting_names_itself_and_what_is_allowed(
  field, value, allowed
):
  with pytest.raises(ValueError, match=f"{field} is {value!r}.*{allowed}"):
    transport.Config(**{field: value})


def test_other_machines_need_the_token():
  with pytest.raises(ValueError, match="need the admin token"):
    transport.TransferTransport(transport.Config(host="10.0.0.1"), None)
