"""Weights from the trainer's devices, for a generator that serves meanwhile.

A generator that is slow skips versions: where the one it was told of is gone,
it takes the trainer's newest. What was served before goes on until a version is
here whole, and after a pull that failed.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from rl_tpu.generation import policies
from rl_tpu.generation.connection import Refused
from rl_tpu.generation.driver import GenerationDriver
from rl_tpu.generation.engine import PolicyEngine
from rl_tpu.transfer.control import Moved
from rl_tpu.transfer.puller import Puller, SupersededError
from rl_tpu.types import VersionedParams


class Intake:
  """Pulls weights for one driver, and counts."""

  def __init__(self, driver: GenerationDriver, token: str | None):
    """`token` is that of the trainer's calls."""
    self._driver = driver
    self._puller = Puller(token)
    self._sums = {"pulls": 0, "failed": 0, "bytes": 0, "seconds": 0.0}

  def counters(self) -> dict[str, float]:
    """Pulls that went well or failed; bytes and seconds of the former."""
    return {**self._sums, "abandoned_shards": self._puller.abandoned}

  async def pull(
    self,
    addresses: Sequence[str],
    version: int,
    life: str,
    timeout_seconds: float,
  ) -> dict[str, Any]:
    """Puts this version or a newer one into service, unless one was given.

    What another life gave does not count (see `GenerationDriver.update`).

    Returns:
      `version` that was given last, `bytes` and `seconds` of the pull.

    Raises:
      Refused: it failed; says at which process or tensor.
    """
    theirs, given = self._driver.accepted
    if theirs == life and given is not None and given >= version:
      return {"version": given, "bytes": 0, "seconds": 0.0}
    try:
      weights, moved = await asyncio.to_thread(
        _pull,
        self._driver.engine,
        self._puller,
        addresses,
        version,
        timeout_seconds,
      )
      self._driver.update(weights, life)
    except (OSError, ValueError, RuntimeError) as error:
      self._sums["failed"] += 1
      raise Refused(_status(error), str(error)) from error
    measured = {"bytes": moved.bytes, "seconds": moved.seconds}
    for name, amount in {"pulls": 1, **measured}.items():
      self._sums[name] += amount
    return {"version": weights.version, **measured}


def _status(error: Exception) -> str:
  """Of gRPC; UNAVAILABLE would mean that this generator is gone."""
  if isinstance(error, TimeoutError):
    return "DEADLINE_EXCEEDED"
  return "INVALID_ARGUMENT" if isinstance(error, ValueError) else "INTERNAL"


def _pull(
  engine: PolicyEngine,
  puller: Puller,
  addresses: Sequence[str],
  version: int,
  timeout_seconds: float,
) -> tuple[VersionedParams, Moved]:
  """This version as the engine holds it, or a newer one where it is gone."""
  deadline = time.monotonic() + timeout_seconds
  while True:
    left = deadline - time.monotonic()
    try:
      pulled, moved = puller.pull(
        addresses, version, policies.abstract(engine), left
      )
      return engine.serve(pulled), moved
    except SupersededError as error:
      if left <= 0:
        raise TimeoutError(f"{error}; there is no time left for it") from error
      version = error.newest
