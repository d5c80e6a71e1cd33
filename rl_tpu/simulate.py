"""The command `simulate`: what a pod would do, before chips are paid for.

The actor, its admission and the buffer are those of a real run, on a virtual
clock. Generators, learner and environments take the time that a compile report
or the config says they take, and compute nothing (`virtual`). Who waits for
whom follows from the code that will run, not from a formula.

Under `async` generators and learner have devices of their own. `sync` and
`lockstep(n)` are `schedules.Serial`: the actor drains, then the batch is
trained, on the same devices and with a resharding between the two.
"""

import asyncio
import collections
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rl_tpu import actor as actors
from rl_tpu import envs, metrics, parts, staleness
from rl_tpu.buffer import Buffer
from rl_tpu.config import ConfigError
from rl_tpu.types import Group, Prompt, Request, Sampling, StopReason
from rl_tpu.virtual import clock
from rl_tpu.virtual.config import Service
from rl_tpu.virtual.environment import VirtualEnvironment
from rl_tpu.virtual.fleet import KINDS, Fleet, Interval, VirtualGenerator

_ENDLESS = 10**9
"""Batches that the actor works for: the simulation ends amid its work, so that
the last batches find the pod as busy as the ones before."""
_ENOUGH = 0.95
"""Of the best throughput of a sweep."""
_COLUMNS = (
  "tokens_per_second",
  "learner_idle_share",
  "generator_idle_share",
  "recompute_share",
  "slots_used_share",
  "staleness_mean",
  "staleness_max",
)


def run(config: parts.Config, show: Callable[[str], None]) -> dict[str, Any]:
  """Simulates a config and its sweeps, and shows a table.

  Args:
    config: of the run; `config.simulate` says what is assumed.
    show: gets the table, line by line.

  Returns:
    The headline figures, after the warm-up: `tokens_per_second` (action tokens
    consumed), `learner_idle_share` (waiting for a batch),
    `generator_idle_share`, `recompute_share` (of the generators' time, for
    caches of interrupted sequences), `slots_used_share` (while decoding),
    `staleness_mean`, `staleness_max`, `staleness` (tokens by staleness),
    `refused_groups`, `batch_seconds`; `service`, the times that it rests on;
    `sweep`, a row for each configuration tried; `enough_generators` and
    `enough_staleness`, the smallest of a sweep with 95% of its best throughput,
    null without one.

  Raises:
    ConfigError: a service time is not known, or the sizes do not fit.
  """
  service = service_times(config)
  show(_heading())
  base = simulate(config, service).figures()
  show(_line(config, base))
  rows = []
  for axis, value, changed in _sweep(config):
    figures = simulate(changed, service).figures()
    show(_line(changed, figures))
    rows.append({axis: value} | {name: figures[name] for name in _COLUMNS})
  return base | {
    "service": dataclasses.asdict(service),
    "sweep": rows,
    "enough_generators": _enough(rows, "generators"),
    "enough_staleness": _enough(rows, "max_staleness"),
  }


def service_times(config: parts.Config) -> Service:
  """The config's service times, completed from its compile report.

  The report speaks of full contexts, so that what depends on their length is at
  its dearest, and of collectives that hide behind nothing.

  Raises:
    ConfigError: a time is neither in the config nor in the report.
  """
  settings = config.simulate
  known = {} if settings.report is None else _reported(config, settings.report)
  stated = dataclasses.asdict(settings.service)
  for name, value in stated.items():
    if value is None:
      if known.get(name) is None:
        raise ConfigError(
          f"config.simulate.service.{name} is None; give it in seconds, or "
          "config.simulate.report a compile report that has an estimate "
          f"(it is {settings.report!r})"
        )
      stated[name] = known[name]
  return Service(**stated)


def _reported(config: parts.Config, path: str) -> dict[str, float | None]:
  """Service times by a compile report of the same config."""
  try:
    report = json.loads(pathlib.Path(path).read_text().splitlines()[-1])
    programs = report["programs"]
  except (OSError, IndexError, ValueError, KeyError, TypeError) as error:
    raise ConfigError(
      f"config.simulate.report is {path!r}; it must be what the command "
      f"`compile` printed: {error!r}"
    ) from error
  seconds = {
    name: None
    if program["compute_seconds_estimated"] is None
    else program["compute_seconds_estimated"] + program["collective_seconds"]
    for name, program in programs.items()
  }
  engine, times = config.engine, dict[str, float | None]()
  if seconds["decode"] is not None:
    times["decode_step"] = seconds["decode"] / engine.steps_per_dispatch
  if seconds["prefill"] is not None:
    tokens = engine.prefill_batches[-1] * engine.prefill_buckets[-1]
    times["prefill_per_token"] = seconds["prefill"] / tokens
  # The report's update is one minibatch; its proximal pass a whole batch.
  passes = [seconds["update"]]
  if "proximal" in seconds:
    passes.append(seconds["proximal"])
  rate, update = report["tokens_per_second"], seconds["update"]
  if rate is not None and update is not None and None not in passes:
    minibatches = config.learner.minibatches
    batch = update * minibatches + sum(s or 0.0 for s in passes[1:])
    times["update_per_token"] = batch / (rate * update * minibatches)
  return times


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
  """One batch that was trained."""

  asked: float
  """When the learner wanted it, in virtual seconds."""
  taken: float
  """When it got it."""
  trained: float
  """When the learner was free again."""
  prompts: tuple[int, ...]
  """Their indices."""
  staleness: dict[int, int]
  """Action tokens by staleness."""

  @property
  def tokens(self) -> int:
    """Action tokens."""
    return sum(self.staleness.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """What a simulation saw; see `run` for the names of its figures."""

  batches: tuple[Batch, ...]
  """All of them, warm-up included."""
  warm_up: int
  """How many of them do not count."""
  generator_seconds: dict[str, float]
  """After the warm-up, over all generators, by kind (`fleet.KINDS`)."""
  generators: int
  refused_groups: int
  """Too stale when they were to be consumed."""
  intervals: tuple[tuple[Interval, ...], ...]
  """Of each generator, the warm-up's included."""

  @property
  def seconds(self) -> float:
    """From the end of the warm-up to the end."""
    return self.batches[-1].trained - self.batches[self.warm_up].asked

  def figures(self) -> dict[str, Any]:
    """The headline figures."""
    batches, seconds = self.batches[self.warm_up :], self.seconds
    by_staleness: collections.Counter[int] = collections.Counter()
    for batch in batches:
      by_staleness.update(batch.staleness)
    tokens = sum(by_staleness.values())
    spent = self.generator_seconds
    whole = seconds * self.generators
    return {
      "tokens_per_second": tokens / seconds,
      "learner_idle_share": sum(b.taken - b.asked for b in batches) / seconds,
      "generator_idle_share": spent["idle"] / whole,
      "recompute_share": spent["recompute"] / whole,
      "slots_used_share": spent["slots"] / (spent["decode"] or 1.0),
      "staleness_mean": sum(s * n for s, n in by_staleness.items()) / tokens,
      "staleness_max": max(by_staleness),
      "staleness": {str(s): by_staleness[s] for s in sorted(by_staleness)},
      "refused_groups": self.refused_groups,
      "batch_seconds": seconds / len(batches),
    }


def simulate(config: parts.Config, service: Service) -> Outcome:
  """Simulates one configuration from its start; equal seeds, equal outcome.

  Raises:
    ConfigError: the sizes do not fit each other, or nothing bounds how many
      groups start.
  """
  if config.staleness_limit is None and config.max_running_groups is None:
    raise ConfigError(
      "config.max_running_groups is None and so is max_staleness; without any "
      "limit all prompts of a run start at once"
    )
  try:
    pod = _Pod(config, service)
  except ValueError as error:
    raise ConfigError(f"config.simulate: {error}") from error
  return clock.run(pod.run())


class _Pod:
  """The parts of one simulated run."""

  def __init__(self, config: parts.Config, service: Service):
    self._config, self._service = config, service
    settings = config.simulate
    self._fleet = Fleet(
      [
        VirtualGenerator(
          service,
          slots=config.engine.slots,
          prefill_batch=config.engine.prefill_batches[-1],
          interruption=config.interruption,
          grain=settings.grain,
          steps=_simulated(config.engine.steps_per_dispatch, config),
          length=_lengths(config),
        )
        for _ in range(settings.generators)
      ]
    )
    self._buffer = _Buffer(
      groups_per_batch=config.groups_per_batch,
      max_staleness=config.staleness_limit,
      on_stale=config.on_stale,
    )
    context = config.engine.context_length // settings.grain
    if _simulated(settings.prompt_tokens, config) >= context:
      raise ValueError(
        f"prompt_tokens is {settings.prompt_tokens}; config.engine."
        f"context_length {config.engine.context_length} leaves no room for an "
        "answer"
      )
    self._actor = actors.Actor(
      actors.Config(
        sampling=Sampling(
          max_tokens=_simulated(config.sampling.max_tokens, config)
        ),
        group_size=config.group_size,
        total_groups=_ENDLESS * config.groups_per_batch,
        max_trajectory_tokens=context,
        max_turns=config.max_turns,
        limits=envs.Limits(step_seconds=math.inf, empty_observations=True),
      ),
      generator=self._fleet,
      make_group=self._environments(),
      prompts=self._prompt,
      admission=staleness.Admission(
        groups_per_batch=config.groups_per_batch,
        max_staleness=config.admitted_staleness,
        max_running=config.max_running_groups,
      ),
      buffer=self._buffer,
      keep=self._keep,
    )
    self._actor.set_served(0)

  async def run(self) -> Outcome:
    """The whole of it."""
    settings = self._config.simulate
    async with asyncio.TaskGroup() as tasks:
      working = [
        tasks.create_task(generator.run())
        for generator in self._fleet.generators
      ]
      working.append(tasks.create_task(self._actor.run()))
      batches, before = [], {}
      for version in range(settings.batches):
        if version == settings.warm_up:
          before = self._spent()
        batches.append(await self._learn(version))
      after = self._spent()
      for task in working:
        task.cancel()
    return Outcome(
      batches=tuple(batches),
      warm_up=settings.warm_up,
      generator_seconds={kind: after[kind] - before[kind] for kind in after},
      generators=settings.generators,
      refused_groups=self._buffer.counts["groups_refused"],
      intervals=tuple(
        tuple(generator.intervals) for generator in self._fleet.generators
      ),
    )

  async def _learn(self, version: int) -> Batch:
    """Takes a batch, trains it and publishes the weights, as schedules do."""
    now, serial = asyncio.get_running_loop().time, self._config.lag is not None
    asked = now()
    if serial:
      await self._actor.drain()
      groups = self._buffer.take(version, timeout=0)
    else:
      groups = await self._buffer.next(version)
    taken = now()
    service, lengths = (
      self._service,
      [len(t) for group in groups for t in group.trajectories],
    )
    assert service.update_per_token is not None
    seconds = service.update_per_batch + service.publish
    seconds += self._tokens(sum(lengths)) * service.update_per_token
    if serial:
      seconds += 2 * service.reshard + service.travel
    await asyncio.sleep(seconds)
    self._publish(version + 1, 0.0 if serial else service.travel)
    values, counts = np.unique(
      metrics.staleness_of_tokens(groups, version), return_counts=True
    )
    return Batch(
      asked=asked,
      taken=taken,
      trained=now(),
      prompts=tuple(group.prompt.index for group in groups),
      staleness={
        int(s): self._tokens(int(n))
        for s, n in zip(values, counts, strict=True)
      },
    )

  def _publish(self, version: int, travel: float) -> None:
    """Sends weights on their way."""
    self._actor.set_version(version)
    if travel:
      asyncio.get_running_loop().call_later(travel, self._arrive, version)
    else:
      self._arrive(version)

  def _arrive(self, version: int) -> None:
    self._fleet.update(version)
    self._actor.set_served(version)

  def _spent(self) -> dict[str, float]:
    """Seconds of all generators so far, by kind."""
    spent = [generator.spent() for generator in self._fleet.generators]
    return {kind: sum(one[kind] for one in spent) for kind in KINDS}

  def _tokens(self, simulated: int) -> int:
    return simulated * self._config.simulate.grain

  def _prompt(self, index: int) -> Prompt:
    length = _simulated(self._config.simulate.prompt_tokens, self._config)
    return Prompt(index=index, tokens=np.zeros(length, np.int32))

  def _keep(self, group: Group) -> bool:
    """A filter that rejects what its identity says it rejects."""
    rng = np.random.default_rng((self._config.seed, group.prompt.index))
    return rng.random() >= self._config.simulate.rejected_share

  def _environments(self) -> Callable[[Prompt, int], list[VirtualEnvironment]]:
    settings = self._config.simulate
    latency = settings.latency.draw()
    observation = _simulated(settings.observation_tokens, self._config)
    rng = np.random.default_rng((self._config.seed, 1))
    return lambda prompt, size: [
      VirtualEnvironment(
        prompt, self._config.max_turns, observation, latency, rng
      )
      for _ in range(size)
    ]


def _simulated(tokens: float, config: parts.Config) -> int:
  """How many simulated tokens stand for so many."""
  return -(-round(tokens) // config.simulate.grain)


def _lengths(config: parts.Config) -> Callable[[Request], tuple[int, Any]]:
  """Answers by the identity of requests: a sweep's pods have equal work."""
  draw = config.simulate.lengths.draw()

  def length(request: Request) -> tuple[int, StopReason]:
    place = (request.prompt_index, request.member, len(request.tokens))
    rng = np.random.default_rng((config.seed, *place))
    wanted = max(1, _simulated(draw(rng), config))
    most = request.sampling.max_tokens
    return min(wanted, most), "stop" if wanted <= most else "length"

  return length


class _Buffer(Buffer):
  """The buffer, whose batches a coroutine can wait for."""

  def __init__(self, **settings: Any):
    super().__init__(**settings)
    self._moved = asyncio.Event()

  async def next(self, version: int) -> list[Group]:
    """`take`, which waits for its event loop instead of its thread."""
    while True:
      self._moved.clear()
      try:
        return self.take(version, timeout=0)
      except TimeoutError:
        await self._moved.wait()

  def put(self, group: Group) -> None:
    super().put(group)
    self._moved.set()

  def close(self) -> None:
    super().close()
    self._moved.set()


def _sweep(
  config: parts.Config,
) -> Iterator[tuple[str, int | None, parts.Config]]:
  """What to try: the axis, its value, the changed config."""
  settings = config.simulate
  for generators in settings.sweep_generators:
    changed = dataclasses.replace(settings, generators=generators)
    yield (
      "generators",
      generators,
      dataclasses.replace(config, simulate=changed),
    )
  for limit in settings.sweep_staleness:
    changed = dataclasses.replace(config, schedule="async", max_staleness=limit)
    yield "max_staleness", limit, changed


def _enough(rows: list[dict[str, Any]], axis: str) -> int | None:
  """The smallest value of an axis that comes near its best throughput."""
  rates = {row[axis]: row["tokens_per_second"] for row in rows if axis in row}
  good = [v for v, r in rates.items() if r >= _ENOUGH * max(rates.values())]
  return min((v for v in good if v is not None), default=None)


def _heading() -> str:
  names = ("generators", "schedule", *_COLUMNS)
  return "  ".join(name.removesuffix("_share") for name in names)


def _line(config: parts.Config, figures: dict[str, Any]) -> str:
  """A row of the table."""
  limit = config.max_staleness
  schedule = config.schedule + (f"({limit})" if config.lag is None else "")
  cells = [str(config.simulate.generators), schedule]
  cells.append(f"{figures['tokens_per_second']:,.0f}")
  cells += [f"{figures[n]:.1%}" for n in _COLUMNS if n.endswith("_share")]
  cells += [f"{figures['staleness_mean']:.2f}", str(figures["staleness_max"])]
  widths = [len(name) for name in _heading().split("  ")]
  return "  ".join(c.rjust(w) for c, w in zip(cells, widths, strict=True))
