"""How many tokens does a processor second generate, here and by peers?

    python -m experiments.benchmarks.serving --peers=auto

One run alternates batches of rl_tpu's generator with batches of Hugging Face
`generate` and of Tunix's sampler, all on the 12M-parameter decoder below
(Qwen3, random weights, float32), all with log-probabilities, all with
`--threads` threads. Each peer is a process under the Python of an environment
of its own that waits while others work:

    python -m venv .peers/hf
    .peers/hf/bin/pip install torch==2.13.0 transformers==5.24.0
    python -m venv .peers/tunix
    .peers/tunix/bin/pip install google-tunix==0.1.7 jax==0.10.2 flax==0.12.8

`--peers=auto` takes those that are there, `none` takes none, and
`--peers=hf=DIRECTORY,tunix=DIRECTORY` names others. A peer that is not there is
reported as missing.

- static: batches of 32 requests: 8 prompts of 32 tokens, 4 times each, as in a
  group; 64 new tokens.
- long tail: lengths are log-normal (sigma 1, mean 64, cut at 512). A static
  batch of 32 runs until its longest has ended; the generator always has
  requests waiting, as in asynchronous training, and refills its slots.
- interruption (AReaL, figure 6b): the long tail with new weights every
  `--update-tokens` tokens, which interrupt (`recompute`) or wait for the end of
  what runs (`drain`).
- ceiling: the same tokens if the model were nothing but its matrix products,
  each in the faster of two layouts; every prompt prefilled for itself.
- outside: share of a decode step that remains with a model that computes
  nothing: sampling, writing the cache, the host.
- prefill: tokens computed, padding included, for each whose keys and values
  were asked for.
- host: processor time a token of driver and gRPC (see `service_cost`).

The aim is 1.5 times the better peer's tokens a processor second on static
batches and 3 times on the long tail. Measured on a quiet machine, two cores of
a Xeon: static 1.66 (1677 to 1009, Tunix; Hugging Face 845), long tail 6.8 (859
to 126), 0.91 of the ceiling; beside other jobs 1.4 to 1.5. Most of what is left
is attention, a quarter of a step: summing in other orders, or over one joined
cache, gained nothing. The gain of interruption, 2.7 (584 to 214 tokens a
second), depends strongly on `--update-tokens` and `--most` (1.5 at 2048 and
128, beside other jobs), so it is not AReaL's 12 to 17 %.

About 12 minutes on two CPU cores. The last line is JSON: `ratio_static`,
`ratio_longtail` (to the better peer; null without one), `interruption_gain`
(tokens a second, recompute to drain), `ratio_ceiling`, and all that the tables
say.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import ceiling, service_cost
from experiments.benchmarks.peers.process import ROOT, Cost, Peer, find
from rl_tpu import sharding
from rl_tpu.generation import engine
from rl_tpu.generation.driver import GenerationDriver, Interruption
from rl_tpu.models import transformer
from rl_tpu.types import Request, Sampling

MODEL = transformer.Config(
  vocab_size=4096,
  d_model=384,
  num_layers=6,
  num_heads=6,
  num_kv_heads=2,
  head_dim=64,
  d_ff=1152,
)
"""`m12`: 11.9M parameters, tied."""


def parse() -> argparse.Namespace:
  """The sizes."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--peers", default="auto", help="auto, none or NAME=DIR,")
  for name, default, what in (
    ("threads", 1, "of XLA and of PyTorch"),
    ("rows", 32, "slots, and rows of a static batch"),
    ("prompt", 32, "tokens of a prompt"),
    ("group", 4, "requests with the same prompt"),
    ("new", 64, "new tokens: all of them, or the mean of the long tail"),
    ("most", 512, "new tokens of the long tail at most"),
    ("steps", 8, "decode steps of a dispatch"),
    ("update-tokens", 4096, "tokens between two weights"),
    ("repeats", 5, "static batches of each"),
    ("tails", 4, "long-tailed batches of each"),
  ):
    parser.add_argument(f"--{name}", type=int, default=default, help=what)
  return parser.parse_args()


# Workloads.


def long_tail(sizes: argparse.Namespace) -> list[int]:
  """New tokens of each request: evenly spaced quantiles in random order.

  So few independent draws would make the ratios a matter of luck.
  """
  count = sizes.rows * sizes.tails
  normal = statistics.NormalDist(np.log(sizes.new) - 0.5)  # Mean `new`.
  quantiles = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
  lengths = np.clip(np.exp(quantiles), 1, sizes.most).astype(int)
  return np.random.default_rng(0).permutation(lengths).tolist()


def requests(
  sizes: argparse.Namespace, lengths: Iterable[int]
) -> Iterator[Request]:
  """Random prompts, `group` requests each."""
  rng = np.random.default_rng(1)
  tokens = np.zeros(0, np.int32)
  for index, length in enumerate(lengths):
    prompt_index, member = divmod(index, sizes.group)
    if not member:
      tokens = rng.integers(1, MODEL.vocab_size, sizes.prompt, np.int32)
    yield Request(
      prompt_index=prompt_index,
      member=member,
      tokens=tokens,
      sampling=Sampling(max_tokens=length),
    )


# The generator.


class Generator:
  """rl_tpu's driver, turned by hand so that it works only when it is timed."""

  def __init__(
    self,
    sizes: argparse.Namespace,
    lengths: Iterable[int],
    *,
    most: int,
    policy: transformer.Policy,
    interruption: Interruption = "keep",
  ):
    longest = sizes.prompt + most
    buckets = [sizes.prompt]
    while interruption == "recompute" and buckets[-1] < longest:
      buckets.append(min(2 * buckets[-1], longest))
    config = engine.Config(
      slots=sizes.rows,
      context_length=longest,
      prefill_buckets=tuple(buckets),
      prefill_batches=tuple(sorted({4, 8, sizes.rows})),
      steps_per_dispatch=sizes.steps,
      min_shared_prefix=sizes.prompt // 2,
    )
    mesh = sharding.make_mesh(sharding.MeshShape(), jax.devices())
    self._engine = engine.PolicyEngine(policy, mesh, config)
    self._params = self._engine.load_params(
      jax.jit(policy.init)(jax.random.key(0))
    )
    self.driver = GenerationDriver(self._engine, interruption=interruption)
    self.driver.update(self._params)
    self.driver.warm_up()
    self._requests = requests(sizes, lengths)
    self._slots = sizes.rows
    self._loop = asyncio.new_event_loop()
    self._open: set[asyncio.Task] = set()

  def batch(self) -> Cost:
    """As many requests as there are slots, from the first to the last."""
    self._ask(self._slots)
    return self._timed(lambda: not self._open)

  def flow(self, tokens: int, update_tokens: int = 0) -> Cost:
    """At least so many tokens while requests keep waiting.

    Args:
      tokens: to sample.
      update_tokens: after which new weights arrive, again and again; 0: never.
    """
    began = updated = self.driver.counters().tokens

    def enough() -> bool:
      nonlocal updated
      self._ask(2 * self._slots - len(self._open))
      sampled = self.driver.counters().tokens
      if update_tokens and sampled - updated >= update_tokens:
        updated = sampled
        self._params = dataclasses.replace(
          self._params, version=self._params.version + 1
        )
        self.driver.update(self._params)
      return sampled - began >= tokens

    return self._timed(enough)

  def step_seconds(self, sizes: argparse.Namespace) -> float:
    """Processor seconds of a decode step with every slot in use."""
    self._ask(self._slots)
    dispatches = sizes.new // sizes.steps - 1

    async def run() -> float:
      await asyncio.sleep(0)
      self.driver.step()  # Prefills too.
      began = time.process_time()
      for _ in range(dispatches):
        self.driver.step()
      spent = time.process_time() - began
      while self.driver.step():
        await asyncio.sleep(0)
      return spent

    seconds = self._loop.run_until_complete(run())
    return seconds / dispatches / sizes.steps

  def computed(self) -> float:
    """Tokens that prefills computed for each that they were asked for."""
    sums = self.driver.counters()
    return sums.prefilled_tokens / sums.missing_tokens

  def close(self) -> None:
    """Withdraws what is open."""
    self.driver.stop()
    gone = asyncio.gather(*self._open, return_exceptions=True)
    self._loop.run_until_complete(gone)
    self._loop.close()

  def _ask(self, count: int) -> None:
    for request in itertools.islice(self._requests, max(count, 0)):
      task = self._loop.create_task(self.driver.generate(request))
      self._open.add(task)
      task.add_done_callback(self._open.discard)

  def _timed(self, done) -> Cost:
    async def run() -> None:
      while not done():
        await asyncio.sleep(0)
        self.driver.step()

    sampled = self.driver.counters().tokens
    began = time.process_time(), time.perf_counter()
    self._loop.run_until_complete(run())
    spent = time.process_time() - began[0], time.perf_counter() - began[1]
    return self.driver.counters().tokens - sampled, *spent


class Idle(transformer.Policy):
  """A model that computes nothing, for what a step costs beside the model."""

  def decode(self, params, tokens, positions, caches):
    """Logits that depend on the token, keys and values that are constant."""
    del positions, caches
    config = self.config
    layers = config.num_layers // self.stacks
    heads = (layers, len(tokens), config.num_kv_heads)
    empty = jnp.zeros((*heads, config.head_dim))
    logits = tokens[:, None] * params["embedding"][None, :, 0]
    return logits, [(empty, empty)] * self.stacks


# The run.


def rates(costs: list[Cost]) -> dict[str, float]:
  """Medians over batches of tokens a processor second and a second."""
  return {
    "tokens_per_cpu_second": statistics.median(n / cpu for n, cpu, _ in costs),
    "tokens_per_second": statistics.median(n / wall for n, _, wall in costs),
  }


def pooled(costs: list[Cost]) -> dict[str, float]:
  """The same over all batches together, since theirs differ."""
  tokens, processor, wall = np.sum(costs, axis=0)
  return {
    "tokens_per_cpu_second": float(tokens / processor),
    "tokens_per_second": float(tokens / wall),
  }


def compare_static(sizes: argparse.Namespace, peers: dict[str, Peer]) -> dict:
  """Rates by name, batches taking turns after one each for warm-up."""
  policy = transformer.Policy(MODEL)
  lengths = [sizes.new] * sizes.rows
  ours = Generator(
    sizes, itertools.repeat(sizes.new), most=sizes.new, policy=policy
  )
  costs: dict[str, list[Cost]] = {name: [] for name in ("rl_tpu", *peers)}
  products = []
  for _ in range(1 + sizes.repeats):
    costs["rl_tpu"].append(ours.batch())
    products.append(ceiling.seconds(MODEL, sizes.rows, sizes.prompt))
    for name, peer in peers.items():
      costs[name].append(peer.batch(lengths))
  result = {name: rates(measured[1:]) for name, measured in costs.items()}
  step, prefill = np.median(products, axis=0)
  tokens = sizes.rows * sizes.new
  result["ceiling"] = {
    "tokens_per_cpu_second": float(tokens / (sizes.new * step + prefill))
  }
  idle = Generator(
    sizes, itertools.repeat(sizes.new), most=sizes.new, policy=Idle(MODEL)
  )
  steps = [
    (idle.step_seconds(sizes), ours.step_seconds(sizes))
    for _ in range(1 + sizes.repeats)
  ]
  result["prefill"] = {"computed_per_token": ours.computed()}
  ours.close()
  idle.close()
  outside, whole = np.median(steps[1:], axis=0)
  result["outside"] = {"share": float(outside / whole)}
  return result


def compare_longtail(sizes: argparse.Namespace, peers: dict[str, Peer]) -> dict:
  """Rates by name and by what new weights do, batches taking turns.

  Each of ours samples what a batch of the peers counts, from slots in the
  middle of their work.
  """
  lengths, policy = long_tail(sizes), transformer.Policy(MODEL)
  kinds: dict[str, tuple[Interruption, int]] = {
    "rl_tpu": ("keep", 0),
    "recompute": ("recompute", sizes.update_tokens),
    "drain": ("drain", sizes.update_tokens),
  }
  ours = {
    name: Generator(
      sizes,
      itertools.cycle(lengths),
      most=sizes.most,
      policy=policy,
      interruption=interruption,
    )
    for name, (interruption, _) in kinds.items()
  }
  for name, (_, update_tokens) in kinds.items():
    ours[name].flow(2 * sizes.rows * sizes.new, update_tokens)
  for peer in peers.values():
    peer.batch([sizes.new + 1] * sizes.rows)
  costs: dict[str, list[Cost]] = {name: [] for name in (*ours, *peers)}
  for start in range(0, len(lengths), sizes.rows):
    batch = lengths[start : start + sizes.rows]
    for name, (_, update_tokens) in kinds.items():
      # A whole number of updates, so that each pays for all it causes.
      tokens = update_tokens or sum(batch)
      costs[name].append(ours[name].flow(tokens, update_tokens))
    for name, peer in peers.items():
      costs[name].append(peer.batch(batch))
  for one in ours.values():
    one.close()
  return {name: pooled(measured) for name, measured in costs.items()}


def host_microseconds() -> dict[str, Any]:
  """Processor microseconds a token without a model, by slots and way."""
  sizes = argparse.Namespace(tokens=200, step_ms=0, repeats=3)
  return {
    str(slots): service_cost.measure(slots, 0, sizes) for slots in (8, 32, 128)
  }


def ratio(results: dict, peers: Iterable[str]) -> float | None:
  """Tokens a processor second to those of the better peer."""
  rate = {
    name: figures.get("tokens_per_cpu_second")
    for name, figures in results.items()
  }
  best = max((rate[name] for name in peers), default=None)
  return best and round(rate["rl_tpu"] / best, 3)


def show(title: str, results: dict) -> None:
  """One line a row."""
  print(f"\n{title}")
  for name, figures in results.items():
    cells = (f"{key} {value:.4g}" for key, value in figures.items())
    print(f"  {name:10} " + "   ".join(cells), flush=True)


def main() -> None:
  """Prints the tables and the JSON line."""
  sizes = parse()
  os.environ["NPROC"] = str(sizes.threads)  # XLA's threads, here and in peers.
  os.environ["JAX_PLATFORMS"] = "cpu"
  jax.config.update("jax_platforms", "cpu")
  homes, missing = find(sizes.peers)
  print(
    f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, "
    f"jax {jax.__version__}\n"
    + ", ".join(f"{name} {value}" for name, value in vars(sizes).items())
  )
  shape = {
    **dataclasses.asdict(MODEL),
    "prompt": sizes.prompt,
    "threads": sizes.threads,
    "limits": sorted({sizes.new, sizes.most}),
  }
  peers = {name: Peer(name, home, shape) for name, home in homes.items()}
  for name, peer in peers.items():
    print(f"{name}: {peer.version}")
  for name in missing:
    print(f"{name}: missing, no environment {ROOT / '.peers' / name}")
  static = compare_static(sizes, peers)
  show("static", static)
  longtail = compare_longtail(sizes, peers)
  show("long tail", longtail)
  host = host_microseconds()
  show(
    "host, us/token",
    {
      slots: {w: sum(c) for w, c in each.items()}
      for slots, each in host.items()
    },
  )
  for peer in peers.values():
    peer.close()
  gain = {
    key: round(longtail["recompute"][key] / longtail["drain"][key], 3)
    for key in longtail["drain"]
  }
  ours, best = (
    static[name]["tokens_per_cpu_second"] for name in ("rl_tpu", "ceiling")
  )
  figures = {
    "ratio_static": ratio(static, peers),
    "ratio_longtail": ratio(longtail, peers),
    "interruption_gain": gain["tokens_per_second"],
    "interruption_gain_cpu": gain["tokens_per_cpu_second"],
    "ratio_ceiling": round(ours / best, 3),
    "outside_model": round(static["outside"]["share"], 3),
    "missing": missing,
    "static": static,
    "longtail": longtail,
    "host_microseconds": host,
  }
  print(json.dumps(figures))


if __name__ == "__main__":
  main()
