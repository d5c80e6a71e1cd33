"""TOPR on the quickstart's task.

  python -m rl_tpu train --config=experiments/methods/topr.py[:SCHEDULE]

Right answers are imitated in full, wrong ones weighted by a ratio held below 1.
About a minute on two cores; the number to expect is in README.md beside this
file. SCHEDULE is async (default), sync or lockstep(n).
"""

import ml_collections

from experiments import quickstart
from rl_tpu import algorithms
from rl_tpu.config import Choice, to_config_dict


def get_config(schedule: str = "async") -> ml_collections.ConfigDict:
  """The quickstart's config with this method."""
  config = quickstart.get_config(schedule)
  config.name = "topr"
  use(config)
  return config


def use(config: ml_collections.ConfigDict) -> None:
  """Puts the method into a config of any task."""
  loss = algorithms.get("topr").Config()
  config.algorithm = to_config_dict(Choice(name="topr", config=loss))
