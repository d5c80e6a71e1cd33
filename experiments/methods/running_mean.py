"""Running means on the quickstart's task: one trajectory a prompt, no critic.

  python -m rl_tpu train --config=experiments/methods/running_mean.py[:SCHEDULE]
      [--config.algorithm.scope=global --config.directory=runs/global_mean]

256 prompts with one answer each, as in `sao.py`; the baseline is the mean of
the prompt's last 8 outcomes or, in scope global, of the last 128 of all. The
5,733 training prompts last for 22 batches: till then scope prompt falls back on
the batch's own mean, and after them it knows one outcome of each prompt. About
a minute on two cores; the number to expect is in README.md beside this file.
SCHEDULE is async (default), sync or lockstep(n).
"""

import ml_collections

from experiments import quickstart
from rl_tpu import algorithms
from rl_tpu.config import Choice, to_config_dict


def get_config(schedule: str = "async") -> ml_collections.ConfigDict:
  """The quickstart's config with this method."""
  config = quickstart.get_config(schedule)
  config.name = "running_mean"
  use(config)
  return config


def use(config: ml_collections.ConfigDict) -> None:
  """Puts the method into a config of any task."""
  config.groups_per_batch *= config.group_size
  config.group_size = 1
  loss = algorithms.get("running_mean").Config()
  config.algorithm = to_config_dict(Choice(name="running_mean", config=loss))
