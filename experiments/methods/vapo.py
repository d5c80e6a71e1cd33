"""VAPO on the quickstart's task: PPO with a critic, lambda by length.

  python -m rl_tpu train --config=experiments/methods/vapo.py[:SCHEDULE]

Eight answers a prompt; the baseline is a critic that first learns the starting
policy's returns, and rewarded answers are imitated a little besides. About two
minutes on two cores; the number to expect is in README.md beside this file.
SCHEDULE is async (default), sync or lockstep(n).
"""

import ml_collections

from experiments import quickstart
from rl_tpu import algorithms, critic
from rl_tpu.config import Choice, to_config_dict


def get_config(schedule: str = "async") -> ml_collections.ConfigDict:
  """The quickstart's config with this method."""
  config = quickstart.get_config(schedule)
  config.name = "vapo"
  use(config)
  return config


def use(config: ml_collections.ConfigDict) -> None:
  """Puts the method into a config of any task."""
  loss = algorithms.get("vapo").Config(nll_coefficient=0.1)
  config.algorithm = to_config_dict(Choice(name="vapo", config=loss))
  config.critic = to_config_dict(
    critic.Config(
      learning_rate=5 * config.learner.learning_rate,
      warmup_minibatches=10,
      pretraining_batches=20,
    )
  )
