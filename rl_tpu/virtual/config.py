"""What a simulation assumes: service times, lengths, latencies, sizes.

Nothing is assumed silently: a time that neither the config nor a compile report
states is an error, not a guess.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from rl_tpu.metrics import read_jsonl

Draw = Callable[[np.random.Generator], float]


def _check_least(part: object, least: float, *names: str) -> None:
  """Raises ValueError that names the first field below `least`."""
  for name in names:
    value = getattr(part, name)
    if value is not None and not value >= least:
      raise ValueError(f"{name} is {value!r}; it must be >= {least}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distribution:
  """A positive quantity that differs from one time to the next."""

  kind: Literal["constant", "lognormal", "empirical"] = "constant"
  """`constant` is always `mean`; `lognormal` has a long tail; `empirical` draws
  from what a run measured."""
  mean: float = 0.0
  """Of constant and lognormal, before `largest` cuts, >= 0."""
  sigma: float = 0.0
  """Of the logarithm of a lognormal, >= 0; answers of reasoning models spread
  by about 1."""
  least: float = 0.0
  """What is below becomes it, >= 0."""
  largest: float | None = None
  """What is above becomes it, >= `least`; None cuts nothing."""
  directory: str | None = None
  """Of the run that an empirical distribution is read from: the lists `lengths`
  in its batches.jsonl."""

  def __post_init__(self):
    _check_least(self, 0, "mean", "sigma", "least")
    _check_least(self, self.least, "largest")
    if (self.directory is not None) != (self.kind == "empirical"):
      raise ValueError(
        f"directory is {self.directory!r} and kind {self.kind!r}; an empirical "
        "distribution, and no other, has a directory"
      )

  def draw(self) -> Draw:
    """A function that draws one value by the generator it is given.

    Raises:
      ValueError: the run of an empirical distribution holds no values.
    """
    values = self._values()
    largest = math.inf if self.largest is None else self.largest
    location = math.log(self.mean) - self.sigma**2 / 2 if self.mean else 0.0

    def one(rng: np.random.Generator) -> float:
      value = self.mean
      if self.kind == "lognormal" and self.mean:
        value = rng.lognormal(location, self.sigma)
      elif self.kind == "empirical":
        value = values[rng.integers(len(values))]
      return min(max(value, self.least), largest)

    return one

  def _values(self) -> list[float]:
    if self.directory is None:
      return []
    path = f"{self.directory}/batches.jsonl"
    values = [n for row in read_jsonl(path) for n in row.get("lengths", [])]
    if not values:
      raise ValueError(f"directory: {path} holds no `lengths`")
    return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
  """Seconds that the parts of a pod take; None takes the compile report's.

  One decode step of a generator with n running sequences and C cached tokens
  takes decode_step + n decode_per_sequence + C decode_per_cached_token.
  """

  decode_step: float | None = None
  """Of one step, however much runs, > 0."""
  decode_per_sequence: float = 0.0
  """More, for each running sequence, >= 0."""
  decode_per_cached_token: float = 0.0
  """More, for each token that attention reads, >= 0; 0 where the whole cache is
  read at every step, as ours is."""
  prefill_call: float = 0.0
  """Of one call of the program, >= 0."""
  prefill_per_token: float | None = None
  """More, for each token prefilled, >= 0."""
  update_per_batch: float = 0.0
  """Of training one batch, >= 0."""
  update_per_token: float | None = None
  """More, for each of its tokens, all passes over it together, >= 0."""
  publish: float = 0.0
  """That publishing weights holds the learner up, >= 0."""
  travel: float = 0.0
  """More until generators can take the weights, while both sides go on and
  admission waits, >= 0; under sync and lockstep all wait."""
  swap: float = 0.0
  """That a generator stands still to take weights over, recomputing apart,
  >= 0."""
  reshard: float = 0.0
  """Of each switch between generating and learning on the same devices, twice a
  batch under sync and lockstep, >= 0."""

  def __post_init__(self):
    names = [field.name for field in dataclasses.fields(self)]
    _check_least(self, 0, *names)
    if self.decode_step == 0:
      raise ValueError("decode_step is 0; it must be > 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Of the command `simulate`."""

  report: str | None = None
  """File whose last line is what `compile` printed for this config."""
  service: Service = dataclasses.field(default_factory=Service)
  """What goes before the report."""
  generators: int = 1
  """Generator slices, each with config.engine.slots, >= 1. Under sync and
  lockstep they are the trainer's own devices, in their other role."""
  prompt_tokens: int = 256
  """Of every prompt, >= 1."""
  lengths: Distribution = dataclasses.field(
    default_factory=lambda: Distribution(
      kind="lognormal", mean=256, sigma=1.0, least=1
    )
  )
  """Tokens of one action; config.sampling.max_tokens cuts them."""
  latency: Distribution = dataclasses.field(default_factory=Distribution)
  """Seconds that the environment takes to answer an action. An episode has
  config.max_turns actions."""
  observation_tokens: int = 0
  """Of the environment's answers but the last, >= 0."""
  rejected_share: float = 0.0
  """Of finished groups that a filter such as dapo's drops, in [0, 1)."""
  batches: int = 24
  """To be trained, >= 1."""
  warm_up: int = 8
  """The first of them, whose times and staleness do not count, in
  [0, batches)."""
  grain: int = 1
  """Tokens that one simulated token stands for, >= 1. Lengths become multiples
  of it and requests meet the generator only every so many steps, or every
  config.engine.steps_per_dispatch if these are more; memory and time shrink by
  it."""
  sweep_generators: tuple[int, ...] = ()
  """Further numbers of generators to try, each >= 1."""
  sweep_staleness: tuple[int | None, ...] = ()
  """Further limits of staleness to try under async; None is no limit."""

  def __post_init__(self):
    _check_least(self, 1, "generators", "prompt_tokens", "batches", "grain")
    _check_least(self, 0, "observation_tokens")
    if not 0 <= self.rejected_share < 1:
      raise ValueError(
        f"rejected_share is {self.rejected_share!r}; it must be in [0, 1)"
      )
    if not 0 <= self.warm_up < self.batches:
      raise ValueError(
        f"warm_up is {self.warm_up!r}; it must be in [0, batches = "
        f"{self.batches})"
      )
    for name, least in (("sweep_generators", 1), ("sweep_staleness", 0)):
      for value in getattr(self, name):
        if value is not None and value < least:
          raise ValueError(f"{name} has {value!r}; each must be >= {least}")
