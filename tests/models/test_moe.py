import dataclasses

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from test_transformer import SMALL, logits, make, row

from rl_tpu import sharding
from rl_tpu.models import attention, moe, quantization, transformer
from rl_tpu.types import Estimate

D, F, E, K = 16, 24, 8, 3
MOE = dataclasses.replace(
  SMALL, num_experts=8, experts_per_token=2, d_ff=24, tied=False
)
SPREAD = sharding.MeshShape(fsdp=2, tensor=2, expert=2)
mixture = jax.jit(moe.mixture, static_argnames=("per_token", "normalize"))


@pytest.fixture(autouse=True, params=["grouped"])
def way(request, monkeypatch):
  """Tokens are too many for all experts, or few enough (`every`)."""
  few = {"grouped": 0, "every": 1000}[request.param]
  monkeypatch.setattr(moe, "_FEW", few)


both_ways = pytest.mark.parametrize("way", ["grouped", "every"], indirect=True)


def mesh(shape=SPREAD):
  return sharding.make_mesh(shape, jax.devices())


def drawn(tokens=20, seed=0):
  """Tokens, a router and experts."""
  keys = jax.random.split(jax.random.key(seed), 5)
  normal = jax.random.normal
  experts = (
    normal(keys[2], (E, D, F)) / 4,
    normal(keys[3], (E, D, F)) / 4,
    normal(keys[4], (E, F, D)) / 5,
  )
  return normal(keys[0], (tokens, D)), normal(keys[1], (D, E)), experts


def looped(x, router, experts, normalize):
  """One token after the other, one expert after the other, in float64."""
  x, router, gate, up, down = (
    np.asarray(a, np.float64) for a in (x, router, *experts)
  )
  out, chosen = np.zeros_like(x), []
  for n, token in enumerate(x):
    p = np.exp(token @ router)
    p /= p.sum()
    best = np.argsort(-p, kind="stable")[:K]
    total = p[best].sum() if normalize else 1.0
    for e in best:
      z = token @ gate[e]
      hidden = z / (1 + np.exp(-z)) * (token @ up[e])
      out[n] += p[e] / total * (hidden @ down[e])
    chosen.append(best)
  return out, np.array(chosen)


def dense(x, router, experts, normalize):
  """Every expert for every token, weighted by gates that are mostly 0."""
  gate, up, down = experts
  p = jax.nn.softmax(x @ router)
  kept = p >= jnp.sort(p)[:, -K][:, None]
  gates = jnp.where(kept, p, 0.0)
  if normalize:
    gates /= gates.sum(-1, keepdims=True)
  hidden = jax.nn.silu(jnp.einsum("nd,edf->nef", x, gate))
  hidden *= jnp.einsum("nd,edf->nef", x, up)
  return jnp.einsum("nef,efd,ne->nd", hidden, down, gates)


def weighted(y):
  return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape))


def gradients(function, *arguments):
  return jax.grad(lambda *a: weighted(function(*a)), argnums=(0, 1, 2))(
    *arguments
  )


def assert_close(one, other, atol=2e-5):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=atol), one, other
  )


@both_ways
@pytest.mark.parametrize("normalize", [True, False])
def test_a_token_gets_the_gated_sum_of_its_likeliest_experts(normalize):
  arguments = drawn()
  run = lambda *a: moe.mixture(*a, per_token=K, normalize=normalize)  # noqa: E731
  y, routing = jax.jit(run)(*arguments)
  expected, chosen = looped(*arguments, normalize)
  np.testing.assert_allclose(y, expected, atol=1e-5)
  np.testing.assert_array_equal(routing.experts, chosen)


@both_ways
@pytest.mark.parametrize("normalize", [True, False])
def test_the_gradient_is_that_of_all_experts_under_the_same_gates(normalize):
  def sparse(*a):
    return moe.mixture(*a, per_token=K, normalize=normalize)[0]

  @jax.jit
  def both(*a):
    expected = gradients(lambda *a: dense(*a, normalize), *a)
    return gradients(sparse, *a), expected

  assert_close(*both(*drawn()))


def test_no_expert_is_ever_full():
  x, _, experts = drawn()
  router = jnp.zeros((D, E)).at[:, 5].set(x.sum(0))
  x = jnp.abs(x) * jnp.sign(router[:, 5])  # All of them want expert 5 most.
  y, routing = mixture(x, router, experts, per_token=K, normalize=True)
  assert set(np.asarray(routing.experts)[:, 0]) == {5}
  expected, _ = looped(x, router, experts, True)
  np.testing.assert_allclose(y, expected, atol=1e-5)


def test_of_equally_likely_experts_the_first_are_chosen():
  x, _, experts = drawn(tokens=2)
  options = {"per_token": K, "normalize": True}
  routing = mixture(x, jnp.zeros((D, E)), experts, **options)[1]
  assert np.asarray(routing.experts).tolist() == [[0, 1, 2]] * 2
  np.testing.assert_allclose(routing.entropy, np.log(E), rtol=1e-6)


def test_a_token_does_not_see_its_batch_mates():
  (x, *weights), (other, *_) = drawn(), drawn(seed=1)
  options = {"per_token": K, "normalize": True}
  y = mixture(x, *weights, **options)[0]
  mixed = mixture(x.at[3:].set(other[3:]), *weights, **options)[0]
  np.testing.assert_array_equal(mixed[:3], y[:3])  # to the last bit
  alone = mixture(x[:3], *weights, **options)[0]
  np.testing.assert_allclose(alone, y[:3], atol=1e-6)


def test_the_router_computes_in_float32_whatever_the_tokens_are():
  x, router, experts = drawn()
  narrow = x.astype(jnp.bfloat16)
  options = {"per_token": K, "normalize": True}
  y, routing = mixture(narrow, router, experts, **options)
  wide = mixture(narrow.astype(jnp.float32), router, experts, **options)
  np.testing.assert_array_equal(routing.entropy, wide[1].entropy)
  np.testing.assert_array_equal(routing.experts, wide[1].experts)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_allclose(y.astype(jnp.float32), wide[0], atol=0.1)


@both_ways
@pytest.mark.parametrize(
  ("shape", "tokens"),
  [(SPREAD, 7), (SPREAD, 203), (sharding.MeshShape(data=2, expert=4), 20)],
  ids=["tokens travel", "experts travel", "2x4"],
)
def test_X08_a_mesh_computes_what_one_device_does(shape, tokens):
  def run(*a):
    return moe.mixture(*a, per_token=K, normalize=True)[0]

  both = lambda *a: (run(*a), gradients(run, *a))  # noqa: E731
  arguments = drawn(tokens)
  expected = jax.jit(both)(*arguments)
  axes = ("expert", "embed", "mlp"), ("expert", "mlp", "embed")
  places = [sharding.named(mesh(shape), *axes[i]) for i in (0, 0, 1)]
  x, router, experts = arguments
  arguments = x, router, jax.device_put(experts, tuple(places))
  with jax.set_mesh(mesh(shape)):
    got = jax.jit(both)(*arguments)
  assert_close(got, expected)


@pytest.mark.parametrize(
  ("tokens", "pairs", "experts"),
  [(20, 5 * 2 * K, E // 2), (200, 50 * K, E)],
  ids=["few tokens reach both of an axis", "experts reach many tokens"],
)
def test_each_device_multiplies_by_its_own_experts_or_for_its_own_tokens(
  tokens, pairs, experts
):
  def products(jaxpr, found):
    for equation in jaxpr.eqns:
      if equation.primitive.name == "ragged_dot_general":
        rows, weights, _ = equation.invars
        found.append((rows.aval.shape[0], *weights.aval.shape))
      for inner in jax.extend.core.jaxprs_in_params(equation.params):
        products(inner, found)
    return found

  def run(*a):
    return moe.mixture(*a, per_token=K, normalize=True)[0]

  with jax.set_mesh(mesh()):
    jaxpr = jax.make_jaxpr(run)(*drawn(tokens))
  shapes = products(jaxpr.jaxpr, [])
  inward = (pairs, experts, D, F // 2)
  assert shapes == [inward, inward, (pairs, experts, F // 2, D)]


def test_few_tokens_are_multiplied_by_every_expert_and_many_are_grouped(
  monkeypatch,
):
  monkeypatch.setattr(moe, "_FEW", 20)
  run = lambda *a: moe.mixture(*a, per_token=K, normalize=True)  # noqa: E731
  grouped = ["ragged" in str(jax.make_jaxpr(run)(*drawn(n))) for n in (20, 21)]
  assert grouped == [False, True]


def test_the_tpu_kernel_gives_the_gradient_of_the_weights():
  keys = jax.random.split(jax.random.key(0), 3)
  rows = jax.random.normal(keys[0], (256, 128))
  gradient = jax.random.normal(keys[1], (256, 384))
  weights = jax.random.normal(keys[2], (5, 128, 384))
  sizes = jnp.array([7, 0, 130, 60, 1])
  _, pull = jax.vjp(lambda w: moe.matmul(rows, w, sizes), weights)
  got = moe.of_weights(rows, gradient, sizes, interpret=True)
  np.testing.assert_allclose(got, pull(gradient)[0], atol=1e-4)
  assert not np.any(got[1])


@pytest.mark.parametrize("turned", [False, True])
def test_the_tpu_kernel_multiplies_each_row_by_its_expert(turned):
  keys = jax.random.split(jax.random.key(0), 2)
  weights = jax.random.normal(keys[0], (5, 128, 384))
  rows = jax.random.normal(keys[1], (256, 384 if turned else 128))
  sizes = jnp.array([7, 0, 130, 60, 1])
  shaped = weights.swapaxes(1, 2) if turned else weights
  expected = moe.matmul(rows, shaped, sizes)
  got = moe.of_rows(rows, weights, sizes, turned=turned, interpret=True)
  grouped = int(sizes.sum())
  np.testing.assert_allclose(got[:grouped], expected[:grouped], atol=1e-4)


def test_cached_decode_equals_the_full_forward():
  policy, params = make(MOE)
  tokens = jax.random.randint(jax.random.key(2), (3, 9), 0, 48)
  expected = logits(policy, params, tokens, *whole_rows(tokens))
  lengths = jnp.array([2, 5, 8])
  ((keys, values),) = policy.prefill(params, tokens)
  seen = jnp.arange(9) < lengths[:, None]
  own = tokens[jnp.arange(3), lengths]
  cache = [attention.as_cache(keys, values)]
  got, *_ = policy.decode(params, own, lengths, [(cache, seen)])
  np.testing.assert_allclose(got, expected[jnp.arange(3), lengths], atol=1e-4)
  # Tokens 4 to 8 continue a cache that holds the first four.
  first = [attention.as_cache(keys[:, :, :4], values[:, :, :4])]
  (rest,) = policy.extend(
    params, tokens[:, 4:], jnp.full(3, 4), first, jnp.arange(3)
  )
  assert_close(rest, (keys[:, :, 4:], values[:, :, 4:]))


def whole_rows(tokens):
  """Positions and ids of rows that hold one trajectory each."""
  rows, length = tokens.shape
  return jnp.tile(jnp.arange(length), (rows, 1)), jnp.zeros_like(tokens)


def test_X08_a_decoder_on_a_2x2x2_mesh_computes_what_one_device_does():
  policy, params = make(MOE)
  tokens = jnp.arange(28).reshape(4, 7)
  spread = jax.device_put(params, policy.param_shardings(mesh()))
  experts = spread["layers"]["feed_forward"]["experts"]
  assert experts["gate"].addressable_shards[0].data.shape == (2, 4, 16, 12)

  def both(p):
    out = logits(policy, p, tokens, *whole_rows(tokens))
    return out, jax.grad(
      lambda p: weighted(logits(policy, p, tokens, *whole_rows(tokens)))
    )(p)

  expected = jax.jit(both)(params)
  with jax.set_mesh(mesh()):
    got = jax.jit(both)(spread)
  assert_close(got, expected, atol=1e-4)


def test_loads_are_counted_by_hand():
  # Two layers, one row of three tokens, one of them padding; 4 experts.
  routing = moe.Routing(
    experts=jnp.array([[[[0, 1], [0, 2], [3, 3]]], [[[1, 0], [0, 1], [2, 3]]]]),
    entropy=jnp.array([[[0.5, 1.0, 9.0]], [[0.1, 0.4, 9.0]]]),
  )
  mask = jnp.array([[True, True, False]])
  found = moe.loads(routing, mask, 4)
  load = found["expert_load"]
  assert load.total.tolist() == [[2, 1, 1, 0], [2, 2, 0, 0]]
  assert found["router_entropy"].mean(0.0) == pytest.approx(2.0 / 2 / 2)
  # A layer's mean expert gets half a token's choice: 2 choices, 4 experts.
  assert moe.imbalance(np.asarray(load.mean(0.0))) == {
    "expert_load_max": 2.0,
    "dead_experts": 3 / 8,
  }
  twice = load + Estimate(total=load.total[:, ::-1], count=load.count)
  assert moe.imbalance(np.asarray(twice.mean(0.0))) == {
    "expert_load_max": 1.0,
    "dead_experts": 0.0,
  }


def test_routing_of_packed_rows_names_every_layer_and_token():
  policy, params = make(MOE)
  tokens = jnp.arange(10).reshape(2, 5)
  hidden, routing = policy.routed(params, tokens, *whole_rows(tokens))
  assert hidden.shape == (2, 5, 32)
  assert routing.experts.shape == (2, 2, 5, 2)
  assert routing.entropy.shape == (2, 2, 5)
  dense_policy, dense_params = make(SMALL)
  plain = dense_policy.routed(dense_params, tokens, *whole_rows(tokens))
  assert plain[1] is None


def test_experts_are_decayed_and_the_router_is_not():
  axes = transformer.Policy(MOE).logical_axes()["layers"]["feed_forward"]
  assert set(axes["router"]) == {"layers", None}
  for name in ("gate", "up", "down"):
    assert {"expert", "embed", "mlp"} < set(axes["experts"][name])


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_experts": -1}, "num_experts is -1; it must be >= 0"),
    ({"experts_per_token": 9}, r"experts_per_token is 9.*num_experts = 8"),
    ({"experts_per_token": 0}, r"experts_per_token is 0.*in \[1, "),
    ({"num_experts": 0}, r"experts_per_token is 2.*num_experts = 0"),
  ],
)
def test_an_impossible_choice_of_experts_names_its_field(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(MOE, **changes)


def test_experts_that_do_not_divide_over_the_mesh_are_named():
  policy = transformer.Policy(dataclasses.replace(MOE, num_experts=6))
  with pytest.raises(ValueError, match=r"'down'.*'expert' of size 6.*4 ways"):
    policy.param_shardings(mesh(sharding.MeshShape(expert=4)))


def test_quantization_has_a_grid_for_each_expert_and_channel():
  _, params = make(MOE)
  block = params["layers"]["feed_forward"]
  block["experts"]["gate"] *= jnp.arange(1, 9)[:, None, None]
  snap = jax.jit(quantization.snap_weights, static_argnums=1)
  int4 = quantization.Config(weights="int4")
  snapped = snap({"feed_forward": block}, int4)["feed_forward"]
  np.testing.assert_array_equal(snapped["router"], block["router"])
  for name, w in block["experts"].items():
    w = np.asarray(w)
    scale = np.abs(w).max(axis=2, keepdims=True) / 7
    expected = np.round(w / scale) * scale
    np.testing.assert_allclose(snapped["experts"][name], expected, rtol=1e-4)
    assert snapped["experts"][name].shape == w.shape


def test_padding_is_routed_and_disturbs_nobody():
  policy, params = make(MOE)
  tokens = jnp.array([[5, 6, 7, 8]])
  padded = jnp.array([[5, 6, 7, 8, 0, 0, 0]])
  got = logits(policy, params, padded, *row(4, pad=3))
  expected = logits(policy, params, tokens, *row(4))
  np.testing.assert_allclose(got[:, :4], expected, atol=1e-5)


def test_what_a_kernel_leaves_behind_the_last_group_reaches_nothing(
  monkeypatch,
):
  whole = jax.lax.ragged_dot

  def careless(rows, weights, sizes):
    grouped = jnp.arange(len(rows)) < jnp.sum(sizes)
    out = whole(rows, weights, sizes)
    return jnp.where(grouped[:, None], out, jnp.nan)

  monkeypatch.setattr(jax.lax, "ragged_dot", careless)
  x, router, experts = drawn()

  def run(*a):
    return moe.mixture(*a, per_token=K, normalize=True)[0]

  two = mesh(sharding.MeshShape(expert=2))
  both = jax.jit(lambda *a: (run(*a), gradients(run, *a)))
  with jax.set_mesh(two):
    got = both(x, router, experts)
  expected = dense(x, router, experts, True)
  np.testing.assert_allclose(got[0], expected, atol=1e-5)
  assert_close(got[1], gradients(lambda *a: dense(*a, True), *drawn()))
