"""Weights from a trainer's devices straight to a generator's, and checked.

The trainer and each generator are jobs of their own, so that the death of one
costs the others nothing. `jax.experimental.transfer` moves arrays between them
device to device, but it neither reshards nor checks nor times out: another
sharding gives wrong values in silence, a dead or unknown peer a wait without
end, and what was offered stays in memory until it is pulled. So

- shards are keyed by tensor and global index, offered when they are asked for,
  and put together on the generator's devices in its own sharding (`shards`);
- every trainer process says what it owns, with a checksum of each shard
  (`publisher`), and a generator returns weights only if all of them have
  arrived, agree with their checksums and are finite (`puller`);
- every wait has a deadline, and names the process and the tensor it waits for.
"""
