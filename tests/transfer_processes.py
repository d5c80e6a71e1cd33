"""Trainer processes that publish weights, to be pulled by the tests.

    python transfer_processes.py lone
    python transfer_processes.py PORT INDEX DIRECTORY GENERATOR...

The first publishes version 1 from one process, says where, and stays until its
input ends. The second is one process of two with two devices each; version 1
goes by transfer to every generator (host:port), version 2 by Orbax, version 3
by transfer in bfloat16.
"""

import asyncio
import json
import pathlib
import sys

if __name__ == "__main__":
  here = pathlib.Path(__file__).resolve()
  sys.path[:0] = [str(here.parents[1])]

import jax
import numpy as np

from rl_tpu import sharding
from rl_tpu.models import transformer

POLICY = transformer.Policy(
  transformer.Config(
    vocab_size=64,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    d_ff=32,
  )
)
TOKEN = "a token of some length"


def random_params(version):
  """The weights of a version, the same in every process."""
  rng = np.random.default_rng(version)
  return jax.tree.map(
    lambda x: rng.standard_normal(x.shape).astype(x.dtype),
    POLICY.abstract_params(),
  )


def lone():
  from rl_tpu.transfer import publisher

  source = publisher.Publisher()
  source.publish(jax.device_put(random_params(1), jax.devices()[1]), 1)
  print(source.address, flush=True)
  sys.stdin.read()


def trainer(port, index, directory, generators):
  jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
  from rl_tpu import transport
  from rl_tpu.generation import client

  mesh = sharding.make_mesh(sharding.MeshShape(fsdp=2, tensor=2), jax.devices())
  where = POLICY.param_shardings(mesh)
  kinds = [
    transport.Config(timeout_seconds=60.0),
    transport.Config(kind="orbax", timeout_seconds=60.0),
    transport.Config(dtype="bfloat16", timeout_seconds=60.0),
  ]
  made = [transport.make_transport(kind, directory, TOKEN) for kind in kinds]

  async def offer(one):
    async with asyncio.TaskGroup() as tasks:
      for address in generators:
        connected = client.GenerationClient(address, token=TOKEN)
        tasks.create_task(one.offer(connected))

  for version, one in enumerate(made, 1):
    params = sharding.distribute(random_params(version), where)
    one.publish(params, version)
    jax.tree.map(lambda x: x.delete(), params)  # As donating them would.
  if index == 0:
    for one in made:
      asyncio.run(offer(one))
      print(json.dumps(one.metrics()), flush=True)
  sys.stdin.read()  # Pulls come from both processes.
  for one in made:
    one.close()


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 2)
  if sys.argv[1] == "lone":
    lone()
  else:
    trainer(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
