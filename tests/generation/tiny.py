"""A random 2-layer model, and what a learner would say of its samples."""

import jax
import jax.numpy as jnp
import numpy as np

from rl_tpu import ops
from rl_tpu.models import transformer

POLICY = transformer.Policy(
  transformer.Config(
    vocab_size=64,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=32,
  )
)
INIT = jax.jit(POLICY.init)


@jax.jit
def _forward(params, tokens, temperature):
  positions = jnp.arange(tokens.shape[1])[None]
  hidden = POLICY.hidden(params, tokens, positions, jnp.zeros_like(tokens))
  logits = POLICY.logits(params, hidden)
  logp = ops.token_logp(logits, tokens, temperature)
  return logp, jax.nn.log_softmax(logits / temperature)


def _scored(params, request, sampled):
  tokens = np.zeros((1, 24), np.int32)
  context = (*request.tokens, *sampled)
  tokens[0, : len(context)] = context
  logp, whole = _forward(params, tokens, request.sampling.temperature)
  places = slice(len(request.tokens), len(context))
  before = slice(places.start - 1, places.stop - 1)
  return np.asarray(logp[0, places]), np.asarray(whole[0, before])


def full_forward_logp(params, request, sampled):
  """The learner's logp of a request's sampled tokens."""
  return _scored(params, request, sampled)[0]


def full_forward_head(params, request, sampled, size):
  """The learner's most likely tokens at each sampled one: (ids, logp)."""
  whole = _scored(params, request, sampled)[1]
  ids = np.argsort(-whole, axis=-1, kind="stable")[:, :size]
  return ids, np.take_along_axis(whole, ids, axis=-1)
