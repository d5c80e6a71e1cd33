"""How far does each mismatch move a policy from the learner's?

    python -m experiments.benchmarks.mismatch

Draws random weights and lets an engine of each mismatch (weights rounded or
noisy, cache rounded) sample from them after random prompts, keeping the whole
distribution of each token. Reports over the sampled tokens the mean and the
largest |log q - log p|, with q the engine's and p the learner's policy: the
mean is what a run logs as `engine_mismatch`. Then mean(log q - log p), the k1
estimate of KL(q || p), and beside it the exact KL.

Expect all but k1, which is the noisiest, to grow from int8 over fp8 to int4 and
with the noise, and groups of 32 to mend part of int4. Weights are random: where
these stand in a trained model, its own figures differ. Two to four minutes
on two CPU cores. The last line is JSON: by size and variant, the four figures.
"""

import argparse
import json
import os
import platform

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rl_tpu import sharding
from rl_tpu.generation import decoding, engine
from rl_tpu.models import quantization, transformer
from rl_tpu.types import Request, Sampling

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
    "--models", nargs="+", default=["tiny"], help="sizes by name"
  )
  for name, default, what in (
    ("rows", 16, "token rows"),
    ("prompt", 16, "tokens of a row that are prefilled"),
    ("length", 64, "tokens of a row"),
    ("seed", 0, "of weights, rows and sampled tokens"),
  ):
    parser.add_argument(f"--{name}", type=int, default=default, help=what)
  return parser.parse_args()


def sample(
  policy: transformer.Policy,
  params: transformer.Params,
  mismatch: quantization.Config,
  prompts: Int[np.ndarray, "S P"],
  sizes: argparse.Namespace,
) -> decoding.Result:
  """What an engine with this mismatch samples, with whole distributions."""
  answer = sizes.length - sizes.prompt
  served = engine.PolicyEngine(
    policy,
    sharding.make_mesh(sharding.MeshShape(), jax.devices()),
    engine.Config(
      slots=sizes.rows,
      context_length=sizes.length,
      prefill_buckets=(sizes.prompt,),
      prefill_batches=(sizes.rows,),
      steps_per_dispatch=answer,
      behavior_top_k=policy.config.vocab_size,
      min_shared_prefix=0,
      mismatch=mismatch,
    ),
  )
  served.set_starting_params(params)
  weights = served.load_params(params)
  how = Sampling(max_tokens=answer)
  admissions = [
    decoding.Admission(
      slot=row,
      tokens=prompt,
      budget=answer,
      request=Request(prompt_index=row, member=0, tokens=prompt, sampling=how),
    )
    for row, prompt in enumerate(prompts)
  ]
  state = served.admit(weights, served.init_decode_state(), admissions)
  return served.generate(weights, state)[1].convert_to_numpy()


def measure(
  policy: transformer.Policy, sizes: argparse.Namespace
) -> dict[str, dict[str, float]]:
  """The figures of every variant for one model."""
  keys = jax.random.split(jax.random.key(sizes.seed))
  params = jax.jit(policy.init)(keys[0])
  shape = (sizes.rows, sizes.prompt)
  vocabulary = policy.config.vocab_size
  prompts = np.asarray(jax.random.randint(keys[1], shape, 0, vocabulary))

  @jax.jit
  def score(tokens: Int[Array, "S T"]) -> Float[Array, "S n V"]:
    """The learner's distributions of what the engine sampled."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    ids = jnp.zeros_like(tokens)
    hidden = policy.hidden(params, tokens, positions, ids)
    logits = policy.logits(params, hidden[:, sizes.prompt - 1 : -1])
    return jax.nn.log_softmax(logits)

  results = {}
  for name, fields in VARIANTS.items():
    config = quantization.Config(**fields)
    sampled = sample(policy, params, config, prompts, sizes)
    clean = np.asarray(score(np.concatenate([prompts, sampled.tokens], axis=1)))
    taken = np.take_along_axis(clean, sampled.tokens[..., None], axis=-1)
    gap = sampled.logp - taken[..., 0]
    behavior = sampled.topk_logp
    apart = behavior - np.take_along_axis(clean, sampled.topk_ids, axis=-1)
    kl = np.sum(np.exp(behavior) * apart, axis=-1)
    figures = (np.abs(gap).mean(), np.abs(gap).max(), gap.mean(), kl.mean())
    results[name] = dict(zip(FIGURES, map(float, figures), strict=True))
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
