"""One process of `async_vs_sync`: the trainer, or a generator of its own.

    python -m experiments.benchmarks.async_vs_sync_part ROLE RUN OUTPUT

ROLE is `train` or `serve`, RUN a run's settings as JSON. What the process saw
is written to OUTPUT, as JSON with times of the monotonic clock, which all
processes of a machine share. Both are the real commands' parts; what is put on
top are lengths of answers that a long tail decides and not the policy, and an
environment that takes its time.
"""

import asyncio
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from experiments import quickstart
from rl_tpu import config as configs
from rl_tpu import envs, learner, parts, serve, sharding, train
from rl_tpu.generation import engine, roster
from rl_tpu.generation import server as servers
from rl_tpu.models import transformer
from rl_tpu.types import Chunk, Completion, Request, Sampling
from rl_tpu.view import View
from rl_tpu.virtual.config import Config, Distribution

LONGEST = 96
"""Tokens of an answer; the prompt has up to 7."""
CONTEXT = 104


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What one run is made of."""

  schedule: str
  directory: str
  latency: bool
  """Whether the environment takes 50 to 500 ms, most answers near the least."""
  batches: int
  devices: int = 1
  """CPU devices of either side; a process has no more than it has cores."""
  port: int | None = None
  """Of the generator that has a process of its own; None: the trainer's."""

  @property
  def separate(self) -> bool:
    """Whether the generator has a process of its own."""
    return self.port is not None


def make_config(run: Run) -> parts.Config:
  """The quickstart's task with longer answers, from random weights."""
  base = configs.build(parts.Config, quickstart.get_config(run.schedule))
  latency = Distribution()
  if run.latency:
    latency = Distribution(
      kind="lognormal", mean=0.15, sigma=1.0, least=0.05, largest=0.5
    )
  remote = ()
  if run.port is not None:
    remote = (f"127.0.0.1:{run.port}",)
  mesh = sharding.MeshShape(data=run.devices)
  return dataclasses.replace(
    base,
    directory=run.directory,
    batches=run.batches,
    groups_per_batch=8,
    group_size=4,
    model=transformer.sized("tiny"),
    sampling=Sampling(max_tokens=LONGEST),
    learner=learner.Config(
      row_length=CONTEXT, microbatch_rows=4, minibatches=1, learning_rate=1e-5
    ),
    engine=engine.Config(
      slots=32,
      context_length=CONTEXT,
      prefill_buckets=(8, CONTEXT),
      prefill_batches=(8,),
      steps_per_dispatch=4,
    ),
    devices=parts.Devices(trainer=mesh, generator=mesh),
    warm_start=dataclasses.replace(base.warm_start, batches=0, wrong_batches=0),
    evaluation=dataclasses.replace(base.evaluation, every=0, problems=8),
    checkpoint_every=run.batches,
    remote=roster.Config(addresses=remote),
    serve=servers.Config(weights="awaited", port=run.port or 0),
    simulate=Config(
      prompt_tokens=6,
      lengths=Distribution(
        kind="lognormal", mean=24, sigma=1.0, least=1, largest=LONGEST
      ),
      latency=latency,
      batches=run.batches,
      warm_up=run.batches // 4,
    ),
  )


class Lengths:
  """A generator whose answers are as long as their identity says."""

  def __init__(self, generator: Any, config: parts.Config):
    self._generator, self._seed = generator, config.seed
    self._draw = config.simulate.lengths.draw()

  async def generate(
    self, request: Request, progress: list[Chunk] | None = None
  ) -> Completion:
    """A turn of so many tokens, whatever they are."""
    place = (request.prompt_index, request.member, len(request.tokens))
    wanted = self._draw(np.random.default_rng((self._seed, *place)))
    sampling = dataclasses.replace(
      request.sampling, max_tokens=max(1, round(wanted)), stop_ids=()
    )
    request = dataclasses.replace(request, sampling=sampling)
    return await self._generator.generate(request, progress)


class Slow:
  """An environment that takes its time."""

  def __init__(self, environment: envs.Environment, draw, rng):
    self._environment, self._draw, self._rng = environment, draw, rng

  async def reset(self) -> np.ndarray:
    """The prompt, at once."""
    return await self._environment.reset()

  async def step(self, action, stop_reason) -> envs.Step:
    """The answer, late."""
    if seconds := self._draw(self._rng):
      await asyncio.sleep(seconds)
    return await self._environment.step(action, stop_reason)


class Notes(View):
  """Notes when each batch had been trained."""

  def __init__(self):
    super().__init__(0)
    self.seen: list[float] = []

  def batch(
    self, batch: int, metrics: Mapping[str, float], seconds_left: float
  ) -> None:
    """A batch's line comes right after its end."""
    self.seen.append(time.monotonic() - metrics["seconds"])


def watch_engine() -> list[tuple[float, int]]:
  """When sequences were admitted, and how many of them were new."""
  seen, admit = [], engine.PolicyEngine.admit

  def noting(self, weights, state, admissions):
    new = [a for a in admissions if len(a.tokens) == len(a.request.tokens)]
    seen.append((time.monotonic(), len(new)))
    return admit(self, weights, state, admissions)

  engine.PolicyEngine.admit = noting
  return seen


def be_trainer(config: parts.Config) -> dict[str, Any]:
  """Trains; returns where the log's second 0 lies on the clock."""
  task, rng = envs.get(config.task.name).Task, np.random.default_rng(0)
  draw, environment = config.simulate.latency.draw(), task.environment
  task.environment = lambda self, prompt: Slow(
    environment(self, prompt), draw, rng
  )
  make = parts.make_actor
  parts.make_actor = lambda config, task, rows, generator, buffer: make(
    config, task, rows, Lengths(generator, config), buffer
  )
  notes = Notes()
  train.run(config, notes)
  return {"origin": min(notes.seen)}


def be_generator(config: parts.Config) -> dict[str, Any]:
  """Serves until it is told to end; returns what the driver did when."""
  drivers, make = [], parts.make_driver

  def keep(*arguments, **settings):
    drivers.append(make(*arguments, **settings))
    return drivers[-1]

  parts.make_driver = keep
  serve.run(config, View(0))
  return {"events": drivers[0].take_events()}


def main(role: str, run: str, output: str) -> None:
  """Plays the role, then tells what it saw."""
  config = make_config(Run(**json.loads(run)))
  jax.config.update("jax_num_cpu_devices", config.devices.trainer.size)
  cache = pathlib.Path("runs/cache/compiled").absolute()
  cache.mkdir(parents=True, exist_ok=True)
  jax.config.update("jax_compilation_cache_dir", str(cache))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  admissions = watch_engine()
  play = {"train": be_trainer, "serve": be_generator}[role]
  found = play(config) | {"admissions": admissions}
  pathlib.Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
  main(*sys.argv[1:])
