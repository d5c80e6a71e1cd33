"""SAO on the quickstart's task: one trajectory a prompt, and a critic.

  python -m rl_tpu train --config=experiments/methods/sao.py[:SCHEDULE]

256 prompts with one answer each in place of 32 with eight; the baseline is a
critic that first learns the starting policy's returns, then takes two updates
for each of the policy's, with its attention frozen, at five times the rate.
About two minutes on two cores; the number to expect is in README.md beside
this file. SCHEDULE is async (default), sync or lockstep(n).
"""

import ml_collections

from rl_tpu import algorithms, critic, envs, learner, parts, sft
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.generation import engine
from rl_tpu.models import transformer
from rl_tpu.types import Sampling


def get_config(schedule: str = "async") -> ml_collections.ConfigDict:
  """The quickstart's config with this method."""
  task = envs.get("reasoning_gym").Config(
    generator="spell_backward",
    generator_config={"min_word_len": 3, "max_word_len": 5},
    template="{word}=",
    size=8_000,
  )
  loss = algorithms.get("sao").Config(band="math")
  return to_config_dict(
    parts.Config(
      name="sao",
      schedule=schedule,
      batches=40,
      groups_per_batch=256,
      group_size=1,
      max_staleness=2,
      task=Choice(name="reasoning_gym", config=task),
      algorithm=Choice(name="sao", config=loss),
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
      critic=critic.Config(
        learning_rate=2e-3, warmup_minibatches=10, pretraining_batches=20
      ),
      warm_start=sft.Config(batches=325, wrong_batches=25, wrong_fraction=0.4),
    )
  )
