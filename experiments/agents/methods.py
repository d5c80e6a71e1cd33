r"""SAO, GRPO with SAO's mask, and running means, on the calculator task.

  python -m rl_tpu train --config=experiments/agents/methods.py:METHOD \
      [--config.seed=N]

METHOD is one of METHODS. Everything but the method is that of
`tool_arithmetic.py`, so that each sees 60 batches of 128 trajectories: SAO and
the running means 128 prompts once each, GRPO 16 prompts with 8 members. All
mask ratios outside (0.7, 6), so what differs is what an outcome is compared
with: a critic, the group, the prompt's or everyone's earlier outcomes.
`baselines.py` runs three of them; the numbers to expect are in README.md.
"""

import ml_collections

from experiments.agents import tool_arithmetic
from rl_tpu import algorithms
from rl_tpu.config import Choice, to_config_dict

METHODS = ("sao", "grpo_dis", "running_mean", "running_mean_global")


def get_config(method: str = "sao") -> ml_collections.ConfigDict:
  """The tool task's config with another method; SAO is as it is there."""
  if method not in METHODS:
    raise ValueError(f"method is {method!r}; it must be one of {METHODS}")
  config = tool_arithmetic.get_config()
  config.name = f"tool_arithmetic_{method}"
  if method == "grpo_dis":
    config.groups_per_batch, config.group_size = 16, 8
    # GRPO's advantages, and of score centering's corrections the mask alone.
    loss = algorithms.get("score_centering").Config(
      correction="mask", low=0.7, high=6.0, centering=False, baseline="group"
    )
    config.algorithm = to_config_dict(
      Choice(name="score_centering", config=loss)
    )
  elif method != "sao":
    scope = "global" if method == "running_mean_global" else "prompt"
    loss = algorithms.get("running_mean").Config(scope=scope)
    config.algorithm = to_config_dict(Choice(name="running_mean", config=loss))
  return config
