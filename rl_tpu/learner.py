r"""The learner: one jitted update over a mesh, exact under micro-batching.

A batch is consumed once. Before its first minibatch one forward pass without
gradients gives the proximal logp (weights before the update) if the algorithm
requires it; a critic, if the algorithm has one, learns from the batch and gives
its values; and the advantages are computed over the whole batch. Then each
minibatch is one optimizer step. Its gradient is

  grad sum_m total_m / sum_m count_m      over its microbatches m,

so splitting a minibatch differently changes nothing but memory (Estimates add;
the division happens once). Updates whose gradient is not finite are skipped
and counted; several in a row stop the run.

Rows are laid out [minibatches, microbatches, rows, T]; `rows` is split over
the (data, fsdp, expert) axes of the mesh, and T over `sequence` in the model.
"""

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from rl_tpu import algorithms, critic, ops, optimizer, scoring, sharding
from rl_tpu.models import moe, transformer
from rl_tpu.optimizer import NonFiniteError as NonFiniteError
from rl_tpu.types import Batch, Estimate, PolicyOutputs

_OF_PROXIMAL = frozenset({"proximal_logp", "proximal_topk_logp"})
"""Outputs that the forward pass before the first minibatch gives."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(optimizer.Config):
  """How a batch becomes optimizer steps."""

  minibatches: int = 1
  """Optimizer steps per batch, >= 1 (AReaL: 4)."""
  microbatch_rows: int = 8
  """Rows of one backward pass, >= 1; a multiple of data * fsdp * expert."""
  row_length: int = 128
  """Tokens of a packed row, >= 2; no trajectory may be longer."""
  logit_chunk: int = 128
  """Most positions of each row whose logits live at once, >= 0; 0 is all of
  them. Rows longer than that pass the output head once more (Score Centering:
  128)."""
  router_replay: bool = False
  """Sampled tokens pass the experts that their generator chose for them
  (engine.record_experts), under the router's own gates: what separates the
  numbers of both sides cannot turn into other experts (R3, arXiv:2510.11370).
  Prompts and observations, the reference and the critic choose themselves."""

  def __post_init__(self):
    super().__post_init__()
    for name, least in (
      ("minibatches", 1),
      ("microbatch_rows", 1),
      ("row_length", 2),
      ("logit_chunk", 0),
    ):
      if getattr(self, name) < least:
        raise ValueError(
          f"{name} is {getattr(self, name)!r}; it must be >= {least}"
        )

  @property
  def rows_multiple(self) -> int:
    """A batch must have a multiple of this many rows."""
    return self.minibatches * self.microbatch_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class State(optimizer.State):
  """What training changes: the policy's weights and optimizer, the critic's."""

  critic: optimizer.State | None = None


class Learner:
  """Trains a policy by one algorithm over one mesh."""

  def __init__(
    self,
    policy: transformer.Policy,
    algorithm: ModuleType,
    algorithm_config: Any,
    config: Config,
    mesh: jax.sharding.Mesh,
    *,
    learning_rate: optax.Schedule | None = None,
    critic_config: critic.Config | None = None,
  ):
    """Builds the jitted functions; nothing is computed yet.

    Args:
      policy: what is trained.
      algorithm: a module of `rl_tpu.algorithms`.
      algorithm_config: its Config.
      config: how a batch becomes optimizer steps.
      mesh: where.
      learning_rate: by optimizer step, in place of the config's.
      critic_config: of the critic, where the algorithm has one.

    Raises:
      ValueError: weights or microbatch rows do not divide over the mesh, or
        there are no experts to replay.
    """
    ways = sharding.ways(mesh, "rows")
    if config.router_replay and not policy.config.num_experts:
      raise ValueError(
        "router_replay is True; it must be False for a policy without experts "
        "(num_experts 0)"
      )
    if config.microbatch_rows % ways:
      raise ValueError(
        f"microbatch_rows is {config.microbatch_rows}; it must be a multiple "
        f"of data * fsdp * expert = {ways}"
      )
    parts = sharding.ways(mesh, "context")
    if config.row_length % parts:
      raise ValueError(
        f"row_length is {config.row_length}; it must be a multiple of "
        f"sequence = {parts}"
      )
    self.policy = policy
    self.algorithm = algorithm
    self.algorithm_config = algorithm_config
    self.requires = algorithms.requires(algorithm, algorithm_config)
    self.config = config
    self.mesh = mesh
    self.optimizer = optimizer.Optimizer(
      config,
      mesh,
      policy.abstract_params(),
      policy.logical_axes(),
      learning_rate=learning_rate,
    )
    self.critic = None
    if hasattr(algorithm, "value_loss"):
      self.critic = critic.Critic(
        policy,
        algorithm,
        algorithm_config,
        critic_config or critic.Config(),
        mesh,
      )
    self._reference: Any = None
    self._seen: dict[str, Any] = {}
    rows = sharding.named(mesh, None, None, "rows")
    self._score = jax.jit(self._score_batch, out_shardings=rows)
    self._credit = jax.jit(self._credit_batch, out_shardings=rows)
    self._update = jax.jit(
      self._update_minibatch,
      donate_argnums=0,
      out_shardings=(self.optimizer.shardings, None),
    )
    if self.critic is not None:
      self._values = jax.jit(self._values_of_batch, out_shardings=rows)
      self._returns = jax.jit(
        self._returns_of_batch, out_shardings=(rows, None)
      )
      self._update_critic = jax.jit(
        self._update_critic_once,
        donate_argnums=0,
        out_shardings=(self.critic.optimizer.shardings, None),
      )

  def init(self, params: Any, seed: int = 0) -> State:
    """A fresh state around a copy of these weights.

    The critic starts from the same weights, its head from `seed`.
    """
    state = self.optimizer.init(params)
    values = None
    if self.critic is not None:
      values = self.critic.init(state.params, jax.random.key(seed))
    return State(params=state.params, optimizer=state.optimizer, critic=values)

  def set_reference(self, params: Any) -> None:
    """Keeps a copy of these weights as the reference policy of a KL term."""
    self._reference = sharding.reshard(params, self.optimizer.shardings.params)

  def abstract_state(self) -> State:
    """Shapes, dtypes and shardings of a state, for restoring one."""
    policy = self.optimizer.abstract_state()
    values = None
    if self.critic is not None:
      values = self.critic.optimizer.abstract_state()
    return State(
      params=policy.params, optimizer=policy.optimizer, critic=values
    )

  def traced(self, batch: Batch) -> dict[str, jax.stages.Traced]:
    """The programs that cost most, by name, on their way to a compiler.

    `update` is the step on one minibatch; `proximal` the forward pass over the
    whole batch, where the algorithm needs one; `values` and `critic_update` the
    critic's pass and step on the whole batch, where there is a critic. Nothing
    is allocated: the mesh may be one of described devices.

    Args:
      batch: shapes and dtypes of a packed batch, see `packing.abstract`.

    Raises:
      ValueError: its rows do not divide into minibatches and microbatches.
    """
    n, m, r = self._dealt(batch.tokens.shape[0])
    arranged = self._with_replay(batch).map_rows(
      lambda x: jax.ShapeDtypeStruct((n, m, r, *x.shape[1:]), x.dtype)
    )
    arranged = sharding.placed(arranged, self._places(arranged))
    state = self.optimizer.abstract_state()
    reference = None
    if "reference_logp" in self.requires:
      reference = state.params
    programs = {}
    with jax.set_mesh(self.mesh):
      score = self._score.trace(state.params, reference, arranged)
      outputs = sharding.placed(score.out_info, self._places(score.out_info))
      if self.requires & _OF_PROXIMAL or reference is not None:
        programs["proximal"] = score
      if self.critic is not None:
        own = self.critic.optimizer.abstract_state()
        programs["values"] = self._values.trace(own.params, arranged)
        values = outputs.target_logp
        arranged = dataclasses.replace(arranged, values=values, returns=values)
        outputs = dataclasses.replace(outputs, values=values)
        programs["critic_update"] = self._update_critic.trace(own, arranged)
      arranged = dataclasses.replace(arranged, advantages=outputs.target_logp)
      programs["update"] = self._update.trace(state, arranged, outputs, 0)
    return programs

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
      ValueError: a reference policy is needed and was not set, or the batch
        lacks the experts to replay.
    """
    if "reference_logp" in self.requires and self._reference is None:
      raise ValueError(
        "the algorithm needs reference_logp; call set_reference first"
      )
    pooled: dict[str, Estimate] = {}
    policy = optimizer.State(params=state.params, optimizer=state.optimizer)
    values = state.critic
    frozen = False
    with jax.set_mesh(self.mesh):
      arranged = self._arrange(batch)
      outputs = self._score(policy.params, self._reference, arranged)
      if self.critic is not None:
        frozen = int(batch.version) < self.critic.config.only_batches
        values, arranged, outputs, pooled = self._learn_values(
          values, arranged, outputs
        )
      advantages = self._credit(arranged, outputs)
      arranged = dataclasses.replace(arranged, advantages=advantages)
      self._seen = {"advantage": advantages}
      if outputs.proximal_logp is not None:
        self._seen["proximal_logp"] = outputs.proximal_logp
      for index in range(0 if frozen else self.config.minibatches):
        policy, metrics = self._update(policy, arranged, outputs, index)
        pooled = _pool(pooled, metrics)
    state = State(
      params=policy.params, optimizer=policy.optimizer, critic=values
    )
    return state, self._fetch(state, pooled)

  def seen(self) -> dict[str, Float[np.ndarray, "R T"]]:
    """Advantages of the batch trained last, and proximal_logp if it had any.

    In the rows of that batch; NaN in those that only other processes hold.
    """
    return {name: _undealt(array) for name, array in self._seen.items()}

  def train_critic(
    self, state: State, batch: Batch
  ) -> tuple[State, dict[str, float]]:
    """Lets the critic alone learn from a batch; `state.critic` is donated."""
    assert self.critic is not None, "the algorithm has no critic"
    with jax.set_mesh(self.mesh):
      arranged = self._arrange(batch)
      outputs = self._score(state.params, self._reference, arranged)
      values, _, _, pooled = self._learn_values(state.critic, arranged, outputs)
    state = dataclasses.replace(state, critic=values)
    return state, self._fetch(state, pooled)

  def _arrange(self, batch: Batch) -> Batch:
    """Deals rows to minibatches in turn and puts them on the mesh."""
    n, m, r = self._dealt(batch.tokens.shape[0])
    batch = self._with_replay(batch)

    def deal(x):
      rest = np.shape(x)[1:]
      dealt = np.asarray(x).reshape(m * r, n, *rest).swapaxes(0, 1)
      return dealt.reshape(n, m, r, *rest)

    batch = batch.map_rows(deal)
    return sharding.distribute(batch, self._places(batch))

  def _with_replay(self, batch: Batch) -> Batch:
    """The batch, with experts if and only if they are replayed."""
    if not self.config.router_replay:
      return dataclasses.replace(batch, behavior_experts=None)
    if batch.behavior_experts is None:
      raise ValueError(
        "router_replay is True, but the batch has no behavior_experts: its "
        "generators must deliver them (engine.record_experts)"
      )
    wanted = self.policy.config.routed
    shape = batch.behavior_experts.shape[2:]
    if shape != wanted:
      raise ValueError(
        f"behavior_experts has {shape} layers and experts a token; it must "
        f"have {wanted}, those of the policy"
      )
    return batch

  def _dealt(self, rows: int) -> tuple[int, int, int]:
    """How many minibatches, microbatches of each, and rows of each."""
    n, r = self.config.minibatches, self.config.microbatch_rows
    if rows % (n * r):
      raise ValueError(
        f"the batch has {rows} rows; it must be a multiple of "
        f"minibatches * microbatch_rows = {n * r}"
      )
    return n, rows // (n * r), r

  def _places(self, arranged: Any) -> Any:
    """Where the arrays of a dealt batch, or of its outputs, live."""
    by_rows = sharding.named(self.mesh, None, None, "rows")
    whole = sharding.named(self.mesh)
    return jax.tree.map(lambda x: by_rows if x.ndim >= 4 else whole, arranged)

  def _score_batch(self, params, reference, arranged: Batch) -> PolicyOutputs:
    """Outputs that are constant over the minibatches, [n, m, r, T, ...].

    `reference` is None where no KL term needs it.
    """
    # Before the first minibatch target and proximal are the same policy;
    # algorithms that do not require it see behavior in its place.
    outputs = PolicyOutputs(target_logp=arranged.behavior_logp)
    if self.requires & _OF_PROXIMAL:
      topk = "proximal_topk_logp" in self.requires
      required = frozenset({"target_topk_logp"} if topk else ())
      proximal = self._forward(params, arranged, required)
      outputs = PolicyOutputs(
        target_logp=proximal.target_logp,
        proximal_logp=proximal.target_logp,
        proximal_topk_logp=proximal.target_topk_logp,
      )
    if reference is None:
      return outputs
    arranged = dataclasses.replace(arranged, behavior_experts=None)
    known = self._forward(reference, arranged, frozenset())
    return dataclasses.replace(outputs, reference_logp=known.target_logp)

  def _forward(
    self, params, arranged: Batch, required: frozenset[str]
  ) -> PolicyOutputs:
    """A forward pass over all microbatches, [n, m, r, T, ...]."""
    micro, count = _microbatches(arranged)
    outputs = jax.lax.map(
      lambda index: self._outputs(params, micro(index), required)[0],
      jnp.arange(count),
    )
    return jax.tree.map(
      lambda x: x.reshape(*arranged.tokens.shape, *x.shape[3:]), outputs
    )

  def _credit_batch(self, arranged: Batch, outputs: PolicyOutputs):
    """Advantages of the whole batch, [n, m, r, T]."""
    advantages = self.algorithm.advantages(
      *_flat(arranged, outputs), self.algorithm_config
    )
    return advantages.reshape(arranged.tokens.shape)

  def _learn_values(self, values, arranged: Batch, outputs: PolicyOutputs):
    """Updates the critic K times; see `critic`.

    Returns its state, the batch with values and returns, the outputs with the
    values that advantages are made of, and metrics.
    """
    assert self.critic is not None
    before = self._values(values.params, arranged)
    outputs = dataclasses.replace(outputs, values=before)
    returns, explained = self._returns(arranged, outputs)
    arranged = dataclasses.replace(arranged, values=before, returns=returns)
    pooled = {"explained_variance": explained}
    last = self.critic.updates - 1
    for update in range(self.critic.updates):
      if update == last > 0:
        # "pre": the values before the last update.
        before = self._values(values.params, arranged)
      values, metrics = self._update_critic(values, arranged)
      pooled = _pool(pooled, metrics)
    if self.algorithm_config.values == "post":
      before = self._values(values.params, arranged)
    return values, arranged, dataclasses.replace(outputs, values=before), pooled

  def _values_of_batch(self, params, arranged: Batch):
    assert self.critic is not None
    model = self.critic.model
    micro, count = _microbatches(arranged)
    values = jax.lax.map(
      lambda index: model.values(params, micro(index)), jnp.arange(count)
    )
    return values.reshape(arranged.tokens.shape)

  def _returns_of_batch(self, arranged: Batch, outputs: PolicyOutputs):
    assert self.critic is not None
    flat, flat_outputs = _flat(arranged, outputs)
    returns = self.critic.returns(flat, flat_outputs)
    explained = critic.explained_variance(
      ops.required(flat_outputs.values, "outputs.values"),
      returns,
      flat.action_mask,
    )
    return returns.reshape(arranged.tokens.shape), explained

  def _update_critic_once(self, values: optimizer.State, arranged: Batch):
    assert self.critic is not None
    micro, count = _microbatches(arranged)
    return self.critic.step(values, micro, count)

  def _outputs(
    self, params, batch: Batch, required: frozenset[str]
  ) -> tuple[PolicyOutputs, dict[str, Estimate]]:
    return scoring.outputs_and_loads(
      self.policy, params, batch, required, self.config.logit_chunk
    )

  def _update_minibatch(
    self, state: optimizer.State, arranged: Batch, constants, index
  ):
    """One optimizer step on minibatch `index`."""

    def microbatch(m):
      pick = lambda x: x[index, m]  # noqa: E731
      return arranged.map_rows(pick), jax.tree.map(pick, constants)

    def loss(params, micro):
      batch, fixed = micro
      live, loads = self._outputs(params, batch, self.requires)
      outputs = dataclasses.replace(
        fixed,
        target_logp=live.target_logp,
        target_topk_logp=live.target_topk_logp,
        entropy=live.entropy,
      )
      total, metrics = self.algorithm.loss(
        outputs, batch, self.algorithm_config
      )
      return total, metrics | loads

    state, metrics, gradient = self.optimizer.step(
      state, loss, microbatch, arranged.tokens.shape[1]
    )
    norm = Estimate(total=optax.tree.norm(gradient), count=jnp.ones(()))
    return state, metrics | {"grad_norm": norm}

  def _fetch(self, state: State, pooled: dict) -> dict[str, float]:
    """Metrics on the host; stops the run if updates keep being skipped."""
    policy = optimizer.State(params=state.params, optimizer=state.optimizer)
    guards = {"the policy": self.optimizer.skipped(policy)}
    if self.critic is not None and state.critic is not None:
      guards["the critic"] = self.critic.optimizer.skipped(state.critic)
    pooled, guards = jax.device_get((pooled, guards))
    for what, (in_a_row, _) in guards.items():
      self.optimizer.check_finite(int(in_a_row), what)
    means = {
      name: estimate.mean(float("nan")) for name, estimate in pooled.items()
    }
    load = means.pop("expert_load", None)
    metrics = {name: float(mean) for name, mean in means.items()}
    if load is not None:
      metrics |= moe.imbalance(np.asarray(load))
    skipped = sum(total for _, total in guards.values())
    return metrics | {"nonfinite_updates": float(skipped)}


def _undealt(array: jax.Array) -> Float[np.ndarray, "R T"]:
  """What this process holds of a dealt array, in the order before dealing."""
  here = np.full(array.shape, np.nan, np.float32)
  for shard in array.addressable_shards:
    here[shard.index] = shard.data
  n, m, r, length = array.shape
  return here.reshape(n, m * r, length).swapaxes(0, 1).reshape(-1, length)


def _microbatches(arranged: Batch):
  """The batch's microbatches as a function of their number, and how many."""
  n, m = arranged.tokens.shape[:2]
  joined = arranged.map_rows(lambda x: x.reshape(n * m, *x.shape[2:]))
  return lambda index: joined.map_rows(lambda x: x[index]), n * m


def _flat(arranged: Batch, outputs: PolicyOutputs):
  """Batch and outputs with one row axis."""
  flatten = lambda x: x.reshape(-1, *x.shape[3:])  # noqa: E731
  return arranged.map_rows(flatten), jax.tree.map(flatten, outputs)


def _pool(pooled: dict[str, Estimate], new: dict[str, Estimate]):
  return pooled | {
    name: pooled[name] + estimate if name in pooled else estimate
    for name, estimate in new.items()
  }
