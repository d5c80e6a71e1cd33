"""A run under Pathways: one process, which sees the chips of all slices.

`xpk workload create-pathways` makes a head, whose container runs the command on
CPUs, and workers on every slice. To JAX they are the devices of one machine:
trainer and generator have disjoint meshes of it, and weights move between them
without a network of our own, so no addresses, ports or tokens. Pathways has
slices of one shape only. The command registers Pathways with JAX first, see
under_pathways.py.
"""

from collections.abc import Sequence

from launch import gke, xpk
from launch.plan import Plan, draft
from launch.settings import Settings
from launch.steps import Step
from rl_tpu.config import ConfigError

NEEDS = ("project", "zone", "cluster", "image", "storage", "artifacts")
outcome = gke.outcome
_PROGRAM = ("python", "-m", "launch.under_pathways", "train")


def make(settings: Settings, flags: Sequence[str]) -> Plan:
  """Plans a run of one process.

  Raises:
    ConfigError: the run cannot be launched so; says why.
  """
  plan = draft(settings, flags, xpk.MOST_ON_A_HOST)
  generators, config = plan.generators, plan.config
  if config.remote.names_any:
    raise ConfigError(
      f"config.remote.addresses is {config.remote.addresses}; it must be empty "
      "with pathways, where one process has trainer and generator"
    )
  if generators and generators.topology.name != plan.trainer.topology.name:
    raise ConfigError(
      f"config.compile.generator_topology is {generators.topology.name!r}; "
      f"with pathways it must be the trainer's, {plan.trainer.topology.name!r}"
    )
  chips = _slices(plan) * plan.trainer.hosts * plan.trainer.chips
  if config.num_devices != chips:
    raise ConfigError(
      f"config.devices has {config.num_devices} devices; it must have {chips}, "
      f"the chips of {_slices(plan)} slices of {plan.trainer.topology.name}"
    )
  return plan


def start(plan: Plan) -> list[Step]:
  """Creates the workload."""
  command = plan.command(_PROGRAM, [*plan.placed, "--resume=auto"])
  workload = xpk.workload(plan, plan.name, plan.trainer, _slices(plan), command)
  grace = plan.settings.grace_seconds
  return [
    Step(
      argv=(
        *("xpk", "workload", "create-pathways", *workload),
        f"--pathways-gcs-location={plan.settings.artifacts}",
        f"--termination-grace-period-seconds={grace}",
      )
    )
  ]


def status(plan: Plan) -> Step:
  """Asks for the end that the workload's JobSet has come to."""
  return gke.terminal_state(plan.settings, plan.name)


def stop(plan: Plan) -> list[Step]:
  """Deletes the workload."""
  return [xpk.delete(plan, plan.name)]


def logs(plan: Plan) -> list[Step]:
  """Follows the run."""
  return [gke.follow(plan.settings, plan.name, "pathways-head")]


def _slices(plan: Plan) -> int:
  return plan.trainer.count + plan.settings.generators
