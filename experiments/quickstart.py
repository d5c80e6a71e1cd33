"""Does a language model visibly learn by asynchronous RL on two CPU cores?

  bash launch/quickstart.sh
  python -m rl_tpu train --config=experiments/quickstart.py[:SCHEDULE]

A model of 0.1M parameters learns to spell words backward ('hello=' -> 'olleh').
It first imitates demonstrations whose last batches are partly wrong, so that it
knows the answer but seldom samples it; then decoupled PPO (AReaL) trains it
while a generator keeps sampling, at most `max_staleness` versions behind.
SCHEDULE is async (default), sync or lockstep(n). What `sweep` adds is run by
`python -m launch local --sweep`, see launch/README.md.
"""

from collections.abc import Callable

import ml_collections

from rl_tpu import algorithms, envs, learner, parts, sft
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.generation import engine
from rl_tpu.models import transformer
from rl_tpu.types import Sampling


def get_config(schedule: str = "async") -> ml_collections.ConfigDict:
  """The quickstart's config under one of the schedules."""
  task = envs.get("reasoning_gym").Config(
    generator="spell_backward",
    generator_config={"min_word_len": 3, "max_word_len": 5},
    template="{word}=",
    size=8_000,
  )
  loss = algorithms.get("decoupled_ppo").Config(baseline="group")
  return to_config_dict(
    parts.Config(
      name="quickstart",
      schedule=schedule,
      batches=40,
      groups_per_batch=32,
      group_size=8,
      max_staleness=2,
      task=Choice(name="reasoning_gym", config=task),
      algorithm=Choice(name="decoupled_ppo", config=loss),
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


def sweep(add: Callable[..., None]) -> None:
  """The runs of the README's table."""
  for seed in range(3):
    for schedule in ("async", "sync"):
      add(seed=seed, schedule=schedule)
