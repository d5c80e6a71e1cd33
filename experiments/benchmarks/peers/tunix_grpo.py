"""Tunix's GRPO, timed by another process.

Runs under the Python of the peer's own environment, which knows nothing of
rl_tpu (see `experiments.benchmarks.learner`). The first argument is a JSON
object of sizes; its `work` is one of

- update: each line of standard input is a JSON list, the new tokens of each
  trajectory of a batch, which is padded to the limit that fits it, as static
  shapes need. One program: `grpo_loss_fn`, its gradient, its norm, clip and
  AdamW, as the trainer of Tunix compiles it.
- step: each line lets `GRPOLearner.train` take one step: the vanilla sampler,
  reward, loss, gradient, clip, AdamW and its own logging.

Each line of standard output answers one: tokens that count, CPU seconds of the
process, seconds, peak memory in MB.
"""

import importlib.metadata
import json
import sys
from collections.abc import Iterator

import answers
import jax
import numpy as np
import optax
from flax import nnx
from tunix.rl import algo_core as algo_core
from tunix.rl import common, function_registry, rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout
from tunix_sampler import Tokens, make_model


def make_optimizer() -> optax.GradientTransformation:
  """Clip and AdamW."""
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def make_config(sizes: dict) -> grpo_learner.GRPOConfig:
  """GRPO without a KL term: no reference policy."""
  return grpo_learner.GRPOConfig(num_generations=sizes["group"], beta=0.0)


def update(model: nnx.Module, sizes: dict) -> None:
  """Answers each batch of lengths after one optimizer step on it."""
  optimizer = nnx.Optimizer(model, make_optimizer(), wrt=nnx.Param)
  config = make_config(sizes)
  config.temperature = 1.0
  grpo = function_registry.get_policy_loss_fn("grpo")

  @nnx.jit(donate_argnames=("optimizer",))
  def step(model, optimizer, example):
    def loss(model):
      return grpo(model, example, algo_config=config, pad_id=0, eos_id=-1)

    # All that the loss reports is returned, or it would not be computed.
    reported, grads = nnx.value_and_grad(loss, has_aux=True)(model)
    norm = optax.global_norm(grads)
    optimizer.update(model, grads)
    return reported, norm

  rng = np.random.default_rng(0)
  for line in sys.stdin:
    lengths = np.array(json.loads(line))
    rows = len(lengths)
    most = min(m for m in sizes["limits"] if m >= lengths.max())
    began = answers.now()
    counted = np.arange(most) < lengths[:, None]
    shape = (rows, sizes["prompt"] + most)
    tokens = rng.integers(1, sizes["vocab_size"], shape, np.int32)
    prompts, completions = np.split(tokens, [sizes["prompt"]], axis=1)
    example = common.TrainExample(
      prompt_ids=prompts,
      prompt_mask=np.ones_like(prompts, bool),
      completion_ids=np.where(counted, completions, 0),
      completion_mask=counted,
      advantages=rng.standard_normal(rows).astype(np.float32),
      ref_per_token_logps=None,
      old_per_token_logps=None,
    )
    jax.block_until_ready(step(model, optimizer, example))
    jax.block_until_ready(nnx.state(model))
    answers.cost(int(lengths.sum()) + rows * sizes["prompt"], began)


class Words(Tokens):
  """Tokens whose text is their ids, apart."""

  def __init__(self, vocab_size: int):
    self._eos = vocab_size - 1

  def encode(self, text: str, **_) -> list[int]:
    """Reads ids."""
    return [int(word) for word in text.split()]

  def decode(self, ids, **_) -> str:
    """Writes ids."""
    return " ".join(str(int(i)) for i in ids)

  def eos_id(self) -> int:
    """The last id."""
    return self._eos


def reward(prompts, completions, **_) -> list[float]:
  """The share of even tokens."""
  del prompts
  ids = [[int(word) for word in text.split()] for text in completions]
  return [sum(i % 2 == 0 for i in row) / max(len(row), 1) for row in ids]


def batches(sizes: dict) -> Iterator[dict]:
  """Prompts of a step for each line; answers when the next are asked for."""
  rng = np.random.default_rng(0)
  tokens = sizes["rows"] * (sizes["prompt"] + sizes["new"])
  while sys.stdin.readline():
    began = answers.now()
    shape = (sizes["rows"] // sizes["group"], sizes["prompt"])
    rows = rng.integers(1, sizes["vocab_size"] - 1, shape)
    texts = [" ".join(str(i) for i in row) for row in rows]
    yield {"prompts": np.array(texts)}
    answers.cost(tokens, began)


def step(model: nnx.Module, sizes: dict) -> None:
  """Trains, a step for each line."""
  one = np.array(jax.devices()[:1]).reshape(1, 1)
  mesh = jax.sharding.Mesh(one, ("fsdp", "tp"))
  roles = rl_cluster.Role
  cluster = rl_cluster.RLCluster(
    actor=model,
    reference=None,
    tokenizer=Words(sizes["vocab_size"]),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh={
        role: mesh for role in (roles.ACTOR, roles.REFERENCE, roles.ROLLOUT)
      },
      rollout_engine="vanilla",
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=make_optimizer(),
        eval_every_n_steps=1_000_000,
        max_steps=10_000,
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=sizes["new"],
        max_prompt_length=sizes["prompt"],
        kv_cache_size=sizes["prompt"] + sizes["new"],
        temperature=1.0,
        top_p=1.0,
      ),
    ),
  )
  learner = grpo_learner.GRPOLearner(
    cluster, make_config(sizes), reward_fns=reward
  )
  learner.train(batches(sizes))


def main() -> None:
  """Answers line by line."""
  sizes = json.loads(sys.argv[1])
  model = make_model(sizes)
  version = importlib.metadata.version("google-tunix")
  said = f"tunix {version}, jax {jax.__version__}"
  answers.begin(said)
  {"update": update, "step": step}[sizes["work"]](model, sizes)


if __name__ == "__main__":
  main()
