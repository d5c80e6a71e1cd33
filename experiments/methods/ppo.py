"""PPO without a critic on the quickstart's task.

  python -m rl_tpu train --config=experiments/methods/ppo.py[:SCHEDULE]

Clips around the policy that sampled, however stale: AReaL's naive baseline.
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
  config.name = "ppo"
  use(config)
  return config


def use(config: ml_collections.ConfigDict) -> None:
  """Puts the method into a config of any task."""
  loss = algorithms.get("ppo").Config()
  config.algorithm = to_config_dict(Choice(name="ppo", config=loss))
