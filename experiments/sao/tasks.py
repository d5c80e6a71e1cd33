"""The tool task of this folder's studies, with the same lag each time.

A model of 0.13M parameters multiplies by calling a calculator
(`experiments/agents/tool_arithmetic.py`); lockstep makes every token a given
number of versions stale, so that a run is the same to the last bit. Methods
differ in the loss alone and see as many trajectories.

`half_taught` is that with numbers of three digits, after imitation that ended
early: 0.4 of the answers are right, since digits are miscopied, and to copy
them is what is left to learn. Lag and rate were chosen with runs of seed 0 so
that SAO masks under 2% of the tokens (the paper: 0.04 to 0.6%) and its critic
explains some variance (the paper: 0.5 to 0.6). On `tool_task` with 8 versions,
where imitation had blurred what the policy knew, it masked 4.7% and explained
nothing, runs of one arm ended anywhere from 0.27 to 0.99, and nothing could be
told apart.
"""

import ml_collections

from experiments import training
from experiments.agents import tool_arithmetic
from rl_tpu.models import quantization

GROUP = 8
"""Members of GRPO's groups, the paper's: 16 prompts of 8 in place of 128."""


LAG, RATE = 4, 4e-4
"""Of `half_taught`: versions, and Adam's learning rate."""


def half_taught(
  seed: int,
  scale: str,
  batches: int = 120,
  lag: int = LAG,
  weights: quantization.Grid = "none",
) -> ml_collections.ConfigDict:
  """SAO on the half-taught task; 2 small batches at scale smoke.

  Args:
    seed: of the run.
    scale: smoke or cpu; paper is cpu's.
    batches: of the run.
    lag: versions that every token is stale.
    weights: grid of the generator's weights.
  """
  config = tool_task(seed, lag, scale)
  config.task.digits = 3
  config.sampling.max_tokens = 9
  config.engine.context_length = 48
  config.engine.prefill_buckets = (12, 24, 48)
  config.engine.mismatch.weights = weights
  config.learner.learning_rate = RATE
  if scale != "smoke":
    config.batches = batches
    config.warm_start.batches, config.warm_start.wrong_batches = 150, 0
  return config


def tool_task(seed: int, lag: int, scale: str) -> ml_collections.ConfigDict:
  """SAO on the tool task; 60 batches, or 2 small ones at scale smoke."""
  config = tool_arithmetic.get_config(f"lockstep({lag})")
  config.seed = seed
  config.evaluation.every = 10
  if scale == "smoke":
    config.batches, config.evaluation.every = 2, 0
    config.groups_per_batch, config.evaluation.problems = 16, 8
    config.critic.pretraining_batches = 1
    config.warm_start.batches, config.warm_start.wrong_batches = 20, 2
  return config


def set_method(config: ml_collections.ConfigDict, method: str) -> None:
  """Gives SAO's config one of the paper's arms.

  | method | baseline | ratio outside the band |
  |---|---|---|
  | SAO | critic | masked |
  | GRPO+DIS | group, mean and deviation | masked |
  | GRPO | the same | PPO's clip, higher above: 0.2, 0.28 |
  | DIS only | the batch's mean and deviation | masked |
  | running mean | the prompt's last 8 outcomes | masked |
  """
  mask = {"correction": "mask", "low": 0.7, "high": 6.0, "centering": False}
  if method == "SAO":
    training.set_loss(config, "sao", band="math")
  elif method == "GRPO":
    set_groups(config)
    training.set_loss(config, "grpo", clip_high=0.28)
  elif method == "GRPO+DIS":
    set_groups(config)
    training.set_loss(config, "score_centering", baseline="group", **mask)
  elif method == "DIS only":
    training.set_loss(config, "score_centering", baseline="batch", **mask)
  elif method == "running mean":
    training.set_loss(config, "running_mean", scope="prompt")
  else:
    raise ValueError(f"method is {method!r}; see experiments/sao/tasks.py")


def set_groups(config: ml_collections.ConfigDict) -> None:
  """As many trajectories, in groups of the paper's size."""
  config.groups_per_batch //= GROUP
  config.group_size = GROUP
