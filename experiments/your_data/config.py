"""Does a model learn your questions by your reward function?

  python -m rl_tpu train --config=experiments/your_data/config.py
      [:METHOD | :FOLDER | :METHOD,FOLDER]

The example sorts four digits ('4152=' -> '1245'): `questions.jsonl` has the
questions and examples of answers, of which half are in the wrong order;
`rewards.py` says that ascending is right. Put yours in their place, by flags or
in a copy of this folder; docs/your_data.md says how.

Without FOLDER a model of 0.1M parameters that reads bytes is drawn, imitates
the examples and goes on by RL; expect `heldout_after` of 0.85 or more, from 0.4
before, in two minutes on two cores. With one, weights and tokenizer are those
of that Hugging Face folder (Qwen2, Qwen3, Qwen3-MoE, Llama 3), which is asked
in its chat's form and imitates nothing.

METHOD is the name of a file in experiments/methods, as `sao`; without it the
loss is decoupled PPO, one minibatch a batch.
"""

import importlib
import os
import pathlib

import ml_collections

from experiments import methods
from rl_tpu import algorithms, envs, evaluate, learner, parts, sft
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.generation import engine
from rl_tpu.models import huggingface, transformer
from rl_tpu.types import Sampling

HERE = os.path.relpath(os.path.dirname(__file__))


def get_config(asked: str = "") -> ml_collections.ConfigDict:
  """The questions, from nothing or from a folder, by some method.

  Args:
    asked: METHOD, FOLDER, both with a comma between them, or neither.

  Raises:
    FileNotFoundError: it is a word that names neither.
  """
  first, _, rest = asked.partition(",")
  method, folder = (first, rest) if first in _methods() else (None, asked)
  if folder and "/" not in folder and not os.path.isdir(folder):
    raise FileNotFoundError(
      f"{folder} is not there; after the colon comes a folder or one of "
      f"{', '.join(_methods())}"
    )
  config = from_folder(folder) if folder else from_nothing()
  if method is not None:
    config.name = f"{config.name}_{method}"
    importlib.import_module(f"experiments.methods.{method}").use(config)
  return config


def _methods() -> list[str]:
  folders = [pathlib.Path(folder) for folder in methods.__path__]
  return sorted(path.stem for f in folders for path in f.glob("*.py"))


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
      # The longest answer, four digits, and the stop token are 5; one more
      # lets an answer be too long and still be scored.
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
        context_length=12,  # the beginning, "4152=" and max_tokens
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
