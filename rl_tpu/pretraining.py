"""Value pretraining: the critic learns the starting policy's returns.

A fresh critic knows nothing, and advantages made of its values would mislead
the policy in the first batches. SAO (arXiv:2607.07508) and VC-PPO therefore let
the critic learn first, from trajectories that the fixed starting policy
samples. The optimizer starts anew afterwards. The result depends on the config
alone and is kept under its hash, so runs share it.
"""

import dataclasses
import pathlib
from typing import Any

import jax

from rl_tpu import checkpoint, data, envs, learner, packing, parts, schedules
from rl_tpu import weights as publishing
from rl_tpu.config import ConfigError, digest, to_json
from rl_tpu.view import View

_SEED = 2**30
"""Added to the run's seed: what is sampled here shares no key with training."""

_ELSEWHERE = (
  *("name", "directory", "cache", "schedule", "batches", "max_staleness"),
  *("on_stale", "max_running_groups", "evaluation", "devices"),
  *("checkpoint_every", "checkpoints_kept", "interruption", "compile"),
  *("resume", "distributed", "remote", "transport"),
)
"""Fields of the run that the result does not depend on."""


def pretrain(
  config: parts.Config,
  trainer: learner.Learner,
  state: learner.State,
  *,
  task: envs.Task,
  rows: dict[str, data.Rows],
  generator_mesh: jax.sharding.Mesh,
  view: View,
) -> tuple[learner.State, dict[str, float]]:
  """Trains the critic alone for `config.critic.pretraining_batches`.

  Args:
    config: of the run.
    trainer: its learner, which has a critic.
    state: of version 0; its critic is donated.
    task: asks and judges.
    rows: of its splits.
    generator_mesh: where the policy samples.
    view: told what is going on.

  Returns:
    The state with the critic pretrained, its optimizer fresh; and the metrics
    of the last batch, none if the result was cached.

  Raises:
    ConfigError: it is not cached and the trainer has several processes.
  """
  assert trainer.critic is not None, "the algorithm has no critic"
  where = pathlib.Path(config.cache) / "value" / _digest(config)
  metrics: dict[str, float] = {}
  if where.exists():
    view.note(f"value pretraining: taken from {where}")
    abstract = trainer.critic.optimizer.abstract_state().params
    critic_params = checkpoint.restore_params(where, abstract)
  else:
    if jax.process_count() > 1:
      raise ConfigError(
        "value pretraining needs one process; let the command `value` do it "
        "first, with the same config"
      )
    state, metrics = _learn(
      config, trainer, state, task, rows, generator_mesh, view
    )
    assert state.critic is not None
    critic_params = state.critic.params
    checkpoint.save_params(where, critic_params)
  fresh = trainer.critic.optimizer.init(critic_params)
  return dataclasses.replace(state, critic=fresh), metrics


def _learn(
  config: parts.Config,
  trainer: learner.Learner,
  state: learner.State,
  task: envs.Task,
  rows: dict[str, data.Rows],
  generator_mesh: jax.sharding.Mesh,
  view: View,
) -> tuple[learner.State, dict[str, float]]:
  """Samples with the weights of version 0 throughout, batch by batch."""
  batches = config.critic.pretraining_batches
  sampled = dataclasses.replace(
    config,
    schedule="sync",
    batches=batches,
    seed=(config.seed + _SEED) % 2**31,
    on_stale="allow",  # The version counts batches; the weights stay.
  )
  buffer = parts.make_buffer(sampled)
  driver = parts.make_driver(sampled, generator_mesh, buffer.fail)
  shardings = trainer.policy.param_shardings(generator_mesh)
  published = publishing.publish(state.params, 0, shardings)
  driver.engine.set_starting_params(published.params)
  actor = parts.make_actor(sampled, task, rows, driver, buffer)
  schedule = schedules.Serial(actor, driver, buffer)
  metrics: dict[str, float] = {}
  try:
    schedule.serve(published)
    schedule.start()
    for version in range(batches):
      groups = schedule.take(version, lambda: False)
      assert groups is not None
      batch = packing.pack(
        [t for group in groups for t in group.trajectories],
        row_length=config.learner.row_length,
        version=version,
        rows_multiple=config.learner.rows_multiple,
        minibatches=config.learner.minibatches,
      )
      state, metrics = trainer.train_critic(state, batch)
      actor.set_version(version + 1)
      if version % 10 == 0 or version == batches - 1:
        view.note(
          f"value pretraining: batch {version + 1}/{batches}, explained "
          f"variance {metrics['explained_variance']:.3f}"
        )
  finally:
    schedule.stop()
  return state, metrics


def _digest(config: parts.Config) -> str:
  """Names the result by all that it depends on."""
  described: dict[str, Any] = to_json(config)
  for name in _ELSEWHERE:
    del described[name]
  return digest(described)
