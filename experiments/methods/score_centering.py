"""Score Centering with a truncated weight, on the quickstart's task.

  python -m rl_tpu train --config=experiments/methods/score_centering.py

The sampler keeps its 32 most likely tokens of each step, and their expected
weighted score is taken off: constant reward then moves nothing. About a minute
on two cores; the number to expect is in README.md beside this file. After a
colon the schedule: async (default), sync or lockstep(n).
"""

import ml_collections

from experiments import quickstart
from rl_tpu import algorithms
from rl_tpu.config import Choice, to_config_dict


def get_config(schedule: str = "async") -> ml_collections.ConfigDict:
  """The quickstart's config with this method."""
  config = quickstart.get_config(schedule)
  config.name = "score_centering"
  use(config)
  return config


def use(config: ml_collections.ConfigDict) -> None:
  """Puts the method into a config of any task."""
  loss = algorithms.get("score_centering").Config(
    correction="truncate", top_k=32
  )
  config.algorithm = to_config_dict(Choice(name="score_centering", config=loss))
  config.engine.behavior_top_k = 32
