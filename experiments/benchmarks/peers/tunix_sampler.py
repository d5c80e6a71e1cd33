"""Tunix's sampler, timed by another process.

Runs under the Python of the peer's own environment, which knows nothing of
rl_tpu (see `experiments.benchmarks.serving`). The first argument is a JSON
object of sizes. Each line of standard input is a JSON list: new tokens of each
row of one batch. The sampler is a static batch: all rows run until the longest
has ended. Each line of standard output answers one: tokens that count, CPU
seconds of the process, seconds.

Its buffers have the size of the longest answer allowed, as they must where
rows end by a stop token, and its loop ends when the longest row of this batch
has ended; so there is one compilation for each limit, not for each batch.
"""

import dataclasses
import json
import sys
import time

import flax
import jax
import numpy as np
from flax import nnx
from tunix.generate import sampler as tunix_sampler
from tunix.models.qwen3 import model as qwen3


class Tokens:
  """A tokenizer whose text is its token ids."""

  def encode(self, text: np.ndarray) -> list[int]:
    """Token ids are passed as they are."""
    return text.tolist()

  def decode(self, ids: list[int]) -> str:
    """Costs nothing."""
    del ids
    return ""

  def bos_id(self) -> None:
    """None is put before prompts."""

  def eos_id(self) -> int:
    """No token ends a row."""
    return -1

  def pad_id(self) -> int:
    """In no prompt."""
    return 0


class Sampler(tunix_sampler.Sampler):
  """Ends a batch where its longest row would have ended it."""

  steps = 0

  def init_sample_state(self, *args, **kwargs):
    """The state, with the steps of this batch."""
    state = super().init_sample_state(*args, **kwargs)
    total = np.int32(state.num_input_tokens + self.steps)
    return dataclasses.replace(state, total_sampling_steps=total)


def make_model(sizes: dict) -> qwen3.Qwen3:
  """The architecture of rl_tpu's decoder, every weight random.

  Tunix initialises feed-forward kernels to zero.
  """
  config = qwen3.ModelConfig(
    num_layers=sizes["num_layers"],
    vocab_size=sizes["vocab_size"],
    embed_dim=sizes["d_model"],
    hidden_dim=sizes["d_ff"],
    num_heads=sizes["num_heads"],
    head_dim=sizes["head_dim"],
    num_kv_heads=sizes["num_kv_heads"],
    rope_theta=1_000_000,
    norm_eps=1e-6,
    use_tied_embedding=True,
  )
  model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
  rng = np.random.default_rng(0)

  def draw(leaf: jax.Array) -> jax.Array:
    value = rng.standard_normal(leaf.shape, np.float32) * 0.05
    return jax.device_put(value)

  nnx.update(model, jax.tree.map(draw, nnx.state(model)))
  return model


def main() -> None:
  """Answers line by line."""
  sizes = json.loads(sys.argv[1])
  model = make_model(sizes)
  samplers = {}
  for most in sizes["limits"]:
    cache = tunix_sampler.CacheConfig(
      cache_size=sizes["prompt"] + most,
      num_layers=sizes["num_layers"],
      num_kv_heads=sizes["num_kv_heads"],
      head_dim=sizes["head_dim"],
    )
    samplers[most] = Sampler(model, Tokens(), cache)
  import importlib.metadata as metadata

  print(
    json.dumps(
      {
        "version": f"tunix {metadata.version('google-tunix')}, "
        f"jax {jax.__version__}, flax {flax.__version__}"
      }
    ),
    flush=True,
  )
  rng = np.random.default_rng(0)
  for call, line in enumerate(sys.stdin):
    lengths = json.loads(line)
    most = min(m for m in sizes["limits"] if m >= max(lengths))
    sampler = samplers[most]
    sampler.steps = max(lengths)
    shape = (len(lengths), sizes["prompt"])
    prompts = rng.integers(1, sizes["vocab_size"], shape)
    began = time.perf_counter(), time.process_time()
    out = sampler(
      list(prompts),
      max_generation_steps=most,
      max_prompt_length=sizes["prompt"],
      return_logprobs=True,
      eos_tokens=[-1],
      temperature=1.0,
      top_p=1.0,
      seed=call,
    )
    assert len(out.logprobs) == len(lengths)
    answer = {
      "tokens": sum(lengths),
      "cpu_seconds": time.process_time() - began[1],
      "seconds": time.perf_counter() - began[0],
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
  main()
