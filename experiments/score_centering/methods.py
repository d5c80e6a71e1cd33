"""The methods of Score Centering's figures, by the paper's names.

Its Table 1: all ratios are target/behavior, weights are constants, advantages
are the reward minus its mean in the group. GSPO's and TOPR's are of whole
sequences, DPPO masks by the difference of probabilities; the others are
`score_centering` with a correction of that name, centered or not.
"""

from typing import Any

import ml_collections

from experiments import training

TOP_K = 32
"""Of the sampler's head, unless a study asks for another."""
_CENTERING = "score_centering"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
  "PG": (_CENTERING, {"correction": "none", "centering": False}),
  "IS": (_CENTERING, {"correction": "is", "centering": False}),
  "TIS": (_CENTERING, {"correction": "truncate", "centering": False}),
  "MIS": (_CENTERING, {"correction": "mask", "centering": False}),
  "PPO": (_CENTERING, {"correction": "ppo", "centering": False}),
  "DAPO": (_CENTERING, {"correction": "dapo", "centering": False}),
  "GSPO": ("gspo", {"baseline": "group_mean"}),
  "TOPR": ("topr", {"baseline": "group_mean"}),
  "DPPO": ("dppo", {"baseline": "group_mean", "threshold": 0.2}),
  "SC": (_CENTERING, {"correction": "none"}),
  "TIS+SC": (_CENTERING, {"correction": "truncate"}),
  "MIS+SC": (_CENTERING, {"correction": "mask"}),
  "PPO+SC": (_CENTERING, {"correction": "ppo"}),
}
"""Name and fields of each one's loss."""
TEN = tuple(METHODS)[:10]
"""Of Fig. 1."""


def loss(
  method: str, top_k: int = TOP_K, baseline: str = "group_mean"
) -> tuple[str, dict[str, Any]]:
  """Name and fields of a method's loss.

  Args:
    method: of METHODS.
    top_k: size of the head where scores are centered; 0: the whole vocabulary.
    baseline: of the advantages, see `ops.outcome_advantages`.
  """
  name, fields = METHODS[method]
  fields = fields | {"baseline": baseline}
  if is_centered(method):
    fields["top_k"] = top_k
  return name, fields


def is_centered(method: str) -> bool:
  """Whether its generator must keep a head."""
  name, fields = METHODS[method]
  return name == _CENTERING and fields.get("centering", True)


def set_method(
  config: ml_collections.ConfigDict,
  method: str,
  top_k: int = TOP_K,
  baseline: str = "group_mean",
) -> None:
  """Gives a config a method, see `loss`, and its generator the head."""
  name, fields = loss(method, top_k, baseline)
  head = (top_k or config.model.vocab_size) if is_centered(method) else 0
  config.engine.behavior_top_k = head
  training.set_loss(config, name, **fields)
