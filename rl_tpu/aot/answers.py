"""Whether a run fits, as `compile` found it: kept for who asks before a start.

Finding it takes minutes, so the headline figures are kept under a digest of
what they follow from: the parts of the config that the programs are made of,
the code, the compiler. After any change there is no answer, rather than an old
one; programs that did not change make the next one quick.
"""

import pathlib
from typing import Any

from rl_tpu import identity, metrics, parts
from rl_tpu.config import digest, to_json
from rl_tpu.topology import OPTIONS

_SECTIONS = (
  *("groups_per_batch", "group_size", "algorithm", "model", "learner"),
  *("engine", "devices", "critic", "compile"),
)
"""Of the config: what the programs depend on."""


def read(config: parts.Config) -> dict[str, Any] | None:
  """The figures of `compile` for this config and code; None: not compiled."""
  path = _path(config)
  return metrics.read_json(path) if path.exists() else None


def write(config: parts.Config, figures: dict[str, Any]) -> None:
  """Keeps the figures."""
  path = _path(config)
  path.parent.mkdir(parents=True, exist_ok=True)
  metrics.write_json(path, figures)


def _path(config: parts.Config) -> pathlib.Path:
  plain, code = to_json(config), identity.of_code()
  del code["rl_tpu commit"]  # The source says more.
  known = [{name: plain[name] for name in _SECTIONS}, OPTIONS, code]
  folder = pathlib.Path(config.cache) / "compiled_for_tpus"
  return folder / f"answer-{digest(known)}.json"
