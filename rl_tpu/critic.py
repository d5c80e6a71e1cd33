"""The critic: a value model with its own weights, optimizer and update count.

SAO (arXiv:2607.07508, section 3.3) updates it K times for each policy update,
at a higher rate, with its attention frozen: gradients of a value loss are large
there and unstable. The loss, the returns and K are the algorithm's
(`value_loss`, `returns`, `critic_updates`, `freeze`), and so is what the value
head gives: the bins of its config's `value_support`, or one number where that
is None or missing. Everything else is here.

One update is one optimizer step on the whole batch, in the learner's
microbatches.
"""

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from rl_tpu import ops, optimizer
from rl_tpu.models import transformer
from rl_tpu.models.value import ValueModel
from rl_tpu.types import Batch, Estimate, PolicyOutputs

_ATTENTION = "['attention']"
_FEED_FORWARD = "['feed_forward']"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(optimizer.Config):
  """The critic's optimizer, and when it starts."""

  learning_rate: float = 5e-6
  """Peak, > 0 (SAO: 5e-6, five times the policy's)."""
  warmup_minibatches: int = 10
  """Optimizer steps of linear warm-up (SAO: "10-step warmup")."""
  weight_decay: float = 0.0
  """Decoupled, on matrices only, >= 0; SAO does not state one."""
  pretraining_batches: int = 0
  """Batches sampled by the starting policy that the critic alone learns from
  before the run, >= 0. SAO insists on them and gives no number."""
  only_batches: int = 0
  """First batches of the run that leave the policy as it is, >= 0: the other
  reading of SAO's warm-up."""

  def __post_init__(self):
    super().__post_init__()
    for name in ("pretraining_batches", "only_batches"):
      if getattr(self, name) < 0:
        raise ValueError(f"{name} is {getattr(self, name)}; it must be >= 0")


class Critic:
  """Values and their updates, as functions for the learner's jit."""

  def __init__(
    self,
    policy: transformer.Policy,
    algorithm: ModuleType,
    algorithm_config: Any,
    config: Config,
    mesh: jax.sharding.Mesh,
  ):
    """Builds the optimizer; nothing is computed yet.

    Raises:
      ValueError: weights do not divide over the mesh.
    """
    self.model = ValueModel(
      policy, getattr(algorithm_config, "value_support", None)
    )
    self.config = config
    self.updates: int = algorithm_config.critic_updates
    self._algorithm = algorithm
    self._algorithm_config = algorithm_config
    frozen = algorithm_config.freeze == "attention"
    self.optimizer = optimizer.Optimizer(
      config,
      mesh,
      self.model.abstract_params(),
      self.model.logical_axes(),
      is_frozen=lambda path: frozen and _ATTENTION in path,
    )

  def init(self, policy_params: Any, key: jax.Array) -> optimizer.State:
    """Starts from a policy's weights."""
    init = jax.jit(
      self.model.init, out_shardings=self.optimizer.shardings.params
    )
    return self.optimizer.init(init(policy_params, key))

  def returns(self, batch: Batch, outputs: PolicyOutputs) -> Array:
    """The targets of the whole batch, [R, T]."""
    return self._algorithm.returns(batch, outputs, self._algorithm_config)

  def step(
    self, state: optimizer.State, microbatch, count: int
  ) -> tuple[optimizer.State, dict[str, Estimate]]:
    """One update on the whole batch, inside jit.

    Args:
      state: before it.
      microbatch: the m-th Batch, with `returns` and the `values` before this
        batch's updates.
      count: microbatches.
    """

    def loss(params, batch: Batch):
      values, logits = self.model.predict(params, batch)
      outputs = PolicyOutputs(
        target_logp=batch.behavior_logp, values=values, value_logits=logits
      )
      return self._algorithm.value_loss(outputs, batch, self._algorithm_config)

    state, metrics, gradient = self.optimizer.step(
      state, loss, microbatch, count
    )
    metrics = {f"critic_{name}": value for name, value in metrics.items()}
    return state, metrics | _norms(gradient)


def explained_variance(
  values: Float[Array, "R T"], returns: Float[Array, "R T"], mask: Array
) -> Estimate:
  """1 - Var(R - V) / Var(R) over the batch's action tokens (SAO, figure 4a).

  Not counted where the returns do not vary.
  """
  _, spread = ops.masked_mean_std(returns, mask)
  _, left = ops.masked_mean_std(returns - values, mask)
  varies = spread > 0
  share = 1.0 - jnp.square(left / jnp.where(varies, spread, 1.0))
  return Estimate(
    total=jnp.where(varies, share, 0.0), count=varies.astype(jnp.float32)
  )


def _norms(gradient: Any) -> dict[str, Estimate]:
  """Gradient norms of the whole critic and by group of weights."""
  groups: dict[str, list] = {
    "critic_grad_norm": [],
    "critic_grad_norm_attention": [],
    "critic_grad_norm_feed_forward": [],
    "critic_grad_norm_other": [],
  }
  for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
    key = jax.tree_util.keystr(path)
    kind = "other"
    if _ATTENTION in key:
      kind = "attention"
    elif _FEED_FORWARD in key:
      kind = "feed_forward"
    groups["critic_grad_norm"].append(leaf)
    groups[f"critic_grad_norm_{kind}"].append(leaf)
  return {
    name: Estimate(total=optax.tree.norm(leaves), count=jnp.ones(()))
    for name, leaves in groups.items()
  }
