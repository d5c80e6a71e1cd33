"""What did a run start with? Its own config, for the commands that come after.

  python -m rl_tpu evaluate --config=experiments/of_run.py:RUN

RUN is a run's directory, also one that was moved; flags change fields as of any
config. Without RUN it is the quickstart's.
"""

import pathlib

import ml_collections

from experiments import quickstart
from rl_tpu import metrics, parts
from rl_tpu.config import build, to_config_dict


def get_config(run: str = "") -> ml_collections.ConfigDict:
  """The config that a run's directory holds, with that directory."""
  if not run:
    return quickstart.get_config()
  saved = metrics.read_json(pathlib.Path(run) / "config.json")
  return to_config_dict(build(parts.Config, saved | {"directory": run}))
