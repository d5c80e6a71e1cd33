"""AReaL: decoupled PPO on the quickstart's task, four minibatches a batch.

  python -m rl_tpu train --config=experiments/methods/areal.py[:SCHEDULE]

The paper's objective and its number of minibatches, so that the clip around the
proximal policy acts. About a minute on two cores; the number to expect is in
README.md beside this file. SCHEDULE is async (default), sync or lockstep(n).
"""

import ml_collections

from experiments import quickstart
from rl_tpu import algorithms
from rl_tpu.config import Choice, to_config_dict


def get_config(schedule: str = "async") -> ml_collections.ConfigDict:
  """The quickstart's config with this method."""
  config = quickstart.get_config(schedule)
  config.name = "areal"
  use(config)
  return config


def use(config: ml_collections.ConfigDict) -> None:
  """Puts the method into a config of any task."""
  loss = algorithms.get("decoupled_ppo").Config(baseline="group")
  config.algorithm = to_config_dict(Choice(name="decoupled_ppo", config=loss))
  config.learner.minibatches = 4
  # A quarter of a batch has fewer rows to compute at once.
  rows = config.learner.microbatch_rows
  config.learner.microbatch_rows = max(rows // 2, 1)
