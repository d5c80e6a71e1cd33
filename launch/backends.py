"""Where runs can be launched to, by name, and what each place can do."""

import subprocess
from collections.abc import Sequence
from typing import Literal, Protocol

from launch import gke, pathways, tpu_vm, xpk
from launch.plan import Plan
from launch.settings import Settings
from launch.steps import Step

Outcome = Literal["running", "done", "failed", "absent"]


class Backend(Protocol):
  """A module; none of its functions sends anything."""

  @property
  def NEEDS(self) -> Sequence[str]:
    """Settings that it cannot do without."""
    ...

  def make(self, settings: Settings, flags: Sequence[str]) -> Plan:
    """Plans and checks a run."""
    ...

  def start(self, plan: Plan) -> list[Step]:
    """What starts it, or goes on with it."""
    ...

  def status(self, plan: Plan) -> Step:
    """What asks how it is."""
    ...

  def outcome(self, asked: subprocess.CompletedProcess[str]) -> str:
    """What the answer means, an Outcome."""
    ...

  def logs(self, plan: Plan) -> list[Step]:
    """What shows what it says."""
    ...

  def stop(self, plan: Plan) -> list[Step]:
    """What ends it, with a checkpoint, and all that was created for it."""
    ...


CLOUDS: dict[str, Backend] = {
  "gke": gke,
  "pathways": pathways,
  "tpu_vm": tpu_vm,
  "xpk": xpk,
}


def plan_on(name: str, settings: Settings, flags: Sequence[str]) -> Plan:
  """Plans a run on one of the clouds.

  Raises:
    ConfigError: settings or config do not allow it; names the field.
  """
  backend = CLOUDS[name]
  needs = backend.NEEDS
  if not settings.generators:
    needs = [field for field in needs if not field.startswith("token_")]
  settings.need(name, needs)
  return backend.make(settings, flags)
