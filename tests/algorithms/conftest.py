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
def gradient():
  """A function giving d loss.total / d target_logp of the actions."""

  def gradient(module, outputs, batch, config):
    def total(target_logp):
      live = dataclasses.replace(outputs, target_logp=target_logp)
      return module.loss(live, batch, config)[0].total

    return jax.grad(total)(outputs.target_logp)[0, 1:]

  return gradient
