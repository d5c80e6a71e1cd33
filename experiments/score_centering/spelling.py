"""The task and the methods of this folder's studies.

The quickstart's model (0.13M parameters) spells words backward; plain SGD, as
in the paper, on group-centred rewards of +1 and -1, in lockstep, so that a run
is the same to the last bit. The sampler alone is noisy, rounded or late;
held-out accuracy is that of the clean policy.
"""

from typing import Any

import ml_collections

from experiments import quickstart
from rl_tpu import algorithms
from rl_tpu.config import Choice, to_config_dict

_CENTERED = {"top_k": 32}
_PLAIN = {"centering": False}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
  "PG": ("score_centering", {"correction": "none", **_PLAIN}),
  "IS": ("score_centering", {"correction": "is", **_PLAIN}),
  "TIS": ("score_centering", {"correction": "truncate", **_PLAIN}),
  "MIS": ("score_centering", {"correction": "mask", **_PLAIN}),
  "PPO": ("score_centering", {"correction": "ppo", **_PLAIN}),
  "DAPO": ("score_centering", {"correction": "dapo", **_PLAIN}),
  "GSPO": ("gspo", {"baseline": "group_mean"}),
  "TOPR": ("topr", {}),
  "DPPO": ("dppo", {"baseline": "group_mean", "threshold": 0.2}),
  "SC": ("score_centering", {"correction": "none", **_CENTERED}),
  "TIS+SC": ("score_centering", {"correction": "truncate", **_CENTERED}),
  "MIS+SC": ("score_centering", {"correction": "mask", **_CENTERED}),
  "PPO+SC": ("score_centering", {"correction": "ppo", **_CENTERED}),
}
"""Name to algorithm and its fields: the paper's grid, bands its own."""
COLUMNS = (
  *("reward", "heldout_accuracy", "entropy", "engine_mismatch"),
  *("head_mass", "weight_masked", "grad_norm"),
)
"""What the studies keep of a run."""


def spelling(
  method: str, seed: int, scale: str, **mismatch: Any
) -> ml_collections.ConfigDict:
  """The config of a run whose sampler differs from the policy.

  Args:
    method: of METHODS.
    seed: of the run.
    scale: `smoke` trains 4 batches.
    mismatch: fields of `quantization.Config`.
  """
  config = quickstart.get_config("lockstep(0)")
  config.seed = seed
  config.batches = 4 if scale == "smoke" else 120
  config.evaluation.every = 0 if scale == "smoke" else 20
  config.shaping.scale, config.shaping.bias = 2.0, -0.5
  config.engine.mismatch.update(mismatch)
  name, fields = METHODS[method]
  loss = algorithms.get(name).Config(**fields)
  config.algorithm = to_config_dict(Choice(name=name, config=loss))
  config.engine.behavior_top_k = (
    fields.get("top_k", 0) if fields.get("centering", True) else 0
  )
  return config
