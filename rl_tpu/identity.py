"""What a process says of itself, so that another can tell whether they fit.

A trainer and its generators are started apart, often on different machines from
different images. What must be the same on both sides is small: the code, the
packages that compile it, the model and the part of the engine's config that
changes what is sampled, the tokenizer. `describe` says it, the generator's
service passes it on, and the preflight compares.
"""

import functools
import hashlib
import importlib.metadata
import pathlib
import platform
from typing import Any

from rl_tpu import metrics, parts
from rl_tpu.config import to_json
from rl_tpu.models import tokenizer as tokenizers

PACKAGES = ("jax", "jaxlib", "libtpu")
"""Whose versions decide what is computed, or whether processes understand each
other."""

SIZES = (
  *("slots", "prefill_buckets", "prefill_batches", "prompts_per_row"),
  *("steps_per_dispatch", "dispatch_ahead", "min_shared_prefix"),
)
"""Of the engine's config: how fast a generator is, not what it samples. Each
may have its own."""


def describe(
  config: parts.Config, text: tokenizers.Tokenizer
) -> dict[str, Any]:
  """What a process with this config and tokenizer is.

  Returns:
    `code` (versions by name), `config` (what both sides must agree on, by its
    place), `tokenizer` (a digest); values that JSON and msgpack keep.
  """
  plain = to_json(config)
  engine = {k: v for k, v in plain["engine"].items() if k not in SIZES}
  return {
    "code": of_code(),
    "config": {
      "model": plain["model"],
      "engine": engine,
      "interruption": plain["interruption"],
      "devices": {"generator": plain["devices"]["generator"]},
    },
    "tokenizer": tokenizers.fingerprint(text),
  }


def of_code() -> dict[str, str]:
  """Versions of Python, of the packages that matter, and of this code."""
  installed = {name: _version(name) for name in PACKAGES}
  return {
    "python": platform.python_version(),
    **installed,
    "rl_tpu commit": metrics.commit() or "not known",
    "rl_tpu source": source(),
  }


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return "not installed"


@functools.cache
def source() -> str:
  """A digest of this package's files: edits that no commit has change it."""
  root = pathlib.Path(__file__).parent
  digest = hashlib.sha256()
  for path in sorted(root.rglob("*.py")):
    digest.update(str(path.relative_to(root)).encode() + b"\0")
    digest.update(path.read_bytes() + b"\0")
  return digest.hexdigest()[:16]
