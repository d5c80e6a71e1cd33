"""The supervised warm start: where reinforcement learning begins.

A model of random weights earns no reward, so it first imitates demonstrations;
a pretrained one may, or may start as it is.
Imitation is REINFORCE with reward 1 on what is shown: the loss is the mean
-logp of the answer tokens, and the learner that does RL does this too.

Most of it shows right answers and teaches the skill. The last batches, at a low
learning rate, show wrong ones too and blur it: the policy still knows the
answer (greedy decoding is good) but does not often sample it, which leaves work
for RL. The result depends on the config, model, task and seed alone and is kept
under their hash, so runs share it.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from rl_tpu import (
  algorithms,
  checkpoint,
  data,
  envs,
  learner,
  packing,
  processes,
  sharding,
)
from rl_tpu.config import digest
from rl_tpu.models import huggingface, transformer
from rl_tpu.types import Trajectory

LOOKED_AT = 512
"""Rows whose demonstrations are measured where none is imitated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How much is shown, and how much of it is wrong."""

  batches: int = 325
  """Optimizer steps, >= 0; 0 leaves the weights as drawn or pretrained."""
  wrong_batches: int = 25
  """The last of these, which show wrong answers too, in [0, batches]."""
  wrong_fraction: float = 0.4
  """Share of wrong answers in them, in [0, 1]."""
  trajectories_per_batch: int = 128
  """Demonstrations of one step, >= 1."""
  learning_rate: float = 4e-3
  """Peak, > 0."""
  final_learning_rate: float = 4e-4
  """At the end of a cosine from the peak, >= 0."""
  warmup_batches: int = 20
  """Steps of linear warm-up from 0, >= 0."""

  def __post_init__(self):
    for name, good, allowed in (
      ("batches", self.batches >= 0, ">= 0"),
      (
        "wrong_batches",
        0 <= self.wrong_batches <= self.batches,
        f"in [0, {self.batches}]",
      ),
      ("wrong_fraction", 0 <= self.wrong_fraction <= 1, "in [0, 1]"),
      ("trajectories_per_batch", self.trajectories_per_batch >= 1, ">= 1"),
      ("learning_rate", self.learning_rate > 0, "> 0"),
      ("final_learning_rate", self.final_learning_rate >= 0, ">= 0"),
      ("warmup_batches", self.warmup_batches >= 0, ">= 0"),
    ):
      if not good:
        raise ValueError(
          f"warm_start.{name} is {getattr(self, name)!r}; it must be {allowed}"
        )


def warm_start(
  config: Config,
  *,
  policy: transformer.Policy,
  pretrained: str | None = None,
  task: envs.Task,
  rows: data.RowSource,
  row_length: int,
  mesh: jax.sharding.Mesh,
  seed: int,
  cache: pathlib.Path,
  note: Callable[[str], None],
) -> Any:
  """Weights after imitation, on `mesh`; from the cache where it has them.

  Args:
    config: how much to imitate.
    policy: what is trained.
    pretrained: folder of the weights to start from; None: drawn from `seed`.
    task: makes the demonstrations.
    rows: of the training split.
    row_length: tokens of a packed row.
    mesh: the trainer's.
    seed: of weights, order and wrong answers.
    cache: directory that keeps results by hash.
    note: told what is going on.
  """
  if pretrained and not config.batches:
    return huggingface.load(pretrained, policy, mesh)
  shardings = policy.param_shardings(mesh)
  where = cache / _digest(config, policy, pretrained, task, seed)
  if processes.agreed(where.exists()):
    note(f"warm start: taken from {where}")
    abstract = sharding.placed(policy.abstract_params(), shardings)
    return checkpoint.restore_params(where, abstract)
  if pretrained:
    params = huggingface.load(pretrained, policy, mesh)
  else:
    init = jax.jit(policy.init, out_shardings=shardings)
    params = init(jax.random.key(seed))
  if config.batches:
    stream = data.DemonstrationStream(
      rows,
      seed=seed,
      batch_size=config.trajectories_per_batch,
      demonstrate=task.demonstration,
    )
    trainer = _trainer(config, policy, row_length, mesh)
    params = _imitate(config, trainer, params, stream, note)
  checkpoint.save_params(where, params)
  return params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Longest:
  """The largest of some demonstrations."""

  answer: np.ndarray
  """i32[n], the longest answer, its stop token included."""
  whole: int
  """Tokens of the longest prompt and answer together."""


def longest(
  config: Config, task: envs.Task, rows: data.RowSource, seed: int
) -> Longest | None:
  """Measures the right demonstrations that a warm start shows.

  Without one (`batches` 0) it measures those of the first rows, which nobody
  imitates, where the task knows any; None: it knows none.

  Raises:
    ValueError: the warm start has nothing to show.
  """
  size = config.trajectories_per_batch
  steps = -(-(len(rows) if config.batches else LOOKED_AT) // size)
  stream = data.DemonstrationStream(
    rows, seed=seed, batch_size=size, demonstrate=task.demonstration
  )
  try:
    pairs = [
      pair
      for step in range(min(config.batches or steps, steps))
      for pair in stream.batch(step)
    ]
  except ValueError:
    if config.batches:
      raise
    return None
  return Longest(
    answer=max((answer for _, answer in pairs), key=len),
    whole=max(len(prompt) + len(answer) for prompt, answer in pairs),
  )


def _trainer(
  config: Config,
  policy: transformer.Policy,
  row_length: int,
  mesh: jax.sharding.Mesh,
) -> learner.Learner:
  """REINFORCE without a baseline, which imitates what earned 1."""
  reinforce = algorithms.get("reinforce")
  return learner.Learner(
    policy,
    reinforce,
    reinforce.Config(baseline="none"),
    learner.Config(
      microbatch_rows=8 * sharding.ways(mesh, "rows"),
      row_length=row_length,
      weight_decay=0.0,
    ),
    mesh,
    learning_rate=optax.warmup_cosine_decay_schedule(
      0.0 if config.warmup_batches else config.learning_rate,
      config.learning_rate,
      min(config.warmup_batches, config.batches - 1),
      config.batches,
      config.final_learning_rate,
    ),
  )


def _imitate(
  config: Config,
  trainer: learner.Learner,
  params: Any,
  stream: data.DemonstrationStream,
  note: Callable[[str], None],
) -> Any:
  """Trains on the stream; the last batches show wrong answers too."""
  state = trainer.init(params)
  right = config.batches - config.wrong_batches
  for step in range(config.batches):
    wrong = config.wrong_fraction if step >= right else 0.0
    first = step * config.trajectories_per_batch
    shown = [
      _shown(first + i, prompt, answer)
      for i, (prompt, answer) in enumerate(stream.batch(step, wrong))
    ]
    batch = packing.pack(
      shown,
      row_length=trainer.config.row_length,
      version=step,
      rows_multiple=trainer.config.rows_multiple,
    )
    state, metrics = trainer.train(state, batch)
    if step % 100 == 0 or step == config.batches - 1:
      note(
        f"warm start: batch {step + 1}/{config.batches}, "
        f"loss {metrics['loss']:.3f}"
      )
  return state.params


def _shown(index: int, prompt: np.ndarray, answer: np.ndarray) -> Trajectory:
  """A demonstration as a trajectory that earned 1."""
  tokens = np.concatenate([prompt, answer])
  action_mask = np.arange(len(tokens)) >= len(prompt)
  rewards = np.zeros(len(tokens), np.float32)
  rewards[-1] = 1.0
  return Trajectory(
    prompt_id=index,
    group_id=index,
    member=0,
    tokens=tokens,
    action_mask=action_mask,
    behavior_logp=np.zeros(len(tokens), np.float32),
    token_version=np.where(action_mask, 0, -1).astype(np.int32),
    rewards=rewards,
  )


def _digest(config, policy, pretrained, task: envs.Task, seed: int) -> str:
  """Names the result by all that it depends on."""
  return digest(
    [
      dataclasses.asdict(config),
      dataclasses.asdict(policy.config),
      huggingface.fingerprint(pretrained) if pretrained else None,
      task.name,
      task.fingerprint,
      seed,
    ]
  )
