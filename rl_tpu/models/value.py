"""The value model: the policy's decoder with a scalar head.

It has parameters of its own, started from a policy's (SAO, arXiv:2607.07508,
section 3). V of token t is the return to expect from the state before it, so it
is read where the logits of token t are: at position t - 1. For the first token
of a turn that is the last token of the observation, which the model has read.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rl_tpu import ops
from rl_tpu.models import transformer
from rl_tpu.types import Batch

_HEAD_STD = 0.02
"""Of the head's first weights, beside a bias of 0."""


@dataclasses.dataclass(frozen=True)
class ValueModel:
  """A critic as functions of (params, batch); hashable, holds no arrays.

  The tree of weights is {"decoder": the policy's without its output head,
  "head": {"weight": [D], "bias": []}}.
  """

  policy: transformer.Policy

  def init(self, policy_params: transformer.Params, key: jax.Array) -> Any:
    """The policy's weights with a fresh head."""
    size = self.policy.config.d_model
    return {
      "decoder": _without_head(policy_params),
      "head": {
        "weight": _HEAD_STD * jax.random.normal(key, (size,)),
        "bias": jnp.zeros(()),
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
      "head": {"weight": (None,), "bias": ()},
    }

  def values(self, params: Any, batch: Batch) -> Float[Array, "R T"]:
    """V of each token in float32; meaningless off the action mask."""
    hidden = self.policy.hidden(
      params["decoder"], batch.tokens, batch.positions, batch.trajectory_ids
    )
    head = params["head"]
    predicted = hidden.astype(jnp.float32) @ head["weight"] + head["bias"]
    return ops.shift_to_tokens(predicted)


def _without_head(params: transformer.Params) -> transformer.Params:
  return {name: part for name, part in params.items() if name != "head"}
