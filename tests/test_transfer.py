import gc
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transfer_processes
from transfer_processes import POLICY, random_params

from rl_tpu import messages, sharding
from rl_tpu.transfer import control, publisher, puller, shards
from rl_tpu.transfer.shards import Box, Cut

MESHES = {
  "fsdp2 x tensor2": sharding.MeshShape(fsdp=2, tensor=2),
  "fsdp4": sharding.MeshShape(fsdp=4),
  "tensor2": sharding.MeshShape(tensor=2),
  "data2 x tensor2": sharding.MeshShape(data=2, tensor=2),
  "one device": sharding.MeshShape(),
}
SECONDS = 60.0
"""For what should come; nothing here waits for it."""


def on_trainer(params, shape="fsdp2 x tensor2"):
  mesh = sharding.make_mesh(MESHES[shape], jax.devices())
  return jax.device_put(params, POLICY.param_shardings(mesh))


def at_generator(shape="tensor2"):
  """What arrives at the last four devices."""
  mesh = sharding.make_mesh(MESHES[shape], jax.devices()[4:])
  return sharding.placed(POLICY.abstract_params(), POLICY.param_shardings(mesh))


@pytest.fixture
def published():
  """A trainer process that has published version 1."""
  with_weights = publisher.Publisher()
  with_weights.publish(on_trainer(random_params(1)), 1)
  yield with_weights
  with_weights.close()


def pull(source, version=1, abstract=None, seconds=SECONDS, by=None):
  by = by or puller.Puller()
  like = abstract or at_generator()
  return by.pull([source.address], version, like, seconds)


def assert_equal(got, want):
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), want)


# Shards.


def slow_checksum(array):
  width = min(array.dtype.itemsize, 4)
  total = 0
  for place, bits in enumerate(np.frombuffer(array.tobytes(), f"<u{width}")):
    mixed = place * 0x9E3779B1 % 2**32
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77 % 2**32
    total += int(bits) * ((mixed ^ (mixed >> 13)) | 1)
  return total % 2**32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "int8"])
def test_the_checksum_is_that_of_a_slow_loop_and_finds_a_bit_and_a_move(dtype):
  rng = np.random.default_rng(0)
  values = (rng.standard_normal((3, 4, 5)) * 50).astype(jnp.dtype(dtype))
  checksum = int(shards.inspect(values)[0])
  assert checksum == slow_checksum(values)
  raw = bytearray(values.tobytes())
  for place in (0, len(raw) // 2, len(raw) - 1):
    for bit in (0, 7):
      raw[place] ^= 1 << bit
      flipped = np.frombuffer(bytes(raw), values.dtype).reshape(values.shape)
      assert int(shards.inspect(flipped)[0]) != checksum
      raw[place] ^= 1 << bit
  moved = values.copy()
  moved[0], moved[1] = values[1], values[0]
  assert int(shards.inspect(moved)[0]) != checksum


def test_the_checksum_finds_rows_that_moved_where_weights_were_rounded():
  """Numbers with 16 zero bits and a stride of 2^16: a sum of i * x is blind."""
  values = np.zeros((2, 2**16), np.float32)
  values[0, :8], values[1, :8] = 1.0, 2.0
  assert int(shards.inspect(values)[0]) != int(shards.inspect(values[::-1])[0])


def test_values_that_are_not_finite_are_counted():
  values = np.array([1.0, np.nan, np.inf, 0.0], np.float32)
  assert int(shards.inspect(values)[1]) == 2
  assert int(shards.inspect(np.arange(4))[1]) == 0


def test_shards_cover_a_block_exactly_or_not_at_all():
  left, right = Box((0, 0), (4, 3)), Box((0, 3), (4, 5))
  block = Box((1, 2), (2, 4))
  assert shards.cover(block, [Box((9, 9), (1, 1)), left, right]) == {
    1: Cut((1, 2), (0, 0), (2, 1)),
    2: Cut((1, 0), (0, 1), (2, 3)),
  }
  with pytest.raises(ValueError, match="6 of the 8 elements .* no shard"):
    shards.cover(block, [left])
  with pytest.raises(ValueError, match="overlap"):
    shards.cover(block, [left, right, Box((2, 4), (1, 1))])


# Whole versions.


@pytest.mark.parametrize("there", MESHES)
@pytest.mark.parametrize("here", ["fsdp2 x tensor2", "data2 x tensor2"])
def test_X08_X09_weights_arrive_bit_equal_in_the_generators_sharding(
  here, there
):
  want = random_params(1)
  params = on_trainer(want, here)
  source = publisher.Publisher()
  sent = source.publish(params, 1)
  jax.tree.map(lambda x: x.delete(), params)  # As donating them would.
  like = at_generator(there)
  weights, moved = pull(source, abstract=like)
  source.close()
  assert weights.version == moved.version == 1
  assert_equal(weights.params, want)
  size = sum(x.nbytes for x in jax.tree.leaves(want))
  assert sent.bytes == moved.bytes == size  # Each shard once.
  assert moved.bytes_per_second > 0

  def check(array, wanted):
    assert array.dtype == wanted.dtype
    assert array.sharding.device_set <= set(jax.devices()[4:])
    assert array.sharding.is_equivalent_to(wanted.sharding, array.ndim)
    for shard in array.addressable_shards:
      assert shard.data.devices() == {shard.device}

  jax.tree.map(check, weights.params, like)


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_the_copy_shares_no_buffer_with_what_may_be_donated(dtype):
  params = on_trainer(random_params(1))

  def places(tree):
    return {
      shard.data.unsafe_buffer_pointer()
      for leaf in jax.tree.leaves(tree)
      for shard in leaf.addressable_shards
    }

  copy = publisher.owned_copy(params, dtype)
  assert not places(params) & places(copy)


def test_H15_each_version_arrives_as_it_is(published):
  by, seen = puller.Puller(), set()
  for version in (1, 2, 3):
    if version > 1:
      published.publish(on_trainer(random_params(version)), version)
    weights, _ = pull(published, version, by=by)
    assert_equal(weights.params, random_params(version))
    seen.add(float(weights.params["embedding"].sum()))
  assert len(seen) == 3
  sums = published.counters()
  assert (sums["publishes"], sums["pulls"]) == (3, 3)
  assert sums["offered_bytes"] == sums["published_bytes"]


def test_weights_that_travel_in_bfloat16_are_the_rounded_ones():
  source = publisher.Publisher(dtype="bfloat16")
  sent = source.publish(on_trainer(random_params(1)), 1)
  weights, moved = pull(source)
  source.close()
  rounded = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16).astype(np.float32), random_params(1)
  )
  assert_equal(weights.params, rounded)
  size = sum(x.nbytes for x in jax.tree.leaves(rounded))
  assert sent.bytes == moved.bytes == size // 2


def test_H15_weights_of_another_model_are_refused_by_name(published):
  like = at_generator()
  unknown = {name: x for name, x in like.items() if name != "embedding"}
  with pytest.raises(ValueError, match=r"weight \['embedding'\]; the policy"):
    pull(published, abstract=unknown)
  missing = {**like, "bias": like["embedding"]}
  with pytest.raises(ValueError, match=r"has no weight \['bias'\]"):
    pull(published, abstract=missing)
  turned = jax.ShapeDtypeStruct(
    like["embedding"].shape[::-1],
    jnp.float32,
    sharding=like["final_norm"]["scale"].sharding,
  )
  with pytest.raises(ValueError, match=r"\['embedding'\] of the trainer is"):
    pull(published, abstract={**like, "embedding": turned})
  whole = jax.ShapeDtypeStruct(
    like["embedding"].shape, jnp.int32, sharding=like["embedding"].sharding
  )
  with pytest.raises(ValueError, match=r"must be int32"):
    pull(published, abstract={**like, "embedding": whole})


def replace_shard(source, version, name, change):
  """Changes a shard between what is said of it and what is sent."""
  held = source._versions[version]
  described = control.Description.unpack(messages.unpack_map(held.described))
  names = [tensor.name for tensor in described.tensors]
  number = next(
    i for i, s in enumerate(described.shards) if names[s.tensor] == name
  )
  changed = list(held.shards)
  changed[number] = change(changed[number])
  object.__setattr__(held, "shards", tuple(changed))


def flip_a_bit(shard):
  bits = np.array(shard).view(np.uint32)
  bits.flat[3] ^= 1
  return jax.device_put(bits.view(np.float32), shard.device)


def test_a_shard_that_changed_on_the_way_is_refused_by_name(published):
  replace_shard(published, 1, "['embedding']", flip_a_bit)
  with pytest.raises(
    ValueError,
    match=rf"weight \['embedding'\] \(shard at \(0, 0\) .* {published.address}"
    " arrived with checksum",
  ):
    pull(published)


def test_a_shard_that_nobody_owns_is_missed_by_name(published):
  held = published._versions[1]
  message = messages.unpack_map(held.described)
  message["shards"] = message["shards"][1:]
  del message["v"]
  object.__setattr__(held, "described", messages.pack_map(**message))
  with pytest.raises(ValueError, match=r"\['embedding'\] is incomplete"):
    pull(published)


def test_weights_that_are_not_finite_are_refused_by_name():
  params = random_params(1)
  params["embedding"][5, 3] = np.nan
  source = publisher.Publisher()
  source.publish(on_trainer(params), 1)
  with pytest.raises(ValueError, match=r"\['embedding'\] .* 1 values .* finit"):
    pull(source)
  source.close()


# Versions that come and go.


def test_a_version_that_is_gone_names_the_newest(published):
  published.publish(on_trainer(random_params(2)), 2)
  with pytest.raises(puller.SupersededError, match="newest is 2") as raised:
    pull(published, 1)
  assert raised.value.newest == 2
  with pytest.raises(ValueError, match="version 2; it must be greater than 2"):
    published.publish(on_trainer(random_params(2)), 2)


def test_a_version_that_is_not_published_yet_is_waited_for(published):
  with pytest.raises(TimeoutError, match="not published version 2 .* is 1"):
    pull(published, 2, seconds=0.1)
  later = threading.Thread(
    target=published.publish, args=(on_trainer(random_params(2)), 2)
  )
  later.start()
  weights, _ = pull(published, 2)
  later.join()
  assert_equal(weights.params, random_params(2))


def test_a_slow_pull_keeps_its_version_and_lets_go_of_it(published):
  """Newer versions come between any two of its tensors."""
  slow = puller.Puller(wave_bytes=1)
  start, version = slow._start, 1

  def publish_and_start(*args):
    nonlocal version
    started = start(*args)
    version += 1
    published.publish(on_trainer(random_params(version)), version)
    assert set(published._versions) == {1, version}
    return started

  slow._start = publish_and_start
  weights, _ = pull(published, 1, by=slow)
  assert_equal(weights.params, random_params(1))
  assert version > 5
  assert set(published._versions) == {version}


def test_versions_that_nobody_pulls_cost_one_copy():
  source = publisher.Publisher()
  params = {"w": jnp.ones(2**20)}
  held = []
  for version in range(8):
    source.publish(params, version)
    gc.collect()
    held.append(sum(array.nbytes for array in jax.live_arrays()))
  source.close()
  assert max(held) == held[0]


def test_offers_that_were_never_taken_are_freed_when_their_lease_ends():
  source = publisher.Publisher(lease_seconds=0.0)
  source.publish(on_trainer(random_params(1)), 1)
  peer = control.Peer(source.address, None)
  answer = peer.call(
    control.OFFER, time.monotonic() + SECONDS, version=1, pull="p", ids=[0, 1]
  )
  taken = jax.ShapeDtypeStruct(
    source._versions[1].shards[0].shape,
    jnp.float32,
    sharding=jax.sharding.SingleDeviceSharding(jax.devices()[5]),
  )
  server = publisher.transfer.start_transfer_server(
    jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"]
  )
  connection = server.connect(source._transfer.address())
  jax.block_until_ready(connection.pull(answer["uuids"][0], [taken]))
  source.publish(on_trainer(random_params(2)), 2)
  source.close()  # Ends the withdrawals first.
  assert source.counters()["withdrawn_offers"] == 2
  peer.close()


def test_calls_without_the_token_are_refused():
  source = publisher.Publisher(token="a token of some length")
  source.publish(on_trainer(random_params(1)), 1)
  for wrong in (None, "another token of that length"):
    with pytest.raises(PermissionError, match=source.address):
      pull(source, by=puller.Puller(wrong))
  pull(source, by=puller.Puller("a token of some length"))
  source.close()


@pytest.mark.parametrize(
  "wrong",
  [
    {"tensors": [["w", "float99", [2]]]},
    {"tensors": [["w", "float32"]]},
    {"shards": [[0, [0], [3], 1]]},
    {"shards": [[1, [0], [2], 1]]},
    {"shards": [[0, "x", [2], 1]]},
    {"transfer_address": None},
  ],
)
def test_a_description_that_makes_no_sense_is_refused(wrong):
  good = {
    "tensors": [["w", "float32", [2]]],
    "shards": [[0, [0], [2], 1]],
    "transfer_address": "127.0.0.1:1",
  }
  control.Description.unpack(dict(good))
  with pytest.raises(messages.WireError):
    control.Description.unpack(good | wrong)


# Processes.


@pytest.fixture
def trainer_process():
  """A process that has published version 1."""
  process = subprocess.Popen(
    [sys.executable, transfer_processes.__file__, "lone"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  with process:
    assert process.stdout is not None
    process.address = process.stdout.readline().strip()
    yield process
    process.kill()


def after_the_offer(monkeypatch, act):
  """Acts when the trainer has offered and nothing was pulled yet."""
  call = control.Peer.call

  def called(self, name, *args, **fields):
    answer = call(self, name, *args, **fields)
    if name == control.OFFER:
      act()
    return answer

  monkeypatch.setattr(control.Peer, "call", called)


def test_a_trainer_that_hangs_or_dies_is_named_within_the_deadline(
  trainer_process, monkeypatch
):
  by, address = puller.Puller(), trainer_process.address
  weights, _ = pull(trainer_process, by=by)
  assert_equal(weights.params, random_params(1))

  os.kill(trainer_process.pid, signal.SIGSTOP)
  with pytest.raises(TimeoutError, match=f"{address} did not answer Describe"):
    pull(trainer_process, by=by, seconds=0.5)
  os.kill(trainer_process.pid, signal.SIGCONT)
  pull(trainer_process, by=by)

  with monkeypatch.context() as patched:
    after_the_offer(
      patched, lambda: os.kill(trainer_process.pid, signal.SIGSTOP)
    )
    with pytest.raises(
      TimeoutError, match=rf"weight \['.* {address} has not arrived in time"
    ):
      pull(trainer_process, by=by, seconds=1.0)
  assert by.abandoned > 0
  os.kill(trainer_process.pid, signal.SIGCONT)
  weights, _ = pull(trainer_process, by=by)
  assert_equal(weights.params, random_params(1))

  def kill():
    trainer_process.kill()
    trainer_process.wait()

  with monkeypatch.context() as patched:
    after_the_offer(patched, kill)
    with pytest.raises(OSError, match=rf"weight \['.* {address}"):
      pull(trainer_process, by=by, seconds=1.0)
  with pytest.raises(ConnectionError, match=address):
    pull(trainer_process, by=by)
