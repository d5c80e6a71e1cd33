r"""Draws one token a row, and says how likely it was.

    token = argmax_v (log q(v) + Gumbel noise),     logp = log q(token)

where q is softmax(logits / temperature) restricted to the tokens that top-k,
top-p and min-p keep, and renormalised: the distribution really sampled from,
which is what importance weights need. Temperature 0 takes the most likely
token, with logp 0. The head of q, its k most likely tokens, comes out of the
same step: score centering needs it, and later weights could not give it again.

The noise of the token at position t comes from the key

    fold_in(fold_in(fold_in(key(seed), prompt_index), member), t)

so a sample depends on the weights and on who asks, never on the slot, the
batch or the order of arrival. Everything is float32 and runs in the graph.

Axes: S slots, V vocabulary, K the head.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float, Int, UInt32

_REACHED = 1e-6
"""Mass by which float32 sums may miss top_p and still have reached it."""


Head = tuple[Int[Array, "S K"], Float[Array, "S K"]]
"""The most likely tokens in order, and their log q; -1 and -inf where the
support has fewer than K."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """How each slot samples: the fields of `types.Sampling`, one row a slot."""

  temperature: Float[Array, " S"]
  top_k: Int[Array, " S"]
  top_p: Float[Array, " S"]
  min_p: Float[Array, " S"]

  @property
  def filtered(self) -> Bool[Array, " S"]:
    """Whether a slot samples from a smaller support."""
    return (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)


def identity_keys(
  seed: UInt32[Array, " S"],
  prompt_index: UInt32[Array, " S"],
  member: UInt32[Array, " S"],
) -> UInt32[Array, "S 2"]:
  """Key data of each sequence; position is folded in when it samples.

  The generator is named, so that samples do not depend on JAX's flags.
  """

  def one(seed, prompt_index, member):
    key = jax.random.key(seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, prompt_index), member)
    return jax.random.key_data(key)

  return jax.vmap(one)(seed, prompt_index, member)


def sample(
  logits: Float[Array, "S V"],
  keys: UInt32[Array, "S 2"],
  positions: Int[Array, " S"],
  settings: Settings,
  live: Bool[Array, " S"],
  head_size: int = 0,
) -> tuple[Int[Array, " S"], Float[Array, " S"], Head | None]:
  """Samples the token at `positions` of every slot.

  Args:
    logits: of the next token, before temperature.
    keys: from `identity_keys`.
    positions: where the sampled token will stand in its sequence.
    settings: of each slot.
    live: slots whose result is used; filters sort the vocabulary, which is
      only done while a live slot asks for one.
    head_size: K, at most V; 0 leaves the head out.

  Returns:
    Tokens, their log-probability under the distribution sampled from, and that
    distribution's head.
  """
  greedy = settings.temperature == 0.0
  divisor = jnp.where(greedy, 1.0, settings.temperature)
  scaled = logits.astype(jnp.float32) / divisor[:, None]
  kept = jax.lax.cond(
    jnp.any(settings.filtered & live),
    lambda: jnp.where(_keep(scaled, settings), scaled, -jnp.inf),
    lambda: scaled,
  )
  noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(
    keys, positions, scaled.shape[1]
  )
  token = _argmax(kept + jnp.where(greedy[:, None], 0.0, noise))
  chosen = jnp.take_along_axis(kept, token[:, None], axis=-1)[:, 0]
  total = jax.nn.logsumexp(kept, axis=-1)
  logp = jnp.where(greedy, 0.0, chosen - total)
  head = _head(kept, total, greedy, head_size) if head_size else None
  return token, logp, head


def _head(
  kept: Float[Array, "S V"],
  total: Float[Array, " S"],
  greedy: Bool[Array, " S"],
  size: int,
) -> Head:
  """The `size` most likely tokens; ties go to the lower id, as in `_argmax`."""
  largest, ids = jax.lax.top_k(kept, size)
  certain = jnp.where(jnp.arange(size) == 0, 0.0, -jnp.inf)
  logp = jnp.where(greedy[:, None], certain, largest - total[:, None])
  return jnp.where(logp > -jnp.inf, ids, -1), logp


def _gumbel(
  key_data: UInt32[Array, " 2"], position: Int[Array, ""], size: int
) -> Float[Array, " V"]:
  """Standard Gumbel noise for the tokens of one place.

  Both words of each Threefry block are used, which halves what is the largest
  part of sampling on a CPU. Uniforms are odd multiples of 2^-24: never 0 or 1.
  """
  key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
  key = jax.random.key_data(jax.random.fold_in(key, position))
  bits = threefry_2x32(key, jnp.arange(size, dtype=jnp.uint32))
  uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
  return -jnp.log(-jnp.log(uniform))


def _argmax(scores: Float[Array, "S V"]) -> Int[Array, " S"]:
  """Index of each row's largest score, the lowest of several.

  Two plain reductions: XLA's argmax neither vectorises on CPUs nor keeps the
  noise from being computed again inside it, and takes five times as long.
  """
  scores = jax.lax.optimization_barrier(scores)
  largest = scores.max(axis=-1, keepdims=True)
  last = scores.shape[1] - 1
  place = jnp.where(scores == largest, jnp.arange(last + 1), last)
  return place.min(axis=-1).astype(jnp.int32)


def _keep(
  scaled: Float[Array, "S V"], settings: Settings
) -> Bool[Array, "S V"]:
  """Tokens that survive top-k, then top-p of what is left, then min-p.

  The most likely token always survives. Ties are broken by token id, so k
  means k.
  """
  order = jnp.argsort(-scaled, axis=-1, stable=True)
  ranked = jnp.take_along_axis(scaled, order, axis=-1)
  rank = jnp.arange(scaled.shape[1])
  top_k = jnp.where(settings.top_k > 0, settings.top_k, scaled.shape[1])
  keep = rank < top_k[:, None]
  mass = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
  before = jnp.cumsum(mass, axis=-1) - mass
  top_p = jnp.where(settings.top_p < 1.0, settings.top_p, jnp.inf)
  keep &= before < top_p[:, None] - _REACHED
  keep &= mass >= settings.min_p[:, None] * mass[:, :1]
  keep |= rank == 0
  rows = jnp.arange(scaled.shape[0])[:, None]
  return jnp.zeros_like(keep).at[rows, order].set(keep)
