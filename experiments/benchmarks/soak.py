"""Does a service that is tormented for long lose anything?

    python -m experiments.benchmarks.soak --requests=2000 --seed=0

A process serves a small random policy three times, once for each way to meet
new weights. Requests reach it by gRPC (whole, streamed, and as messages by
hand), by JetStream's Decode, by OpenAI's HTTP API (whole, streamed, chats) and
in the process itself. Some are cancelled, some clients vanish, some prompts are
too long, some fields are wrong, some come when there is no room. Meanwhile
weights are replaced, weights that are broken are offered, and services pause.

Afterwards: each request ended once, with a reason that its fate allows; no
slot, queue, task, thread or open file is held; a service takes as many requests
as it may; what nothing disturbed agrees with a plain forward pass; and memory
does not grow, by the slope of a line through the second half of the run.

Expect no faults. Of the memory: each look at weights on disk, good or bad,
costs 75 KiB for this model, in lists that TensorStore does not free: about 1100
of the slope. Steps of about 1 MiB fall where they like. The slope was 750 to
3400 for 2000 requests and 850 for 6000; 11 for 6000 without new weights.

One minute on two CPU cores. The last line is JSON: requests, reasons,
kib_per_1000_requests, faults and what was held at the end; the exit status is 1
where there are faults.
"""

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import soak_plan, soak_samples, soak_server
from experiments.benchmarks.soak_plan import Errand
from experiments.benchmarks.soak_samples import Sample
from experiments.benchmarks.soak_traffic import Outcome, Traffic
from rl_tpu import checkpoint

WORKERS = 16
MEDDLE_EVERY = 20
"""Requests; an event may take longer than the next so many."""
POOL_THREADS = 8
"""More of gRPC's and TensorStore's, whose pools grow where they were busy."""
POLICIES = 4
"""Different weights; version v has those of v % POLICIES."""
PATIENCE_SECONDS = 60.0
"""For what must happen soon: only what never happens takes so long."""
ROOT = pathlib.Path(soak_server.__file__).parents[2]


def parse() -> argparse.Namespace:
  """The sizes."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  for name, default, what in (
    ("requests", 2000, "in all"),
    ("seed", 0, "of what is done, not of when"),
    ("bound", 4096, "largest good slope, KiB per 1000 requests: 4 KiB each"),
  ):
    parser.add_argument(f"--{name}", type=int, default=default, help=what)
  return parser.parse_args()


# The process.


class Server:
  """The other process, and the lines that go back and forth."""

  def __init__(self, process: asyncio.subprocess.Process):
    self._process = process
    self._ids = itertools.count()
    self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
    self.last: dict[str, Any] = {}
    """What it said at its end."""

  async def read(self) -> None:
    """Hands answers out until there are no more."""
    assert self._process.stdout
    async for data in self._process.stdout:
      line = json.loads(data)
      if "id" in line:
        self._waiting.pop(line["id"]).set_result(line)
      else:
        self.last = line
    for future in self._waiting.values():
      future.set_exception(ConnectionError("the server's process ended"))

  async def ask(self, **line: Any) -> dict[str, Any]:
    """Says a line, and gives the answer."""
    assert self._process.stdin
    number = next(self._ids)
    future = asyncio.get_running_loop().create_future()
    self._waiting[number] = future
    self._process.stdin.write(
      f"{json.dumps({'id': number, **line})}\n".encode()
    )
    return await future


@contextlib.asynccontextmanager
async def serving(
  weights: pathlib.Path, faults: list[str]
) -> AsyncIterator[tuple[Server, dict[str, dict[str, str]]]]:
  """The process while it serves, and where its services listen."""
  process = await asyncio.create_subprocess_exec(
    *(sys.executable, "-m", soak_server.__name__, str(weights)),
    cwd=ROOT,
    # One heap: those of threads grow by whoever happens to allocate when.
    env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    stdin=asyncio.subprocess.PIPE,
    stdout=asyncio.subprocess.PIPE,
  )
  assert process.stdin and process.stdout
  try:
    where = json.loads(await process.stdout.readline())
    server = Server(process)
    reader = asyncio.create_task(server.read())
    yield server, where
    process.stdin.close()
    async with asyncio.timeout(PATIENCE_SECONDS):
      status = await process.wait()
      await reader
    if status or server.last.get("generating") != 0:
      faults.append(f"the process ended with {status} and {server.last}")
  finally:
    if process.returncode is None:
      process.kill()
      await process.wait()


# Weights.


class Weights:
  """Directories with weights, good and broken."""

  def __init__(self, directory: pathlib.Path):
    self.directory = directory
    init = jax.jit(soak_server.POLICY.init)
    self.params = [init(jax.random.key(seed)) for seed in range(POLICIES)]
    for seed, params in enumerate(self.params):
      checkpoint.save_params(self.good(seed), params)
    first = self.params[0]
    spoilt = jax.tree.map(
      lambda leaf: leaf.at[(0,) * leaf.ndim].set(jnp.nan), first
    )
    checkpoint.save_params(directory / "nan", spoilt)
    longer = jax.tree.map(lambda leaf: jnp.repeat(leaf, 2, axis=0), first)
    checkpoint.save_params(directory / "shape", longer)
    shutil.copytree(self.good(1), directory / "torn")
    for path in sorted((directory / "torn").rglob("d/*")):
      path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    self.bad = [directory / n for n in ("nan", "shape", "torn", "missing")]

  def good(self, version: int) -> pathlib.Path:
    """Where those of a version are."""
    return self.directory / str(version % POLICIES)


# What happens meanwhile.


class Meddler:
  """Replaces weights, offers broken ones, pauses."""

  def __init__(self, traffic: dict[str, Traffic], weights: Weights, seed: int):
    self._traffic = traffic
    self._weights = weights
    self._chance = random.Random(seed)
    self._versions = dict.fromkeys(traffic, 0)
    self._acts = itertools.cycle((self._update, self._spoil, self._pause))
    self.counts: collections.Counter[str] = collections.Counter()

  async def meddle(self) -> None:
    """One event at one of the services."""
    name = self._chance.choice([*self._traffic])
    act = next(self._acts)
    self.counts[act.__name__.strip("_")] += 1
    await act(name)

  async def _update(self, name: str) -> None:
    self._versions[name] += 1
    version = self._versions[name]
    client = self._traffic[name].client
    await client.update(str(self._weights.good(version)), version)
    await self._served(name)

  async def _served(self, name: str) -> None:
    """Waits until the newest weights are in service."""
    wanted = self._versions[name]
    async with asyncio.timeout(PATIENCE_SECONDS):
      while (await self._traffic[name].client.status())["version"] != wanted:
        await asyncio.sleep(0.01)

  async def _spoil(self, name: str) -> None:
    """Weights that must be refused; what is served stays."""
    served = self._versions[name]
    choices = [(path, served + 1) for path in self._weights.bad]
    path, version = self._chance.choice(
      [*choices, (self._weights.good(served), served)]
    )
    client = self._traffic[name].client
    try:
      await client.update(str(path), version)
    except ValueError:
      now = (await client.status())["version"]
      assert now == served, (path, now, served)
    else:
      raise AssertionError(f"{path} was taken as version {version}")

  async def _pause(self, name: str) -> None:
    """Nothing is sampled for a while."""
    client = self._traffic[name].client
    await client.pause()
    sampled = (await client.status())["counters"]["tokens"]
    await asyncio.sleep(self._chance.uniform(0, 0.05))
    assert (await client.status())["counters"]["tokens"] == sampled
    await client.resume()


class Run:
  """What came of the errands."""

  def __init__(self, server: Server, meddler: Meddler):
    self._server = server
    self._meddler = meddler
    self.reasons: collections.Counter[str] = collections.Counter()
    self.ways: collections.Counter[str] = collections.Counter()
    self.samples: list[Sample] = []
    self.memory: list[tuple[int, int]] = []
    """(requests so far, KiB)."""

  @property
  def requests(self) -> int:
    """How many ended."""
    return self.reasons.total()

  async def go(
    self, errands: Iterable[Errand], traffic: dict[str, Traffic]
  ) -> None:
    """Sends workers on errands; meddles and looks at memory now and then."""
    waiting = iter(errands)

    async def work() -> None:
      for errand in waiting:
        try:
          async with asyncio.timeout(2 * PATIENCE_SECONDS):
            self._note(errand, await traffic[errand.service].run(errand))
        except BaseException as error:
          error.add_note(f"on {errand}")
          raise

    async def watch() -> None:
      seen = self.requests
      while not all(worker.done() for worker in workers):
        await asyncio.sleep(0.005)
        if self.requests - seen < MEDDLE_EVERY:
          continue
        seen = self.requests
        self.memory.append((seen, (await self._server.ask(do="memory"))["kib"]))
        await self._meddler.meddle()

    async with asyncio.TaskGroup() as group:
      workers = [group.create_task(work()) for _ in range(WORKERS)]
      group.create_task(watch())

  def _note(self, errand: Errand, outcomes: list[Outcome]) -> None:
    self.ways[errand.way] += len(outcomes)
    for outcome in outcomes:
      self.reasons[outcome.reason] += 1
      if outcome.sample is not None:
        self.samples.append(outcome.sample)


# What must be true afterwards.


async def quiet(
  server: Server, most: dict[str, int] | None = None
) -> dict[str, Any]:
  """What is held when the process has noticed that its clients left.

  Args:
    server: the process.
    most: of what may be held, once no client is left; None: there still are.
  """

  def busy(held: dict[str, Any]) -> bool:
    used = [
      one[what]
      for one in held["services"].values()
      for what in ("busy_slots", "waiting", "open")
    ]
    return any(used) or any(
      held[name] > allowed for name, allowed in (most or {}).items()
    )

  ends = time.monotonic() + PATIENCE_SECONDS / 4
  held = await server.ask(do="look")
  while busy(held) and time.monotonic() < ends:
    await asyncio.sleep(0.1)
    held = await server.ask(do="look")
  return held


def leaks(held: dict[str, Any], most: dict[str, int]) -> list[str]:
  """What is held at last though nobody waits for it."""
  found = [
    f"{name} are {held[name]}; they were {allowed}"
    for name, allowed in most.items()
    if held[name] > allowed
  ]
  for name, one in held["services"].items():
    for what in ("busy_slots", "waiting", "open", "ended_again"):
      if one[what]:
        found.append(f"{name}: {what} is {one[what]}")
    ends = one["completions"] + one["cancellations"]
    if one["taken"] != ends:
      found.append(f"{name}: {one['taken']} were taken, {ends} ended")
  return found


async def full_house(traffic: Traffic) -> None:
  """As many as a service may have open; none is refused."""
  how = soak_plan.plan(1, 0)[0].sampling
  common = dict(service="any", fate="end", prompt="a", sampling=how, after=0)
  for way, calls, count in (
    ("generate", soak_server.LIMIT, 1),
    ("http", 1, soak_server.LIMIT),
  ):
    errands = [
      Errand(index=i, way=way, count=count, stop=(), **common)
      for i in range(calls)
    ]
    for outcomes in await asyncio.gather(*map(traffic.run, errands)):
      for outcome in outcomes:
        assert outcome.reason in ("stop", "length"), outcome


def slope(memory: list[tuple[int, int]]) -> float:
  """KiB per 1000 requests: least squares over the second half."""
  half = np.array(memory[len(memory) // 2 :], float)
  if len(half) < 2:
    return 0.0
  return float(1000 * np.polyfit(half[:, 0], half[:, 1], 1)[0])


# The run.


async def soak(
  requests: int, seed: int, directory: pathlib.Path
) -> dict[str, Any]:
  """Runs it; `faults` has a sentence for each thing that is wrong."""
  began = time.monotonic()
  weights = Weights(directory)
  faults: list[str] = []
  errands = soak_plan.plan(requests, seed)
  # What is made once, such as a pool's threads, is made in the first part.
  warm = len(errands) // 4
  async with serving(weights.good(0), faults) as (server, where):
    traffic = {
      name: Traffic(at["grpc"], at["http"], soak_server.TOKEN, server.ask)
      for name, at in where.items()
    }
    meddler = Meddler(traffic, weights, seed)
    run = Run(server, meddler)
    first = await quiet(server)
    most = {"tasks": first["tasks"], "objects": 0}
    for part in (errands[:warm], errands[warm:]):
      async with contextlib.AsyncExitStack() as stack:
        for one in traffic.values():
          await stack.enter_async_context(one)
        await run.go(part, traffic)
        await quiet(server)
        for one in traffic.values():
          await full_house(one)
      held = await quiet(server, most)
      faults += leaks(held, most)
      for name in ("threads", "files"):
        most.setdefault(name, held[name])
      pools = held["system_threads"] + POOL_THREADS
      most.setdefault("system_threads", pools)
  sampled = run.samples[:: max(len(run.samples) // 200, 1)]
  wrong = [soak_samples.fault(sample, weights.params) for sample in sampled]
  faults += [one for one in wrong if one is not None]
  return {
    "requests": run.requests,
    "reasons": dict(run.reasons),
    "ways": dict(run.ways),
    "meddled": dict(meddler.counts),
    "checked": len(sampled),
    "kib_per_1000_requests": round(slope(run.memory), 1),
    "memory": run.memory,
    "first": first,
    "held": held,
    "faults": faults,
    "seconds": round(time.monotonic() - began, 1),
  }


def main() -> int:
  """Prints what happened; whether anything is wrong."""
  sizes = parse()
  os.environ["JAX_PLATFORMS"] = "cpu"  # Also of the other process.
  jax.config.update("jax_platforms", "cpu")
  with tempfile.TemporaryDirectory() as directory:
    figures = asyncio.run(
      soak(sizes.requests, sizes.seed, pathlib.Path(directory))
    )
  grown = figures["kib_per_1000_requests"]
  if grown > sizes.bound:
    figures["faults"].append(
      f"memory grows by {grown} KiB per 1000 requests; at most {sizes.bound}"
    )
  for name, value in figures.items():
    print(f"{name:24} {value}")
  print(json.dumps(figures))
  return 1 if figures["faults"] else 0


if __name__ == "__main__":
  sys.exit(main())
