import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu import sharding
from rl_tpu.models import attention, transformer

SMALL = transformer.Config(
  vocab_size=48,
  d_model=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  d_ff=48,
)

MOE = dataclasses.replace(SMALL, num_experts=4, experts_per_token=2)


def make(config=SMALL, seed=0):
  policy = transformer.Policy(config)
  return policy, policy.init(jax.random.key(seed))


def row(*lengths, pad=0):
  """Positions and trajectory ids of one packed row."""
  positions = [p for n in lengths for p in range(n)] + [0] * pad
  ids = [i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * pad
  return jnp.array([positions]), jnp.array([ids])


def logits(policy, params, tokens, positions, ids):
  return policy.logits(params, policy.hidden(params, tokens, positions, ids))


@pytest.mark.parametrize("config", [SMALL, MOE], ids=["dense", "experts"])
def test_H22_a_packed_trajectory_equals_itself_alone(config):
  policy, params = make(config)
  a, b = jnp.array([5, 6, 7]), jnp.array([8, 9, 10, 11])
  positions, ids = row(3, 4)
  assert positions.tolist() == [[0, 1, 2, 0, 1, 2, 3]]

  def packed(params, a):
    tokens = jnp.concatenate([a, b])[None]
    return logits(policy, params, tokens, positions, ids)[0, 3:]

  def alone(params):
    return logits(policy, params, b[None], *row(4))[0]

  np.testing.assert_allclose(packed(params, a), alone(params), atol=1e-5)
  weight = jax.random.normal(jax.random.key(1), (4, SMALL.vocab_size))
  gradient = jax.grad(lambda p: jnp.sum(weight * packed(p, a)))(params)
  expected = jax.grad(lambda p: jnp.sum(weight * alone(p)))(params)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5),
    gradient,
    expected,
  )
  changed = packed(params, jnp.array([40, 41, 42]))
  assert np.array_equal(changed, packed(params, a))  # to the last bit


def test_padding_does_not_change_a_trajectory():
  policy, params = make()
  tokens = jnp.array([[5, 6, 7, 8]])
  padded = jnp.array([[5, 6, 7, 8, 0, 0, 0]])
  whole = logits(policy, params, padded, *row(4, pad=3))
  expected = logits(policy, params, tokens, *row(4))
  np.testing.assert_allclose(whole[:, :4], expected, atol=1e-5)
  assert np.isfinite(whole).all()


@pytest.mark.parametrize(
  ("kv_heads", "stacks"), [(1, 1), (2, 1), (4, 1), (2, 2)]
)
def test_cached_decode_equals_the_full_forward(kv_heads, stacks):
  config = dataclasses.replace(SMALL, num_kv_heads=kv_heads, tied=False)
  policy, params = make(config)
  tokens = jax.random.randint(jax.random.key(2), (3, 9), 0, 48)
  positions = jnp.broadcast_to(jnp.arange(9), (3, 9))
  expected = logits(policy, params, tokens, positions, jnp.zeros_like(tokens))
  lengths = jnp.array([2, 5, 8])
  policy = dataclasses.replace(policy, stacks=stacks)
  params = policy.split(params)
  prefilled = policy.prefill(params, tokens)
  unwritten = jnp.arange(9)[None, :] >= lengths[:, None]
  garbage = jnp.where(unwritten[None, :, :, None, None], 1e3, 0.0)
  own = tokens[jnp.arange(3), lengths]
  seen = jnp.arange(9) < lengths[:, None]
  cache = [
    attention.as_cache(keys + garbage, values + garbage)
    for keys, values in prefilled
  ]
  got, new, _ = policy.decode(params, own, lengths, [(cache, seen)])
  np.testing.assert_allclose(got, expected[jnp.arange(3), lengths], atol=1e-4)
  assert len(prefilled) == len(new) == stacks
  for (keys, _), (own_keys, _) in zip(prefilled, new, strict=True):
    whole_keys = keys[:, jnp.arange(3), lengths]
    np.testing.assert_allclose(own_keys, whole_keys, atol=1e-5)


@pytest.mark.parametrize("experts", [0, 4])
def test_a_generator_holds_weights_as_its_products_round_them(experts):
  config = dataclasses.replace(
    SMALL,
    compute_dtype="bfloat16",
    num_experts=experts,
    experts_per_token=experts // 2,
  )
  policy, params = make(config)
  held = policy.served(params)
  for path, weight in jax.tree_util.tree_leaves_with_path(held):
    wide = path[-1].key in ("scale", "router")
    assert weight.dtype == (jnp.float32 if wide else jnp.bfloat16)
  tokens = jnp.array([[5, 6, 7, 8]])
  got = logits(policy, held, tokens, *row(4))
  expected = logits(policy, params, tokens, *row(4))
  np.testing.assert_array_equal(got, expected)


def test_stacks_must_divide_the_layers():
  with pytest.raises(ValueError, match="stacks is 3; it must divide .* 2"):
    transformer.Policy(SMALL, stacks=3)


def test_a_mesh_of_2x2_computes_what_one_device_does():
  policy, params = make()
  mesh = sharding.make_mesh(sharding.MeshShape(fsdp=2, tensor=2), jax.devices())
  tokens = jnp.arange(14).reshape(2, 7)
  positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
  ids = jnp.zeros_like(tokens)
  expected = logits(policy, params, tokens, positions, ids)
  spread = jax.device_put(params, policy.param_shardings(mesh))
  query = spread["layers"]["attention"]["query"]
  assert query.addressable_shards[0].data.shape == (2, 16, 2, 8)
  with jax.set_mesh(mesh):
    got = jax.jit(lambda p: logits(policy, p, tokens, positions, ids))(spread)
  np.testing.assert_allclose(got, expected, atol=1e-5)


def test_rows_that_a_mesh_would_split_unevenly_are_refused():
  """XLA would add to the gradient of token 0 what stands in the padding."""
  policy, params = make()
  shape = sharding.MeshShape(fsdp=2, expert=2)
  mesh = sharding.make_mesh(shape, jax.devices())
  tokens = jnp.zeros((2, 7), jnp.int32)
  policy.hidden(params, tokens, tokens, tokens)
  with jax.set_mesh(mesh), pytest.raises(ValueError, match="2 rows.*4 ways"):
    jax.eval_shape(lambda p: policy.hidden(p, *[tokens] * 3), params)


def test_a_mesh_splits_the_residual_stream_by_tokens_if_they_divide():
  policy, _ = make()
  mesh = sharding.make_mesh(sharding.MeshShape(fsdp=2, tensor=2), jax.devices())

  def stream(length):
    whole = jnp.zeros((2, length), jnp.int32)
    with jax.set_mesh(mesh):
      program = jax.jit(
        jax.grad(lambda p: policy.hidden(p, *[whole] * 3).sum())
      )
      placed = sharding.placed(
        policy.abstract_params(), policy.param_shardings(mesh)
      )
      text = program.lower(placed).compile().as_text()
    kept = (policy.config.num_layers, 1, length // 2, policy.config.d_model)
    return f"f32[{','.join(map(str, kept))}]" in text

  assert stream(12)
  assert not stream(13)


def products(config, length=12):
  """Products with weights in a gradient."""
  policy, params = make(config)
  whole = jnp.zeros((2, length), jnp.int32)
  loss = lambda p: policy.hidden(p, *[whole] * 3).sum()  # noqa: E731
  text = str(jax.make_jaxpr(jax.grad(loss))(params))
  found = re.findall(r"dot_general\[(.*?)preferred_element_type", text, re.S)
  return sum("([], [])" in dimensions for dimensions in found)


def test_remat_dots_computes_no_product_with_weights_again():
  none, dots, full = (
    products(dataclasses.replace(SMALL, remat=remat))
    for remat in ("none", "dots", "full")
  )
  assert none == dots < full


def test_unrolled_layers_compute_the_same_without_a_loop():
  policy, params = make()
  whole = jnp.arange(24).reshape(2, 12) % 8

  def gradient(unroll):
    config = dataclasses.replace(policy.config, unroll=unroll)
    hidden = transformer.Policy(config).hidden
    return jax.jit(jax.grad(lambda p: hidden(p, *[whole] * 3).sum()))

  scanned, unrolled = gradient(1), gradient(policy.config.num_layers)
  assert "stablehlo.while" in scanned.lower(params).as_text()
  assert "stablehlo.while" not in unrolled.lower(params).as_text()
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
    scanned(params),
    unrolled(params),
  )


def test_on_one_device_no_copy_is_transposed_for_the_gradient_of_a_weight():
  policy, params = make(dataclasses.replace(SMALL, unroll=SMALL.num_layers))
  whole = jnp.zeros((2, 12), jnp.int32)
  program = jax.jit(jax.grad(lambda p: policy.hidden(p, *[whole] * 3).sum()))
  text = program.lower(params).compile().as_text()
  hidden = policy.config.d_ff
  assert f"f32[{hidden},2,12]" not in text


def test_rotary_scores_depend_on_distance_only():
  q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 8))

  def score(i, j):
    turn = lambda x, p: transformer.rotary(  # noqa: E731
      x, transformer.turns(jnp.array([p]), x.shape[-1] // 2, 1e4)
    )
    return jnp.vdot(turn(q, i), turn(k, j))

  np.testing.assert_allclose(score(7, 4), score(3, 0), atol=1e-5)
  assert abs(score(7, 4) - score(7, 1)) > 1e-4


@pytest.mark.parametrize("config", [SMALL, MOE], ids=["dense", "experts"])
def test_every_weight_gets_a_gradient(config):
  policy, params = make(dataclasses.replace(config, tied=False))
  tokens = jnp.arange(8)[None]
  positions, ids = row(8)
  weight = jax.random.normal(jax.random.key(1), (1, 8, SMALL.vocab_size))
  gradient = jax.grad(
    lambda p: jnp.sum(weight * logits(policy, p, tokens, positions, ids))
  )(params)
  dead = [
    jax.tree_util.keystr(path)
    for path, g in jax.tree_util.tree_leaves_with_path(gradient)
    if not np.abs(g).max() > 0
  ]
  assert dead == []


@pytest.mark.parametrize(
  ("name", "millions"),
  [
    ("tiny", 0.13),
    ("1m", 0.94),
    ("qwen3-0.6b", 596),
    ("qwen3-32b", 32762),
    ("qwen3-30b-a3b", 30532),
  ],
)
def test_sizes_have_the_parameters_that_their_names_say(name, millions):
  policy = transformer.Policy(transformer.sized(name))
  assert policy.num_params() / 1e6 == pytest.approx(millions, rel=0.02)


def test_a_wrong_size_lists_those_there_are():
  with pytest.raises(ValueError, match=r"'7b'.*'qwen3-8b'"):
    transformer.sized("7b")


@pytest.mark.parametrize(
  ("field", "value"),
  [("num_kv_heads", 3), ("head_dim", 7), ("num_layers", 0)],
)
def test_an_impossible_shape_names_its_field(field, value):
  with pytest.raises(ValueError, match=f"{field} is {value}"):
    dataclasses.replace(SMALL, **{field: value})


def test_a_mesh_that_does_not_divide_names_the_tensor():
  mesh = sharding.make_mesh(sharding.MeshShape(tensor=4), jax.devices())
  with pytest.raises(ValueError, match=r"'key'.*'kv_heads' of size 2.*4 ways"):
    transformer.Policy(SMALL).param_shardings(mesh)
