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
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rl_tpu import (
  checkpoint,
  data,
  evaluate,
  metrics,
  packing,
  parts,
  schedules,
  weights,
)
from rl_tpu.config import ConfigError, differences, to_json
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
    ConfigError: the directory holds a run of another config, or there are too
      few devices.
    Stopped: SIGINT or SIGTERM came; a checkpoint was written.
    Exception: a part failed; its error, after everything was shut down.
  """
  summary = claim(config)
  if summary is not None:
    view.note(f"{config.run_directory} is complete; remove it to train again")
    return summary
  with contextlib.ExitStack() as stack:
    this = _Run(config, view, stack)
    stack.enter_context(view.open())
    stack.enter_context(this.signals())
    if this.version == 0:
      this.log_evaluation(0, this.evaluate())
    this.schedule.start()
    while this.version < config.batches:
      began = time.monotonic()
      groups = this.take()
      taken = time.monotonic()
      batch = this.pack(groups)
      this.state, trained = this.learner.train(this.state, batch)
      this.version += 1
      this.schedule.publish(this.versioned())
      ended = time.monotonic()
      row = describe(groups, this.version - 1) | trained
      this.log_batch(groups, row, began, taken, ended)
      if this.due(config.evaluation.every):
        this.start_evaluation()
      if this.stop_requested:
        this.stop()
      if this.due(config.checkpoint_every):
        this.save()
    this.finish_evaluations()
    this.log_evaluation(this.version, this.evaluate())
    this.save()
    summary = this.summary()
  metrics.write_json(config.run_directory / "summary.json", summary)
  return summary


def claim(config: parts.Config) -> dict[str, Any] | None:
  """Writes what the run is into its directory, or checks that it is the same.

  Returns:
    The summary if the run is complete.

  Raises:
    ConfigError: the directory belongs to a run of another config.
  """
  directory = config.run_directory
  path = directory / "config.json"
  described = to_json(config)
  if path.exists():
    lines = differences(metrics.read_json(path), described)
    if lines:
      raise ConfigError(
        f"{directory} holds a run of another config; choose another "
        "config.directory or remove it.\n" + "\n".join(lines)
      )
  directory.mkdir(parents=True, exist_ok=True)
  metrics.write_json(path, described)
  metrics.write_json(directory / "environment.json", metrics.environment())
  summary = directory / "summary.json"
  return metrics.read_json(summary) if summary.exists() else None


def describe(groups: Sequence[Group], version: int) -> dict[str, float]:
  """Metrics of a batch trained at `version` that need no device."""
  trajectories = [t for group in groups for t in group.trajectories]
  stale = staleness_of_tokens(groups, version)
  mixed = [len(set(t.token_version[t.action_mask])) > 1 for t in trajectories]
  truncated = [t.stop_reason == "length" for t in trajectories]
  return {
    "reward": float(np.mean([t.outcome for t in trajectories])),
    "action_tokens": float(len(stale)),
    "truncated": float(np.mean(truncated)),
    "staleness_mean": float(stale.mean()),
    "staleness_max": float(stale.max()),
    "mixed_version_trajectories": float(sum(mixed)),
  }


def staleness_of_tokens(groups: Sequence[Group], version: int) -> np.ndarray:
  """Version less token version of every action token."""
  return np.concatenate(
    [
      version - t.token_version[t.action_mask]
      for group in groups
      for t in group.trajectories
    ]
  )


class _Run:
  """The parts of one run, and the little that changes beside them."""

  def __init__(
    self, config: parts.Config, view: View, stack: contextlib.ExitStack
  ):
    """Makes every part, new or restored; `stack` ends them in order."""
    trainer_mesh, generator_mesh = parts.meshes(config)
    task, rows = parts.make_task(config)
    self.config, self.view, self.task = config, view, task
    self.learner = parts.make_learner(config, trainer_mesh)
    self.checkpointer = checkpoint.Checkpointer(
      config.run_directory / "checkpoints", keep=config.checkpoints_kept
    )
    stack.callback(self.checkpointer.close)
    buffer = parts.make_buffer(config)
    self.driver = parts.make_driver(config, generator_mesh, buffer.fail)
    self.actor = parts.make_actor(config, task, rows, self.driver, buffer)
    restored = self.checkpointer.restore_latest(self.learner.abstract_state())
    if restored is None:
      params = parts.start_params(config, task, rows, trainer_mesh, view)
      self.state = self.learner.init(params)
      self.version, self.seconds, self.waited = 0, 0.0, 0.0
    else:
      view.note(f"resuming {config.run_directory} at batch {restored.version}")
      self.state, self.version = restored.state, restored.version
      self.seconds = restored.meta["seconds"]
      self.waited = restored.meta["waited"]
      groups = checkpoint.unpack_groups(restored.host, restored.meta["groups"])
      self.actor.restore(restored.meta["actor"] | {"groups": groups})
    self.log = metrics.RunLog(
      config.run_directory,
      resume_at=None if restored is None else self.version,
    )
    stack.callback(self.log.close)
    self._weight_shardings = self.learner.policy.param_shardings(generator_mesh)
    self.driver.update(self.versioned())
    self.driver.warm_up()
    kind = schedules.Concurrent if config.lag is None else schedules.Serial
    self.schedule = kind(self.actor, self.driver, buffer)
    stack.callback(self.schedule.stop)
    self.stop_requested = False
    self._heldout = data.heldout(
      rows["heldout"], config.evaluation.problems, task.prompt
    )
    self._evaluations: list[tuple[int, Any]] = []
    self._origin = time.monotonic()
    self._generated = 0
    self._accuracy: dict[str, float] = {}

  def take(self) -> list[Group]:
    """The next batch's groups; a stop request may come while it waits."""
    start = time.monotonic()
    try:
      return self.schedule.take(self.version)
    except KeyboardInterrupt:
      self.stop()
      raise
    finally:
      self.waited += time.monotonic() - start

  def pack(self, groups: Sequence[Group]) -> Batch:
    """A batch of the groups, dealt by chance that the version decides."""
    return packing.pack(
      [t for group in groups for t in group.trajectories],
      row_length=self.config.learner.row_length,
      version=self.version,
      rows_multiple=self.config.learner.rows_multiple,
      minibatches=self.config.learner.minibatches,
      shuffle_seed=self.config.seed * 1_000_003 + self.version,
    )

  def versioned(self) -> VersionedParams:
    """A copy of the weights on the generator's mesh."""
    return weights.publish(
      self.state.params, self.version, self._weight_shardings
    )

  def due(self, every: int) -> bool:
    """Whether something that comes every so many batches comes now."""
    last = self.version == self.config.batches
    return every > 0 and self.version % every == 0 and not last

  def evaluate(self) -> dict[str, float]:
    """Held-out accuracy now; raises if the generator has failed."""
    result = self.schedule.call(self._evaluation())
    if self.driver.failure is not None:
      raise self.driver.failure
    return result

  def start_evaluation(self) -> None:
    """Evaluates beside the training, from this version's weights on.

    In async training newer weights may reach it before it ends; the row is
    that of the version it started with.
    """
    future = self.schedule.submit(self._evaluation())
    self._evaluations.append((self.version, future))

  def finish_evaluations(self) -> None:
    """Waits for those under way and logs them."""
    for batch, future in self._evaluations:
      self.log_evaluation(batch, future.result())
    self._evaluations = []

  def _evaluation(self):
    return evaluate.evaluate(
      self.driver,
      self.task.environment,
      self._heldout,
      sampling=parts.sampling(self.config, self.task),
      seed=self.config.seed,
      max_turns=self.config.max_turns,
      max_trajectory_tokens=self.config.engine.context_length,
    )

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
    """Writes and shows one trained batch; times are of the monotonic clock."""
    for done in [e for e in self._evaluations if e[1].done()]:
      self._evaluations.remove(done)
      self.log_evaluation(done[0], done[1].result())
    seconds = ended - began
    self.seconds += seconds
    generated = self.driver.counters().tokens
    row |= {
      "generated_tokens_per_second": (generated - self._generated) / seconds,
      "trained_tokens_per_second": row["action_tokens"] / seconds,
      "learner_wait_share": (taken - began) / seconds,
      "seconds": self.seconds,
    }
    self._generated = generated
    self.log.write(self.version, row)
    stale, tokens = np.unique(
      staleness_of_tokens(groups, self.version - 1), return_counts=True
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
    intervals = [("learner", "wait", began, taken)]
    intervals.append(("learner", "train", taken, ended))
    intervals += [
      ("generator", kind, start, end)
      for start, end, kind in self.driver.take_events()
    ]
    self.log.record(
      "events",
      self.version,
      {
        "intervals": [
          (part, kind, start - self._origin, end - self._origin)
          for part, kind, start, end in intervals
        ]
      },
    )
    left = self.config.batches - self.version
    shown = row | self._accuracy
    self.view.batch(self.version, shown, left * self.seconds / self.version)

  def save(self) -> None:
    """Starts a checkpoint of this moment."""
    snapshot = self.actor.snapshot()
    arrays, described = checkpoint.pack_groups(snapshot.pop("groups"))
    meta = {
      "actor": snapshot,
      "groups": described,
      "seconds": self.seconds,
      "waited": self.waited,
    }
    self.checkpointer.save(self.version, self.state, arrays, meta)

  def stop(self) -> None:
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
      if self.stop_requested or self.schedule.waiting:
        raise KeyboardInterrupt
      self.stop_requested = True
      self.view.note("stopping after this batch; once more stops at once")

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
    this = _Run(config, view, stack)
    return {"batch": this.version, **this.evaluate()}
