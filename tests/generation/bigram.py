"""A policy that is a table, so tests can say what it will do.

The next token depends on the last one only: params["table"][last] holds its
logits. Scripts, exact distributions and NaNs are then one line each, while
everything around the model is the real thing.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from rl_tpu import sharding
from rl_tpu.generation import engine
from rl_tpu.models import transformer
from rl_tpu.types import Request, Sampling

VOCAB = 16
CONFIG = engine.Config(
  slots=4,
  context_length=16,
  prefill_buckets=(4, 8, 16),
  prefill_batches=(4,),
  steps_per_dispatch=2,
)


@dataclasses.dataclass(frozen=True)
class Bigram:
  vocab_size: int = VOCAB
  stacks: int = 1
  kv_grid: str = "none"

  @property
  def config(self) -> transformer.Config:
    return transformer.Config(
      vocab_size=self.vocab_size,
      d_model=1,
      num_layers=1,
      num_heads=1,
      num_kv_heads=1,
      head_dim=2,
      d_ff=1,
    )

  def abstract_params(self):
    shape = (self.vocab_size, self.vocab_size)
    return {"table": jax.ShapeDtypeStruct(shape, jnp.float32)}

  def param_shardings(self, mesh):
    return {"table": sharding.named(mesh)}

  def served(self, params):
    return params

  def prefill(self, params, tokens, positions=None, ids=None):
    empty = jnp.zeros((1, *tokens.shape, 1, 2))
    return [(empty, empty)]

  def decode(self, params, tokens, positions, caches):
    empty = jnp.zeros((1, len(tokens), 1, 2))
    return params["table"][tokens], [(empty, empty)], None


def one_device_mesh():
  return sharding.make_mesh(sharding.MeshShape(), jax.devices())


def make_engine(config=CONFIG, vocab_size=VOCAB):
  return engine.PolicyEngine(Bigram(vocab_size), one_device_mesh(), config)


def script(*tokens, vocab_size=VOCAB):
  """Logits under which each token is surely followed by the next one."""
  table = np.zeros((vocab_size, vocab_size), np.float32)
  for last, following in itertools.pairwise(tokens):
    table[last, following] = 1e4
  return {"table": table}


def uniform(vocab_size=VOCAB):
  return {"table": np.zeros((vocab_size, vocab_size), np.float32)}


def ask(*prompt, index=0, member=0, seed=0, **sampling):
  return Request(
    prompt_index=index,
    member=member,
    seed=seed,
    tokens=np.asarray(prompt, np.int32),
    sampling=Sampling(**sampling),
  )
