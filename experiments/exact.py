"""Losses in expectation: every token of a small vocabulary, at known prefixes.

A row is a prefix; each of its V entries is one token that could be taken, whose
advantage is multiplied by the probability of taking it. The loss of such a
batch is the expected loss, its gradient the expected gradient: what a method
does, without the noise of sampling. The sampler's head is the whole vocabulary.
"""

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_tpu.types import Batch, PolicyOutputs


def batch_of(
  target: Float[Array, "P V"],
  behavior: Float[Array, "P V"],
  advantages: Float[Array, "P V"],
) -> tuple[PolicyOutputs, Batch]:
  """A batch of all tokens at P prefixes, and what a learner makes of it.

  Args:
    target: logits of the policy being differentiated.
    behavior: logits of the policy that sampled.
    advantages: of each token, times the probability of being there and taking
      it.
  """
  prefixes, size = target.shape
  target, behavior = jax.nn.log_softmax(target), jax.nn.log_softmax(behavior)
  shape = (prefixes, size + 1)

  def after_prompt(x, fill=0.0):
    """Entries for the tokens; the first place of a row is the prompt's."""
    return jnp.pad(x, ((0, 0), (1, 0)), constant_values=fill)

  def everywhere(x):
    return jnp.broadcast_to(x[:, None], (*shape, size))

  mask = jnp.broadcast_to(jnp.arange(size + 1) > 0, shape)
  rows = jnp.arange(prefixes)
  batch = Batch(
    tokens=after_prompt(jnp.broadcast_to(jnp.arange(size), target.shape), 0),
    trajectory_ids=jnp.broadcast_to(rows[:, None], shape),
    positions=jnp.broadcast_to(jnp.arange(size + 1), shape),
    action_mask=mask,
    behavior_logp=after_prompt(behavior),
    token_version=jnp.where(mask, 0, -1),
    rewards=jnp.zeros(shape),
    temperature=jnp.ones(shape),
    truncated=jnp.zeros(prefixes, bool),
    group_ids=rows,
    version=jnp.asarray(0),
    behavior_topk_ids=everywhere(
      jnp.broadcast_to(jnp.arange(size), target.shape)
    ),
    behavior_topk_logp=everywhere(behavior),
    advantages=after_prompt(advantages),
  )
  outputs = PolicyOutputs(
    target_logp=after_prompt(target),
    proximal_logp=jax.lax.stop_gradient(after_prompt(target)),
    target_topk_logp=everywhere(target),
  )
  return outputs, batch


def gradient(
  module: ModuleType,
  config: Any,
  target: Float[Array, "P V"],
  behavior: Float[Array, "P V"],
  advantages: Float[Array, "P V"],
) -> Float[Array, "P V"]:
  """Of the expected loss by the target's logits; see `batch_of`."""

  def total(logits):
    outputs, batch = batch_of(logits, behavior, advantages)
    return module.loss(outputs, batch, config)[0].total

  return jax.grad(total)(target)


def push(
  module: ModuleType,
  config: Any,
  ratios: Float[Array, " n"],
  advantage: float,
  moved: float = 1.0,
  beside: Float[Array, " n"] | float = 1.0,
) -> Float[Array, " n"]:
  """How a loss pushes a token's log-probability, by target/behavior.

  Minus the loss's derivative, for one token whose behavior probability is 0.1.
  Its trajectory has one more token, whose advantage is 0.

  Args:
    module: of the loss, in `rl_tpu.algorithms`.
    config: of its kind.
    ratios: target/behavior.
    advantage: of the token.
    moved: proximal/behavior.
    beside: target/behavior of the other token.
  """
  other = jnp.broadcast_to(jnp.log(0.1 * jnp.asarray(beside)), ratios.shape)

  def total(target_logp):
    logits = jnp.zeros((len(ratios), 2))
    advantages = logits.at[:, 0].set(advantage)
    outputs, batch = batch_of(logits, logits, advantages)
    behavior = jnp.full_like(outputs.target_logp, jnp.log(0.1))
    outputs = dataclasses.replace(
      outputs,
      target_logp=behavior.at[:, 1:].set(
        jnp.stack([target_logp, other], axis=1)
      ),
      proximal_logp=behavior + jnp.log(moved),
    )
    batch = dataclasses.replace(batch, behavior_logp=behavior)
    return module.loss(outputs, batch, config)[0].total

  return -jax.grad(total)(jnp.log(0.1 * ratios))
