"""The methods of this folder: three papers', and what they make together.

| method | baseline | correction of the ratio | centered |
|---|---|---|---|
| GRPO | group | PPO's clip around the behavior policy | no |
| AReaL | batch | clip around the proximal policy, weight up to 5 | no |
| SAO | critic | mask outside (0.7, 6) | no |
| SC | group's mean | held in [0, 2] | yes |
| AReaL + SC | batch | AReaL's | yes |
| SAO + SC | critic | SAO's | yes |

All take the same trajectories and optimizer steps, in four minibatches; SAO's
critic comes on top (`cost.py` says what it costs). SAO samples one member of
256 prompts where the others sample eight of 32. AReaL and SAO share no
composition: each is a way to treat the same ratio.
"""

import ml_collections

from experiments.areal import settings
from rl_tpu import algorithms, critic
from rl_tpu.config import Choice, to_config_dict

TOP_K = 32
"""Tokens of the sampler's head."""
METHODS = {
  "GRPO": ("grpo", {}),
  "AReaL": ("decoupled_ppo", {}),
  "SAO": ("sao", {"band": "math"}),
  "SC": ("score_centering", {"correction": "truncate"}),
  "AReaL + SC": ("decoupled_ppo", {"centering": True}),
  "SAO + SC": ("sao", {"band": "math", "centering": True}),
}
PARENTS = {"AReaL + SC": "AReaL", "SAO + SC": "SAO"}
"""What centering is added to."""
CRITIC = critic.Config(
  learning_rate=2e-3, warmup_minibatches=10, pretraining_batches=10
)


def centered(method: str) -> bool:
  """Whether the sampler's head is needed."""
  return method.endswith("SC")


def choice(method: str) -> Choice:
  """The loss of one of METHODS."""
  name, fields = METHODS[method]
  if centered(method):
    fields = fields | {"top_k": TOP_K}
  return Choice(name=name, config=algorithms.get(name).Config(**fields))


def configured(
  method: str, lag: int, weights: str, seed: int, scale: str
) -> ml_collections.ConfigDict:
  """A method on the quickstart's task.

  Args:
    method: of METHODS.
    lag: versions that every token is stale.
    weights: grid of the generator's weights, `none` or `int4`.
    seed: of the run.
    scale: smoke or cpu; paper is cpu's.
  """
  config = settings.small(lag, seed, "smoke" if scale == "smoke" else "cpu")
  config.algorithm = to_config_dict(choice(method))
  if method.startswith("SAO"):
    config.groups_per_batch, config.group_size = 256, 1
    config.critic = to_config_dict(CRITIC)
    if scale == "smoke":
      config.critic.pretraining_batches = 2
  if centered(method):
    config.engine.behavior_top_k = TOP_K
  config.engine.mismatch.weights = weights
  return config
