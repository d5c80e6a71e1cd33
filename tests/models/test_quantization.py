import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu import sharding
from rl_tpu.models import quantization, transformer
from rl_tpu.models.quantization import Config, snap_cache, snap_weights

SMALL = transformer.Config(
  vocab_size=48,
  d_model=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  d_ff=48,
  tied=False,
)
snap_jitted = jax.jit(snap_weights, static_argnums=1)
draw_jitted = jax.jit(quantization.draw_noise, static_argnums=1)
GRIDS = ("int8", "int4", "int3", "int2", "fp8")
LARGEST = {"int8": 127, "int4": 7, "int3": 3, "int2": 1, "fp8": 448}


@functools.cache
def weights():
  """A decoder's weights, each channel at a scale of its own."""
  params = transformer.Policy(SMALL).init(jax.random.key(0))
  spread = lambda w: w * jnp.exp(jnp.linspace(-2, 2, w.shape[-1]))  # noqa: E731
  return jax.tree.map(spread, params)


@functools.cache
def feed_forward():
  """Three weights of one shape, large enough for statistics."""
  weight = jax.random.normal(jax.random.key(5), (2, 64, 64))
  return {"gate": weight, "up": 2 * weight, "norm": {"scale": 1 + weight}}


def named(tree):
  name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {name(path): np.asarray(leaf) for path, leaf in leaves}


def channels(tree):
  """Matmul weights as (name, [channels, inputs]), written out by hand."""
  d, h = SMALL.d_model, SMALL.head_dim
  for name, x in named(tree).items():
    match name.split("/")[-1]:
      case "query" | "key" | "value":
        yield name, np.moveaxis(x, 1, -1).reshape(-1, d)
      case "out":
        yield name, x.reshape(SMALL.num_layers, -1, d).mT.reshape(-1, 4 * h)
      case "gate" | "up" | "down" | "head":
        yield name, x.mT.reshape(-1, x.shape[-2])
      case "embedding":
        yield name, x


def equal(tree, other):
  return jax.tree.all(
    jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), tree, other)
  )


def rounded(levels, grid):
  """The nearest levels, by NumPy and ml_dtypes."""
  if grid == "fp8":
    clipped = np.clip(levels, -448, 448).astype(np.float32)
    return clipped.astype(jnp.float8_e4m3fn).astype(np.float32)
  return np.clip(np.round(levels), -LARGEST[grid], LARGEST[grid])


@pytest.mark.parametrize("grid", GRIDS)
def test_each_output_channel_takes_the_nearest_values_of_its_own_grid(grid):
  snapped = dict(channels(snap_jitted(weights(), Config(weights=grid))))
  assert len(snapped) == 9
  most = {"int8": 255, "int4": 15, "int3": 7, "int2": 3, "fp8": 253}[grid]
  for name, clean in channels(weights()):
    scale = np.abs(clean).max(axis=1, keepdims=True) / LARGEST[grid]
    levels = snapped[name] / scale
    np.testing.assert_allclose(
      levels, rounded(levels, grid), rtol=1e-4, atol=1e-6, err_msg=name
    )
    assert max(len(np.unique(channel)) for channel in snapped[name]) <= most
    step = scale
    if grid == "fp8":
      exponent = np.floor(np.log2(np.abs(clean / scale)))
      step = scale * 2.0 ** (np.maximum(exponent, -6) - 3)
    error = np.abs(snapped[name] - clean) / step
    assert error.max() <= 0.5 * (1 + 2e-3), name
    assert error.max() > 0.4, name


def test_norms_and_routers_stay_whole_and_dtypes_and_shapes_stay():
  params = weights() | {"router": jnp.linspace(0, 1, 8).reshape(4, 2)}
  params["head"] = params["head"].astype(jnp.bfloat16)
  snapped = snap_jitted(params, Config(weights="int4"))
  before, after = named(params), named(snapped)
  shapes = lambda tree: {k: (x.shape, x.dtype) for k, x in tree.items()}  # noqa: E731
  assert shapes(after) == shapes(before)
  same = {k for k in before if np.array_equal(before[k], after[k])}
  assert same == {k for k in before if k.endswith(("scale", "router"))}


def test_an_unknown_weight_is_refused_by_name():
  with pytest.raises(ValueError, match="weight layers/gadget is not one"):
    snap_weights(
      {"layers": {"gadget": jnp.ones((2, 2))}}, Config(weights="fp8")
    )


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("group_size", [0, 8])
def test_snapping_twice_is_snapping_once(grid, group_size):
  config = Config(weights=grid, group_size=group_size)
  once = snap_jitted(weights(), config)
  assert not equal(once, weights())
  assert equal(snap_jitted(once, config), once)


@pytest.mark.parametrize("grid", GRIDS)
def test_jit_gives_the_same_bits_also_inside_a_larger_program(grid):
  config = Config(weights=grid, kv=grid)
  eager = snap_weights(feed_forward(), config)
  assert equal(snap_jitted(feed_forward(), config), eager)

  def consume(w, x, snap):
    held = snap_weights({"up": w}, config)["up"] if snap else w
    return held + x, snap_cache(x, config.kv) * w if snap else x * w

  consume = jax.jit(consume, static_argnames="snap")
  w, x = jax.random.normal(jax.random.key(1), (2, 48, 48))
  held = snap_weights({"up": w}, config)["up"]
  fused, apart = consume(w, x, snap=True), consume(held, x, snap=False)
  assert jnp.array_equal(fused[0], apart[0])
  assert jnp.array_equal(fused[1], snap_cache(x, config.kv) * w)


@pytest.mark.parametrize("grid", GRIDS)
def test_rounding_survives_in_the_compiled_program(grid):
  """No cast to a narrow type that a compiler may fold with the one back."""
  config = Config(weights=grid, kv=grid)

  def both(x):
    return snap_weights({"up": x}, config), snap_cache(x, config.kv)

  lowered = jax.jit(both).lower(jnp.ones((8, 8)))
  assert "f8E4M3" not in lowered.as_text()
  compiled = lowered.compile().as_text()
  explicit = "reduce-precision" if grid == "fp8" else "round-nearest-even"
  assert compiled.count(explicit) >= 2


def test_e4m3_equals_ml_dtypes_on_every_number_and_midpoint():
  numbers = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)
  numbers = np.unique(numbers[np.isfinite(numbers)].astype(np.float32))
  assert len(numbers) == 253
  middle = (numbers[1:] + numbers[:-1]) / 2
  beside = [np.nextafter(middle, sign * np.float32(1e9)) for sign in (1, -1)]
  x = np.concatenate([numbers, middle, *beside, [449, 1e6, -1e6]])
  x = x.astype(np.float32)
  snap = functools.partial(snap_cache, grid="fp8")
  for function in (snap, jax.jit(snap)):
    np.testing.assert_array_equal(function(x[None]), rounded(x[None], "fp8"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("grid", ["int8", "int4"])
def test_a_cache_entry_has_a_scale_for_each_token_and_head(grid, dtype):
  x = jax.random.normal(jax.random.key(3), (2, 5, 4, 16))
  x *= jnp.exp(jax.random.normal(jax.random.key(4), (2, 5, 4, 1)))
  x = x.astype(dtype)
  snap = jax.jit(functools.partial(snap_cache, grid=grid))
  snapped = snap(x)
  assert (snapped.dtype, snapped.shape) == (x.dtype, x.shape)
  wide, got = np.asarray(x, np.float32), np.asarray(snapped, np.float32)
  scale = np.abs(wide).max(axis=-1, keepdims=True) / LARGEST[grid]
  ulp = 2.0**-8 if dtype == "bfloat16" else 1e-4
  expected = rounded(wide / scale, grid) * scale
  close = np.abs(got - expected) <= ulp * np.abs(wide).max(-1, keepdims=True)
  assert close.mean() > 0.999  # a tie may fall either way
  alone = snap(x[1, 2, 3])
  assert np.array_equal(alone, snapped[1, 2, 3])


def test_an_fp8_cache_has_no_scale_and_saturates():
  x = jnp.array([[1000.0, 17.1, 0.001], [-500.0, 0.3, 0.0]])
  expected = [[448.0, 18.0, 2.0**-9 * 1.0], [-448.0, 0.3125, 0.0]]
  assert snap_cache(x, "fp8").tolist() == expected


def test_a_channel_of_zeros_stays_zero():
  config = Config(weights="int8")
  assert not snap_weights({"up": jnp.zeros((4, 3))}, config)["up"].any()
  assert not snap_cache(jnp.zeros((2, 4)), "int4").any()


def test_groups_have_scales_of_their_own():
  w = jnp.concatenate([jnp.full((4, 1), 100.0), jnp.full((4, 1), 0.01)])
  whole = snap_weights({"up": w}, Config(weights="int4"))["up"]
  assert whole[4:].tolist() == [[0.0]] * 4
  grouped = snap_weights({"up": w}, Config(weights="int4", group_size=4))["up"]
  np.testing.assert_allclose(grouped, w, rtol=1e-4)


def test_groups_that_do_not_divide_name_the_weight():
  with pytest.raises(ValueError, match="group_size is 5.* 32 inputs.*/out"):
    out = {"attention": {"out": jnp.ones((4, 8, 32))}}
    snap_weights(out, Config(weights="int4", group_size=5))


def test_noise_is_relative_and_each_tensors_own():
  config = Config(weight_noise=0.02, noise_seed=3)
  noise = quantization.draw_noise(feed_forward(), config)
  unit = jax.tree.map(lambda n, w: np.asarray(n / w), noise, feed_forward())
  first, second = unit["gate"]
  for x in (first, second, unit["up"], unit["norm"]["scale"]):
    assert x.std() == pytest.approx(0.02, rel=0.05)
    assert x.mean() == pytest.approx(0, abs=0.001)
  for one, other in ((first, second), (unit["gate"], unit["up"])):
    assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.05


def test_noise_is_the_same_for_every_version_and_differs_by_seed():
  config = Config(weight_noise=0.02)
  noise = quantization.draw_noise(feed_forward(), config)
  assert equal(quantization.draw_noise(feed_forward(), config), noise)
  other = dataclasses.replace(config, noise_seed=1)
  assert not equal(quantization.draw_noise(feed_forward(), other), noise)
  later = jax.tree.map(lambda w: 2 * w, feed_forward())
  for version in (feed_forward(), later):
    held = snap_weights(version, config, noise)
    assert equal(held, jax.tree.map(jnp.add, version, noise))


def test_a_tensors_noise_depends_on_its_name_alone():
  config = Config(weight_noise=0.1)
  up = feed_forward()["up"]
  whole = quantization.draw_noise(feed_forward(), config)
  assert equal(quantization.draw_noise({"up": up}, config)["up"], whole["up"])


def test_noise_comes_before_the_grid():
  config = Config(weights="int4", weight_noise=0.05)
  noise = quantization.draw_noise(feed_forward(), config)
  noisy = jax.tree.map(jnp.add, feed_forward(), noise)
  expected = snap_weights(noisy, Config(weights="int4"))
  assert equal(snap_weights(feed_forward(), config, noise), expected)


def test_noise_missing_or_not_wanted_is_refused():
  assert quantization.draw_noise(weights(), Config()) is None
  with pytest.raises(ValueError, match="weight_noise is 0.1 and noise is miss"):
    snap_weights(weights(), Config(weight_noise=0.1))
  with pytest.raises(ValueError, match="weight_noise is 0.0 and noise is giv"):
    snap_weights(weights(), Config(), weights())


def test_without_mismatch_everything_passes_through():
  assert snap_weights(weights(), Config()) is weights()
  x = jnp.ones(3)
  assert snap_cache(x, "none") is x


@pytest.mark.parametrize(
  "config",
  [
    Config(weights="int8", weight_noise=0.01),
    Config(weights="fp8"),
    Config(weights="int4", group_size=8),
  ],
)
def test_a_mesh_of_2x2_snaps_to_the_same_bits_and_keeps_shardings(config):
  policy = transformer.Policy(SMALL)
  mesh = sharding.make_mesh(sharding.MeshShape(fsdp=2, tensor=2), jax.devices())
  shardings = policy.param_shardings(mesh)
  spread = jax.device_put(weights(), shardings)
  noise = None
  if config.weight_noise:
    draw = functools.partial(quantization.draw_noise, config=config)
    noise = jax.jit(draw, out_shardings=shardings)(spread)
  snap = functools.partial(snap_weights, config=config)
  got = jax.jit(snap, out_shardings=shardings)(spread, noise=noise)
  expected = snap_jitted(weights(), config, draw_jitted(weights(), config))
  assert equal(jax.device_get(got), jax.device_get(expected))
  alike = jax.tree.map(
    lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), got, shardings
  )
  assert jax.tree.all(alike)


@pytest.mark.parametrize(("period", "taken"), [(1, [0, 1, 2, 3]), (3, [0, 3])])
def test_the_generator_takes_over_every_nth_version(period, taken):
  config = Config(refresh_period=period)
  assert [v for v in range(4) if config.refreshes(v)] == taken


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("weights", "int5"),
    ("kv", "bf16"),
    ("group_size", -1),
    ("group_size", 32),  # of weights that are not snapped
    ("weight_noise", -0.1),
    ("weight_noise", float("nan")),
    ("noise_seed", -1),
    ("noise_seed", 2**32),
    ("refresh_period", 0),
  ],
)
def test_a_bad_field_is_refused_by_name(field, value):
  with pytest.raises(ValueError, match=f"{field} is {value!r}; it must be"):
    Config(**{field: value})
