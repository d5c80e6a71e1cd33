import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_learner import EXPERTS, POLICY, SETTINGS, difference, make_batch

from rl_tpu import algorithms, critic, learner, ops, sharding
from rl_tpu.models.value import ValueModel


def value_loss(outputs, batch, config):
  """Plain squared error, and a metric."""
  error = jnp.square(outputs.values - batch.returns)
  loss = ops.estimate(error, batch.action_mask)
  return loss, {"value_error": loss}


def algorithm():
  """A critic's algorithm: policy gradient with R - V."""
  return SimpleNamespace(
    REQUIRES=frozenset({"values"}),
    advantages=lambda batch, outputs, config: jnp.where(
      batch.action_mask, batch.returns - outputs.values, 0.0
    ),
    returns=lambda batch, outputs, config: ops.outcome_advantages(
      batch, "none"
    ),
    loss=lambda outputs, batch, config: (
      ops.estimate(-batch.advantages * outputs.target_logp, batch.action_mask),
      {},
    ),
    value_loss=value_loss,
  )


def make(updates=2, freeze="attention", values="pre", **changes):
  options = SimpleNamespace(
    critic_updates=updates, freeze=freeze, values=values
  )
  settings = critic.Config(
    **{"learning_rate": 1e-2, "warmup_minibatches": 0, **changes}
  )
  return build(algorithm(), options, settings)


def build(module, options, settings, shape=None, policy=POLICY):
  """A learner and its first state."""
  mesh = sharding.make_mesh(shape or sharding.MeshShape(), jax.devices())
  it = learner.Learner(
    policy,
    module,
    options,
    dataclasses.replace(SETTINGS, minibatches=1),
    mesh,
    critic_config=settings,
  )
  return it, it.init(jax.jit(policy.init)(jax.random.key(0)))


def count_of(state):
  """Optimizer steps taken."""
  counts = [
    int(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.optimizer)
    if jax.tree_util.keystr(path).endswith(".count")
  ]
  assert len(set(counts)) == 1
  return counts[0]


BATCH = make_batch(dataclasses.replace(SETTINGS, minibatches=1))


def test_sao_h_frozen_attention_is_bit_identical_after_20_updates():
  it, state = make(updates=1, weight_decay=0.1)
  start = jax.device_get(state.critic.params)
  for _ in range(20):
    state, metrics = it.train(state, BATCH)
  after = jax.device_get(state.critic.params)
  attention = after["decoder"]["layers"]["attention"]
  jax.tree.map(
    np.testing.assert_array_equal,
    attention,
    start["decoder"]["layers"]["attention"],
  )
  assert count_of(state.critic) == 20
  for part in ("feed_forward", "feed_forward_norm", "attention_norm"):
    assert (
      difference(
        after["decoder"]["layers"][part], start["decoder"]["layers"][part]
      )
      > 0
    )
  assert difference(after["head"], start["head"]) > 0
  # The gradient itself is still measured there.
  assert metrics["critic_grad_norm_attention"] > 0
  parts = ("attention", "feed_forward", "other")
  squares = sum(metrics[f"critic_grad_norm_{p}"] ** 2 for p in parts)
  assert metrics["critic_grad_norm"] ** 2 == pytest.approx(squares, rel=1e-4)
  moments = jax.tree_util.tree_leaves_with_path(state.critic.optimizer)
  assert not any("['attention']" in jax.tree_util.keystr(p) for p, _ in moments)


def test_a_critic_with_experts_trains_them_with_its_attention_frozen():
  options = SimpleNamespace(critic_updates=1, freeze="attention", values="pre")
  settings = critic.Config(learning_rate=1e-2, warmup_minibatches=0)
  it, state = build(algorithm(), options, settings, policy=EXPERTS)
  start = jax.device_get(state.critic.params)
  state, metrics = it.train(state, BATCH)
  assert count_of(state.critic) == 1
  after = jax.device_get(state.critic.params)["decoder"]["layers"]
  before = start["decoder"]["layers"]
  assert difference(after["attention"], before["attention"]) == 0
  for part in ("router", "experts"):
    moved = difference(
      after["feed_forward"][part], before["feed_forward"][part]
    )
    assert moved > 0
  assert metrics["critic_grad_norm_feed_forward"] > 0


def test_without_freezing_attention_moves_too():
  it, state = make(freeze="none")
  start = jax.device_get(state.critic.params["decoder"]["layers"]["attention"])
  state, _ = it.train(state, BATCH)
  moved = state.critic.params["decoder"]["layers"]["attention"]
  assert difference(moved, start) > 0


@pytest.mark.parametrize("updates", [1, 3])
def test_sao_i_the_critic_steps_k_times_for_each_policy_step(updates):
  it, state = make(updates=updates)
  for _ in range(2):
    state, _ = it.train(state, BATCH)
  assert count_of(state) == 2
  assert count_of(state.critic) == 2 * updates


def test_values_are_learnt_and_explain_more_of_the_returns():
  it, state = make(weight_decay=0.0)
  seen = []
  for _ in range(25):
    state, metrics = it.train_critic(state, BATCH)
    seen.append(metrics["explained_variance"])
  assert seen[0] < 0.1
  assert seen[-1] > 0.5
  assert count_of(state) == 0  # the policy was left alone


def make_histogram(shape=None, **options):
  """SAO with a critic that classifies."""
  module = algorithms.get("sao")
  config = module.Config(value_loss="hl_gauss", value_bins=21, **options)
  settings = critic.Config(learning_rate=1e-2, warmup_minibatches=0)
  return build(module, config, settings, shape)


def test_a_histogram_critic_learns_alone_with_its_attention_frozen():
  it, state = make_histogram()
  start = jax.device_get((state.params, state.critic.params))
  assert start[1]["head"]["weight"].shape == (16, 21)
  seen = []
  for _ in range(25):
    state, metrics = it.train_critic(state, BATCH)
    seen.append(metrics)
  assert seen[0]["critic_loss"] == pytest.approx(np.log(21), rel=0.05)
  assert seen[-1]["critic_loss"] < 0.7 * seen[0]["critic_loss"]
  assert seen[0]["explained_variance"] < 0.1
  assert seen[-1]["explained_variance"] > 0.5
  assert 0 < seen[-1]["critic_value"] < 1
  assert difference(state.params, start[0]) == 0
  layers = state.critic.params["decoder"]["layers"]
  before = start[1]["decoder"]["layers"]
  assert difference(layers["attention"], before["attention"]) == 0
  assert difference(layers["feed_forward"], before["feed_forward"]) > 0


def test_a_histogram_critic_learns_on_a_mesh_of_2x2_as_on_one_device():
  found = {}
  for name, shape in (
    ("one", None),
    ("four", sharding.MeshShape(fsdp=2, tensor=2)),
  ):
    it, state = make_histogram(shape, critic_updates=1)
    state, metrics = it.train_critic(state, BATCH)
    found[name] = jax.device_get(state.critic.params), metrics
  assert difference(found["one"][0], found["four"][0]) < 1e-5
  for metric in ("critic_loss", "critic_grad_norm", "explained_variance"):
    assert found["four"][1][metric] == pytest.approx(
      found["one"][1][metric], abs=1e-4
    )


def test_the_value_is_the_mean_of_the_histogram_at_its_own_token():
  support = ops.Support(low=0.0, high=1.0, bins=9, sigma=0.75)
  model = ValueModel(POLICY, support)
  params = model.init(
    jax.jit(POLICY.init)(jax.random.key(0)), jax.random.key(1)
  )
  values, logits = model.predict(params, BATCH)
  assert logits.shape == (*BATCH.tokens.shape, 9)
  mean = ops.histogram_mean(logits, support)
  np.testing.assert_allclose(
    values[BATCH.action_mask], mean[BATCH.action_mask], rtol=1e-6
  )
  assert np.std(values[BATCH.action_mask]) > 0
  np.testing.assert_array_equal(model.values(params, BATCH), values)


def test_the_first_batches_may_leave_the_policy_as_it_is():
  it, state = make(only_batches=2)
  start = jax.device_get(state.params)
  state, metrics = it.train(state, BATCH)  # of version 1
  assert difference(state.params, start) == 0
  assert "grad_norm" not in metrics
  later = dataclasses.replace(BATCH, version=np.int32(2))
  state, metrics = it.train(state, later)
  assert difference(state.params, start) > 0


def test_values_before_and_after_the_last_update_differ_in_the_advantages():
  norms = {}
  for values in ("pre", "post"):
    it, state = make(updates=2, values=values)
    _, metrics = it.train(state, BATCH)
    norms[values] = metrics["grad_norm"]
  assert norms["pre"] != pytest.approx(norms["post"], rel=1e-3)


def test_a_value_is_read_before_its_token_and_not_across_trajectories():
  model = ValueModel(POLICY)
  params = model.init(
    jax.jit(POLICY.init)(jax.random.key(0)), jax.random.key(1)
  )
  base = model.values(params, BATCH)
  row, column = 0, 4
  owner = BATCH.trajectory_ids[row, column]
  tokens = np.array(BATCH.tokens)
  tokens[row, column] = (tokens[row, column] + 1) % 32
  moved = model.values(params, dataclasses.replace(BATCH, tokens=tokens))
  changed = np.asarray(base != moved)
  where = np.argwhere(changed)
  assert len(where) > 0
  for r, t in where:
    assert r == row and t > column
  first_actions = BATCH.action_mask & (BATCH.positions == 2)
  inside = changed & BATCH.action_mask
  assert (BATCH.trajectory_ids[inside] == owner).all()
  assert first_actions.any()


def test_the_critic_starts_from_the_policy():
  _, state = make()
  np.testing.assert_array_equal(
    state.critic.params["decoder"]["embedding"], state.params["embedding"]
  )
  assert float(state.critic.params["head"]["bias"]) == 0


def test_explained_variance_is_that_of_the_residual():
  returns = jnp.array([[0.0, 1.0, 2.0, 9.0]])
  mask = jnp.array([[True, True, True, False]])
  perfect_up_to_bias = returns - 5.0
  got = critic.explained_variance(perfect_up_to_bias, returns, mask)
  assert float(got.mean(np.nan)) == pytest.approx(1.0)
  half = jnp.array([[1.0, 1.0, 1.0, 0.0]])
  assert float(
    critic.explained_variance(half, returns, mask).mean(np.nan)
  ) == pytest.approx(0.0)
  flat = critic.explained_variance(half, jnp.ones((1, 4)), mask)
  assert float(flat.count) == 0
