"""One process of a trainer: what every one of them holds, and does together.

A trainer on several hosts is several processes, each with the shards of weights
and optimizer that its devices hold. Process 0 is the run of `train.py`; the
others are made of this module alone, and `follow` it. A verb below runs in all
of them at once: process 0 tells the others (see `processes`), and all go on as
one would.
"""

import contextlib
import dataclasses
import io
import math
from typing import Any

import numpy as np
import rich.console

from rl_tpu import checkpoint, parts, pretraining, transport, weights
from rl_tpu.config import ConfigError, differences, to_json
from rl_tpu.processes import Team
from rl_tpu.types import Batch
from rl_tpu.view import View


class Trainer:
  """The learner, its state and its checkpoints."""

  def __init__(
    self,
    config: parts.Config,
    view: View,
    team: Team,
    stack: contextlib.ExitStack,
  ):
    """Makes what needs no weights; `stack` ends it."""
    _check(config, team)
    self.config, self.view, self.team, self._stack = config, view, team, stack
    self._trainer_mesh, self._generator_mesh = parts.meshes(config)
    self.learner = parts.make_learner(config, self._trainer_mesh)
    self.task, self._rows = parts.make_task(config)
    for doubt in parts.doubts(config, self.task, self._rows):
      view.note(f"warning: {doubt}")
    self._transport: transport.Transport | None = None

  def open_checkpoints(self) -> None:
    """Opens the run's checkpoints."""
    self.checkpointer = checkpoint.Checkpointer(
      self.config.run_directory / "checkpoints",
      keep=self.config.checkpoints_kept,
    )
    self._stack.callback(self.checkpointer.close)

  def load(self) -> checkpoint.Restored | None:
    """Takes the state of the newest checkpoint; None if there is none."""
    restored = self.checkpointer.restore_latest(self.learner.abstract_state())
    if restored is not None:
      self.state, self.version = restored.state, restored.version
    return restored

  def begin(self) -> dict[str, float]:
    """Starts at version 0, from the weights of the warm start.

    Returns:
      The explained variance that value pretraining reached, if it ran.
    """
    self.state = self.learner.init(self._start_params(), self.config.seed)
    self.version = 0
    critic = self.learner.critic
    if critic is None or not critic.config.pretraining_batches:
      return {}
    self.state, reached = pretraining.pretrain(
      self.config,
      self.learner,
      self.state,
      task=self.task,
      rows=self._rows,
      generator_mesh=self._generator_mesh,
      view=self.view,
    )
    return {
      name: value
      for name, value in reached.items()
      if name == "explained_variance" and math.isfinite(value)
    }

  def refer(self) -> Any:
    """Tells the learner the weights that the run began with, if it refers.

    Returns:
      The same for the noise of the generator, where it has any.
    """
    anchored = "reference_logp" in self.learner.requires
    noisy = self.config.engine.mismatch.weight_noise
    if not (anchored or noisy):
      return None
    params = self._start_params()
    if anchored:
      self.learner.set_reference(params)
    return weights.readable(params) if noisy else None

  def _start_params(self) -> Any:
    return parts.start_params(
      self.config, self.task, self._rows, self._trainer_mesh, self.view
    )

  def train(self, batch: Batch) -> dict[str, float]:
    """Consumes one packed batch, which makes the next version."""
    self.team.tell("train", arrays=_present(batch))
    self.state, metrics = self.learner.train(self.state, batch)
    self.version += 1
    return metrics

  def weights(self) -> Any:
    """This version's weights, readable here; may share the state's buffers."""
    self.team.tell("weights")
    return weights.readable(self.state.params)

  def make_transport(self, life: str) -> transport.Transport:
    """How weights reach generators that have processes of their own."""
    self.team.tell("transport", {"life": life})
    self._transport = parts.make_transport(self.config, life)
    return self._transport

  def publish_too(self) -> None:
    """Publishes this version's weights, as process 0 does by itself."""
    assert self._transport is not None, "no transport was made"
    self._transport.publish(self.state.params, self.version)

  def store(self, host: dict[str, Any], meta: dict[str, Any]) -> None:
    """Starts a checkpoint of this version.

    Args:
      host: arrays that process 0 holds beside the state.
      meta: what it holds that is not an array.
    """
    self.team.tell("store")
    self.checkpointer.save(self.version, self.state, host, meta)


def _check(config: parts.Config, team: Team) -> None:
  """Refuses what only one process can do."""
  period = config.engine.mismatch.refresh_period
  if team.count > 1 and config.remote.names_any and period > 1:
    raise ConfigError(
      f"config.engine.mismatch.refresh_period is {period}; it must be 1 where "
      "several processes train and config.remote names generators"
    )


def _present(batch: Batch) -> dict[str, np.ndarray]:
  """The arrays that a packed batch has, by field."""
  fields = (field.name for field in dataclasses.fields(batch))
  values = ((name, getattr(batch, name)) for name in fields)
  return {
    name: np.asarray(value) for name, value in values if value is not None
  }


def follow(config: parts.Config) -> dict[str, Any]:
  """Does as process 0 does, until the run ends; in every other process.

  Returns:
    `process`, which this is, and the `version` that the run reached.

  Raises:
    ConfigError: process 0 has another config, or it does not fit.
    Stopped: the run was stopped.
  """
  team = Team(config.distributed)
  quiet = View(0, rich.console.Console(file=io.StringIO(), quiet=True))
  version = 0
  with contextlib.ExitStack() as stack, team.together():
    orders = team.orders()
    for begin in orders:  # None where the run is complete.
      _check_same(config, begin.words["config"])
      this = Trainer(config, quiet, team, stack)
      this.open_checkpoints()
      if this.load() is None:
        this.begin()
      this.refer()
      stack.enter_context(team.signals(lambda text: None))
      for order in orders:
        if order.verb == "train":
          this.train(Batch(**order.arrays))
        elif order.verb == "weights":
          this.weights()
        elif order.verb == "transport":
          stack.callback(this.make_transport(order.words["life"]).close)
        elif order.verb == "publish":
          this.publish_too()
        else:
          assert order.verb == "store", order.verb
          this.store({"of_process_0": np.zeros(1)}, {})
      version = this.version
  return {"process": team.index, "version": version}


def _check_same(config: parts.Config, leading: dict[str, Any]) -> None:
  """Refuses programs that would not fit those of process 0."""
  here = to_json(config)
  lines = differences(leading, here | {"distributed": leading["distributed"]})
  if lines:
    raise ConfigError(
      "process 0 of the trainer has another config.\n" + "\n".join(lines)
    )
