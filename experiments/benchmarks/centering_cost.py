"""What does centering by the sampler's head cost an update?

    python -m experiments.benchmarks.centering_cost

Times whole updates (`Learner.train`) of `score_centering` with and without
centering: same weights, same batch, taking turns, after two updates each for
warm-up. Then compiles the gradient of one microbatch for rows of T and of 2T
tokens and asks XLA for its temporary memory; this model has one layer of one
head, so that attention, which grows with T * T, does not hide the vocabulary.

Expect a ratio of at most 1.10, and memory that grows from T to 2T by far less
than the [R,T,V] array of float32 that the last row of the table names.
About three minutes on two CPU cores. The last line is JSON: ratio of the median
times by the clock (and of processor time, which other work on the machine does
not disturb), and temporary bytes by name.
"""

import argparse
import dataclasses
import json
import os
import platform
import time

import jax
import numpy as np

from rl_tpu import learner, packing, scoring, sharding
from rl_tpu.algorithms import score_centering
from rl_tpu.models import transformer
from rl_tpu.types import Batch, Trajectory

VARIANTS = {"plain": False, "centered": True}


def parse() -> argparse.Namespace:
  """The sizes."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  for name, default, what in (
    ("rows", 4, "rows of a batch, R"),
    ("length", 256, "tokens of a row, T"),
    ("vocab", 32_768, "vocabulary, V"),
    ("top-k", 128, "sampler's head, K"),
    ("chunk", 128, "positions whose logits live at once"),
    ("width", 256, "width of the model, D"),
    ("layers", 4, "layers of the model"),
    ("repeats", 15, "timed updates of each variant"),
  ):
    parser.add_argument(f"--{name}", type=int, default=default, help=what)
  return parser.parse_args()


def make_policy(
  sizes: argparse.Namespace, layers: int, heads: int
) -> transformer.Policy:
  """A model in which, as in small language models, V dominates."""
  return transformer.Policy(
    transformer.Config(
      vocab_size=sizes.vocab,
      d_model=sizes.width,
      num_layers=layers,
      num_heads=heads,
      num_kv_heads=heads,
      head_dim=sizes.width // 8,
      d_ff=3 * sizes.width,
    )
  )


def make_batch(sizes: argparse.Namespace, length: int) -> Batch:
  """A trajectory a row; prompts of an eighth, heads at random places."""
  rng = np.random.default_rng(0)
  mask = np.arange(length) >= length // 8
  shape = (length, sizes.top_k)
  trajectories = []
  for member in range(sizes.rows):
    ids = rng.integers(0, sizes.vocab // sizes.top_k, shape)
    ids += np.arange(sizes.top_k) * (sizes.vocab // sizes.top_k)
    logp = np.log(rng.dirichlet(np.ones(sizes.top_k), length) * 0.99)
    trajectories.append(
      Trajectory(
        prompt_id=0,
        group_id=0,
        member=member,
        tokens=rng.integers(0, sizes.vocab, length).astype(np.int32),
        action_mask=mask,
        behavior_logp=np.where(mask, -8.0, 0.0).astype(np.float32),
        token_version=np.where(mask, 0, -1),
        rewards=np.eye(length, dtype=np.float32)[-1] * (member % 2),
        behavior_topk_ids=np.where(mask[:, None], ids, -1),
        behavior_topk_logp=np.where(mask[:, None], logp, -np.inf),
      )
    )
  return packing.pack(trajectories, row_length=length, version=0)


def time_updates(sizes: argparse.Namespace) -> dict[str, list[float]]:
  """Median seconds of an update by variant: by the clock, of processors."""
  policy = make_policy(sizes, sizes.layers, 8)
  batch = make_batch(sizes, sizes.length)
  mesh = sharding.make_mesh(sharding.MeshShape(), jax.devices())
  settings = learner.Config(
    microbatch_rows=sizes.rows,
    row_length=sizes.length,
    logit_chunk=sizes.chunk,
  )
  learners = {
    name: learner.Learner(
      policy,
      score_centering,
      score_centering.Config(centering=centering, top_k=sizes.top_k),
      settings,
      mesh,
    )
    for name, centering in VARIANTS.items()
  }
  params = jax.jit(policy.init)(jax.random.key(0))
  states = {name: it.init(params) for name, it in learners.items()}
  seconds: dict[str, list] = {name: [] for name in VARIANTS}
  for repeat in range(2 + sizes.repeats):
    for name in sorted(VARIANTS, reverse=repeat % 2 == 0):
      began = time.perf_counter(), time.process_time()
      states[name], _ = learners[name].train(states[name], batch)
      ended = time.perf_counter(), time.process_time()
      seconds[name].append(np.subtract(ended, began))
  return {
    name: np.median(measured[2:], axis=0).tolist()
    for name, measured in seconds.items()
  }


def temporary_bytes(
  sizes: argparse.Namespace, length: int, chunk: int, centering: bool
) -> int:
  """Temporary memory of a microbatch's gradient."""
  policy, batch = make_policy(sizes, 1, 1), make_batch(sizes, length)
  batch = dataclasses.replace(batch, advantages=batch.rewards)
  config = score_centering.Config(centering=centering, top_k=sizes.top_k)

  def loss(params, batch):
    outputs = scoring.policy_outputs(
      policy, params, batch, score_centering.requires(config), chunk
    )
    return score_centering.loss(outputs, batch, config)[0].total

  program = jax.jit(jax.grad(loss)).lower(policy.abstract_params(), batch)
  return program.compile().memory_analysis().temp_size_in_bytes


def main() -> None:
  """Prints the table and the JSON line."""
  sizes = parse()
  print(
    f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, "
    f"{jax.devices()[0]}, jax {jax.__version__}\n"
    + ", ".join(f"{name} {value}" for name, value in vars(sizes).items())
  )
  seconds = time_updates(sizes)
  for name, (clock, processors) in seconds.items():
    print(f"{name:10} {clock * 1e3:8.1f} ms {processors * 1e3:8.1f} CPU ms")
  ratio, processor_ratio = np.divide(seconds["centered"], seconds["plain"])
  print(f"{'ratio':10} {ratio:8.3f}    {processor_ratio:8.3f}")
  memory = {}
  for name, centering in VARIANTS.items():
    for chunk in (sizes.chunk, 0):
      for length in (sizes.length, 2 * sizes.length):
        key = f"{name}, {f'chunk {chunk}' if chunk else 'whole'}, T {length}"
        memory[key] = temporary_bytes(sizes, length, chunk, centering)
        print(f"{key:32} {memory[key] / 2**20:8.1f} MiB")
  logits = 4 * sizes.rows * sizes.length * sizes.vocab
  key = f"[R,T,V] in float32, T {sizes.length}"
  print(f"{key:32} {logits / 2**20:8.1f} MiB")
  figures = {
    "ratio": round(float(ratio), 4),
    "processor_ratio": round(float(processor_ratio), 4),
    "temp_bytes": memory,
  }
  print(json.dumps(figures))


if __name__ == "__main__":
  main()
