import dataclasses
import math
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
import two_processes

from rl_tpu import algorithms, learner, packing, sharding
from rl_tpu.models import transformer
from rl_tpu.types import Estimate, Trajectory

POLICY = transformer.Policy(
  transformer.Config(
    vocab_size=32,
    d_model=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    d_ff=16,
  )
)
SETTINGS = learner.Config(
  minibatches=2,
  microbatch_rows=4,
  row_length=16,
  learning_rate=1e-2,
  warmup_minibatches=0,
)


def trajectory(index, member, rng, version=0):
  length = int(rng.integers(4, 12))
  mask = np.arange(length) >= 2
  rewards = np.zeros(length, np.float32)
  rewards[-1] = rng.integers(0, 2)
  return Trajectory(
    prompt_id=index,
    group_id=index,
    member=member,
    tokens=rng.integers(0, 32, length).astype(np.int32),
    action_mask=mask,
    behavior_logp=np.where(mask, rng.normal(-3.5, 0.3, length), 0),
    token_version=np.where(mask, version, -1),
    rewards=rewards,
  )


def make_batch(settings=SETTINGS, groups=12, version=1):
  rng = np.random.default_rng(0)
  return packing.pack(
    [trajectory(i, m, rng) for i in range(groups) for m in range(4)],
    row_length=settings.row_length,
    version=version,
    rows_multiple=16,
    minibatches=settings.minibatches,
  )


def make(
  settings=SETTINGS,
  algorithm="decoupled_ppo",
  shape=None,
  policy=POLICY,
  **options,
):
  module = algorithms.get(algorithm)
  mesh = sharding.make_mesh(shape or sharding.MeshShape(), jax.devices())
  it = learner.Learner(policy, module, module.Config(**options), settings, mesh)
  return it, it.init(policy.init(jax.random.key(0)))


def difference(one, other):
  return max(
    float(np.abs(np.asarray(x) - np.asarray(y)).max())
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  )


@pytest.fixture(scope="module")
def trained():
  it, state = make()
  start = jax.device_get(state.params)
  state, metrics = it.train(state, make_batch())
  return start, jax.device_get(state.params), metrics


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_H04_microbatch_size_changes_nothing(rows, trained):
  it, state = make(dataclasses.replace(SETTINGS, microbatch_rows=rows))
  state, metrics = it.train(state, make_batch())
  assert difference(state.params, trained[1]) < 1e-5
  for name, value in metrics.items():
    expected = pytest.approx(trained[2][name], abs=1e-5, nan_ok=True)
    assert value == expected, name


@pytest.mark.parametrize(
  "shape",
  [
    sharding.MeshShape(fsdp=2, tensor=2),
    sharding.MeshShape(data=2, fsdp=2, tensor=2),
    sharding.MeshShape(fsdp=2, sequence=2, tensor=2),
    sharding.MeshShape(sequence=4),
  ],
  ids=["2x2", "2x2x2", "2x2x2 with parts of rows", "4 parts of rows"],
)
def test_X08_a_mesh_trains_as_one_device_does(shape, trained):
  it, state = make(shape=shape)
  moments = jax.tree.leaves(state.optimizer)
  assert any(len(m.sharding.device_set) == shape.size for m in moments)
  state, metrics = it.train(state, make_batch())
  assert difference(state.params, trained[1]) < 1e-5
  assert metrics["grad_norm"] == pytest.approx(trained[2]["grad_norm"], 1e-4)


def test_two_processes_train_as_one_does(tmp_path, trained):
  port = two_processes.free_port()
  saved = tmp_path / "params.npz"
  running = [
    subprocess.Popen(
      [sys.executable, two_processes.__file__, str(port), str(index), saved],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for index in range(2)
  ]
  outputs = [process.communicate(timeout=300)[0] for process in running]
  assert [process.returncode for process in running] == [0, 0], outputs
  with np.load(saved) as arrays:
    params = [arrays[name] for name in arrays.files]
  assert difference(params, jax.tree.leaves(trained[1])) < 1e-5


def test_how_trajectories_are_packed_changes_nothing():
  # In one minibatch, since longer rows deal trajectories out differently.
  results = []
  for row_length in (16, 32):
    settings = dataclasses.replace(
      SETTINGS, minibatches=1, row_length=row_length
    )
    it, state = make(settings)
    batch = make_batch(settings)
    state, _ = it.train(state, batch)
    results.append((batch.tokens.shape, jax.device_get(state.params)))
  (shape, params), (other_shape, other_params) = results
  assert shape != other_shape
  assert difference(params, other_params) < 1e-5


def test_moments_in_bfloat16_take_half_the_memory_and_train_alike(trained):
  it, state = make(dataclasses.replace(SETTINGS, first_moment_dtype="bfloat16"))
  kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(state.optimizer)}
  assert "bfloat16" in kinds
  state, _ = it.train(state, make_batch())
  assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)} == {
    "float32"
  }
  start, expected, _ = trained
  moved = difference(start, expected)
  assert 0 < difference(state.params, expected) < 0.02 * moved


@pytest.mark.parametrize("fsdp", [1, 2])
def test_moments_in_their_hosts_memory_train_alike(fsdp, trained):
  settings = dataclasses.replace(SETTINGS, moments="host")
  it, state = make(settings, shape=sharding.MeshShape(fsdp=fsdp))

  def kinds():
    moments = {
      leaf.sharding.memory_kind
      for leaf in jax.tree.leaves(state.optimizer)
      if leaf.ndim
    }
    return moments, {
      leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)
    }

  assert kinds() == ({"pinned_host"}, {"device"})
  state, _ = it.train(state, make_batch())
  assert kinds() == ({"pinned_host"}, {"device"})
  assert difference(state.params, trained[1]) < 1e-5


def test_padding_rows_change_nothing(trained):
  batch = make_batch()
  empty = {
    "tokens": 0,
    "trajectory_ids": -1,
    "positions": 0,
    "action_mask": False,
    "behavior_logp": np.nan,
    "token_version": -1,
    "rewards": 0,
    "temperature": 1,
  }
  more = {
    name: np.pad(getattr(batch, name), ((0, 16), (0, 0)), constant_values=value)
    for name, value in empty.items()
  }
  it, state = make()
  state, _ = it.train(state, dataclasses.replace(batch, **more))
  assert difference(state.params, trained[1]) < 1e-5


def test_the_proximal_policy_is_that_before_the_first_minibatch():
  seen = {}

  def loss(outputs, batch, config):
    gap = jnp.abs(outputs.target_logp - outputs.proximal_logp)
    count = batch.action_mask.sum().astype(jnp.float32)
    total = jnp.where(batch.action_mask, outputs.target_logp, 0).sum()
    largest = jnp.where(batch.action_mask, gap, 0).max()
    metrics = {"gap": Estimate(total=largest, count=jnp.ones(()))}
    return Estimate(total=-total, count=count), metrics

  module = SimpleNamespace(
    REQUIRES=frozenset({"proximal_logp"}),
    advantages=lambda batch, outputs, config: batch.rewards,
    loss=loss,
  )
  mesh = sharding.make_mesh(sharding.MeshShape(), jax.devices())
  for minibatches in (1, 2):
    settings = dataclasses.replace(SETTINGS, minibatches=minibatches)
    it = learner.Learner(POLICY, module, None, settings, mesh)
    state = it.init(POLICY.init(jax.random.key(0)))
    _, metrics = it.train(state, make_batch(settings))
    seen[minibatches] = metrics["gap"]
  assert seen[1] < 1e-5  # the weights have not moved yet
  assert seen[2] > 1e-3  # the second minibatch is off the proximal policy


@pytest.mark.parametrize(
  "shape", [sharding.MeshShape(), sharding.MeshShape(fsdp=2, tensor=2)]
)
def test_the_head_is_scored_under_target_and_proximal_beside_its_tokens(shape):
  def loss(outputs, batch, config):
    mask = batch.action_mask

    def largest(x, y):
      gap = jnp.where(mask, jnp.abs(x - y), 0).max()
      return Estimate(total=gap, count=jnp.ones(()))

    target, proximal = outputs.target_topk_logp, outputs.proximal_topk_logp
    metrics = {
      # Slot 0 holds the token taken, so that any misplacement shows.
      "target": largest(target[..., 0], outputs.target_logp),
      "proximal": largest(proximal[..., 0], outputs.proximal_logp),
      "moved": largest(target[..., 1], proximal[..., 1]),
      "entropy": largest(outputs.entropy, 0),
    }
    count = mask.sum().astype(jnp.float32)
    total = jnp.where(mask, outputs.target_logp, 0).sum()
    return Estimate(total=-total, count=count), metrics

  module = SimpleNamespace(
    REQUIRES=frozenset(
      {"target_topk_logp", "proximal_logp", "proximal_topk_logp", "entropy"}
    ),
    advantages=lambda batch, outputs, config: batch.rewards,
    loss=loss,
  )
  settings = dataclasses.replace(SETTINGS, logit_chunk=5)
  batch = make_batch(settings)
  ids = np.stack([batch.tokens, (batch.tokens + 7) % 32], axis=-1)
  logp = np.full(ids.shape, -4.0, np.float32)
  batch = dataclasses.replace(
    batch, behavior_topk_ids=ids, behavior_topk_logp=logp
  )
  mesh = sharding.make_mesh(shape, jax.devices())
  it = learner.Learner(POLICY, module, None, settings, mesh)
  state = it.init(POLICY.init(jax.random.key(0)))
  _, metrics = it.train(state, batch)
  assert metrics["target"] < 1e-5 and metrics["proximal"] < 1e-5
  assert metrics["moved"] > 1e-3  # in the second minibatch
  assert 0 < metrics["entropy"] <= np.log(32)


def test_with_one_minibatch_the_ratio_is_one_and_nothing_is_clipped():
  it, state = make(dataclasses.replace(SETTINGS, minibatches=1))
  _, metrics = it.train(state, make_batch())
  assert metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
  assert metrics["clip_fraction"] == 0
  assert metrics["behavior_weight"] != pytest.approx(1.0, abs=1e-3)


def test_H26_the_gradient_norm_is_the_true_one_however_it_is_accumulated():
  settings = dataclasses.replace(SETTINGS, minibatches=1, max_grad_norm=1e9)
  batch = make_batch(settings)
  it, state = make(settings, "reinforce", baseline="none")
  params = jax.device_get(state.params)

  def loss(params):
    hidden = POLICY.hidden(
      params, batch.tokens, batch.positions, batch.trajectory_ids
    )
    logp = jax.nn.log_softmax(POLICY.logits(params, hidden))
    rows = np.arange(batch.tokens.shape[0])[:, None]
    before = np.arange(batch.tokens.shape[1])[None, :] - 1
    own = logp[rows, before, batch.tokens]
    returns = np.zeros(batch.tokens.shape, np.float32)
    for n in range(48):
      inside = batch.trajectory_ids == n
      returns[inside] = batch.rewards[inside].sum()
    mask = batch.action_mask
    return -jnp.where(mask, own * returns, 0).sum() / mask.sum()

  gradient = jax.grad(loss)(params)
  squares = [float(jnp.sum(jnp.square(g))) for g in jax.tree.leaves(gradient)]
  _, metrics = it.train(state, batch)
  assert metrics["grad_norm"] == pytest.approx(np.sqrt(sum(squares)), 1e-4)


def test_an_update_that_is_not_finite_is_skipped_and_counted_then_stops():
  settings = dataclasses.replace(
    SETTINGS, minibatches=1, max_nonfinite_in_a_row=2
  )
  it, state = make(settings, "reinforce", baseline="none")
  start = jax.device_get(state.params)
  good = make_batch(settings)
  bad = dataclasses.replace(
    good, rewards=np.where(good.rewards > 0, np.inf, 0).astype(np.float32)
  )
  state, metrics = it.train(state, bad)
  assert metrics["nonfinite_updates"] == 1
  assert difference(state.params, start) == 0
  state, _ = it.train(state, good)
  assert difference(state.params, start) > 0  # and the count starts again
  state, metrics = it.train(state, bad)
  assert metrics["nonfinite_updates"] == 2
  with pytest.raises(learner.NonFiniteError, match="2 updates in a row"):
    it.train(state, bad)


def test_norms_are_not_decayed_and_matrices_are():
  settings = dataclasses.replace(
    SETTINGS, minibatches=1, weight_decay=0.5, learning_rate=0.1
  )
  it, state = make(settings, "reinforce", baseline="none")
  start = jax.device_get(state.params)
  batch = make_batch(settings)
  still = dataclasses.replace(batch, rewards=np.zeros_like(batch.rewards))
  state, _ = it.train(state, still)
  after = state.params
  np.testing.assert_array_equal(
    after["final_norm"]["scale"], start["final_norm"]["scale"]
  )
  np.testing.assert_array_equal(
    after["layers"]["attention_norm"]["scale"],
    start["layers"]["attention_norm"]["scale"],
  )
  np.testing.assert_allclose(
    after["embedding"], start["embedding"] * 0.95, rtol=1e-5
  )


@pytest.mark.parametrize("norm", [math.inf, 0.1])
def test_plain_sgd_steps_along_the_gradient(norm):
  """Two rates move the weights in proportion, a clip to a given length."""
  moved = []
  for rate in (1e-2, 2e-2):
    settings = dataclasses.replace(
      SETTINGS,
      kind="sgd",
      minibatches=1,
      weight_decay=0.0,
      learning_rate=rate,
      warmup_minibatches=0,
      max_grad_norm=norm,
    )
    instance, state = make(settings)
    before = jax.device_get(state.params)
    state, metrics = instance.train(state, make_batch(settings))
    after = jax.device_get(state.params)
    step = jax.tree.map(lambda a, b: np.asarray(b) - a, before, after)
    moved.append(jax.flatten_util.ravel_pytree(step)[0])
    length = np.linalg.norm(moved[-1])
    assert length == pytest.approx(rate * min(metrics["grad_norm"], norm), 1e-3)
  np.testing.assert_allclose(moved[1], 2 * moved[0], rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"kind": "lion"}, "kind is 'lion'; it must be 'adamw' or 'sgd'"),
    ({"kind": "sgd"}, "weight_decay is 0.05; it must be 0 with kind 'sgd'"),
    (
      {"kind": "sgd", "weight_decay": 0.0, "moments": "host"},
      "moments is 'host'; it must be 'device' with kind 'sgd'",
    ),
  ],
)
def test_sgd_has_no_decay_and_no_moments(fields, message):
  with pytest.raises(ValueError, match=message):
    learner.Config(**fields)


def test_what_does_not_fit_is_refused_by_name():
  with pytest.raises(ValueError, match="microbatch_rows is 3.*= 2"):
    make(
      dataclasses.replace(SETTINGS, microbatch_rows=3),
      shape=sharding.MeshShape(data=2),
    )
  with pytest.raises(ValueError, match="beta2 is 1.0"):
    dataclasses.replace(SETTINGS, beta2=1.0)
  it, state = make(dataclasses.replace(SETTINGS, microbatch_rows=32))
  with pytest.raises(ValueError, match=r"32 rows.*= 64"):
    it.train(state, make_batch())


def test_the_reference_stays_where_it_was_while_the_policy_moves():
  settings = dataclasses.replace(SETTINGS, minibatches=1)
  it, state = make(settings, "grpo", kl_coefficient=0.1)
  batch = make_batch(settings)
  with pytest.raises(ValueError, match="call set_reference first"):
    it.train(state, batch)
  it.set_reference(state.params)
  state, first = it.train(state, batch)
  state, second = it.train(state, batch)
  kl = next(name for name in first if "reference" in name)
  assert first[kl] == pytest.approx(0.0, abs=1e-6)
  assert second[kl] > 1e-5


EXPERTS = transformer.Policy(
  dataclasses.replace(POLICY.config, num_experts=8, experts_per_token=2)
)


def train_experts(rows, shape=None):
  settings = dataclasses.replace(SETTINGS, minibatches=1, microbatch_rows=rows)
  it, state = make(settings, shape=shape, policy=EXPERTS)
  state, metrics = it.train(state, make_batch(settings))
  return jax.device_get(state.params), metrics


@pytest.fixture(scope="module")
def experts_trained():
  return train_experts(rows=4)


def test_loads_of_experts_are_those_of_the_whole_batch(experts_trained):
  batch = make_batch(dataclasses.replace(SETTINGS, minibatches=1))
  _, routing = jax.jit(EXPERTS.routed)(
    EXPERTS.init(jax.random.key(0)),
    batch.tokens,
    batch.positions,
    batch.trajectory_ids,
  )
  real = batch.trajectory_ids >= 0
  assert not real.all()
  load = np.bincount(np.asarray(routing.experts)[0, real].ravel(), minlength=8)
  _, metrics = experts_trained
  expected = load.max() / load.mean()
  assert metrics["expert_load_max"] == pytest.approx(expected, rel=1e-6)
  assert metrics["dead_experts"] == (load == 0).mean()
  entropy = np.asarray(routing.entropy)[0, real].mean()
  assert metrics["router_entropy"] == pytest.approx(entropy, rel=1e-5)
  assert "expert_load" not in metrics


@pytest.mark.parametrize(
  ("rows", "shape"),
  [
    (8, None),
    (4, sharding.MeshShape(fsdp=2, tensor=2, expert=2)),
    (4, sharding.MeshShape(sequence=2, tensor=2, expert=2)),
  ],
  ids=["microbatches", "mesh", "parts of rows"],
)
def test_X08_H04_experts_train_alike_however_they_are_split(
  rows, shape, experts_trained
):
  params, metrics = train_experts(rows, shape)
  expected_params, expected = experts_trained
  assert difference(params, expected_params) < 1e-4
  assert metrics.keys() == expected.keys()
  for name in ("expert_load_max", "dead_experts", "router_entropy", "loss"):
    assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5)


def test_what_was_dealt_to_minibatches_comes_back_in_the_batchs_order():
  rows = np.arange(12 * 3, dtype=np.float32).reshape(12, 3)
  n, m, r = 2, 3, 2
  dealt = rows.reshape(m * r, n, 3).swapaxes(0, 1).reshape(n, m, r, 3)
  mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("rows",))
  split = jax.sharding.PartitionSpec(None, None, "rows")
  there = jax.device_put(dealt, jax.sharding.NamedSharding(mesh, split))
  np.testing.assert_array_equal(learner._undealt(there), rows)
