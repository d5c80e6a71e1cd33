"""The process that the soak torments: three services, and a look inside.

One driver, gRPC server and HTTP server for each way to meet new weights, of a
random policy over bytes. It is told what to do by lines of JSON and answers
each with one: where its services listen, how much memory it has, what it
holds, or what its own driver says to a request of this process. When there are
no more lines it ends as a server does that was told to.
"""

import asyncio
import collections
import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import sys
import threading
from typing import Any

import jax
import numpy as np

from rl_tpu import sharding
from rl_tpu.generation import engine, openai_api, policies, requests, server
from rl_tpu.generation import text as texts
from rl_tpu.generation.connection import Connection
from rl_tpu.generation.driver import INTERRUPTIONS, GenerationDriver
from rl_tpu.models import transformer
from rl_tpu.models.tokenizer import ByteTokenizer
from rl_tpu.types import Chunk, Completion, Request, Sampling

TOKENIZER = ByteTokenizer()
POLICY = transformer.Policy(
  transformer.Config(
    vocab_size=TOKENIZER.vocab_size,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=32,
  )
)
ENGINE = engine.Config(
  slots=4,
  context_length=128,
  prefill_buckets=(32, 128),
  prefill_batches=(4,),
  steps_per_dispatch=2,
  behavior_top_k=2,
  min_shared_prefix=4,
)
LIMIT = 12
"""Requests that a service may have open by gRPC, and as many by HTTP."""
TOKEN = "the token of the soak"


class Watched(GenerationDriver):
  """Counts how often each request of a client ends."""

  taken = 0

  def __init__(self, *arguments: Any, **named: Any):
    super().__init__(*arguments, **named)
    self.ends: collections.Counter[int] = collections.Counter()

  def open(self, request: Request, client: requests.Client) -> Any:
    """As the driver's, with a look at what the client gets."""
    ends = 0

    def receive(outcome: Completion | Chunk | Exception) -> None:
      nonlocal ends
      if not isinstance(outcome, Chunk) or outcome.stop_reason is not None:
        ends += 1
        self.ends[ends] += 1
      client.receive(outcome)

    watched = dataclasses.replace(client, receive=receive)
    opened = super().open(request, watched)
    self.taken += 1
    return opened

  def place_request_on_prefill_queue(self, request: Any) -> None:
    """As the driver's; JetStream's clients count as well."""
    super().place_request_on_prefill_queue(request)
    self.taken += 1


class Service:
  """One driver and whatever serves it."""

  def __init__(self, interruption: Any, weights: str):
    mesh = sharding.make_mesh(sharding.MeshShape(), jax.devices())
    served = engine.PolicyEngine(POLICY, mesh, ENGINE)
    self.driver = Watched(served, interruption=interruption)
    self.driver.update(policies.load(served, weights, 0))
    self.driver.warm_up()
    self.driver.start()

  async def start(self, stack: contextlib.AsyncExitStack) -> dict[str, str]:
    """Listens; says where."""
    stack.push_async_callback(asyncio.to_thread, self.driver.stop)
    self.grpc = server.GenerationServer(
      self.driver, server.Config(port=0, max_requests=LIMIT), TOKEN
    )
    await self.grpc.start()
    stack.push_async_callback(self.grpc.stop)
    app = openai_api.make_app(
      self.driver,
      TOKENIZER,
      model_name="policy",
      config=openai_api.Config(
        context_length=ENGINE.context_length,
        max_prompt_length=ENGINE.max_prompt_length,
        behavior_top_k=ENGINE.behavior_top_k,
        max_open_requests=LIMIT,
      ),
    )
    runner = await openai_api.start(app, "127.0.0.1", 0, shutdown_timeout=5)
    stack.push_async_callback(runner.cleanup)
    http = f"http://127.0.0.1:{runner.addresses[0][1]}"
    return {"grpc": f"127.0.0.1:{self.grpc.port}", "http": http}

  def held(self) -> dict[str, Any]:
    """What it holds now, and has counted."""
    driver, counters = self.driver, self.driver.counters()
    return {
      "busy_slots": ENGINE.slots - driver.free_slots,
      "waiting": driver.waiting,
      "open": self.grpc.admission.open,
      "taken": driver.taken,
      "completions": counters.completions,
      "cancellations": counters.cancellations,
      "ended_once": driver.ends[1],
      "ended_again": driver.ends[2],
      "version": driver.version,
    }

  async def ask(self, fields: dict[str, Any]) -> dict[str, Any]:
    """Lets the driver itself answer a request; hangs up after some chunks."""
    tokens, versions, logp, text = [], [], [], ""
    try:
      request = Request(
        prompt_index=fields["index"],
        member=0,
        tokens=np.asarray(fields["prompt"], np.int32),
        sampling=Sampling(**fields["sampling"]),
      )
      pieces = texts.stream_text(
        self.driver, request, TOKENIZER, fields["stop"]
      )
      reason, count = None, 0
      async with contextlib.aclosing(pieces):
        async for piece in pieces:
          text += piece.text
          tokens += piece.chunk.tokens.tolist()
          logp += piece.chunk.logp.tolist()
          versions += [piece.chunk.version] * len(piece.chunk.tokens)
          reason, count = piece.chunk.stop_reason, count + 1
          if reason is None and count == fields["hang_up_after"]:
            reason = "cancelled"
            break
    except ValueError as error:
      return {"refused": str(error)}
    return {
      "reason": reason,
      "tokens": tokens,
      "logp": logp,
      "versions": versions,
      "text": text,
    }


def memory() -> int:
  """KiB that this process has in memory and could not give back."""
  gc.collect()
  ctypes.CDLL("libc.so.6").malloc_trim(0)
  with open("/proc/self/statm") as file:
    pages = int(file.read().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def objects() -> int:
  """Requests and connections that still exist."""
  kinds = (requests.OpenRequest, Connection, texts.StopStrings)
  return sum(isinstance(one, kinds) for one in gc.get_objects())


class Process:
  """Understands the lines."""

  def __init__(self, services: dict[str, Service]):
    self._services = services
    self._local: set[asyncio.Task[None]] = set()

  async def answer(self, line: dict[str, Any]) -> dict[str, Any]:
    """What is said to one line."""
    if line["do"] == "ask":
      return await self._services[line["service"]].ask(line)
    for service in self._services.values():
      service.driver.take_events()  # They are kept for whoever draws them.
    if line["do"] == "memory":
      return {"kib": memory()}
    return {
      "kib": memory(),
      "objects": objects(),
      "threads": threading.active_count(),
      "system_threads": len(os.listdir("/proc/self/task")),
      "files": len(os.listdir("/proc/self/fd")),
      "tasks": len(asyncio.all_tasks()) - len(self._local),
      "services": {name: one.held() for name, one in self._services.items()},
    }

  async def run(self, lines: asyncio.StreamReader) -> None:
    """Answers lines, many at a time, until there are no more."""
    while data := await lines.readline():
      task = asyncio.create_task(self._one(json.loads(data)))
      self._local.add(task)
      task.add_done_callback(self._local.discard)
    await asyncio.gather(*self._local)

  async def _one(self, line: dict[str, Any]) -> None:
    answer = await self.answer(line)
    print(json.dumps({"id": line["id"], **answer}), flush=True)


async def main(weights: str) -> None:
  """Serves until the lines end, then says which threads are left."""
  loop = asyncio.get_running_loop()
  lines = asyncio.StreamReader()
  await loop.connect_read_pipe(
    lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
  )
  services = {name: Service(name, weights) for name in INTERRUPTIONS}
  async with contextlib.AsyncExitStack() as stack:
    where = {name: await one.start(stack) for name, one in services.items()}
    print(json.dumps(where), flush=True)
    await Process(services).run(lines)
  left = [thread.name for thread in threading.enumerate()]
  print(json.dumps({"generating": left.count("generation")}), flush=True)


if __name__ == "__main__":
  asyncio.run(main(sys.argv[1]))
