"""A training run: the loop is `run`.

    groups = schedule.take(version)          actor -> buffer -> here
    batch = packing.pack(groups)
    state, metrics = learner.train(state, batch)
    schedule.publish(weights)                here -> generator
    log, checkpoint, evaluate

Who generates while this loop trains is the schedule's business, in how many
processes it trains is `trainer`'s. A run lives in one directory; the same
command goes on from its newest checkpoint.
"""

import contextlib
import secrets
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from rl_tpu import (
  checkpoint,
  health,
  metrics,
  monitoring,
  ownership,
  packing,
  parts,
  samples,
  schedules,
  tracing,
  weights,
)
from rl_tpu.config import ConfigError, to_json
from rl_tpu.evaluations import Evaluations
from rl_tpu.generation import policies
from rl_tpu.generation.driver import GenerationDriver as Driver
from rl_tpu.generation.fleet import Fleet
from rl_tpu.processes import Stopped as Stopped
from rl_tpu.processes import Team
from rl_tpu.trainer import Trainer
from rl_tpu.types import Batch, Group, VersionedParams
from rl_tpu.view import View


def run(config: parts.Config, view: View) -> dict[str, Any]:
  """Trains until `config.batches`, from the newest checkpoint if there is one.

  Returns:
    The headline figures: `heldout_before` and `heldout_after` (accuracy on
    held-out questions, sampled as in training), `heldout_greedy_before` and
    `heldout_greedy_after`, `train_seconds` (of the loop, evaluations
    included), `max_staleness` (the limit; null for none),
    `max_staleness_consumed`, `learner_wait_share`,
    `mixed_version_trajectories` (consumed ones with tokens of several
    versions), `failed_groups` (dropped, an episode failed), `batches`,
    `directory`.

  Raises:
    ConfigError: the directory is in use or holds a run of another config or a
      state that `config.resume` refuses, there are too few devices, or parts of
      the config do not fit each other or the task.
    Stopped: SIGINT or SIGTERM came; a checkpoint was written.
    Exception: a part failed; its error, after everything was shut down.
  """
  team = Team(config.distributed)
  with contextlib.ExitStack() as stack, team.together():
    summary = parts.claim(config)
    newest = policies.newest(config.run_directory / "checkpoints")
    ownership.check(config.resume, config.run_directory, newest)
    if summary is not None:
      view.note(f"{config.run_directory} is complete; remove it to train again")
      return summary
    team.tell("begin", {"config": to_json(config)})
    this = _Run(config, view, team, stack)
    stack.enter_context(ownership.held(config.run_directory))
    parts.record(config)
    this.open_checkpoints()
    if not this.restore():
      this.begin()
    this.refer()
    this.open_log()
    this.serve()
    stack.enter_context(view.open())
    stack.enter_context(team.signals(view.note))
    if this.version == 0:
      this.log_evaluation()
    elif this.due(config.evaluation.every) and not this.evaluated():
      this.start_evaluation()
    this.start()
    while this.version < config.batches:
      with this.profiles.of(this.version + 1):
        with this.loop.during("wait"):
          groups = this.take()
        with this.loop.during("train"):
          batch = this.pack(groups)
          trained = this.train(batch)
        with this.loop.during("weights"):
          this.publish()
      row = metrics.describe(groups, this.version - 1) | trained
      this.log_batch(groups, row)
      this.log_samples(groups, batch)
      if this.due(config.evaluation.every):
        with this.loop.during("evaluate"):
          this.start_evaluation()
      if team.stop_requested:
        this.stop()
      if this.due(config.checkpoint_every):
        with this.loop.during("checkpoint"):
          this.save()
    this.save()
    this.evaluations.finish(this.log)
    if not this.evaluated():
      this.log_evaluation()
    summary = this.summary()
    for warning in health.warnings(this.log.rows, to_json(config)):
      view.note(f"warning: {warning.rule} {warning.said}")
  metrics.write_json(config.run_directory / "summary.json", summary)
  return summary


class _Run(Trainer):
  """The parts of one run, and the little that changes beside them."""

  def __init__(
    self,
    config: parts.Config,
    view: View,
    team: Team,
    stack: contextlib.ExitStack,
  ):
    """Makes the parts, without weights; `stack` ends them in order."""
    super().__init__(config, view, team, stack)
    self._buffer = parts.make_buffer(config)
    self._history = parts.make_history(config)
    self._life = secrets.token_hex(8)
    self._driver: Driver | None = None
    self._frozen: Driver | None = None
    self._fleet: Fleet | None = None
    self.generator = self._make_generator()
    self.evaluations = Evaluations(config, self.task, self._rows, view)
    self.actor = parts.make_actor(
      config, self.task, self._rows, self.generator, self._buffer
    )
    self.loop = tracing.Loop()
    self.profiles = tracing.Profiles(
      config.trace, config.run_directory, view.note
    )
    self.seconds = self.waited = 0.0
    self._weight_shardings = self.learner.policy.param_shardings(
      self._generator_mesh
    )
    self._published: VersionedParams | None = None

  def _make_generator(self) -> schedules.Generator:
    """The driver of this process, or the fleet of those of others."""
    config, failed = self.config, self._buffer.fail
    if not config.remote.names_any:
      self._driver = parts.make_driver(config, self._generator_mesh, failed)
      return self._driver

    def served(version: int) -> None:
      self.actor.set_served(config.admitted_version(version))

    self._fleet = parts.make_fleet(
      config, self._life, on_served=served, on_failure=failed
    )
    return self._fleet

  def restore(self) -> bool:
    """Takes over from the newest checkpoint; returns whether there is one."""
    restored = self.load()
    if restored is None:
      return False
    directory = self.config.run_directory
    self.view.note(f"resuming {directory} at batch {self.version}")
    self.seconds = restored.meta["seconds"]
    self.waited = restored.meta["waited"]
    groups = checkpoint.unpack_groups(restored.host, restored.meta["groups"])
    progress = checkpoint.unpack_progress(
      restored.host, restored.meta["progress"]
    )
    unfinished = {"groups": groups, "progress": progress}
    self.actor.restore(restored.meta["actor"] | unfinished)
    if self._history:
      self._history.restore(restored.host)
    if "generator" in restored.host:
      self._published = weights.publish(
        restored.host["generator"],
        restored.meta["generator_version"],
        self._weight_shardings,
      )
    return True

  def refer(self) -> None:
    """Tells what refers to the weights that the run began with what they are.

    The reference policy of a KL term, and the noise of the generator.
    """
    params = super().refer()
    if params is not None and self._driver is not None:
      self._driver.engine.set_starting_params(params)

  def open_log(self) -> None:
    """Opens the log, cut back to this version; 0 begins it anew."""
    config = self.config
    writers = self._stack.enter_context(
      monitoring.writers(
        config.logging,
        directory=config.run_directory,
        name=config.name,
        described=to_json(config),
        note=self.view.note,
      )
    )
    self.log = metrics.RunLog(
      config.run_directory, resume_at=self.version or None, writers=writers
    )
    self._stack.callback(self.log.close)
    reached = [row.get("seconds", 0.0) for row in self.log.dropped]
    lost = max(max(reached, default=0.0) - self.seconds, 0.0)
    start = {"unix_time": time.time(), "lost_seconds": lost}
    self.log.record("starts", self.version, start)

  def serve(self) -> None:
    """Lets the generator answer, with the weights that it takes now.

    Those of this version, unless a restored run's generator held older ones.
    """
    self.schedule = self._make_schedule()
    self._stack.callback(self.schedule.stop)
    published = self._published or self.versioned()
    self.schedule.serve(published)
    self._keep(published)

  def _make_schedule(self) -> schedules.Schedule:
    if self._fleet is not None:
      self.view.note("waiting for a generator to take the weights")
      transport = self.make_transport(self._life)
      return schedules.Remote(self.actor, self._fleet, self._buffer, transport)
    assert self._driver is not None
    lag = self.config.lag
    kind = schedules.Concurrent if lag is None else schedules.Serial
    return kind(self.actor, self._driver, self._buffer)

  def start(self) -> None:
    """Lets the actor dispatch, and starts the clock of the loop."""
    self._ended = time.monotonic()
    self._origin = self._ended - self.seconds
    self._generated = self.generator.counters().tokens
    self.schedule.start()

  def take(self) -> list[Group]:
    """The next batch's groups; a stop request may come while it waits."""
    groups = self.schedule.take(self.version, lambda: self.team.stop_requested)
    return self.stop() if groups is None else groups

  def pack(self, groups: Sequence[Group]) -> Batch:
    """A batch of the groups, dealt by the version; they join the history."""
    return packing.pack(
      [t for group in groups for t in group.trajectories],
      row_length=self.config.learner.row_length,
      version=self.version,
      rows_multiple=self.config.learner.rows_multiple,
      minibatches=self.config.learner.minibatches,
      shuffle_seed=self.config.seed * 1_000_003 + self.version,
      baselines=self._history.consume(groups) if self._history else None,
    )

  def versioned(self) -> VersionedParams:
    """A copy of the weights on the generator's mesh.

    Whoever brings them to another process makes the copy that it needs.
    """
    if self._driver is None and not self._keeps:
      self.team.tell("publish")
      return VersionedParams(version=self.version, params=self.state.params)
    return weights.publish(self.weights(), self.version, self._weight_shardings)

  def publish(self) -> None:
    """Gives the generator this version's weights if it takes them over."""
    if self.config.engine.mismatch.refreshes(self.version):
      published = self.versioned()
      self.schedule.publish(published)
      self._keep(published)
    else:
      self.actor.set_version(self.version)

  def _keep(self, published: VersionedParams) -> None:
    """Keeps what checkpoints of versions without a refresh must hold."""
    self._published = published if self._keeps else None

  @property
  def _keeps(self) -> bool:
    return self.config.engine.mismatch.refresh_period > 1

  def due(self, every: int) -> bool:
    """Whether something that comes every so many batches comes now."""
    last = self.version == self.config.batches
    return every > 0 and self.version % every == 0 and not last

  def evaluate(self) -> dict[str, float]:
    """Held-out accuracy now, of the learner's policy.

    Where the generator's is another, training waits and a second engine
    samples, made for it on the same devices. Generators in other processes
    answer with the policy that they have.
    """
    if self._driver is None or self.config.engine.mismatch.exact:
      return self.schedule.call(self.evaluations.ask(self.generator))
    clean = parts.make_driver(self.config.clean, self._generator_mesh)
    clean.update(clean.engine.serve(self.versioned()))
    self._driver.pause()
    schedule = schedules.Serial(self.actor, clean, self._buffer)
    try:
      return schedule.call(self.evaluations.ask(clean))
    finally:
      schedule.stop()
      self._driver.resume()

  def evaluated(self) -> bool:
    """Whether the log holds this version's held-out accuracy."""
    return any(
      row["batch"] == self.version and "heldout_accuracy" in row
      for row in self.log.rows
    )

  def start_evaluation(self) -> None:
    """Evaluates beside the training, from this version's weights on.

    Where the generator's policy is not the learner's, it ends before training
    goes on.
    """
    if self._driver is not None and not self.config.engine.mismatch.exact:
      self.log_evaluation()
      return
    beside = self.config.evaluation.frozen and self.config.lag is None
    generator = self._freeze() if beside else self.generator
    self.evaluations.start(self.version, self.schedule, generator)

  def _freeze(self) -> Driver:
    """An engine that keeps this version's weights until the next evaluation."""
    self.evaluations.finish(self.log)
    if self._frozen is None:
      self._frozen = parts.make_driver(
        self.config, self._generator_mesh, self._buffer.fail
      )
      self._frozen.update(self._frozen.engine.serve(self.versioned()))
      self._frozen.warm_up()
      self._frozen.start()
      self._stack.callback(self._frozen.stop)
    else:
      self._frozen.update(self._frozen.engine.serve(self.versioned()))
    return self._frozen

  def log_evaluation(self) -> None:
    """Evaluates now."""
    self.evaluations.log(self.log, self.version, self.evaluate())

  def log_batch(
    self,
    groups: Sequence[Group],
    row: dict[str, float],
  ) -> None:
    """Writes and shows one batch, whose weights were just handed over.

    A batch's seconds go from the end of the one before to its own end, so
    that what happens in between (evaluations, checkpoints) is in the rates.
    """
    self.evaluations.log_ended(self.log)
    intervals = self.loop.take()
    ended = intervals[-1][1]
    seconds, self._ended = ended - self._ended, ended
    self.seconds += seconds
    spent = dict.fromkeys(tracing.KINDS, 0.0)
    for since, until, kind in intervals:
      spent[kind] += until - since
    self.waited += spent["wait"]
    generated = self.generator.counters().tokens
    row |= {
      **self.schedule.figures(),
      "generated_tokens_per_second": (generated - self._generated) / seconds,
      "trained_tokens_per_second": row["action_tokens"] / seconds,
      **{f"learner_{k}_share": s / seconds for k, s in spent.items()},
      "seconds": self.seconds,
    }
    failures = self.actor.failures
    row["failed_groups"] = float(sum(failures.values()))
    row |= {f"failed_{kind}": float(n) for kind, n in failures.items()}
    self._generated = generated
    self.log.write(self.version, row)
    stale, tokens = np.unique(
      metrics.staleness_of_tokens(groups, self.version - 1), return_counts=True
    )
    self.log.record(
      "batches",
      self.version,
      {
        "prompts": [group.prompt.index for group in groups],
        "staleness_tokens": {
          str(s): int(n) for s, n in zip(stale, tokens, strict=True)
        },
      },
    )
    events = [("learner", *interval) for interval in intervals]
    events += [("generator", *event) for event in self.generator.take_events()]
    bars = [
      (part, kind, start - self._origin, end - self._origin)
      for part, start, end, kind in events
    ]
    self.log.record("events", self.version, {"intervals": bars})
    left = (self.config.batches / self.version - 1) * self.seconds
    self.view.batch(self.version, row | self.evaluations.latest, left)

  def log_samples(self, groups: Sequence[Group], batch: Batch) -> None:
    """Keeps a few of its trajectories for people to read, now and then."""
    if samples.due(self.version, self.config.batches):
      rows = samples.describe(
        groups, batch, self.learner.seen(), self.task.tokenizer
      )
      self.log.record("samples", self.version, {"trajectories": rows})

  def save(self) -> None:
    """Starts a checkpoint of this moment."""
    snapshot = self.actor.snapshot()
    arrays, described = checkpoint.pack_groups(snapshot.pop("groups"))
    moving, progress = checkpoint.pack_progress(snapshot.pop("progress"))
    arrays |= moving
    arrays |= self._history.state() if self._history else {}
    meta = {
      "actor": snapshot,
      "groups": described,
      "progress": progress,
      "seconds": self.seconds,
      "waited": self.waited,
    }
    held = self._published
    if held is not None and held.version != self.version:
      arrays["generator"] = jax.device_get(held.params)
      meta["generator_version"] = held.version
    self.store(arrays, meta)

  def stop(self) -> NoReturn:
    """Saves, then ends the run; the same command goes on from here."""
    if self.version:
      self.save()
    raise Stopped(
      f"stopped after batch {self.version} of {self.config.batches}; "
      "the same command goes on from there"
    )

  def summary(self) -> dict[str, Any]:
    """The headline figures, from the log and the clock."""
    rows = self.log.rows
    heldout = [row for row in rows if "heldout_accuracy" in row]
    trained = [row for row in rows if "reward" in row]
    first, last = heldout[0], heldout[-1]
    return {
      "heldout_before": first["heldout_accuracy"],
      "heldout_after": last["heldout_accuracy"],
      "heldout_greedy_before": first["heldout_greedy"],
      "heldout_greedy_after": last["heldout_greedy"],
      "train_seconds": round(self.seconds, 1),
      "max_staleness": self.config.staleness_limit,
      "max_staleness_consumed": int(max(r["staleness_max"] for r in trained)),
      "learner_wait_share": round(self.waited / self.seconds, 3),
      "mixed_version_trajectories": int(
        sum(r["mixed_version_trajectories"] for r in trained)
      ),
      "failed_groups": int(trained[-1].get("failed_groups", 0)),
      "batches": self.config.batches,
      "directory": str(self.config.run_directory),
    }


def pretrain_value(config: parts.Config, view: View) -> dict[str, Any]:
  """Pretrains the critic, or finds that it was; trains nothing else.

  Returns:
    `batches`, and `explained_variance` of the last one unless it was cached.

  Raises:
    ConfigError: the algorithm has no critic, or no batches are asked for.
  """
  critic = parts.make_learner(config, parts.meshes(config)[0]).critic
  if critic is None or not critic.config.pretraining_batches:
    raise ConfigError(
      "config.critic.pretraining_batches is "
      f"{config.critic.pretraining_batches} with algorithm "
      f"{config.algorithm.name}; value pretraining needs >= 1 and a critic"
    )
  with contextlib.ExitStack() as stack:
    this = Trainer(config, view, Team(config.distributed), stack)
    metrics = this.begin()
  return {"batches": critic.config.pretraining_batches, **metrics}
