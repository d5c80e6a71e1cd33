"""One row of known numbers: a prompt token, then one action per number."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from rl_tpu.types import Batch, PolicyOutputs


@pytest.fixture
def build():
  """A function from lists of numbers to (outputs, batch)."""

  def row(values, fill):
    return jnp.asarray([[fill, *values]])

  def build(
    target, behavior, advantages, proximal=None, token_version=None, version=0
  ):
    length = len(target) + 1
    zeros = jnp.zeros((1, length), jnp.int32)
    versions = token_version or [version] * len(target)
    batch = Batch(
      tokens=zeros,
      trajectory_ids=zeros,
      positions=jnp.arange(length)[None],
      action_mask=row([True] * len(target), False),
      behavior_logp=row(behavior, 0.0),
      token_version=row(versions, -1),
      rewards=zeros.astype(jnp.float32),
      temperature=jnp.ones((1, length)),
      truncated=jnp.zeros(1, bool),
      group_ids=jnp.zeros(1, jnp.int32),
      version=jnp.asarray(version),
      advantages=row(advantages, 0.0),
    )
    outputs = PolicyOutputs(
      target_logp=row(target, 0.0),
      proximal_logp=None if proximal is None else row(proximal, 0.0),
    )
    return outputs, batch

  return build


@pytest.fixture
def one_prefix(build):
  """A function from logits of one prefix to (outputs, batch).

  Every token of the vocabulary is taken once, in order; its advantage is the
  place to put its probability. `head` are the sampler's most likely tokens.
  """

  def one_prefix(target, behavior, advantages, head, proximal=None, **kwargs):
    target, behavior, proximal = jax.tree.map(
      lambda logits: jax.nn.log_softmax(jnp.asarray(logits)),
      (target, behavior, proximal),
      is_leaf=lambda x: isinstance(x, list),
    )
    head = jnp.asarray(head)

    def column(x):
      return jnp.concatenate([jnp.zeros_like(x[:1]), x])[None]

    def repeat(x):
      return jnp.broadcast_to(x[head], (1, len(x) + 1, len(head)))

    outputs, batch = build(
      [0.0] * len(target), [0.0] * len(target), [], **kwargs
    )
    outputs = PolicyOutputs(
      target_logp=column(target),
      target_topk_logp=repeat(target),
      proximal_logp=None if proximal is None else column(proximal),
      proximal_topk_logp=None if proximal is None else repeat(proximal),
    )
    batch = dataclasses.replace(
      batch,
      behavior_logp=column(behavior),
      advantages=column(advantages),
      behavior_topk_ids=repeat(jnp.arange(len(target))),
      behavior_topk_logp=repeat(behavior),
    )
    return outputs, batch

  return one_prefix


@pytest.fixture
def logit_gradient(one_prefix):
  """A function giving (loss.total, its gradient by the target's logits)."""

  def logit_gradient(module, config, target, *args, **kwargs):
    def total(target):
      outputs, batch = one_prefix(target, *args, **kwargs)
      return module.loss(outputs, batch, config)[0].total

    return jax.value_and_grad(total)(jnp.asarray(target))

  return logit_gradient


@pytest.fixture
def gradient():
  """A function giving d loss.total / d target_logp of the actions."""

  def gradient(module, outputs, batch, config):
    def total(target_logp):
      live = dataclasses.replace(outputs, target_logp=target_logp)
      return module.loss(live, batch, config)[0].total

    return jax.grad(total)(outputs.target_logp)[0, 1:]

  return gradient
