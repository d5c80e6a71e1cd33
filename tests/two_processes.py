"""One process of two that train one batch over a mesh of both's devices.

    python two_processes.py PORT INDEX PATH

Each has two CPU devices. Process 0 writes the weights after the batch to PATH,
in the order of their tree.
"""

import pathlib
import socket
import sys


def free_port() -> int:
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]


def main(port: int, index: int, path: pathlib.Path) -> None:
  import jax

  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 2)
  jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)

  import numpy as np
  import test_learner
  from jax.experimental import multihost_utils

  from rl_tpu import sharding

  assert len(jax.devices()) == 4 and len(jax.local_devices()) == 2
  shape = sharding.MeshShape(fsdp=2, tensor=2)
  trainer, state = test_learner.make(shape=shape)
  state, metrics = trainer.train(state, test_learner.make_batch())
  assert metrics["nonfinite_updates"] == 0
  params = multihost_utils.process_allgather(state.params, tiled=True)
  if index == 0:
    np.savez(path, *jax.tree.leaves(params))


if __name__ == "__main__":
  here = pathlib.Path(__file__).resolve()
  sys.path[:0] = [str(here.parents[1]), str(here.parent)]
  main(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))
