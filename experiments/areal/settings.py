"""AReaL's settings: the paper's Table 3, and this folder's small runs.

  python -m rl_tpu train --config=experiments/areal/settings.py[:MODEL]

MODEL is 1.5b, 7b, 14b or 32b: DeepSeek's distilled Qwen2, from a folder in
Hugging Face's format (`--config.pretrained`), on questions of your own
(`--config.task.config.path`); of the paper's split 3/4 of all devices generate.
Table 3 (arXiv:2505.24298) is one set for all models. `small` is the same
method on the quickstart's task, in lockstep, where the same seed gives the same
numbers: four minibatches, clip 0.2, advantages normalised over the batch, and
no cap on the behavior weight. Its learning rate of 2e-4 is half the
quickstart's: with 1e-3 decoupled PPO fell behind PPO at a lag of 8 (one seed).
"""

import math

import ml_collections

from experiments import quickstart
from rl_tpu import algorithms, envs, learner, parts, sft, sharding
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.generation import engine
from rl_tpu.models import transformer
from rl_tpu.types import Sampling

LOSSES = {"naive": "ppo", "decoupled": "decoupled_ppo"}
"""The paper's names, and ours."""
BATCHES = 40
"""Of a small run."""
EVERY = 4
"""Batches between evaluations of a small run."""
ANSWER, PROMPT = 27_648, 1024
"""Tokens at most."""
MODELS = {
  "1.5b": (1536, 28, 12, 2, 8960, 151_936, 1e4),
  "7b": (3584, 28, 28, 4, 18_944, 152_064, 1e4),
  "14b": (5120, 48, 40, 8, 13_824, 152_064, 1e6),
  "32b": (5120, 64, 40, 8, 27_648, 152_064, 1e6),
}
"""Width, layers, heads, heads of keys and values, hidden units, vocabulary,
base of the rotary frequencies; heads are 128 wide."""
STALENESS = {"1.5b": 8, "7b": 8, "14b": 4, "32b": 4}
"""8 for math, 4 for code."""
RUN = {"1.5b": 250, "7b": 250, "14b": 80, "32b": 60}
"""Batches."""


def loss(name: str, baseline: str = "batch") -> Choice:
  """One of LOSSES as the paper has it: clip 0.2, weights without a cap."""
  fields = {"baseline": baseline, "clip_low": 0.2, "clip_high": 0.2}
  if name == "decoupled":
    fields["behavior_weight_cap"] = None
  module = algorithms.get(LOSSES[name])
  return Choice(name=LOSSES[name], config=module.Config(**fields))


def model(name: str) -> transformer.Config:
  """One of MODELS."""
  width, layers, heads, kv_heads, hidden, vocabulary, theta = MODELS[name]
  return transformer.Config(
    vocab_size=vocabulary,
    d_model=width,
    num_layers=layers,
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=128,
    d_ff=hidden,
    rope_theta=theta,
    qk_norm=False,
    attention_bias="qkv",
    tied=False,
    compute_dtype="bfloat16",
    remat="dots",
  )


def get_config(arg: str = "1.5b") -> ml_collections.ConfigDict:
  """The paper's run of one model."""
  context = PROMPT + ANSWER
  rows = -(-context // 1024) * 1024
  steps = RUN[arg] * 4
  return to_config_dict(
    parts.Config(
      name=f"areal_{arg}",
      seed=1,
      batches=RUN[arg],
      groups_per_batch=512,
      group_size=16,
      max_staleness=STALENESS[arg],
      interruption="recompute",
      task=Choice(
        name="math", config=envs.get("math").Config(path="questions.jsonl")
      ),
      algorithm=loss("decoupled"),
      model=model(arg),
      sampling=Sampling(max_tokens=ANSWER, temperature=1.0, top_p=1.0, top_k=0),
      learner=learner.Config(
        minibatches=4,
        microbatch_rows=16,
        row_length=rows,
        logit_chunk=4096,
        learning_rate=2e-5,
        weight_decay=0.05,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-5,
        max_grad_norm=1.0,
        warmup_minibatches=round(0.001 * steps),
      ),
      engine=engine.Config(
        slots=64,
        context_length=context,
        prefill_buckets=(PROMPT, 8192, context),
        prefill_batches=(1,),
        steps_per_dispatch=16,
      ),
      devices=parts.Devices(
        trainer=sharding.MeshShape(fsdp=16),
        generator=sharding.MeshShape(tensor=1 if arg == "1.5b" else 4),
      ),
      warm_start=sft.Config(batches=0, wrong_batches=0),
      checkpoint_every=10,
    )
  )


def set_loss(
  config: ml_collections.ConfigDict, name: str, baseline: str = "batch"
) -> None:
  """Gives a config one of LOSSES."""
  config.algorithm = to_config_dict(loss(name, baseline))


def lag(eta: float) -> int:
  """What lockstep takes for a limit; inf: the first weights sample all."""
  return BATCHES if eta == math.inf else int(eta)


def small(eta: float, seed: int, scale: str) -> ml_collections.ConfigDict:
  """Decoupled PPO on the quickstart's task, every token `eta` versions stale.

  At scale paper it is the paper's ablation on 1.5B, asynchronous: answers up to
  8192 tokens, at most `eta` versions stale.
  """
  if scale == "paper":
    config = get_config("1.5b")
    config.max_staleness = None if eta == math.inf else int(eta)
    config.max_running_groups = 4 * config.groups_per_batch
    config.sampling.max_tokens = 8192
    config.seed, config.evaluation.every = seed, 10
    return config
  config = quickstart.get_config(f"lockstep({lag(eta)})")
  config.seed, config.batches = seed, BATCHES
  config.evaluation.every = EVERY
  config.learner.minibatches, config.learner.microbatch_rows = 4, 8
  config.learner.learning_rate = 2e-4
  set_loss(config, "decoupled")
  if scale == "smoke":
    config.batches, config.evaluation.problems = EVERY, 8
    config.groups_per_batch = 4
    config.warm_start.batches, config.warm_start.wrong_batches = 20, 2
  return config
