"""Losses, one file each, found by name: `rl_tpu/algorithms/<name>.py`.

A file defines `REQUIRES` (the fields of PolicyOutputs that the learner must
compute besides `target_logp`; or `requires(config)` where that depends on the
configuration), a frozen `Config` that validates itself, and

    advantages(batch, outputs, config) -> [R,T], 0 off the action mask
    loss(outputs, batch, config) -> (Estimate, dict[str, Estimate])

`advantages` is called once, on the whole batch. `loss` may be called on any
subset of its rows: totals and counts of the subsets add up. A loss's total is
a sum over action tokens and its count their number. A file that also requires
`baselines` gets them in the batch, from the run's `history`; its Config has
`scope` and `history_window`. With a critic a file also defines

    returns(batch, outputs, config) -> [R,T], what the critic learns
    value_loss(outputs, batch, config) -> (Estimate, dict[str, Estimate])

and its Config has `critic_updates`, `freeze` and `values`, and maybe
`value_support`, the bins of a critic that is a histogram. A file may define
`keep(group) -> bool`: what it refuses is never trained, and another prompt
takes its place. A new algorithm is a new file, its test and a config; nothing
here changes.
"""

import importlib
import pkgutil
from types import ModuleType
from typing import Any


def names() -> tuple[str, ...]:
  """The algorithms there are: this package's files, sorted."""
  return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__)))


def get(name: str) -> ModuleType:
  """The algorithm's module.

  Raises:
    ValueError: if there is no such file; the message lists those there are.
  """
  if name not in names():
    raise ValueError(
      f"algorithm is {name!r}; it must be one of {', '.join(names())}"
    )
  return importlib.import_module(f"{__name__}.{name}")


def requires(module: ModuleType, config: Any) -> frozenset[str]:
  """The outputs, and maybe `baselines`, that this configuration needs."""
  if hasattr(module, "requires"):
    return module.requires(config)
  return module.REQUIRES
