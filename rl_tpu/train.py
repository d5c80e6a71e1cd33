"""A training run: the loop is `run`.

    groups = schedule.take(version)          actor -> buffer -> here
    batch = packing.pack(groups)
    state, metrics = learner.train(state, batch)
    schedule.publish(weights)                here -> generator
    log, checkpoint, evaluate

Who generates while this loop trains is the schedule's business. A run lives in
one directory; the same command goes on from its newest checkpoint.
"""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from rl_tpu import (
  checkpoint,
  data,
  evaluate,
  metrics,
  packing,
  parts,
  pretraining,
  schedules,
  weights,
)
from rl_tpu.config import ConfigError
from rl_tpu.generation.driver import GenerationDriver
from rl_tpu.types import Batch, Group, VersionedParams
from rl_tpu.view import View


class Stopped(Exception):
  """Somebody asked the run to stop; a checkpoint was written."""


def run(config: parts.Config, view: View) -> dict[str, Any]:
  """Trains until `config.batches`, from the newest checkpoint if there is one.

  Returns:
    The headline figures: `heldout_before` and `heldout_after` (accuracy on
    held-out questions, sampled as in training), `heldout_greedy_before` and
    `heldout_greedy_after`, `train_seconds` (of the loop, evaluations
    included), `max_staleness` (the limit; null for none),
    `max_staleness_consumed`, `learner_wait_share`,
    `mixed_version_trajectories` (consumed ones with tokens of several
    versions), `batches`, `directory`.

  Raises:
    ConfigError: the directory holds a run of another config, there are too few
      devices, or parts of the config do not fit each other or the task.
    Stopped: SIGINT or SIGTERM came; a checkpoint was written.
    Exception: a part failed; its error, after everything was shut down.
  """
  summary = parts.claim(config)
  if summary is not None:
    view.note(f"{config.run_directory} is complete; remove it to train again")
    return summary
  with contextlib.ExitStack() as stack:
    this = _Run(config, view, stack)
    parts.record(config)
    if not this.restore():
      this.begin()
    this.refer()
    this.open_log()
    this.serve()
    stack.enter_context(view.open())
    stack.enter_context(this.signals())
    if this.version == 0:
      this.log_evaluation(0, this.evaluate())
    elif this.due(config.evaluation.every) and not this.evaluated():
      this.start_evaluation()
    this.start()
    while this.version < config.batches:
      began = time.monotonic()
      groups = this.take()
      taken = time.monotonic()
      batch = this.pack(groups)
      this.state, trained = this.learner.train(this.state, batch)
      this.version += 1
      this.publish()
      ended = time.monotonic()
      row = metrics.describe(groups, this.version - 1) | trained
      this.log_batch(groups, row, began, taken, ended)
      if this.due(config.evaluation.every):
        this.start_evaluation()
      if this.stop_requested:
        this.stop()
      if this.due(config.checkpoint_every):
        this.save()
    this.save()
    this.finish_evaluations()
    if not this.evaluated():
      this.log_evaluation(this.version, this.evaluate())
    summary = this.summary()
  metrics.write_json(config.run_directory / "summary.json", summary)
  return summary


class _Run:
  """The parts of one run, and the little that changes beside them."""

  def __init__(
    self, config: parts.Config, view: View, stack: contextlib.ExitStack
  ):
    """Makes the parts, without weights; `stack` ends them in order."""
    self.config, self.view, self._stack = config, view, stack
    self._trainer_mesh, self._generator_mesh = parts.meshes(config)
    self.learner = parts.make_learner(config, self._trainer_mesh)
    self._buffer = parts.make_buffer(config)
    self._history = parts.make_history(config)
    self.driver = parts.make_driver(
      config, self._generator_mesh, self._buffer.fail
    )
    self.task, self._rows = parts.make_task(config)
    self._heldout = data.heldout(
      self._rows["heldout"], config.evaluation.problems, self.task.prompt
    )
    self.actor = parts.make_actor(
      config, self.task, self._rows, self.driver, self._buffer
    )
    self.checkpointer = checkpoint.Checkpointer(
      config.run_directory / "checkpoints", keep=config.checkpoints_kept
    )
    stack.callback(self.checkpointer.close)
    self.stop_requested = False
    self._weight_shardings = self.learner.policy.param_shardings(
      self._generator_mesh
    )
    self._published: VersionedParams | None = None
    self._evaluations: list[tuple[int, Any]] = []
    self._accuracy: dict[str, float] = {}

  def restore(self) -> bool:
    """Takes over from the newest checkpoint; returns whether there is one."""
    restored = self.checkpointer.restore_latest(self.learner.abstract_state())
    if restored is None:
      return False
    self.state, self.version = restored.state, restored.version
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

  def begin(self) -> dict[str, float]:
    """Starts at version 0, from the weights of the warm start.

    Returns:
      The explained variance that value pretraining reached, if it ran.
    """
    params = parts.start_params(
      self.config, self.task, self._rows, self._trainer_mesh, self.view
    )
    self.state = self.learner.init(params, self.config.seed)
    critic = self.learner.critic
    reached: dict[str, float] = {}
    if critic is not None and critic.config.pretraining_batches:
      self.state, reached = pretraining.pretrain(
        self.config,
        self.learner,
        self.state,
        task=self.task,
        rows=self._rows,
        generator_mesh=self._generator_mesh,
        view=self.view,
      )
    self.version, self.seconds, self.waited = 0, 0.0, 0.0
    return {
      name: value
      for name, value in reached.items()
      if name == "explained_variance" and math.isfinite(value)
    }

  def refer(self) -> None:
    """Tells what refers to the weights that the run began with what they are.

    The reference policy of a KL term, and the noise of the generator.
    """
    anchored = "reference_logp" in self.learner.requires
    if not (anchored or self.config.engine.mismatch.weight_noise):
      return
    params = parts.start_params(
      self.config, self.task, self._rows, self._trainer_mesh, self.view
    )
    self.driver.engine.set_starting_params(params)
    if anchored:
      self.learner.set_reference(params)

  def open_log(self) -> None:
    """Opens the log, cut back to this version; 0 begins it anew."""
    self.log = metrics.RunLog(
      self.config.run_directory, resume_at=self.version or None
    )
    self._stack.callback(self.log.close)

  def serve(self) -> None:
    """Lets the generator answer, with the weights that it takes now.

    Those of this version, unless a restored run's generator held older ones.
    """
    published = self._published or self.versioned()
    self.driver.update(self.driver.engine.serve(published))
    self._keep(published)
    self.driver.warm_up()
    lag = self.config.lag
    kind = schedules.Concurrent if lag is None else schedules.Serial
    self.schedule = kind(self.actor, self.driver, self._buffer)
    self._stack.callback(self.schedule.stop)

  def start(self) -> None:
    """Lets the actor dispatch, and starts the clock of the loop."""
    self._ended = time.monotonic()
    self._origin = self._ended - self.seconds
    self._generated = self.driver.counters().tokens
    self.schedule.start()

  def take(self) -> list[Group]:
    """The next batch's groups; a stop request may come while it waits."""
    groups = self.schedule.take(self.version, lambda: self.stop_requested)
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
    """A copy of the weights on the generator's mesh."""
    return weights.publish(
      self.state.params, self.version, self._weight_shardings
    )

  def publish(self) -> None:
    """Gives the generator this version's weights if it takes them over."""
    if self.config.engine.mismatch.refreshes(self.version):
      published = self.versioned()
      self.schedule.publish(self.driver.engine.serve(published))
      self._keep(published)
    else:
      self.actor.set_version(self.version)

  def _keep(self, published: VersionedParams) -> None:
    """Keeps what checkpoints of versions without a refresh must hold."""
    always = self.config.engine.mismatch.refresh_period == 1
    self._published = None if always else published

  def due(self, every: int) -> bool:
    """Whether something that comes every so many batches comes now."""
    last = self.version == self.config.batches
    return every > 0 and self.version % every == 0 and not last

  def evaluate(self) -> dict[str, float]:
    """Held-out accuracy now, of the learner's policy.

    Where the generator's is another, training waits and a second engine
    samples, made for it on the same devices.
    """
    if self.config.engine.mismatch.exact:
      return self.schedule.call(self._evaluation(self.driver))
    clean = parts.make_driver(self.config.clean, self._generator_mesh)
    clean.update(clean.engine.serve(self.versioned()))
    self.driver.pause()
    schedule = schedules.Serial(self.actor, clean, self._buffer)
    try:
      return schedule.call(self._evaluation(clean))
    finally:
      schedule.stop()
      self.driver.resume()

  def evaluated(self) -> bool:
    """Whether the log holds this version's held-out accuracy."""
    return any(
      row["batch"] == self.version and "heldout_accuracy" in row
      for row in self.log.rows
    )

  def start_evaluation(self) -> None:
    """Evaluates beside the training, from this version's weights on.

    In async training newer weights may reach it before it ends; the row is
    that of the version it started with. Where the generator's policy is not
    the learner's, it ends before training goes on.
    """
    if not self.config.engine.mismatch.exact:
      self.log_evaluation(self.version, self.evaluate())
      return
    future = self.schedule.submit(self._evaluation(self.driver))
    self._evaluations.append((self.version, future))

  def finish_evaluations(self) -> None:
    """Waits for those under way and logs them."""
    for batch, future in self._evaluations:
      self.log_evaluation(batch, future.result())
    self._evaluations = []

  async def _evaluation(self, driver: GenerationDriver) -> dict[str, float]:
    """Raises if the generator failed; that says nothing of the policy."""
    row = await evaluate.evaluate(
      driver,
      self.task.environment,
      self._heldout,
      sampling=parts.sampling(self.config, self.task),
      seed=self.config.seed,
      max_turns=self.config.max_turns,
      max_trajectory_tokens=self.config.engine.context_length,
      limits=self.config.limits,
    )
    if driver.failure is not None:
      raise driver.failure
    return row

  def log_evaluation(self, batch: int, row: dict[str, float]) -> None:
    """Writes and shows held-out accuracy."""
    self.log.write(batch, row)
    self._accuracy = {"heldout_accuracy": row["heldout_accuracy"]}
    self.view.note(
      f"held-out accuracy after batch {batch}: "
      f"{row['heldout_accuracy']:.3f} sampled, "
      f"{row['heldout_greedy']:.3f} greedy"
      + (f", {row['heldout_failed']:.0f} failed" * bool(row["heldout_failed"]))
    )

  def log_batch(
    self,
    groups: Sequence[Group],
    row: dict[str, float],
    began: float,
    taken: float,
    ended: float,
  ) -> None:
    """Writes and shows one trained batch; times are of the monotonic clock.

    A batch's seconds go from the end of the one before to its own end, so
    that what happens in between (evaluations, checkpoints) is in the rates.
    """
    for done in [e for e in self._evaluations if e[1].done()]:
      self._evaluations.remove(done)
      self.log_evaluation(done[0], done[1].result())
    seconds, self._ended = ended - self._ended, ended
    self.seconds += seconds
    self.waited += taken - began
    generated = self.driver.counters().tokens
    row |= {
      "generated_tokens_per_second": (generated - self._generated) / seconds,
      "trained_tokens_per_second": row["action_tokens"] / seconds,
      "learner_wait_share": (taken - began) / seconds,
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
    events = [("learner", began, taken, "wait")]
    events.append(("learner", taken, ended, "train"))
    events += [("generator", *event) for event in self.driver.take_events()]
    intervals = [
      (part, kind, start - self._origin, end - self._origin)
      for part, start, end, kind in events
    ]
    self.log.record("events", self.version, {"intervals": intervals})
    left = (self.config.batches / self.version - 1) * self.seconds
    self.view.batch(self.version, row | self._accuracy, left)

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
    self.checkpointer.save(self.version, self.state, arrays, meta)

  def stop(self) -> NoReturn:
    """Saves, then ends the run; the same command goes on from here."""
    if self.version:
      self.save()
    raise Stopped(
      f"stopped after batch {self.version} of {self.config.batches}; "
      "the same command goes on from there"
    )

  @contextlib.contextmanager
  def signals(self) -> Iterator[None]:
    """The first SIGINT or SIGTERM stops cleanly; the next one at once."""
    if threading.current_thread() is not threading.main_thread():
      yield
      return

    def handle(number, frame):
      if self.stop_requested:
        raise KeyboardInterrupt
      self.stop_requested = True
      self.view.note("stopping; once more stops at once, without a checkpoint")

    kinds = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(kind, handle) for kind in kinds]
    try:
      yield
    finally:
      for kind, handler in zip(kinds, before, strict=True):
        signal.signal(kind, handler)

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
      "batches": self.config.batches,
      "directory": str(self.config.run_directory),
    }


def evaluate_newest(config: parts.Config, view: View) -> dict[str, Any]:
  """Held-out accuracy of a run's newest checkpoint.

  Raises:
    ConfigError: the run's directory holds no checkpoint.
  """
  directory = config.run_directory / "checkpoints"
  if not directory.is_dir():
    raise ConfigError(f"{directory} is not there: nothing to evaluate")
  with contextlib.ExitStack() as stack:
    this = _Run(config.clean, view, stack)
    if not this.restore():
      raise ConfigError(f"{directory} holds no checkpoint to evaluate")
    this.serve()
    return {"batch": this.version, **this.evaluate()}


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
    this = _Run(config, view, stack)
    metrics = this.begin()
  return {"batches": critic.config.pretraining_batches, **metrics}
