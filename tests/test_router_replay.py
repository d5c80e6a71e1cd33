"""Experts on their way from the generator that chose them to the learner."""

import asyncio
import dataclasses
import io
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
import tiny_run

sys.path.append(str(pathlib.Path(__file__).parent / "generation"))

import test_openai_api as http
import test_server as grpc
from bigram import CONFIG, ask, one_device_mesh

from rl_tpu import (
  algorithms,
  checkpoint,
  learner,
  packing,
  scoring,
  sharding,
  train,
)
from rl_tpu.config import ConfigError
from rl_tpu.generation import driver as drivers
from rl_tpu.generation import engine, openai_api
from rl_tpu.models import quantization, transformer
from rl_tpu.types import Group, Prompt, Trajectory
from rl_tpu.view import View

POLICY = transformer.Policy(
  transformer.Config(
    vocab_size=384,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=16,
    num_experts=8,
    experts_per_token=2,
  )
)
ROUTED = jax.jit(POLICY.routed)
SCORE = jax.jit(scoring.policy_outputs, static_argnums=(0, 3, 4))
RECORDING = dataclasses.replace(
  CONFIG,
  context_length=24,
  prefill_buckets=(8, 24),
  record_experts=True,
)
REQUESTS = [
  ask(*range(10 * i + 1, 10 * i + 4 + i), index=i, max_tokens=12 + i)
  for i in range(4)
]


@pytest.fixture(scope="module")
def params():
  params = jax.jit(POLICY.init)(jax.random.key(0))
  layers = params["layers"]["feed_forward"]
  layers["router"] = layers["router"] * 4  # Choices that matter.
  return params


def make_driver(params, policy=POLICY, config=RECORDING, **mismatch):
  config = dataclasses.replace(config, mismatch=quantization.Config(**mismatch))
  served = engine.PolicyEngine(policy, one_device_mesh(), config)
  served.set_starting_params(params)
  driver = drivers.GenerationDriver(served)
  driver.update(served.load_params(params, 7))
  return driver


async def play(driver, *requests):
  return await grpc.complete(driver, driver, *requests)


def trajectory(request, done):
  """The episode of one turn."""
  start = len(request.tokens)
  length = start + len(done.tokens)

  def placed(values, empty):
    whole = np.full((length, *values.shape[1:]), empty, values.dtype)
    whole[start:] = values
    return whole

  return Trajectory(
    prompt_id=request.prompt_index,
    group_id=request.prompt_index,
    member=0,
    tokens=np.concatenate([request.tokens, done.tokens]),
    action_mask=np.arange(length) >= start,
    behavior_logp=placed(done.logp, 0),
    token_version=placed(done.version, -1),
    rewards=np.zeros(length, np.float32),
    behavior_experts=placed(done.experts, -1),
  )


def sampled_batch(driver):
  done = asyncio.run(play(driver, *REQUESTS))
  episodes = [trajectory(*one) for one in zip(REQUESTS, done, strict=True)]
  return packing.pack(episodes, row_length=48, version=7)


def taken(params, batch):
  """Experts that the learner took to give each action, [actions, L, k]."""
  experts = batch.behavior_experts
  if experts is not None:
    experts = jnp.pad(
      experts[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0)), constant_values=-1
    )
  _, routing = ROUTED(
    params, batch.tokens, batch.positions, batch.trajectory_ids, experts
  )
  by_token = np.moveaxis(np.asarray(routing.experts), 0, 2)
  return np.roll(by_token, 1, axis=1)[batch.action_mask]


def without(batch):
  return dataclasses.replace(batch, behavior_experts=None)


def logp(params, batch, policy=POLICY):
  outputs = SCORE(policy, params, batch, frozenset(), 7)
  return np.asarray(outputs.target_logp)[batch.action_mask]


def test_the_learner_takes_the_experts_of_a_noisy_bfloat16_generator(params):
  narrow = dataclasses.replace(POLICY.config, compute_dtype="bfloat16")
  driver = make_driver(params, transformer.Policy(narrow), weight_noise=0.1)
  batch = sampled_batch(driver)
  recorded = batch.behavior_experts[batch.action_mask]
  assert recorded.min() >= 0 and recorded.dtype == np.int16
  np.testing.assert_array_equal(taken(params, batch), recorded)
  own = np.sort(taken(params, without(batch)))
  assert (own != np.sort(recorded)).any(axis=(1, 2)).mean() > 0.2
  # The loss sees it: the same experts make the two sides' logp more alike.
  gaps = [
    np.abs(logp(params, b) - batch.behavior_logp[batch.action_mask]).mean()
    for b in (batch, without(batch))
  ]
  assert gaps[0] < 0.9 * gaps[1]


def test_at_equal_weights_replay_changes_nothing(params):
  batch = sampled_batch(make_driver(params))
  behavior = batch.behavior_logp[batch.action_mask]
  np.testing.assert_allclose(logp(params, batch), behavior, atol=1e-4)
  np.testing.assert_array_equal(
    logp(params, batch), logp(params, without(batch))
  )


def test_prompts_are_routed_by_the_learner_and_other_choices_are_kept(params):
  batch = sampled_batch(make_driver(params))
  turned = np.where(batch.behavior_experts < 0, -1, 7 - batch.behavior_experts)
  turned = dataclasses.replace(batch, behavior_experts=turned)
  recorded = turned.behavior_experts[batch.action_mask]
  np.testing.assert_array_equal(taken(params, turned), recorded)
  assert np.abs(logp(params, turned) - logp(params, batch)).max() > 0.01
  off = batch.behavior_experts[~batch.action_mask]
  assert (off == -1).all() and off.size


def test_X08_a_2x2x2_mesh_replays_as_one_device_does(params):
  batch = sampled_batch(make_driver(params))
  turned = np.where(batch.behavior_experts < 0, -1, 7 - batch.behavior_experts)
  turned = dataclasses.replace(batch, behavior_experts=turned)

  def loss(params, batch):
    outputs = scoring.policy_outputs(POLICY, params, batch, frozenset(), 7)
    return jnp.sum(outputs.target_logp, where=batch.action_mask)

  run = jax.value_and_grad(loss)
  value, gradient = jax.jit(run)(params, turned)
  shape = sharding.MeshShape(fsdp=2, tensor=2, expert=2)
  mesh = sharding.make_mesh(shape, jax.devices())
  rows = 4 // len(turned.tokens)
  more = turned.map_rows(lambda x: np.concatenate([x] * rows))
  own = jax.device_put(params, POLICY.param_shardings(mesh))
  with jax.set_mesh(mesh):
    on_mesh, its_gradient = jax.jit(run)(own, more)
  np.testing.assert_allclose(on_mesh, rows * value, rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, rows * b, atol=2e-4),
    its_gradient,
    gradient,
  )


def test_the_router_learns_through_the_replayed_experts(params):
  """The gradient is the slope of the loss at fixed experts."""
  batch = sampled_batch(make_driver(params))
  turned = np.where(batch.behavior_experts < 0, -1, 7 - batch.behavior_experts)
  turned = dataclasses.replace(batch, behavior_experts=turned)

  with jax.enable_x64(True):
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    @jax.jit
    def loss(router):
      layers = wide["layers"]
      block = {**layers["feed_forward"], "router": router}
      moved = {**wide, "layers": {**layers, "feed_forward": block}}
      outputs = scoring.policy_outputs(POLICY, moved, turned, frozenset(), 0)
      return jnp.sum(outputs.target_logp, where=turned.action_mask)

    router = wide["layers"]["feed_forward"]["router"]
    gradient = np.asarray(jax.grad(loss)(router))
    assert np.abs(gradient).max(axis=(1, 2)).min() > 1e-2  # In both layers.
    direction = np.random.default_rng(0).normal(size=router.shape)
    step = 2e-3 * direction
    slope = (float(loss(router + step)) - float(loss(router - step))) / 4e-3
  np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=0.02)


def test_experts_come_over_grpc_as_the_driver_recorded_them(params):
  driver = make_driver(params)

  async def main():
    async with grpc.serving(driver) as (_, client):
      return await grpc.complete(driver, client, *REQUESTS)

  far = asyncio.run(main())
  near = asyncio.run(play(make_driver(params), *REQUESTS))
  for one, other in zip(far, near, strict=True):
    assert one.experts.shape == (len(one.tokens), 2, 2)
    grpc.assert_equal(one, other)


def http_ask(driver, records, stream=False):
  async def work(client):
    return await client.completions.create(
      model="policy",
      prompt=[REQUESTS[1].tokens.tolist()],
      max_tokens=9,
      seed=3,
      stream=stream,
      extra_body={"return_token_ids": True, "return_token_experts": True},
    )

  limits = openai_api.Config(
    context_length=24, max_prompt_length=23, record_experts=records
  )
  driver.start()
  try:
    return http.ask_of(driver, work, limits)
  finally:
    driver.stop()


def test_experts_come_over_http_as_the_driver_recorded_them(params):
  (choice,) = http_ask(make_driver(params), True).choices
  request = ask(*REQUESTS[1].tokens, max_tokens=9, seed=3)
  request = dataclasses.replace(
    request,
    sampling=dataclasses.replace(
      request.sampling, stop_ids=http.TOKENIZER.eos_ids
    ),
  )
  (near,) = asyncio.run(play(make_driver(params), request))
  assert choice.token_ids == near.tokens.tolist()
  assert choice.token_experts == near.experts.tolist()


def test_a_generator_that_records_none_refuses_to_tell_them(params):
  silent = dataclasses.replace(RECORDING, record_experts=False)
  driver = make_driver(params, config=silent)
  with pytest.raises(Exception, match="return_token_experts is true.*record"):
    http_ask(driver, False)


def test_experts_are_in_the_checkpoint_with_their_trajectories(params):
  (done,) = asyncio.run(play(make_driver(params), REQUESTS[2]))
  one = trajectory(REQUESTS[2], done)
  bare = dataclasses.replace(one, behavior_experts=None)
  prompt = Prompt(index=2, tokens=REQUESTS[2].tokens)
  groups = [Group(prompt=prompt, trajectories=(bare, one, one))]
  (back,) = checkpoint.unpack_groups(*checkpoint.pack_groups(groups))
  assert back.trajectories[0].behavior_experts is None
  for other in back.trajectories[1:]:
    assert other.behavior_experts.dtype == np.int16
    np.testing.assert_array_equal(other.behavior_experts, one.behavior_experts)


def test_trajectories_with_and_without_experts_are_not_packed_together(params):
  (done,) = asyncio.run(play(make_driver(params), REQUESTS[2]))
  one = trajectory(REQUESTS[2], done)
  bare = dataclasses.replace(one, behavior_experts=None)
  with pytest.raises(ValueError, match=r"experts of shapes.*record_experts"):
    packing.pack([one, bare], row_length=48, version=7)


def replaying(policy=POLICY):
  module = algorithms.get("reinforce")
  return learner.Learner(
    policy,
    module,
    module.Config(),
    learner.Config(microbatch_rows=1, row_length=48, router_replay=True),
    sharding.make_mesh(sharding.MeshShape(), jax.devices()),
  )


def test_a_batch_without_experts_is_refused_where_they_are_replayed(params):
  batch = sampled_batch(make_driver(params))
  it = replaying()
  state = it.init(params)
  with pytest.raises(ValueError, match=r"router_replay.*record_experts"):
    it.train(state, without(batch))
  fewer = dataclasses.replace(
    batch, behavior_experts=batch.behavior_experts[..., :1]
  )
  with pytest.raises(ValueError, match=r"\(2, 1\).*\(2, 2\)"):
    it.train(state, fewer)


def test_a_policy_without_experts_has_none_to_record_or_to_replay():
  dense = transformer.Policy(
    dataclasses.replace(POLICY.config, num_experts=0, experts_per_token=0)
  )
  with pytest.raises(ValueError, match=r"router_replay.*num_experts 0"):
    replaying(dense)
  with pytest.raises(ValueError, match=r"record_experts.*num_experts 0"):
    engine.PolicyEngine(dense, one_device_mesh(), RECORDING)


def replay_config(below, **changes):
  config = tiny_run.get_config(below, batches=2, **changes)
  model = dataclasses.replace(
    config.model, num_layers=2, num_experts=4, experts_per_token=2
  )
  return dataclasses.replace(
    config,
    model=model,
    engine=dataclasses.replace(config.engine, record_experts=True),
    learner=dataclasses.replace(
      config.learner, router_replay=True, minibatches=1
    ),
  )


def test_a_run_replays_what_its_generator_chose(tmp_path, monkeypatch):
  config = replay_config(tmp_path / "run")
  policy, agree = transformer.Policy(config.model), []
  train_batch = learner.Learner.train

  def compare(self, state, batch):
    assert self.config.router_replay
    experts = batch.behavior_experts[batch.action_mask]
    assert experts.shape[1:] == (2, 2) and experts.min() >= 0
    outputs = SCORE(policy, state.params, batch, frozenset(), 0)
    gap = np.asarray(outputs.target_logp) - batch.behavior_logp
    agree.append(np.abs(gap[batch.action_mask]).max())
    return train_batch(self, state, batch)

  monkeypatch.setattr(learner.Learner, "train", compare)
  train.run(config, View(0, rich.console.Console(file=io.StringIO())))
  assert len(agree) == 2 and max(agree) < 1e-4


def test_the_two_sides_of_a_run_must_agree_on_replay(tmp_path):
  config = replay_config(tmp_path / "run")
  silent = dataclasses.replace(config.engine, record_experts=False)
  with pytest.raises(ConfigError, match="record_experts is False.*be True"):
    dataclasses.replace(config, engine=silent)
  dense = dataclasses.replace(config.model, num_experts=0, experts_per_token=0)
  with pytest.raises(ConfigError, match=r"router_replay.*no experts"):
    dataclasses.replace(config, model=dense)
