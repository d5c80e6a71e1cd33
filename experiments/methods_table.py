"""What does each algorithm make of the same batch?

  python -m experiments.methods_table

One seeded batch of stale trajectories (four groups of four, observations among
the actions, rewards +-1) whose policies are tables of logits: behavior, and
from it proximal and target by steps of `DRIFT`. Every algorithm, at its default
configuration, then says of it:

| column | meaning |
|---|---|
| loss | the mean that it would report |
| gradient norm | of that loss, with respect to the target's logits |
| masked | share of action tokens whose own logp gets no gradient |
| effective | effective sample size, (sum w)^2 / (n sum w^2) over n tokens |

where w is the gradient of an action token's logp over its advantage. A policy
gradient without weights has masked 0 and effective 1. Half a minute on two
cores, nearly all of it compiling; the last line is JSON.
"""

import dataclasses
import functools
import json
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from rl_tpu import algorithms
from rl_tpu.packing import pack
from rl_tpu.types import Batch, PolicyOutputs, Trajectory

GROUPS, MEMBERS, VOCABULARY, HEAD = 4, 4, 16, 4
DRIFT = 0.3
"""Deviation of each logit, from behavior to proximal and on to target."""


def make_batch(seed: int = 0) -> tuple[Batch, dict[str, jax.Array]]:
  """A packed batch, and the logits of each policy aligned to its tokens."""
  generator = np.random.default_rng(seed)
  trajectories, tables = [], []
  for index in range(GROUPS * MEMBERS):
    length = int(generator.integers(8, 16))
    behavior = generator.normal(0.0, 1.5, (length, VOCABULARY))
    proximal = behavior + generator.normal(0.0, DRIFT, behavior.shape)
    target = proximal + generator.normal(0.0, DRIFT, behavior.shape)
    reference = behavior + generator.normal(0.0, DRIFT, behavior.shape)
    tables.append(
      {
        "proximal": proximal,
        "target": target,
        "reference": reference,
        "values": generator.uniform(0.0, 1.0, length),
      }
    )
    group, member = divmod(index, MEMBERS)
    # Of the members one to three are right, so that no group is without signal.
    reward = 1.0 if member <= group % (MEMBERS - 1) else -1.0
    trajectories.append(_sample(generator, behavior, group, member, reward))
  earlier = np.zeros(len(trajectories))  # As many were right as were wrong.
  batch = pack(trajectories, row_length=32, version=3, baselines=earlier)
  batch = jax.tree.map(jnp.asarray, batch)
  laid_out = {}
  for name in tables[0]:
    array = np.zeros((*batch.tokens.shape, *tables[0][name].shape[1:]))
    for index, table in enumerate(tables):
      place = np.asarray(batch.trajectory_ids) == index
      array[place] = table[name][np.asarray(batch.positions)[place]]
    laid_out[name] = jnp.asarray(array, jnp.float32)
  return batch, laid_out


def _sample(generator, logits, group, member, reward) -> Trajectory:
  """Draws every action token from its own row of logits."""
  length = len(logits)
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  tokens = np.array([generator.choice(VOCABULARY, p=np.exp(x)) for x in logp])
  mask = np.arange(length) >= 2
  mask[length // 2] = False
  head = np.argsort(-logp, axis=-1)[:, :HEAD]
  return Trajectory(
    prompt_id=group,
    group_id=group,
    member=member,
    tokens=tokens.astype(np.int32),
    action_mask=mask,
    behavior_logp=np.where(mask, logp[np.arange(length), tokens], 0.0).astype(
      np.float32
    ),
    token_version=np.where(mask, 1, -1).astype(np.int32),
    rewards=np.where(np.arange(length) == length - 1, reward, 0.0).astype(
      np.float32
    ),
    behavior_topk_ids=head.astype(np.int32),
    behavior_topk_logp=np.take_along_axis(logp, head, -1).astype(np.float32),
  )


def make_outputs(
  target: jax.Array, policies: dict[str, jax.Array], batch: Batch
) -> PolicyOutputs:
  """What a learner would compute, from the target's logits."""

  def taken(logits):
    logp = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(logp, batch.tokens[..., None], -1)[..., 0]

  def head(logits):
    ids = jnp.maximum(batch.behavior_topk_ids, 0)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), ids, -1)

  p = jax.nn.softmax(target)
  return PolicyOutputs(
    target_logp=taken(target),
    proximal_logp=taken(policies["proximal"]),
    reference_logp=taken(policies["reference"]),
    entropy=-jnp.sum(p * jax.nn.log_softmax(target), -1),
    values=policies["values"],
    target_topk_logp=head(target),
    proximal_topk_logp=head(policies["proximal"]),
  )


def measure(
  module: ModuleType, batch: Batch, policies: dict[str, jax.Array]
) -> dict[str, float]:
  """One row of the table."""
  config = module.Config()
  if hasattr(config, "top_k"):
    config = dataclasses.replace(config, top_k=HEAD)
  figures = jax.jit(functools.partial(_figures, module, config))
  return {k: float(v) for k, v in figures(batch, policies).items()}


def _figures(module, config, batch, policies):
  outputs = make_outputs(policies["target"], policies, batch)
  advantages = module.advantages(batch, outputs, config)
  batch = dataclasses.replace(batch, advantages=advantages)

  def mean_loss(target):
    live = make_outputs(target, policies, batch)
    return module.loss(live, batch, config)[0].mean(empty=0.0)

  def total_loss(target_logp):
    live = dataclasses.replace(outputs, target_logp=target_logp)
    return module.loss(live, batch, config)[0].total

  loss, gradient = jax.value_and_grad(mean_loss)(policies["target"])
  slopes = jax.grad(total_loss)(outputs.target_logp)
  mask, taught = batch.action_mask, advantages != 0
  weight = jnp.where(taught, slopes / jnp.where(taught, advantages, 1.0), 0.0)
  count = jnp.sum(mask)
  return {
    "loss": loss,
    "gradient_norm": jnp.sqrt(jnp.sum(gradient**2)),
    "masked_fraction": jnp.sum(mask & (slopes == 0)) / count,
    "effective_sample_size": jnp.sum(weight) ** 2
    / (count * jnp.sum(weight**2)),
  }


def main() -> None:
  """Prints the table and, last, the same figures as JSON."""
  batch, policies = make_batch()
  rows = {
    name: measure(algorithms.get(name), batch, policies)
    for name in algorithms.names()
  }
  print(f"{'algorithm':16} {'loss':>9} {'gradient norm':>14} masked effective")
  for name, row in rows.items():
    print(
      f"{name:16} {row['loss']:9.4f} {row['gradient_norm']:14.4f} "
      f"{row['masked_fraction']:6.2f} {row['effective_sample_size']:9.2f}"
    )
  print(json.dumps({"algorithms": rows}))


if __name__ == "__main__":
  main()
