"""Any other loss on the quickstart's task, by its name.

  python -m rl_tpu train --config=experiments/methods/baselines.py:NAME

With the defaults of its Config. About a minute on two cores; the numbers to
expect are in README.md beside this file. NAME is one of rloo (default), grpo,
dapo, ppo, gspo, cispo, m2po, topr, dppo, reinforce.
"""

import ml_collections

from rl_tpu import algorithms, envs, learner, parts, sft
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.generation import engine
from rl_tpu.models import transformer
from rl_tpu.types import Sampling


def get_config(name: str = "rloo") -> ml_collections.ConfigDict:
  """The quickstart's config with this method."""
  task = envs.get("reasoning_gym").Config(
    generator="spell_backward",
    generator_config={"min_word_len": 3, "max_word_len": 5},
    template="{word}=",
    size=8_000,
  )
  loss = algorithms.get(name).Config()
  return to_config_dict(
    parts.Config(
      name=name,
      schedule="async",
      batches=40,
      groups_per_batch=32,
      group_size=8,
      max_staleness=2,
      task=Choice(name="reasoning_gym", config=task),
      algorithm=Choice(name=name, config=loss),
      model=transformer.sized("tiny"),
      sampling=Sampling(max_tokens=6),
      learner=learner.Config(
        row_length=104,
        microbatch_rows=16,
        learning_rate=4e-4,
        warmup_minibatches=5,
        weight_decay=0.0,
      ),
      engine=engine.Config(
        slots=16,
        context_length=13,
        prefill_buckets=(8, 13),
        prefill_batches=(8, 16),
        steps_per_dispatch=1,
      ),
      warm_start=sft.Config(batches=325, wrong_batches=25, wrong_fraction=0.4),
    )
  )
