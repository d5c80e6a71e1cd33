"""Does a model learn your questions by your reward function?

  python -m rl_tpu train --config=experiments/your_data/config.py[:FOLDER]

The example sorts four digits ('4152=' -> '1245'): `questions.jsonl` has the
questions and examples of answers, of which half are in the wrong order;
`rewards.py` says that ascending is right. Put yours in their place, by flags or
in a copy of this folder; docs/your_data.md says how.

Without FOLDER a model of 0.1M parameters that reads bytes is drawn, imitates
the examples and goes on by RL; expect `heldout_after` of 0.85 or more, from 0.4
before, in two minutes on two cores. With one, weights and tokenizer are those
of that Hugging Face folder (Qwen2, Qwen3, Qwen3-MoE, Llama 3), which is asked
in its chat's form and imitates nothing.
"""

import os

import ml_collections

from rl_tpu import algorithms, envs, evaluate, learner, parts, sft
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.generation import engine
from rl_tpu.models import huggingface, transformer
from rl_tpu.types import Sampling

HERE = os.path.relpath(os.path.dirname(__file__))


def get_config(folder: str = "") -> ml_collections.ConfigDict:
  """Decoupled PPO on the questions, from nothing or from a folder."""
  return from_folder(folder) if folder else from_nothing()


def from_nothing() -> ml_collections.ConfigDict:
  """A small model that reads bytes, after some imitation."""
  task = envs.get("scored").Config(
    path=f"{HERE}/questions.jsonl",
    reward=f"{HERE}/rewards.py:score",
    template="{digits}=",
    example_field="example",
  )
  loss = algorithms.get("decoupled_ppo").Config(baseline="group")
  return to_config_dict(
    parts.Config(
      name="your_data",
      batches=60,
      groups_per_batch=32,
      group_size=8,
      task=Choice(name="scored", config=task),
      algorithm=Choice(name="decoupled_ppo", config=loss),
      model=transformer.sized("tiny"),
      sampling=Sampling(max_tokens=6),
      learner=learner.Config(
        row_length=96,
        microbatch_rows=16,
        learning_rate=4e-4,
        warmup_minibatches=5,
        weight_decay=0.0,
      ),
      engine=engine.Config(
        slots=16,
        context_length=12,
        prefill_buckets=(12,),
        prefill_batches=(8, 16),
        steps_per_dispatch=1,
      ),
      warm_start=sft.Config(batches=120, wrong_batches=0),
      evaluation=evaluate.Config(problems=100),
    )
  )


def from_folder(folder: str) -> ml_collections.ConfigDict:
  """A pretrained model as it is; sizes for answers of up to 64 tokens."""
  task = envs.get("scored").Config(
    path=f"{HERE}/questions.jsonl",
    reward=f"{HERE}/rewards.py:score",
    template="Sort these digits, and answer with the digits alone: {digits}",
    chat=True,
  )
  loss = algorithms.get("decoupled_ppo").Config(baseline="group")
  return to_config_dict(
    parts.Config(
      name="your_data_pretrained",
      batches=30,
      groups_per_batch=32,
      group_size=8,
      task=Choice(name="scored", config=task),
      algorithm=Choice(name="decoupled_ppo", config=loss),
      model=huggingface.read_config(folder),
      pretrained=folder,
      sampling=Sampling(max_tokens=64),
      learner=learner.Config(
        row_length=1024, microbatch_rows=2, learning_rate=1e-6
      ),
      engine=engine.Config(
        slots=32,
        context_length=256,
        prefill_buckets=(64, 256),
        prefill_batches=(1, 8),
      ),
      warm_start=sft.Config(batches=0, wrong_batches=0),
      evaluation=evaluate.Config(problems=100),
    )
  )
