"""What does it cost to serve a token over the network?

    python -m experiments.benchmarks.service_cost

The engine returns a canned result after the time of a decode step, so that all
processor time is the driver's, the server's and the client's. A client in
another process keeps every slot busy over one call, as an actor does: with
`stream` it takes every decode step's tokens, with `generate` whole answers.
`driver` is the same without a network, in one process.

Expect, of server and client together, about 50 microseconds a token at 128
slots and 100 at 32 where every step is streamed, more than half of it the
driver's own; and a few for whole answers. (With --step-ms 0 about 32 at 128
slots, where JetStream 0.2.2 with a call a request needs about 320.)
Two minutes on two CPU cores.
The last line is JSON: microseconds by slots, head and way.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from typing import Any

import grpc
import jax
import numpy as np

from rl_tpu import sharding
from rl_tpu.generation import decoding, engine, server
from rl_tpu.generation.client import GenerationClient
from rl_tpu.generation.driver import GenerationDriver
from rl_tpu.models import transformer
from rl_tpu.types import Request, Sampling, VersionedParams

WAYS = ("stream", "generate")


def parse() -> argparse.Namespace:
  """The sizes."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--slots", type=int, nargs="+", default=[32, 128])
  parser.add_argument("--heads", type=int, nargs="+", default=[0, 128])
  for name, default, what in (
    ("tokens", 200, "sampled for each request"),
    ("step-ms", 10, "time of a decode step"),
    ("repeats", 3, "of which the median is taken"),
  ):
    parser.add_argument(f"--{name}", type=int, default=default, help=what)
  parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
  return parser.parse_args()


class CannedEngine(engine.PolicyEngine):
  """Takes the time of a decode step, and no processor time to speak of."""

  def __init__(self, slots: int, head: int, tokens: int, seconds: float):
    sizes = dict(d_model=8, num_layers=1, num_heads=1, num_kv_heads=1)
    shape = transformer.Config(vocab_size=256, head_dim=8, d_ff=8, **sizes)
    super().__init__(
      transformer.Policy(shape),
      sharding.make_mesh(sharding.MeshShape(), jax.devices()),
      engine.Config(
        slots=slots,
        context_length=tokens + 8,
        prefill_buckets=(tokens + 8,),
        steps_per_dispatch=1,
        behavior_top_k=head,
        min_shared_prefix=0,
      ),
    )
    self._seconds = seconds
    self._left = np.zeros(slots, np.int64)
    self._data = np.zeros((slots, 5 + 2 * head), np.int32)

  def init_decode_state(self) -> Any:
    """There is none."""
    return None

  def check_params(self, params: Any) -> None:
    """Any will do."""

  def admit(self, params: Any, state: Any, admissions: Any) -> Any:
    """Notes how many tokens each sequence is to have."""
    for admission in admissions:
      self._left[admission.slot] = admission.budget
    return state

  def release(self, state: Any, slots: Any) -> Any:
    """Ends sequences."""
    self._left[list(slots)] = 0
    return state

  def generate(self, params: VersionedParams, decode_state: Any) -> Any:
    """Waits, and has a token for each sequence that wants one."""
    time.sleep(self._seconds)
    live = self._left > 0
    self._left -= live
    data = self._data.copy()
    data[:, 1] = live
    data[:, -1] = np.where(self._left > 0, decoding.RUNNING, decoding.EXHAUSTED)
    head = self.config.behavior_top_k
    return None, decoding.Result.of(data, 1, head, (0, 0), params.version)


async def ask(generator: Any, way: str, slots: int, tokens: int) -> float:
  """Processor seconds of this process for `slots` requests at once."""

  async def one(index: int) -> None:
    request = Request(
      prompt_index=index,
      member=0,
      tokens=np.zeros(4, np.int32),
      sampling=Sampling(max_tokens=tokens),
    )
    if way == "generate":
      count = len((await generator.generate(request)).tokens)
    else:
      count = 0
      async for chunk in generator.stream(request):
        count += len(chunk.tokens)
    assert count == tokens, count

  began = time.process_time()
  await asyncio.gather(*(one(index) for index in range(slots)))
  return time.process_time() - began


async def be_client(address: str, way: str, slots: int, tokens: int) -> None:
  """The other process: a line in, a line out, for every run."""
  async with GenerationClient(address) as client:
    while sys.stdin.readline():
      print(await ask(client, way, slots, tokens), flush=True)


async def over_network(
  driver: GenerationDriver, way: str, sizes: argparse.Namespace
) -> tuple[list[float], list[float]]:
  """Processor seconds of the server's process and of the client's."""
  served = server.GenerationServer(driver, server.Config(port=0), None)
  await served.start()
  slots = driver.engine.config.slots
  arguments = (f"127.0.0.1:{served.port}", way, str(slots), str(sizes.tokens))
  process = await asyncio.create_subprocess_exec(
    *(sys.executable, "-m", "experiments.benchmarks.service_cost"),
    *("--client", *arguments),
    stdin=asyncio.subprocess.PIPE,
    stdout=asyncio.subprocess.PIPE,
  )
  assert process.stdin and process.stdout
  ours, theirs = [], []
  for _ in range(1 + sizes.repeats):
    began = time.process_time()
    process.stdin.write(b"\n")
    theirs.append(float(await process.stdout.readline()))
    ours.append(time.process_time() - began)
  process.stdin.close()
  await process.wait()
  await served.stop()
  return ours[1:], theirs[1:]


def measure(slots: int, head: int, sizes: argparse.Namespace) -> dict[str, Any]:
  """Microseconds of processor time a token, by way: [server, client]."""
  seconds = sizes.step_ms / 1e3
  driver = GenerationDriver(CannedEngine(slots, head, sizes.tokens, seconds))
  driver.update(VersionedParams(version=0, params={}))
  driver.start()

  def each(measured: list[float]) -> float:
    return round(statistics.median(measured) / slots / sizes.tokens * 1e6, 1)

  async def main() -> dict[str, Any]:
    cost: dict[str, Any] = {}
    for way in WAYS:
      alone = [
        await ask(driver, way, slots, sizes.tokens)
        for _ in range(1 + sizes.repeats)
      ]
      cost[f"driver, {way}"] = [each(alone[1:])]
    for way in WAYS:
      measured = await over_network(driver, way, sizes)
      cost[f"service, {way}"] = [each(side) for side in measured]
    return cost

  try:
    return asyncio.run(main())
  finally:
    driver.stop()


def main() -> None:
  """Prints the table and the JSON line."""
  sizes = parse()
  if sizes.client:
    address, way, slots, tokens = sizes.client
    asyncio.run(be_client(address, way, int(slots), int(tokens)))
    return
  print(
    f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, "
    f"grpc {grpc.__version__}, "
    + ", ".join(f"{name} {value}" for name, value in vars(sizes).items())
  )
  figures = {}
  for slots in sizes.slots:
    for head in sizes.heads:
      for way, cost in measure(slots, head, sizes).items():
        key = f"{slots} slots, K {head}, {way}"
        figures[key] = cost
        parts = " + ".join(f"{part:6.1f}" for part in cost)
        print(f"{key:38} {parts} us/token", flush=True)
  print(json.dumps({"microseconds_per_token": figures}))


if __name__ == "__main__":
  main()
