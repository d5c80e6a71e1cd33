"""How far does each mismatch move a policy from the learner's?

    python -m experiments.benchmarks.mismatch

Draws random weights, lays random token rows under them, and at each position
past the prompt samples a token from the policy that a generator would hold
(weights snapped or noisy, or the cache snapped) for the same prefix. Reports
over the sampled tokens what a run logs as engine mismatch: the mean and largest
|log q - log p|, with q the generator's and p the clean policy, and mean(log q -
log p), the k1 estimate of KL(q || p); beside it the exact KL.

Expect all but k1, which is the noisiest, to grow from int8 over fp8 to int4 and
with the noise, and groups of 32 to mend part of int4. Weights are random: where
these stand in a trained model, its own figures differ. About three minutes
on two CPU cores. The last line is JSON: by size and variant, the four figures.
"""

import argparse
import functools
import json
import os
import platform

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rl_tpu.models import attention, quantization, transformer

VARIANTS = {
  "clean": {},
  **{f"weights {g}": {"weights": g} for g in ("int8", "fp8", "int4")},
  "weights int4, groups of 32": {"weights": "int4", "group_size": 32},
  **{f"noise {s}": {"weight_noise": s} for s in (0.001, 0.01, 0.02, 0.05)},
  **{f"kv {g}": {"kv": g} for g in ("int8", "fp8", "int4")},
  "weights int8, kv int4": {"weights": "int8", "kv": "int4"},
}
FIGURES = ("mean_abs", "max_abs", "k1", "kl")


def parse() -> argparse.Namespace:
  """The sizes."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--models", nargs="+", default=["tiny", "5m"], help="sizes by name"
  )
  for name, default, what in (
    ("rows", 16, "token rows"),
    ("prompt", 16, "tokens of a row that are prefilled"),
    ("length", 64, "tokens of a row"),
    ("seed", 0, "of weights, rows and sampled tokens"),
  ):
    parser.add_argument(f"--{name}", type=int, default=default, help=what)
  return parser.parse_args()


def generator_logp(
  policy: transformer.Policy,
  config: quantization.Config,
  prompt: int,
  params: transformer.Params,
  tokens: Int[Array, "S T"],
) -> Float[Array, "n S V"]:
  """Log-probabilities of what follows each token from the prompt's last on.

  Takes the generator's way: prefill, then a decode step a token, each entry of
  the cache snapped when it is written.
  """
  snap = functools.partial(quantization.snap_cache, config=config)
  ((keys, values),) = policy.prefill(params, tokens)

  def step(cache, position):
    at = jnp.full(tokens.shape[:1], position)
    seen = jnp.arange(tokens.shape[1]) < at[:, None]
    caches = [([attention.as_cache(*cache)], seen)]
    logits, (new,) = policy.decode(params, tokens[:, position], at, caches)
    cache = tuple(
      whole.at[:, :, position].set(snap(entry))
      for whole, entry in zip(cache, new, strict=True)
    )
    return cache, jax.nn.log_softmax(logits)

  positions = jnp.arange(prompt - 1, tokens.shape[1])
  return jax.lax.scan(step, (snap(keys), snap(values)), positions)[1]


def measure(
  policy: transformer.Policy, sizes: argparse.Namespace
) -> dict[str, dict[str, float]]:
  """The figures of every variant for one model."""
  keys = jax.random.split(jax.random.key(sizes.seed), 3)
  params = jax.jit(policy.init)(keys[0])
  shape = (sizes.rows, sizes.length)
  tokens = jax.random.randint(keys[1], shape, 0, policy.config.vocab_size)

  score = jax.jit(generator_logp, static_argnums=(0, 1, 2))

  @jax.jit
  def compare(behavior, clean):
    sampled = jax.random.categorical(keys[2], behavior)[..., None]
    gap = jnp.take_along_axis(behavior - clean, sampled, axis=-1)
    kl = jnp.sum(jnp.exp(behavior) * (behavior - clean), axis=-1)
    return jnp.mean(jnp.abs(gap)), jnp.abs(gap).max(), gap.mean(), kl.mean()

  clean = score(policy, quantization.Config(), sizes.prompt, params, tokens)
  results = {}
  for name, fields in VARIANTS.items():
    config = quantization.Config(**fields)
    noise = quantization.draw_noise(params, config)
    held = quantization.snap_weights(params, config, noise)
    cache_only = quantization.Config(kv=config.kv)
    behavior = score(policy, cache_only, sizes.prompt, held, tokens)
    figures = map(float, compare(behavior, clean))
    results[name] = dict(zip(FIGURES, figures, strict=True))
  return results


def main() -> None:
  """Prints the table and the JSON line."""
  sizes = parse()
  print(
    f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, "
    f"{jax.devices()[0]}, jax {jax.__version__}\n"
    + ", ".join(f"{name} {value}" for name, value in vars(sizes).items())
  )
  report = {}
  for name in sizes.models:
    policy = transformer.Policy(transformer.sized(name))
    report[name] = measure(policy, sizes)
    print(f"\n{name:28}" + "".join(f"{figure:>11}" for figure in FIGURES))
    for variant, figures in report[name].items():
      values = "".join(f"{value:11.2e}" for value in figures.values())
      print(f"{variant:28}{values}")
  print(json.dumps(report))


if __name__ == "__main__":
  main()
