"""What every algorithm promises; a new file is covered without an edit.

An algorithm that can center scores is held to it both ways.
"""

import dataclasses
import functools
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from rl_tpu import algorithms, ops
from rl_tpu.packing import pack
from rl_tpu.types import Batch, PolicyOutputs, Trajectory

ROW_LENGTH = 12
VERSION = 3
FLOATS = (
  "behavior_logp",
  "behavior_topk_logp",
  "rewards",
  "advantages",
  "returns",
  "values",
)
HEAD = 3
BINS = 5
SIZES = {"R": 1, "K": HEAD, "B": BINS}
DIFFERENTIATED = ("target_logp", "target_topk_logp", "entropy")
TOGGLED = "+toggled_centering"


def cases():
  """Every algorithm, and once more with the other setting of `centering`."""
  for name in algorithms.names():
    yield name
    if hasattr(algorithms.get(name).Config(), "centering"):
      yield name + TOGGLED


every_algorithm = pytest.mark.parametrize("name", list(cases()))


def find(name):
  """The module and the config of a case."""
  module = algorithms.get(name.removesuffix(TOGGLED))
  config = module.Config()
  if name.endswith(TOGGLED):
    config = dataclasses.replace(config, centering=not config.centering)
  return module, config


def make_trajectory(seed, group_id, member, length):
  """Random turns, the outcome on the last action token."""
  generator = np.random.default_rng(seed)
  mask = generator.random(length) < 0.6
  mask[0], mask[-2] = False, True
  rewards = np.zeros(length, np.float32)
  rewards[np.flatnonzero(mask)[-1]] = generator.normal()
  logp = -generator.uniform(0.1, 2.0, length).astype(np.float32)
  versions = generator.integers(0, VERSION + 1, length).astype(np.int32)
  return Trajectory(
    prompt_id=group_id,
    group_id=group_id,
    member=member,
    tokens=generator.integers(0, 50, length).astype(np.int32),
    action_mask=mask,
    behavior_logp=np.where(mask, logp, np.float32(0.0)),
    token_version=np.where(mask, versions, np.int32(-1)),
    rewards=rewards,
  )


TRAJECTORIES = [
  make_trajectory(seed, *identity)
  for seed, identity in enumerate(
    [(7, 0, 5), (7, 1, 9), (7, 2, 4), (3, 0, 6), (3, 1, 12), (5, 0, 7)]
  )
]


def make_head(generator, shape):
  """Logp of a head that leaves a tail, over the last axis."""
  logits = generator.normal(0.0, 1.0, (*shape[:-1], shape[-1] + 1))
  return np.asarray(jax.nn.log_softmax(logits))[..., :-1]


def make_outputs(trajectory, seed):
  """Every field of PolicyOutputs for one trajectory, [1, T, ...]."""
  generator = np.random.default_rng(100 + seed)
  fields = {}
  for field in dataclasses.fields(PolicyOutputs):
    array_type, *_ = typing.get_args(field.type) or (field.type,)
    sizes = SIZES | {"T": len(trajectory)}
    shape = [sizes[axis] for axis in array_type.dim_str.split()]
    if shape[2:] == [HEAD]:
      fields[field.name] = make_head(generator, shape)
    elif shape[2:] == [BINS]:
      fields[field.name] = generator.normal(0.0, 1.0, shape)
    else:
      noise = generator.normal(0.0, 0.5, shape)
      fields[field.name] = np.minimum(trajectory.behavior_logp + noise, -0.01)
  return fields


def lay_out_head(batch, dtype):
  """Batch fields of the sampler's head; some tokens leave a slot unused."""
  ids = np.full((*batch.tokens.shape, HEAD), -1)
  logp = np.full(ids.shape, -np.inf)
  for n, trajectory in enumerate(TRAJECTORIES):
    generator = np.random.default_rng(200 + n)
    place = np.asarray(batch.trajectory_ids) == n
    order = np.asarray(batch.positions)[place]
    used = generator.random((len(trajectory), HEAD)) < 0.8
    head = make_head(generator, (len(trajectory), HEAD))
    ids[place] = np.where(used, np.arange(HEAD), -1)[order]
    logp[place] = np.where(used, head, -np.inf)[order]
  return {
    "behavior_topk_ids": jnp.asarray(ids),
    "behavior_topk_logp": jnp.asarray(logp, dtype),
  }


def lay_out(batch, dtype=jnp.float32):
  """The same numbers for the same tokens, however they are packed."""
  parts = [make_outputs(t, n) for n, t in enumerate(TRAJECTORIES)]
  fields = {}
  for name, example in parts[0].items():
    array = np.zeros((*batch.tokens.shape, *example.shape[2:]))
    for n, part in enumerate(parts):
      place = np.asarray(batch.trajectory_ids) == n
      array[place] = part[name][0][np.asarray(batch.positions)[place]]
    fields[name] = jnp.asarray(array, dtype)
  outputs = PolicyOutputs(**fields)
  batch = dataclasses.replace(
    batch,
    values=outputs.target_logp * 0.5,
    returns=outputs.target_logp * 0.7,
    **lay_out_head(batch, dtype),
  )
  return outputs, jax.tree.map(jnp.asarray, batch)


def packed():
  return pack(
    TRAJECTORIES,
    row_length=ROW_LENGTH,
    rows_multiple=4,
    version=VERSION,
    baselines=np.array([0.3, 0.3, 0.3, np.nan, np.nan, -0.2]),
  )


@functools.partial(jax.jit, static_argnums=(0, 3))
def with_advantages(module, outputs, batch, config):
  advantages = module.advantages(batch, outputs, config)
  return dataclasses.replace(batch, advantages=advantages)


@functools.cache
def example(name):
  module, config = find(name)
  outputs, batch = lay_out(packed())
  return (
    module,
    config,
    outputs,
    with_advantages(module, outputs, batch, config),
  )


def live_fields(module, outputs, config):
  """The outputs that the loss is differentiated by."""
  needed = algorithms.requires(module, config) | {"target_logp"}
  return {
    field: getattr(outputs, field)
    for field in DIFFERENTIATED
    if field in needed
  }


@functools.partial(jax.jit, static_argnums=(0, 3))
def evaluate(module, outputs, batch, config):
  """Metrics with the loss, and its gradient by output."""

  def loss(live):
    live = dataclasses.replace(outputs, **live)
    estimate, metrics = module.loss(live, batch, config)
    return estimate.total, metrics | {"loss": estimate}

  live = live_fields(module, outputs, config)
  gradient, metrics = jax.grad(loss, has_aux=True)(live)
  return metrics, gradient


def assert_same(left, right, rtol=1e-5):
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=rtol, atol=1e-6),
    left,
    right,
  )


def map_both(function, outputs, batch):
  return jax.tree.map(function, outputs), batch.map_rows(function)


@every_algorithm
def test_requires_names_fields_of_the_outputs_or_baselines(name):
  module, config = find(name)
  fields = {field.name for field in dataclasses.fields(PolicyOutputs)}
  fields = fields - {"target_logp"} | {"baselines"}
  needed = algorithms.requires(module, config)
  assert needed <= module.REQUIRES <= fields


@every_algorithm
def test_nothing_is_needed_that_is_not_required(name):
  module, config, outputs, batch = example(name)
  needed = algorithms.requires(module, config) | {"target_logp"}
  fields = [f.name for f in dataclasses.fields(PolicyOutputs)]
  spare = {field: None for field in fields if field not in needed}
  expected, _ = evaluate(module, outputs, batch, config)
  outputs = dataclasses.replace(outputs, **spare)
  if "baselines" not in needed:
    batch = dataclasses.replace(batch, baselines=None)
  assert_same(evaluate(module, outputs, batch, config)[0], expected)


@every_algorithm
def test_advantages_are_zero_off_the_action_mask_only(name):
  *_, batch = example(name)
  assert batch.advantages.shape == batch.tokens.shape
  assert not np.any(batch.advantages[~batch.action_mask])
  assert np.any(batch.advantages[batch.action_mask])


@every_algorithm
def test_the_loss_counts_action_tokens_and_metrics_are_estimates(name):
  module, config, outputs, batch = example(name)
  metrics, gradient = evaluate(module, outputs, batch, config)
  assert metrics["loss"].count == np.sum(batch.action_mask)
  for slopes in gradient.values():
    assert np.any(slopes) and not np.any(slopes[~batch.action_mask])
  common = ops.behavior_metrics(outputs, batch)
  assert_same({key: metrics[key] for key in common}, common)
  assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(metrics))


@every_algorithm
def test_padding_rows_and_columns_change_nothing(name):
  module, config, outputs, batch = example(name)
  expected = evaluate(module, outputs, batch, config)

  def pad(x, fill=0):
    widths = [(0, 2), (0, 5)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, widths, constant_values=fill)

  padded = dataclasses.replace(
    batch.map_rows(pad),
    trajectory_ids=pad(batch.trajectory_ids, -1),
    token_version=pad(batch.token_version, -1),
    temperature=pad(batch.temperature, 1),
  )
  outputs = jax.tree.map(pad, outputs)
  padded = with_advantages(module, outputs, padded, config)
  assert_same(padded.advantages, pad(batch.advantages))
  metrics, gradient = evaluate(module, outputs, padded, config)
  assert_same(metrics, expected[0])
  assert_same(gradient, jax.tree.map(pad, expected[1]))


@every_algorithm
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_no_number_off_the_mask_reaches_loss_or_gradient(name, poison):
  module, config, outputs, batch = example(name)
  expected = evaluate(module, outputs, batch, config)

  def spoil(x):
    mask = batch.action_mask.reshape(*x.shape[:2], *[1] * (x.ndim - 2))
    return jnp.where(mask, x, poison)

  fields = {field: spoil(getattr(batch, field)) for field in FLOATS}
  spoilt = dataclasses.replace(batch, **fields)
  outputs = jax.tree.map(spoil, outputs)
  advantages = module.advantages(spoilt, outputs, config)
  assert_same(advantages, batch.advantages)
  assert_same(evaluate(module, outputs, spoilt, config), expected)


@every_algorithm
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_H04_splitting_eight_rows_any_way_gives_one_gradient(name, size):
  module, config, outputs, batch = example(name)
  pad = lambda x: jnp.pad(x, [(0, 4)] + [(0, 0)] * (x.ndim - 1))  # noqa: E731
  outputs, batch = map_both(pad, outputs, batch)
  assert batch.tokens.shape[0] == 8 and not batch.action_mask[-1].any()
  expected = evaluate(module, outputs, batch, config)
  parts = []
  for start in range(0, 8, size):
    cut = lambda x, start=start: x[start : start + size]  # noqa: E731
    parts.append(evaluate(module, *map_both(cut, outputs, batch), config))
  metrics = functools.reduce(
    lambda left, right: {key: left[key] + right[key] for key in left},
    [part[0] for part in parts],
  )
  assert_same(metrics, expected[0])
  gradients = [part[1] for part in parts]
  joined = jax.tree.map(lambda *x: jnp.concatenate(x), *gradients)
  assert_same(joined, expected[1])


@every_algorithm
def test_packing_equals_one_row_per_trajectory(name):
  module, config, outputs, batch = example(name)
  rows = []
  for n, trajectory in enumerate(TRAJECTORIES):
    row = pack([trajectory], row_length=ROW_LENGTH, version=VERSION)
    ids = np.where(row.trajectory_ids == 0, n, -1)
    rows.append(dataclasses.replace(row, trajectory_ids=ids))
  fields = {
    field: np.concatenate([getattr(row, field) for row in rows])
    for field in Batch.ROW_FIELDS
    if getattr(rows[0], field) is not None
  }
  single_outputs, single = lay_out(dataclasses.replace(packed(), **fields))
  single = with_advantages(module, single_outputs, single, config)
  metrics, gradient = evaluate(module, outputs, batch, config)
  single_metrics, single_gradient = evaluate(
    module, single_outputs, single, config
  )
  assert_same(single_metrics, metrics)
  for n in range(len(TRAJECTORIES)):
    here = np.asarray(single.trajectory_ids) == n
    there = np.asarray(batch.trajectory_ids) == n
    assert_same(single.advantages[here], batch.advantages[there])
    for field, slopes in gradient.items():
      assert_same(single_gradient[field][here], slopes[there])


@every_algorithm
def test_the_gradient_is_the_finite_difference(name, monkeypatch):
  """In f64; what the loss holds constant is held at its first value."""
  with jax.enable_x64(True):
    module, config = find(name)
    outputs, batch = lay_out(packed(), jnp.float64)
    batch = batch.map_rows(
      lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x
    )
    batch = with_advantages(module, outputs, batch, config)
    _, gradient = evaluate(module, outputs, batch, config)
    gradient, _ = ravel_pytree(gradient)
    assert gradient.dtype == jnp.float64
    start, unravel = ravel_pytree(live_fields(module, outputs, config))

    constants = []
    detach = jax.lax.stop_gradient

    def record(x):
      constants.append(detach(x))
      return constants[-1]

    def total(numbers):
      live = dataclasses.replace(outputs, **unravel(numbers))
      return module.loss(live, batch, config)[0].total

    monkeypatch.setattr(jax.lax, "stop_gradient", record)
    total(start)

    def difference(direction, step=1e-6):
      sides = []
      for sign in (1, -1):
        replay = iter(constants).__next__
        monkeypatch.setattr(jax.lax, "stop_gradient", lambda _, f=replay: f())
        sides.append(total(start + sign * step * direction))
      return (sides[0] - sides[1]) / (2 * step)

    slopes = jax.jit(jax.vmap(difference))(jnp.eye(start.size))
    np.testing.assert_allclose(slopes, gradient, rtol=1e-6, atol=1e-7)


@every_algorithm
def test_on_policy_it_is_the_policy_gradient(name):
  """Without the terms that a coefficient adds to it."""
  module, config, outputs, batch = example(name)
  added = [
    field.name
    for field in dataclasses.fields(config)
    if field.name.endswith("_coefficient")
  ]
  config = dataclasses.replace(config, **dict.fromkeys(added, 0.0))
  target = jnp.where(batch.action_mask, outputs.target_logp, 0.0)
  head = outputs.target_topk_logp
  outputs = dataclasses.replace(
    outputs,
    target_logp=target,
    proximal_logp=target,
    proximal_topk_logp=head,
  )
  batch = dataclasses.replace(
    batch,
    behavior_logp=target,
    behavior_topk_logp=head,
    token_version=jnp.where(batch.action_mask, VERSION, -1),
  )
  metrics, gradient = evaluate(module, outputs, batch, config)
  assert_same(gradient.pop("target_logp"), -batch.advantages)
  assert not np.any(np.abs(gradient.pop("target_topk_logp", 0.0)) > 1e-6)
  assert metrics["behavior_target_kl"].total == 0


@every_algorithm
def test_shapes_that_would_broadcast_are_refused(name):
  module, config, outputs, batch = example(name)
  wrong = batch.tokens.shape[0], 1
  required = algorithms.requires(module, config) | {"target_logp"}
  for field in required - {"baselines"}:
    narrow = dataclasses.replace(
      outputs, **{field: getattr(outputs, field)[:, :1]}
    )
    with pytest.raises(ValueError, match=f"outputs.{field} has shape"):
      module.loss(narrow, batch, config)
  for field in (
    "behavior_logp",
    "behavior_topk_logp",
    "action_mask",
    "advantages",
    "baselines",
  ):
    narrow = dataclasses.replace(batch, **{field: jnp.ones(wrong)})
    with pytest.raises(ValueError, match=f"batch.{field} has shape"):
      module.loss(outputs, narrow, config)
  narrow = dataclasses.replace(batch, rewards=jnp.ones(wrong))
  with pytest.raises(ValueError, match=re.escape(f"shape {wrong}")):
    module.advantages(narrow, outputs, config)
  without = dataclasses.replace(batch, advantages=None)
  with pytest.raises(ValueError, match=r"batch\.advantages is None"):
    module.loss(outputs, without, config)


def change_one_action(outputs, batch, target, behavior):
  """The first action token gets these; proximal is the target there."""
  row, column = np.argwhere(np.asarray(batch.action_mask))[0]
  put = lambda x, value: x.at[row, column].set(value)  # noqa: E731
  outputs = dataclasses.replace(
    outputs,
    target_logp=put(outputs.target_logp, target),
    proximal_logp=put(outputs.proximal_logp, target),
  )
  logp = put(batch.behavior_logp, behavior)
  return outputs, dataclasses.replace(batch, behavior_logp=logp), (row, column)


@every_algorithm
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_X01_a_huge_ratio_is_finite_and_counted(name, advantage):
  module, config, outputs, batch = example(name)
  outputs, batch, place = change_one_action(outputs, batch, -1.0, -100.0)
  advantages = batch.advantages.at[place].set(advantage)
  batch = dataclasses.replace(batch, advantages=advantages)
  metrics, gradient = evaluate(module, outputs, batch, config)
  assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(metrics))
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
  assert metrics["extreme_ratio"].total == 1


@every_algorithm
@pytest.mark.parametrize("missing", [np.nan, -np.inf])
def test_X02_a_logp_that_the_engine_lacks_counts_as_ratio_one(name, missing):
  module, config, outputs, batch = example(name)
  outputs, known, _ = change_one_action(outputs, batch, -0.3, -0.3)
  _, unknown, _ = change_one_action(outputs, batch, -0.3, missing)
  expected, expected_gradient = evaluate(module, outputs, known, config)
  metrics, gradient = evaluate(module, outputs, unknown, config)
  assert_same(gradient, expected_gradient)
  assert metrics.pop("nonfinite_logp").total == 1
  assert expected.pop("nonfinite_logp").total == 0
  assert_same(metrics, expected)


@every_algorithm
def test_a_config_is_a_constant_that_can_be_compared(name):
  _, config = find(name)
  assert hash(config) == hash(find(name)[1])
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.anything = 1


def test_a_wrong_name_is_told_the_right_ones():
  with pytest.raises(ValueError, match=r"'pppo'.*decoupled_ppo.*reinforce"):
    algorithms.get("pppo")
