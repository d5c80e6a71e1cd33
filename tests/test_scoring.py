"""Scoring: the same numbers in chunks as at once, and never all the logits."""

import dataclasses
import io
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
import tiny_run

from rl_tpu import algorithms, learner, packing, scoring, sharding, train
from rl_tpu.config import Choice
from rl_tpu.models import transformer
from rl_tpu.types import Sampling, Trajectory
from rl_tpu.view import View

VOCAB = 32
POLICY = transformer.Policy(
  transformer.Config(
    vocab_size=VOCAB,
    d_model=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    d_ff=24,
  )
)
PARAMS = POLICY.init(jax.random.key(0))
EVERYTHING = frozenset({"target_topk_logp", "entropy", "values"})


def trajectory(length, head_size, rng):
  mask = np.arange(length) >= 2
  ids = np.stack([rng.permutation(VOCAB)[:head_size] for _ in range(length)])
  ids[:, 1:][rng.random((length, head_size - 1)) < 0.3] = -1
  ids[~mask] = -1
  return Trajectory(
    prompt_id=0,
    group_id=0,
    member=0,
    tokens=rng.integers(0, VOCAB, length).astype(np.int32),
    action_mask=mask,
    behavior_logp=np.where(mask, -1.0, 0.0).astype(np.float32),
    token_version=np.where(mask, 0, -1),
    rewards=np.zeros(length, np.float32),
    temperature=float(rng.uniform(0.5, 1.5)),
    behavior_topk_ids=ids.astype(np.int32),
    behavior_topk_logp=np.where(ids >= 0, -2.0, -np.inf).astype(np.float32),
  )


def make_batch(lengths=(5, 4, 6, 3), row_length=10, head_size=4):
  rng = np.random.default_rng(0)
  return packing.pack(
    [trajectory(n, head_size, rng) for n in lengths],
    row_length=row_length,
    version=0,
  )


BATCH = make_batch()


def score(params, chunk, batch=BATCH, requires=EVERYTHING, policy=POLICY):
  return scoring.policy_outputs(policy, params, batch, requires, chunk)


def weighted_sum(params, chunk, batch=BATCH, policy=POLICY):
  """A loss that gives every output of every place another weight."""
  outputs = score(params, chunk, batch, policy=policy)
  return sum(
    jnp.sum(x * jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape))
    for x in jax.tree.leaves(outputs)
  )


GRADIENT = jax.jit(jax.grad(weighted_sum), static_argnums=1)


def assert_close(one, other, tolerance=1e-5):
  for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def whole():
  return jax.jit(score, static_argnums=1)(PARAMS, 0), GRADIENT(PARAMS, 0)


@pytest.mark.parametrize("chunk", [1, 3, 10])
def test_chunks_change_neither_outputs_nor_gradient(chunk, whole):
  outputs = jax.jit(score, static_argnums=1)(PARAMS, chunk)
  assert_close(outputs, whole[0])
  assert_close(GRADIENT(PARAMS, chunk), whole[1])


def test_packed_rows_score_as_log_softmax_by_hand(whole):
  outputs, _ = whole
  hidden = POLICY.hidden(
    PARAMS, BATCH.tokens, BATCH.positions, BATCH.trajectory_ids
  )
  logits = np.asarray(POLICY.logits(PARAMS, hidden), np.float64)
  seen = 0
  for r, t in np.ndindex(*BATCH.tokens.shape):
    ids = BATCH.behavior_topk_ids[r, t]
    if BATCH.positions[r, t] == 0:  # First of a trajectory, or padding.
      assert outputs.target_logp[r, t] == outputs.entropy[r, t] == 0
      assert not np.any(outputs.target_topk_logp[r, t])
      continue
    z = logits[r, t - 1] / BATCH.temperature[r, t]
    logp = z - np.log(np.exp(z).sum())
    np.testing.assert_allclose(
      outputs.target_logp[r, t], logp[BATCH.tokens[r, t]], atol=1e-5
    )
    np.testing.assert_allclose(
      outputs.entropy[r, t], -np.sum(np.exp(logp) * logp), atol=1e-5
    )
    np.testing.assert_allclose(
      outputs.target_topk_logp[r, t],
      np.where(ids >= 0, logp[ids], 0),
      atol=1e-5,
    )
    seen += (ids >= 0).sum()
  assert seen > 20 and len(set(BATCH.temperature.ravel())) == 5


@pytest.mark.parametrize("chunk", [0, 3])
def test_unused_slots_of_the_head_send_no_gradient(chunk):
  def loss(params, kept, batch):
    topk = score(params, chunk, batch).target_topk_logp
    return jnp.sum(jnp.where(kept, topk, 1e6 * topk))

  gradient = jax.jit(jax.grad(loss))
  used = BATCH.behavior_topk_ids >= 0
  some = gradient(PARAMS, used, BATCH)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(some))
  assert_close(some, gradient(PARAMS, np.ones_like(used), BATCH))
  none = np.full_like(BATCH.behavior_topk_ids, -1)
  empty = dataclasses.replace(BATCH, behavior_topk_ids=none)
  assert not any(
    np.any(g) for g in jax.tree.leaves(gradient(PARAMS, used, empty))
  )


def test_nothing_is_computed_that_is_not_required():
  bare = dataclasses.replace(
    BATCH, behavior_topk_ids=None, behavior_topk_logp=None
  )
  outputs = score(PARAMS, 0, bare, frozenset({"proximal_logp"}))
  assert len(jax.tree.leaves(outputs)) == 1
  with pytest.raises(ValueError, match="behavior_topk_ids is None"):
    score(PARAMS, 0, bare)


def test_bfloat16_policies_score_in_float32():
  config = dataclasses.replace(POLICY.config, compute_dtype="bfloat16")
  outputs = score(PARAMS, 4, policy=transformer.Policy(config))
  assert {x.dtype for x in jax.tree.leaves(outputs)} == {jnp.dtype("float32")}


def moved_in_loops(program, shape):
  """Collectives inside loops whose result is an array of this shape."""
  bodies = set(re.findall(r"body=%?([\w.\-]+)", program))
  found, computation = [], ""
  for line in program.splitlines():
    if line.endswith("{") and not line.startswith(" "):
      computation = line.removeprefix("ENTRY ").split()[0].removeprefix("%")
    collective = re.search(
      r"= (.*?) (all-gather|all-reduce|reduce-scatter)\(", line
    )
    if collective and computation in bodies and shape in collective[1]:
      found.append(line)
  return found


@pytest.mark.parametrize("tied", [True, False])
def test_X08_a_mesh_of_2x2_scores_as_one_device_and_moves_the_head_once(tied):
  policy = transformer.Policy(dataclasses.replace(POLICY.config, tied=tied))
  params = policy.init(jax.random.key(1))
  batch = make_batch((5, 4, 6, 3, 9, 8), head_size=3)
  program = jax.jit(jax.grad(weighted_sum), static_argnums=(1, 3))
  expected = program(params, 4, batch, policy)
  shape = sharding.MeshShape(fsdp=2, tensor=2)
  mesh = sharding.make_mesh(shape, jax.devices())
  spread = sharding.reshard(params, policy.param_shardings(mesh))
  rows = jax.tree.map(
    lambda x: jax.device_put(
      x, sharding.named(mesh, *("rows",) * (np.ndim(x) > 1))
    ),
    batch,
  )
  with jax.set_mesh(mesh):
    compiled = program.lower(spread, 4, rows, policy).compile()
    assert_close(compiled(spread, rows), expected, 1e-4)
  text = compiled.as_text()
  assert moved_in_loops(text, "[24,16]") == []
  assert moved_in_loops(text, "[16,24]") == []
  assert moved_in_loops(text, "[24,12]")  # Of the layers: the test sees.


def equations(jaxpr):
  """All of a program's, with those of its loops and parts."""
  for equation in jaxpr.eqns:
    yield equation
    for value in equation.params.values():
      inner = getattr(value, "jaxpr", value)
      if isinstance(inner, jax.extend.core.Jaxpr):
        yield from equations(inner)


def test_a_chunk_is_multiplied_once_more_and_its_normaliser_is_kept():
  batch = make_batch((18,), row_length=20)

  def loss(params):
    outputs = score(params, 5, batch, frozenset())
    return jnp.sum(outputs.target_logp)

  traced = jax.jit(jax.grad(loss)).trace(PARAMS).jaxpr
  widths = [
    (e.primitive.name, v.aval.shape[-1:])
    for e in equations(traced.jaxpr)
    for v in e.invars
  ]
  names = [name for name, width in widths if width == (VOCAB,)]
  assert names.count("reduce_max") == 1
  assert not any(name.startswith("scatter") for name in names)
  # Logits, logits again, their gradient to the hidden states and the head.
  heads = [
    e
    for e in equations(traced.jaxpr)
    if e.primitive.name == "dot_general"
    and any(VOCAB in v.aval.shape for v in (*e.invars, *e.outvars))
  ]
  assert len(heads) == 4


def test_the_gradient_of_bfloat16_logits_is_rounded_once():
  policy = transformer.Policy(
    dataclasses.replace(POLICY.config, compute_dtype="bfloat16")
  )
  traced = jax.jit(jax.grad(weighted_sum), static_argnums=(1, 3)).trace(
    PARAMS, 4, BATCH, policy
  )
  operands = {
    v.aval.dtype
    for e in equations(traced.jaxpr.jaxpr)
    if e.primitive.name == "dot_general"
    for v in e.invars
    if v.aval.shape[-1] == VOCAB
  }
  assert operands == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("chunk", [0, 32])
def test_memory_grows_by_all_the_logits_only_where_nothing_is_chunked(chunk):
  vocab, lengths = 32_768, (64, 128)
  wide = dataclasses.replace(POLICY.config, vocab_size=vocab, num_layers=1)
  policy = transformer.Policy(wide)

  def temporary(length):
    batch = make_batch((length - 3,), row_length=length, head_size=8)
    program = jax.jit(jax.grad(weighted_sum), static_argnums=(1, 3))
    lowered = program.lower(policy.abstract_params(), chunk, batch, policy)
    return lowered.compile().memory_analysis().temp_size_in_bytes

  growth = temporary(lengths[1]) - temporary(lengths[0])
  logits = 4 * (lengths[1] - lengths[0]) * vocab
  if chunk:
    assert growth < 0.1 * logits
  else:
    assert growth > logits


def test_at_staleness_0_a_run_scores_the_head_as_its_sampler_did(
  tmp_path, monkeypatch
):
  plain = tiny_run.get_config(tmp_path)
  config = tiny_run.get_config(
    tmp_path,
    batches=2,
    sampling=Sampling(max_tokens=6, temperature=0.7),
    engine=dataclasses.replace(plain.engine, behavior_top_k=8),
    learner=dataclasses.replace(plain.learner, logit_chunk=5, minibatches=1),
    algorithm=Choice(
      name="score_centering",
      config=algorithms.get("score_centering").Config(top_k=8),
    ),
  )
  policy = transformer.Policy(config.model)
  train_batch, gaps = learner.Learner.train, []

  def compare(self, state, batch):
    outputs = score(
      state.params, 5, batch, frozenset({"target_topk_logp"}), policy
    )
    valid = batch.action_mask[..., None] & (batch.behavior_topk_ids >= 0)
    assert valid.sum() == 8 * batch.action_mask.sum()
    gap = np.abs(outputs.target_topk_logp - batch.behavior_topk_logp)
    gaps.append((int(batch.version), gap[valid].max()))
    state, metrics = train_batch(self, state, batch)
    # The same policies: centering has nothing to take out.
    assert metrics["centering_coefficients"] < 1e-4
    assert 0 < metrics["head_mass"] < 1
    return state, metrics

  monkeypatch.setattr(learner.Learner, "train", compare)
  train.run(config, View(0, rich.console.Console(file=io.StringIO())))
  assert [version for version, _ in gaps] == [0, 1]
  assert max(gap for _, gap in gaps) < 1e-4
