"""The value model: the policy's decoder with a head for the value.

It has parameters of its own, started from a policy's (SAO, arXiv:2607.07508,
section 3). V of token t is the return to expect from the state before it, so it
is read where the logits of token t are: at position t - 1. For the first token
of a turn that is the last token of the observation, which the model has read.

The head gives one number, or the logits of a histogram whose mean V is
(`ops.hl_gauss`). Those are [R, T, B] with far fewer bins than the hidden states
have entries, so the head is applied to a whole microbatch at once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_tpu import ops, sharding
from rl_tpu.models import transformer
from rl_tpu.types import Batch

_HEAD_STD = 0.02
"""Of the head's first weights, beside a bias of 0."""


@dataclasses.dataclass(frozen=True)
class ValueModel:
  """A critic as functions of (params, batch); hashable, holds no arrays.

  The tree of weights is {"decoder": the policy's without its output head,
  "head": {"weight": [D], "bias": []}}, or [D, B] and [B] with a histogram.
  """

  policy: transformer.Policy
  support: ops.Support | None = None
  """Of the histogram; None: the value is one number."""

  @property
  def _bins(self) -> tuple[int, ...]:
    """Shape of what the head says of one position."""
    return () if self.support is None else (self.support.bins,)

  def init(self, policy_params: transformer.Params, key: jax.Array) -> Any:
    """The policy's weights with a fresh head."""
    size = self.policy.config.d_model
    return {
      "decoder": _without_head(policy_params),
      "head": {
        "weight": _HEAD_STD * jax.random.normal(key, (size, *self._bins)),
        "bias": jnp.zeros(self._bins),
      },
    }

  def abstract_params(self) -> Any:
    """Shapes and dtypes of the weights."""
    return jax.eval_shape(
      self.init, self.policy.abstract_params(), jax.random.key(0)
    )

  def logical_axes(self) -> Any:
    """Logical axes of each weight."""
    return {
      "decoder": _without_head(self.policy.logical_axes()),
      "head": {
        "weight": (None, *(None for _ in self._bins)),
        "bias": tuple(None for _ in self._bins),
      },
    }

  def values(self, params: Any, batch: Batch) -> Float[Array, "R T"]:
    """V of each token in float32; meaningless off the action mask."""
    return self.predict(params, batch)[0]

  def predict(
    self, params: Any, batch: Batch
  ) -> tuple[Float[Array, "R T"], Float[Array, "R T B"] | None]:
    """V of each token, and the logits of its histogram if there is one."""
    hidden = self.policy.hidden(
      params["decoder"], batch.tokens, batch.positions, batch.trajectory_ids
    )
    head = params["head"]
    predicted = hidden.astype(jnp.float32) @ head["weight"] + head["bias"]
    rest = (None,) * (predicted.ndim - 1)
    predicted = sharding.constrain(predicted, "rows", *rest)
    if self.support is None:
      return ops.shift_to_tokens(predicted), None
    values = ops.histogram_mean(predicted, self.support)
    each_bin = jax.vmap(ops.shift_to_tokens, in_axes=-1, out_axes=-1)
    return ops.shift_to_tokens(values), each_bin(predicted)


def _without_head(params: transformer.Params) -> transformer.Params:
  return {name: part for name, part in params.items() if name != "head"}
