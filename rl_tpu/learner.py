r"""The learner: one jitted update over a mesh, exact under micro-batching.

A batch is consumed once. Before its first minibatch one forward pass without
gradients gives the proximal logp (weights before the update) if the algorithm
requires it, and the advantages are computed over the whole batch. Then each
minibatch is one optimizer step. Its gradient is

  grad sum_m total_m / sum_m count_m      over its microbatches m,

so splitting a minibatch differently changes nothing but memory (Estimates add;
the division happens once). Updates whose gradient is not finite are skipped
and counted; several in a row stop the run.

Rows are laid out [minibatches, microbatches, rows, T]; `rows` is split over
the (data, fsdp) axes of the mesh.
"""

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rl_tpu import algorithms, ops, sharding
from rl_tpu.models import transformer
from rl_tpu.types import Batch, Estimate, PolicyOutputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """How a batch becomes optimizer steps."""

  minibatches: int = 1
  """Optimizer steps per batch, >= 1 (AReaL: 4)."""
  microbatch_rows: int = 8
  """Rows of one backward pass, >= 1; a multiple of data * fsdp."""
  row_length: int = 128
  """Tokens of a packed row, >= 2; no trajectory may be longer."""
  learning_rate: float = 2e-5
  """Peak, > 0 (AReaL: 2e-5)."""
  warmup_minibatches: int = 0
  """Optimizer steps of linear warm-up from 0, >= 0; constant after."""
  weight_decay: float = 0.05
  """Decoupled, on matrices only, >= 0 (AReaL: 0.05)."""
  beta1: float = 0.9
  """Adam's first decay, in [0, 1)."""
  beta2: float = 0.95
  """Adam's second decay, in [0, 1) (AReaL: 0.95)."""
  epsilon: float = 1e-5
  """Added to the root of Adam's second moment, > 0 (AReaL: 1e-5)."""
  max_grad_norm: float = 1.0
  """Gradients are scaled down to this global norm, > 0."""
  max_nonfinite_in_a_row: int = 3
  """Skipped updates in a row that stop the run, >= 1."""

  def __post_init__(self):
    for name, good, allowed in (
      ("minibatches", self.minibatches >= 1, ">= 1"),
      ("microbatch_rows", self.microbatch_rows >= 1, ">= 1"),
      ("row_length", self.row_length >= 2, ">= 2"),
      ("learning_rate", self.learning_rate > 0, "> 0"),
      ("warmup_minibatches", self.warmup_minibatches >= 0, ">= 0"),
      ("weight_decay", self.weight_decay >= 0, ">= 0"),
      ("beta1", 0 <= self.beta1 < 1, "in [0, 1)"),
      ("beta2", 0 <= self.beta2 < 1, "in [0, 1)"),
      ("epsilon", self.epsilon > 0, "> 0"),
      ("max_grad_norm", self.max_grad_norm > 0, "> 0"),
      ("max_nonfinite_in_a_row", self.max_nonfinite_in_a_row >= 1, ">= 1"),
    ):
      if not good:
        raise ValueError(
          f"learner.{name} is {getattr(self, name)!r}; it must be {allowed}"
        )

  @property
  def rows_multiple(self) -> int:
    """A batch must have a multiple of this many rows."""
    return self.minibatches * self.microbatch_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
  """What an update changes; sharded over the trainer mesh."""

  params: Any
  optimizer: Any


class NonFiniteError(RuntimeError):
  """Several updates in a row had a gradient that is not finite."""


class Learner:
  """Trains a policy by one algorithm over one mesh."""

  def __init__(
    self,
    policy: transformer.Policy,
    algorithm: ModuleType,
    algorithm_config: Any,
    config: Config,
    mesh: jax.sharding.Mesh,
    learning_rate: optax.Schedule | None = None,
  ):
    """Builds the jitted functions; nothing is computed yet.

    Args:
      policy: what is trained.
      algorithm: a module of `rl_tpu.algorithms`.
      algorithm_config: its Config.
      config: how a batch becomes optimizer steps.
      mesh: where.
      learning_rate: by optimizer step, in place of the config's.

    Raises:
      ValueError: weights or microbatch rows do not divide over the mesh.
    """
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if config.microbatch_rows % ways:
      raise ValueError(
        f"learner.microbatch_rows is {config.microbatch_rows}; it must be a "
        f"multiple of data * fsdp = {ways}"
      )
    self.policy = policy
    self.algorithm = algorithm
    self.algorithm_config = algorithm_config
    self.requires = algorithms.requires(algorithm, algorithm_config)
    self.config = config
    self.mesh = mesh
    self._optimizer = _optimizer(config, policy.logical_axes(), learning_rate)
    self.shardings = self._state_shardings()
    rows = sharding.named(mesh, None, None, "rows", None)
    self._prepare = jax.jit(self._prepare_batch, out_shardings=rows)
    self._update = jax.jit(
      self._update_minibatch,
      donate_argnums=0,
      out_shardings=(self.shardings, None),
    )

  def init(self, params: Any) -> State:
    """A fresh state around a copy of these weights."""
    params = sharding.reshard(params, self.shardings.params)
    init = jax.jit(self._optimizer.init, out_shardings=self.shardings.optimizer)
    return State(params=params, optimizer=init(params))

  def abstract_state(self) -> State:
    """Shapes, dtypes and shardings of a state, for restoring one."""
    return jax.tree.map(
      lambda leaf, where: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=where
      ),
      self._abstract(),
      self.shardings,
    )

  def train(self, state: State, batch: Batch) -> tuple[State, dict[str, float]]:
    """Consumes one packed host batch; `state` is donated.

    Args:
      state: weights and optimizer of version `batch.version`.
      batch: R rows, R a multiple of `config.rows_multiple`.

    Returns:
      The next state and the batch's metrics; means over its action tokens
      pooled over minibatches.

    Raises:
      NonFiniteError: too many updates in a row were skipped.
    """
    arranged = self._arrange(batch)
    pooled: dict[str, Estimate] = {}
    with jax.set_mesh(self.mesh):
      advantages, outputs = self._prepare(state.params, arranged)
      arranged = dataclasses.replace(arranged, advantages=advantages)
      for index in range(self.config.minibatches):
        state, metrics = self._update(state, arranged, outputs, index)
        pooled = {
          name: pooled[name] + estimate if name in pooled else estimate
          for name, estimate in metrics.items()
        }
    guard = state.optimizer
    host = jax.device_get(
      (pooled, guard.notfinite_count, guard.total_notfinite)
    )
    pooled, in_a_row, total = host
    if in_a_row >= self.config.max_nonfinite_in_a_row:
      raise NonFiniteError(
        f"{int(in_a_row)} updates in a row had a gradient that is not finite "
        f"(batch of version {int(batch.version)}); "
        "learner.max_nonfinite_in_a_row allows "
        f"{self.config.max_nonfinite_in_a_row - 1}"
      )
    metrics = {
      name: float(estimate.mean(float("nan")))
      for name, estimate in pooled.items()
    }
    return state, metrics | {"nonfinite_updates": float(total)}

  def logp(self, params: Any, batch: Batch) -> np.ndarray:
    """Logp of the batch's tokens under `params`, f32[R, T]."""
    with jax.set_mesh(self.mesh):
      outputs = jax.jit(self._outputs)(params, batch)
    return np.asarray(outputs.target_logp)

  def _arrange(self, batch: Batch) -> Batch:
    """Deals rows to minibatches in turn and puts them on the mesh."""
    n, r = self.config.minibatches, self.config.microbatch_rows
    rows, length = batch.tokens.shape
    if rows % (n * r):
      raise ValueError(
        f"the batch has {rows} rows; it must be a multiple of "
        f"minibatches * microbatch_rows = {n * r}"
      )

    def deal(x):
      dealt = np.asarray(x).reshape(rows // n, n, length).swapaxes(0, 1)
      return dealt.reshape(n, rows // (n * r), r, length)

    batch = batch.map_rows(deal)
    by_rows = sharding.named(self.mesh, None, None, "rows", None)
    whole = sharding.named(self.mesh)
    where = jax.tree.map(lambda x: by_rows if np.ndim(x) == 4 else whole, batch)
    return jax.device_put(batch, where)

  def _prepare_batch(self, params, arranged: Batch):
    """What is constant over the minibatches: (advantages, outputs)."""
    n, m, r, length = arranged.tokens.shape
    flat = arranged.map_rows(lambda x: x.reshape(n * m * r, length))
    if "proximal_logp" in self.requires:
      micro = arranged.map_rows(lambda x: x.reshape(n * m, r, length))

      def forward(index):
        part = micro.map_rows(lambda x: x[index])
        return self._outputs(params, part).target_logp

      proximal = jax.lax.map(forward, jnp.arange(n * m))
      proximal = proximal.reshape(n * m * r, length)
    else:
      proximal = None
    # Before the first minibatch target and proximal are the same policy;
    # algorithms that require neither see behavior in their place.
    target = flat.behavior_logp if proximal is None else proximal
    outputs = PolicyOutputs(target_logp=target, proximal_logp=proximal)
    advantages = self.algorithm.advantages(flat, outputs, self.algorithm_config)
    constants = (advantages, outputs)
    return jax.tree.map(lambda x: x.reshape(n, m, r, length), constants)

  def _outputs(self, params, batch: Batch) -> PolicyOutputs:
    hidden = self.policy.hidden(
      params, batch.tokens, batch.positions, batch.trajectory_ids
    )
    logits = self.policy.logits(params, hidden)
    return PolicyOutputs(
      target_logp=ops.token_logp(
        logits, batch.tokens, batch.temperature, batch.trajectory_ids
      )
    )

  def _update_minibatch(self, state: State, arranged, constants, index):
    """One optimizer step on minibatch `index`."""

    def loss(params, micro):
      batch, fixed = micro
      live = self._outputs(params, batch)
      outputs = dataclasses.replace(fixed, target_logp=live.target_logp)
      estimate, metrics = self.algorithm.loss(
        outputs, batch, self.algorithm_config
      )
      return estimate.total, {"loss": estimate} | metrics

    def microbatch(m):
      pick = lambda x: x[index, m]  # noqa: E731
      return arranged.map_rows(pick), jax.tree.map(pick, constants)

    gradient = jax.grad(loss, has_aux=True)

    def accumulate(carry, m):
      new = gradient(state.params, microbatch(m))
      return jax.tree.map(jnp.add, carry, new), None

    zeros = jax.tree.map(
      lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
      jax.eval_shape(gradient, state.params, microbatch(0)),
    )
    count = arranged.tokens.shape[1]
    (total, metrics), _ = jax.lax.scan(accumulate, zeros, jnp.arange(count))
    scale = Estimate(total=jnp.ones(()), count=metrics["loss"].count).mean(
      empty=0.0
    )
    mean = jax.tree.map(lambda g: g * scale, total)
    norm = optax.tree.norm(mean)
    updates, optimizer = self._optimizer.update(
      mean, state.optimizer, state.params
    )
    params = optax.apply_updates(state.params, updates)
    metrics["grad_norm"] = Estimate(total=norm, count=jnp.ones(()))
    return State(params=params, optimizer=optimizer), metrics

  def _abstract(self) -> State:
    params = self.policy.abstract_params()
    return State(
      params=params, optimizer=jax.eval_shape(self._optimizer.init, params)
    )

  def _state_shardings(self) -> State:
    """Optimizer moments live where their weights live."""
    params = self.policy.param_shardings(self.mesh)
    whole = sharding.named(self.mesh)
    optimizer = optax.tree_map_params(
      self._optimizer,
      lambda _, where: where,
      self._abstract().optimizer,
      params,
      transform_non_params=lambda _: whole,
    )
    return State(params=params, optimizer=optimizer)


def _optimizer(
  config: Config, axes: Any, learning_rate: optax.Schedule | None
) -> optax.GradientTransformation:
  """AdamW behind a global-norm clip, guarded against non-finite gradients."""
  is_matrix = jax.tree.map(
    lambda names: any(name not in (None, "layers") for name in names),
    axes,
    is_leaf=lambda leaf: isinstance(leaf, tuple),
  )
  rate = learning_rate or optax.warmup_constant_schedule(
    0.0 if config.warmup_minibatches else config.learning_rate,
    config.learning_rate,
    config.warmup_minibatches,
  )
  chain = optax.chain(
    optax.clip_by_global_norm(config.max_grad_norm),
    optax.adamw(
      rate,
      b1=config.beta1,
      b2=config.beta2,
      eps=config.epsilon,
      weight_decay=config.weight_decay,
      mask=is_matrix,
    ),
  )
  # The guard would apply the update after so many errors; `train` stops first.
  return optax.apply_if_finite(chain, max_consecutive_errors=2**30)
