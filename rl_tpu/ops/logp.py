"""Log-probabilities of tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rl_tpu.ops.rows import continues, shift_to_logits, shift_to_tokens


def next_tokens(
  tokens: Int[Array, "R T"], trajectory_ids: Int[Array, "R T"] | None = None
) -> Int[Array, "R T"]:
  """The token that the logits at each position predict, -1 for none.

  The last position of a trajectory, and padding, predict nothing. Without
  `trajectory_ids` each row is one trajectory.
  """
  if trajectory_ids is None:
    trajectory_ids = jnp.zeros_like(tokens)
  return jnp.where(continues(trajectory_ids), shift_to_logits(tokens, -1), -1)


def label_logp(
  logits: Float[Array, "R T V"],
  labels: Int[Array, "R T"],
  temperature: Float[Array, "R T"] | float,
) -> Float[Array, "R T"]:
  """Log softmax(logits / temperature)[label] in f32; 0 where label is -1.

  Unshifted, so that a learner may call it a chunk of positions at a time; it
  keeps two reductions over V, never the [R,T,V] log-probabilities. Logits
  without a label are not read: NaN there stays there.
  """
  used = labels >= 0
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  logits = jnp.where(used[..., None], logits, 0.0)
  logits = logits / jnp.broadcast_to(temperature, labels.shape)[..., None]
  index = jnp.where(used, labels, 0)[..., None]
  picked = jnp.take_along_axis(logits, index, axis=-1)[..., 0]
  return jnp.where(used, picked - jax.nn.logsumexp(logits, axis=-1), 0.0)


def token_logp(
  logits: Float[Array, "R T V"],
  tokens: Int[Array, "R T"],
  temperature: Float[Array, "R T"] | float,
  trajectory_ids: Int[Array, "R T"] | None = None,
) -> Float[Array, "R T"]:
  """Log-probability of each token given those before it, aligned to `tokens`.

  Entry t comes from `logits[t - 1] / temperature[t]`. The first token of each
  trajectory, and padding, has 0. Temperatures are > 0.
  """
  labels = next_tokens(tokens, trajectory_ids)
  temperature = jnp.broadcast_to(jnp.asarray(temperature), tokens.shape)
  temperature = shift_to_logits(temperature, 1.0)
  return shift_to_tokens(label_logp(logits, labels, temperature))


def known_logp(
  logp: Float[Array, "R T"], otherwise: Float[Array, "R T"]
) -> Float[Array, "R T"]:
  """`logp`, or the constant `otherwise` where it is NaN or infinite.

  An engine may have no log-probability to report for a token of which it is
  nearly sure. With the numerator of a ratio as `otherwise` the token counts
  as on-policy: ratio 1, gradient kept.
  """
  return jnp.where(jnp.isfinite(logp), logp, jax.lax.stop_gradient(otherwise))
