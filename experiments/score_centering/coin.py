"""A problem that is half decided before most of its tokens are taken.

After a prompt a coin falls, which the policy sees. Then it takes 24 tokens of
16 (or of more), a quarter of which are right for this prompt; the reward is
their share, but 0 where the coin fell badly. So the coin, and not the tokens,
decides most of it, as the hard step of a long solution does: an advantage that
is 0 in the mean of a group is above it at every prefix after a good coin, and
below it after a bad one. No single token changes the reward by more than 1/24.
There, by equation 3, drift (reward times the gap of sampler and learner)
outweighs signal; an answer of six letters, each of which can spoil it, shows
nothing of the kind.

The policy is a vector for each prompt and coin times a matrix, in place of a
language model: mismatch is made by `models.quantization` as for one, the cache
being the vector that the matrix reads. Losses are those of `rl_tpu.algorithms`,
of trajectories that the sampler drew. Plain SGD, no clipping, as in the paper.
"""

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rl_tpu import algorithms
from rl_tpu.figures import Row
from rl_tpu.models import quantization
from rl_tpu.types import Batch, PolicyOutputs

PROMPTS, TOKENS, VOCABULARY = 8, 24, 16
WIDTH = 64
GROUPS, MEMBERS = 16, 8
RATE = 0.5
"""Of SGD, unless a study says another."""
Params = dict[str, Array]


class Curve(NamedTuple):
  """Of one run, by step."""

  reward: Float[Array, " n"]
  """Of the sampler's trajectories, 1 where all tokens are right: the share of
  those with a good coin."""
  entropy: Float[Array, " n"]
  """Of the learner's policy, nats a token."""
  engine_mismatch: Float[Array, " n"]
  """Mean |log target - log behavior| of the tokens taken."""


def init(key: jax.Array, vocabulary: int) -> tuple[Params, Bool[Array, "P V"]]:
  """Weights, and which tokens are right for each prompt."""
  states, matrix, right = jax.random.split(key, 3)
  params = {
    "embedding": jax.random.normal(states, (2 * PROMPTS, WIDTH)),
    "head": 1.5 * WIDTH**-0.5 * jax.random.normal(matrix, (WIDTH, vocabulary)),
  }
  first = jnp.arange(vocabulary) < vocabulary // 4
  drawn = jax.vmap(jax.random.permutation, (0, None))(
    jax.random.split(right, PROMPTS), first
  )
  return params, drawn


def logp(
  params: Params, states: Int[Array, " R"], cache: quantization.Grid = "none"
) -> Float[Array, "R V"]:
  """Of every token in each state; the state is 2 * prompt + coin."""
  entries = params["embedding"][states][:, None]  # of one head
  vectors = quantization.snap_cache(entries, cache)[:, 0]
  return jax.nn.log_softmax(vectors @ params["head"])


def run(
  module: ModuleType,
  config: Any,
  mismatch: quantization.Config,
  seed: Int[Array, ""],
  steps: int,
  *,
  bias: float = 0.0,
  vocabulary: int = VOCABULARY,
  rate: float = RATE,
) -> Curve:
  """Trains from scratch; traceable, the seed too.

  Args:
    module: of the loss, in `rl_tpu.algorithms`.
    config: of its kind; a head it reads is the whole vocabulary.
    mismatch: of the sampler; its noise is drawn anew for each seed.
    seed: of weights, noise and sampling.
    steps: of one batch each.
    bias: added to what each trajectory earns; not in the curve's reward.
    vocabulary: tokens to choose from.
    rate: of SGD.
  """
  start, noisy, sampling = jax.random.split(jax.random.key(seed), 3)
  begun, right = init(start, vocabulary)
  noise = _noise(begun, mismatch, noisy)

  def step(carry, number):
    params, served = carry
    refreshes = number % mismatch.refresh_period == 0
    served = jax.tree.map(
      lambda new, old: jnp.where(refreshes, new, old), params, served
    )
    sampler = quantization.snap_weights(served, mismatch, noise)
    key = jax.random.fold_in(sampling, number)
    batch, states, reward = _sample(sampler, mismatch.kv, right, key)
    earned = batch.rewards.at[:, -1].add(bias)
    batch = dataclasses.replace(batch, rewards=earned)
    outputs = _outputs(params, batch, states)
    advantages = module.advantages(batch, outputs, config)
    batch = dataclasses.replace(batch, advantages=advantages)

    def loss(params):
      outputs = _outputs(params, batch, states)
      return module.loss(outputs, batch, config)[0].mean(empty=0.0)

    gap = jnp.abs(outputs.target_logp - batch.behavior_logp)
    slopes = jax.grad(loss)(params)
    moved = jax.tree.map(lambda w, g: w - rate * g, params, slopes)
    every = logp(moved, jnp.arange(2 * PROMPTS))
    entropy = -(jnp.exp(every) * every).sum(-1).mean()
    mean_gap = gap.sum() / batch.action_mask.sum()
    return (moved, served), Curve(reward, entropy, mean_gap)

  return jax.lax.scan(step, (begun, begun), jnp.arange(steps))[1]


def rows_of(
  loss: tuple[str, dict[str, Any]],
  mismatch: quantization.Config,
  seeds: Sequence[int],
  steps: int,
  parts: int,
  **options: Any,
) -> list[Row]:
  """Runs each seed; the means over equal parts of its curve.

  Args:
    loss: name and fields, as of `methods.loss`.
    mismatch: of the sampler.
    seeds: of runs, side by side.
    steps: of each, a multiple of `parts`.
    parts: rows of each.
    **options: of `run`.
  """
  name, fields = loss
  module = algorithms.get(name)
  config = module.Config(**fields)

  def one(seed):
    return run(module, config, mismatch, seed, steps, **options)

  curves = jax.jit(jax.vmap(one))(jnp.asarray(seeds))
  length = steps // parts
  means = jax.tree.map(
    lambda x: np.asarray(x).reshape(len(seeds), parts, length).mean(-1), curves
  )
  return [
    {"seed": seed, "batch": (part + 1) * length}
    | {name: float(getattr(means, name)[i, part]) for name in Curve._fields}
    for i, seed in enumerate(seeds)
    for part in range(parts)
  ]


def _noise(params: Params, mismatch: quantization.Config, key) -> Params | None:
  """As `quantization.draw_noise`, from a key that may be traced."""
  if not mismatch.weight_noise:
    return None
  keys = dict(zip(params, jax.random.split(key, len(params)), strict=True))
  return {
    name: mismatch.weight_noise * w * jax.random.normal(keys[name], w.shape)
    for name, w in params.items()
  }


def _sample(
  sampler: Params, cache: quantization.Grid, right: Bool[Array, "P V"], key
) -> tuple[Batch, Int[Array, " R"], Float[Array, ""]]:
  """A batch, its states, and its mean reward, 1 at best."""
  rows = GROUPS * MEMBERS
  prompts, coins, tokens = jax.random.split(key, 3)
  asked = jax.random.randint(prompts, (GROUPS,), 0, PROMPTS).repeat(MEMBERS)
  coin = jax.random.bernoulli(coins, 0.5, (rows,)).astype(int)
  states = 2 * asked + coin
  every = logp(sampler, states, cache)
  # The tokens whose cumulated probability is below a uniform number: a number
  # for each draw, where `jax.random.categorical` draws one for each token.
  cumulated = jnp.cumsum(jnp.exp(every), axis=-1)[:, None, :-1]
  drawn = jax.random.uniform(tokens, (rows, TOKENS, 1))
  taken = (drawn > cumulated).sum(-1)
  share = jnp.take_along_axis(right[asked], taken, -1).mean(-1)
  reward = share.sum(where=coin == 1) / jnp.maximum(coin.sum(), 1)
  return _batch(taken, every, coin * share), states, reward


def _batch(
  taken: Int[Array, "R n"], every: Float[Array, "R V"], reward: Array
) -> Batch:
  """Trajectories of one prompt token and those taken."""
  rows, count = taken.shape
  shape = (rows, count + 1)
  vocabulary = every.shape[-1]
  mask = jnp.broadcast_to(jnp.arange(count + 1) > 0, shape)
  index = jnp.arange(rows)

  def everywhere(x):
    return jnp.broadcast_to(x, (*shape, vocabulary))

  return Batch(
    tokens=_after_prompt(taken),
    trajectory_ids=jnp.broadcast_to(index[:, None], shape),
    positions=jnp.broadcast_to(jnp.arange(count + 1), shape),
    action_mask=mask,
    behavior_logp=_after_prompt(jnp.take_along_axis(every, taken, -1)),
    token_version=jnp.where(mask, 0, -1),
    rewards=jnp.zeros(shape).at[:, -1].set(reward),
    temperature=jnp.ones(shape),
    truncated=jnp.zeros(rows, bool),
    group_ids=index // MEMBERS,
    version=jnp.asarray(0),
    behavior_topk_ids=everywhere(jnp.arange(vocabulary)),
    behavior_topk_logp=everywhere(every[:, None]),
  )


def _outputs(
  params: Params, batch: Batch, states: Int[Array, " R"]
) -> PolicyOutputs:
  """What the learner makes of a batch."""
  every = logp(params, states)
  target = _after_prompt(
    jnp.take_along_axis(every, batch.tokens[:, 1:], axis=-1)
  )
  shape = batch.behavior_topk_logp.shape
  return PolicyOutputs(
    target_logp=target,
    proximal_logp=jax.lax.stop_gradient(target),
    target_topk_logp=jnp.broadcast_to(every[:, None], shape),
  )


def _after_prompt(x: Array) -> Array:
  """Entries for the tokens taken; the first place is the prompt's."""
  return jnp.pad(x, ((0, 0), (1, 0)))
