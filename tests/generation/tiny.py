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
def _logp(params, tokens, temperature):
  positions = jnp.arange(tokens.shape[1])[None]
  hidden = POLICY.hidden(params, tokens, positions, jnp.zeros_like(tokens))
  return ops.token_logp(POLICY.logits(params, hidden), tokens, temperature)


def full_forward_logp(params, request, sampled):
  """The learner's logp of a request's sampled tokens."""
  start = len(request.tokens)
  tokens = np.zeros((1, 24), np.int32)
  tokens[0, :start] = request.tokens
  tokens[0, start : start + len(sampled)] = sampled
  logp = np.asarray(_logp(params, tokens, request.sampling.temperature))
  return logp[0, start : start + len(sampled)]
