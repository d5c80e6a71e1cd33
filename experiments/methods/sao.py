"""SAO on the quickstart's task: one trajectory a prompt, and a critic.

  python -m rl_tpu train --config=experiments/methods/sao.py[:SCHEDULE]

256 prompts with one answer each in place of 32 with eight, so a batch is as
large; the baseline is a
critic that first learns the starting policy's returns, then takes two updates
for each of the policy's, with its attention frozen, at five times the rate.
About two minutes on two cores; the number to expect is in README.md beside
this file. SCHEDULE is async (default), sync or lockstep(n).
"""

import ml_collections

from experiments import quickstart
from rl_tpu import algorithms, critic
from rl_tpu.config import Choice, to_config_dict


def get_config(schedule: str = "async") -> ml_collections.ConfigDict:
  """The quickstart's config with this method."""
  config = quickstart.get_config(schedule)
  config.name = "sao"
  use(config)
  return config


def use(config: ml_collections.ConfigDict) -> None:
  """Puts the method into a config of any task."""
  config.groups_per_batch *= config.group_size
  config.group_size = 1
  loss = algorithms.get("sao").Config(band="math")
  config.algorithm = to_config_dict(Choice(name="sao", config=loss))
  config.critic = to_config_dict(
    critic.Config(
      learning_rate=5 * config.learner.learning_rate,
      warmup_minibatches=10,
      pretraining_batches=20,
    )
  )
