"""AdamW or plain SGD behind a norm clip, guarded against non-finite gradients.

The settings are a dataclass that the learner's and the critic's configs extend.
Weights that are frozen get no update, no decay and no moments.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from rl_tpu import sharding
from rl_tpu.types import Estimate

HOST_MEMORY = "pinned_host"
"""JAX's name for memory of a host from which its devices copy directly."""
LogicalAxes = Any
"""A tree like the weights whose leaves are tuples of axis names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How gradients become updates."""

  kind: Literal["adamw", "sgd"] = "adamw"
  """AdamW, or the gradient times the learning rate: Score Centering's, without
  moments, decay or, with max_grad_norm infinite, clipping."""
  learning_rate: float = 2e-5
  """Peak, > 0 (AReaL: 2e-5; Score Centering with sgd: 1e-2)."""
  warmup_minibatches: int = 0
  """Optimizer steps of linear warm-up, >= 0; constant after. Step n of them
  (from 1) has n / (warmup_minibatches + 1) of the peak."""
  weight_decay: float = 0.05
  """Decoupled, on matrices only, >= 0 (AReaL: 0.05); 0 with sgd."""
  beta1: float = 0.9
  """Adam's first decay, in [0, 1)."""
  beta2: float = 0.95
  """Adam's second decay, in [0, 1) (AReaL: 0.95)."""
  epsilon: float = 1e-5
  """Added to the root of Adam's second moment, > 0 (AReaL: 1e-5)."""
  first_moment_dtype: Literal["float32", "bfloat16"] = "float32"
  """Of Adam's first moment; bfloat16 saves 2 bytes a weight. The second moment
  and the weights are float32."""
  moments: Literal["device", "host"] = "device"
  """Where Adam's moments lie between optimizer steps. In the memory of the
  devices' hosts they leave 8 bytes a weight of HBM to everything but the step
  itself, and travel there and back in every step."""
  max_grad_norm: float = 1.0
  """Gradients are scaled down to this global norm, > 0; may be infinite."""
  max_nonfinite_in_a_row: int = 3
  """Skipped updates in a row that stop the run, >= 1."""

  def __post_init__(self):
    sgd = self.kind == "sgd"
    for name, good, allowed in (
      ("kind", self.kind in ("adamw", "sgd"), "'adamw' or 'sgd'"),
      ("learning_rate", self.learning_rate > 0, "> 0"),
      ("warmup_minibatches", self.warmup_minibatches >= 0, ">= 0"),
      ("weight_decay", self.weight_decay >= 0, ">= 0"),
      ("beta1", 0 <= self.beta1 < 1, "in [0, 1)"),
      ("beta2", 0 <= self.beta2 < 1, "in [0, 1)"),
      ("epsilon", self.epsilon > 0, "> 0"),
      (
        "first_moment_dtype",
        self.first_moment_dtype in ("float32", "bfloat16"),
        "'float32' or 'bfloat16'",
      ),
      ("moments", self.moments in ("device", "host"), "'device' or 'host'"),
      ("weight_decay", not (sgd and self.weight_decay), "0 with kind 'sgd'"),
      (
        "moments",
        not (sgd and self.moments == "host"),
        "'device' with kind 'sgd', which has none",
      ),
      ("max_grad_norm", self.max_grad_norm > 0, "> 0"),
      ("max_nonfinite_in_a_row", self.max_nonfinite_in_a_row >= 1, ">= 1"),
    ):
      if not good:
        raise ValueError(
          f"{name} is {getattr(self, name)!r}; it must be {allowed}"
        )


class NonFiniteError(RuntimeError):
  """Several updates in a row had a gradient that is not finite."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
  """What an update changes: weights and optimizer, sharded alike."""

  params: Any
  optimizer: Any


class Optimizer:
  """Turns microbatches into one guarded step over a mesh."""

  def __init__(
    self,
    config: Config,
    mesh: jax.sharding.Mesh,
    abstract_params: Any,
    axes: LogicalAxes,
    *,
    learning_rate: optax.Schedule | None = None,
    is_frozen: Callable[[str], bool] = lambda path: False,
  ):
    """Builds the transformation and places its state.

    Args:
      config: its numbers.
      mesh: where weights and moments live.
      abstract_params: shapes and dtypes of the weights.
      axes: their logical axes.
      learning_rate: by optimizer step, in place of the config's.
      is_frozen: of a weight's key path, such as "['layers']['attention']...".

    Raises:
      ValueError: weights do not divide over the mesh.
    """
    self.config = config
    unguarded = _transformation(config, axes, learning_rate, is_frozen)
    if config.moments == "host":
      unguarded = self._fetching(unguarded)
    # The guard would apply the update after so many errors; `check_finite`
    # stops the run first.
    self._transformation = optax.apply_if_finite(
      unguarded, max_consecutive_errors=2**30
    )
    self.abstract = State(
      params=abstract_params,
      optimizer=jax.eval_shape(self._transformation.init, abstract_params),
    )
    params = sharding.tree_shardings(mesh, abstract_params, axes)
    self._moments_in_use = self._like_optimizer(params, mesh)
    moments = params
    if config.moments == "host":
      moments = jax.tree.map(lambda s: s.with_memory_kind(HOST_MEMORY), params)
    self.shardings = State(
      params=params, optimizer=self._like_optimizer(moments, mesh)
    )

  def _fetching(
    self, transformation: optax.GradientTransformation
  ) -> optax.GradientTransformation:
    """The same with moments on hosts, fetched for the update alone.

    The guard calls it in a branch that it takes once it has seen the gradient.
    Anywhere else the compiler would fetch them before the backward pass, and
    no memory would be saved.
    """

    def update(updates, state, params=None):
      state = jax.device_put(state, self._moments_in_use.inner_state)
      updates, state = transformation.update(updates, state, params)
      at_rest = self.shardings.optimizer.inner_state
      return updates, jax.device_put(state, at_rest)

    return optax.GradientTransformation(transformation.init, update)

  def _like_optimizer(self, moments: Any, mesh: jax.sharding.Mesh) -> Any:
    """Shardings of the optimizer's state where its moments have these."""
    whole = sharding.named(mesh)
    return optax.tree_map_params(
      self._transformation,
      lambda leaf, where: leaf if isinstance(leaf, optax.MaskedNode) else where,
      self.abstract.optimizer,
      moments,
      transform_non_params=lambda leaf: whole,
      is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )

  def abstract_state(self) -> State:
    """Shapes, dtypes and shardings of a state, for restoring one."""
    return sharding.placed(self.abstract, self.shardings)

  def init(self, params: Any) -> State:
    """A fresh state around a copy of these weights."""
    params = sharding.reshard(params, self.shardings.params)
    init = jax.jit(
      self._transformation.init, out_shardings=self.shardings.optimizer
    )
    return State(params=params, optimizer=init(params))

  def step(
    self,
    state: State,
    loss: Callable[[Any, Any], tuple[Estimate, dict[str, Estimate]]],
    microbatch: Callable[[jax.Array], Any],
    count: int,
  ) -> tuple[State, dict[str, Estimate], Any]:
    """One step on `count` microbatches, inside jit.

    The gradient is that of the sum of the totals over the sum of the counts,
    so how a minibatch is split changes nothing but memory.

    Args:
      state: before the step.
      loss: of (params, microbatch); an Estimate and metrics.
      microbatch: the m-th of them.
      count: how many there are.

    Returns:
      The state after it, the pooled metrics (`loss` among them), and the
      gradient before clipping.
    """

    def total(params, part):
      estimate, metrics = loss(params, part)
      return estimate.total, {"loss": estimate} | metrics

    gradient = jax.grad(total, has_aux=True)

    def accumulate(carry, m):
      new = gradient(state.params, microbatch(m))
      return jax.tree.map(jnp.add, carry, new), None

    zeros = jax.tree.map(
      lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
      jax.eval_shape(gradient, state.params, microbatch(jnp.int32(0))),
    )
    (summed, metrics), _ = jax.lax.scan(accumulate, zeros, jnp.arange(count))
    scale = Estimate(total=jnp.ones(()), count=metrics["loss"].count)
    mean = jax.tree.map(lambda g: g * scale.mean(empty=0.0), summed)
    updates, optimizer = self._transformation.update(
      mean, state.optimizer, state.params
    )
    params = optax.apply_updates(state.params, updates)
    return State(params=params, optimizer=optimizer), metrics, mean

  def skipped(self, state: State) -> tuple[jax.Array, jax.Array]:
    """Updates skipped as not finite: in a row until now, and in all."""
    guard: Any = state.optimizer
    return guard.notfinite_count, guard.total_notfinite

  def check_finite(self, in_a_row: int, what: str) -> None:
    """Stops the run after too many skipped updates.

    Raises:
      NonFiniteError: names `what` was updated.
    """
    if in_a_row >= self.config.max_nonfinite_in_a_row:
      raise NonFiniteError(
        f"{in_a_row} updates in a row of {what} had a gradient that is not "
        "finite; max_nonfinite_in_a_row allows "
        f"{self.config.max_nonfinite_in_a_row - 1}"
      )


def _transformation(
  config: Config,
  axes: LogicalAxes,
  learning_rate: optax.Schedule | None,
  is_frozen: Callable[[str], bool],
) -> optax.GradientTransformation:
  is_axes = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
  is_matrix = jax.tree.map(
    lambda names: any(name not in (None, "layers") for name in names),
    axes,
    is_leaf=is_axes,
  )
  labels = jax.tree_util.tree_map_with_path(
    lambda path, names: (
      "frozen" if is_frozen(jax.tree_util.keystr(path)) else "trained"
    ),
    axes,
    is_leaf=is_axes,
  )
  # The first step already has a rate: at 0 it would be lost.
  rate = learning_rate or optax.linear_schedule(
    config.learning_rate / (config.warmup_minibatches + 1),
    config.learning_rate,
    config.warmup_minibatches,
  )
  step = optax.sgd(rate)
  if config.kind == "adamw":
    step = optax.adamw(
      rate,
      b1=config.beta1,
      b2=config.beta2,
      eps=config.epsilon,
      mu_dtype=config.first_moment_dtype,
      weight_decay=config.weight_decay,
      mask=lambda params: jax.tree.map(
        lambda decays, leaf: (
          leaf if isinstance(leaf, optax.MaskedNode) else decays
        ),
        is_matrix,
        params,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
      ),
    )
  trained = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), step)
  return optax.partition(
    {"trained": trained, "frozen": optax.set_to_zero()}, labels
  )
