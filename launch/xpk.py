"""A run on Kubernetes by way of XPK: a workload for each of its programs.

XPK makes the JobSets (see gke.py), one replicated job each, whose pods have
names by which they find each other: RUN-g2-slice-job-0-0.RUN-g2 is the
generator on the third slice. A workload with several slices is one program, so
each generator slice has a workload of its own. XPK gives each pod 4 chips.

Only the trainer's workload ends by itself: `stop` deletes all of them.
"""

import shlex
from collections.abc import Sequence

from launch import gke
from launch import plan as plans
from launch.plan import Plan, Slices, addresses
from launch.settings import Settings
from launch.steps import Step

NEEDS = ("project", "zone", "cluster", "image", "storage", "token_file")
MOST_ON_A_HOST = {"v5e": 1, "v5p": 4, "v6e": 4}
"""XPK's machines: ct5lp-hightpu-4t has slices of two hosts or more."""
FAMILIES = {"v5e": "v5litepod", "v5p": "v5p", "v6e": "v6e"}
"""Of --tpu-type=FAMILY-TOPOLOGY."""
outcome = gke.outcome
_JOB = "slice-job"
_RETRIED = "1"
"""Exit code of a process that failed; XPK itself tries 127 to 255 again, but
not 2, which is what the run refuses."""


def make(settings: Settings, flags: Sequence[str]) -> Plan:
  """Plans a run on XPK's machines.

  Raises:
    ConfigError: the run cannot be launched so; says why.
  """
  return plans.make(settings, flags, MOST_ON_A_HOST)


def start(plan: Plan) -> list[Step]:
  """Creates the workloads."""
  token = f"token_file={plan.settings.token_file}"
  remote: tuple[str, ...] = ()
  steps = []
  if plan.generators is not None:
    names = _generators(plan)
    hosts = [f"{n}-{_JOB}-0-0.{n}:{plan.settings.port}" for n in names]
    remote = (addresses(hosts), f"--config.remote.{token}")
    command = plan.serve(f"--config.serve.{token}")
    steps = [_create(plan, name, plan.generators, 1, command) for name in names]
  command = plan.train(*remote)
  trainer = _create(
    plan, _trainer(plan), plan.trainer, plan.trainer.count, command
  )
  return [*steps, trainer]


def status(plan: Plan) -> Step:
  """Asks for the end that the trainer's JobSet has come to."""
  return gke.terminal_state(plan.settings, _trainer(plan))


def stop(plan: Plan) -> list[Step]:
  """Deletes the workloads, the trainer's first: it writes a checkpoint."""
  return [delete(plan, name) for name in [_trainer(plan), *_generators(plan)]]


def logs(plan: Plan) -> list[Step]:
  """Follows the trainer's first process."""
  return [gke.follow(plan.settings, _trainer(plan), _JOB)]


def delete(plan: Plan, name: str) -> Step:
  """Deletes a workload."""
  return Step(
    argv=(
      *("xpk", "workload", "delete", f"--workload={name}", "--force"),
      *cluster(plan),
    ),
    may_fail=True,
  )


def cluster(plan: Plan) -> tuple[str, ...]:
  """Where workloads are."""
  settings = plan.settings
  return (
    f"--cluster={settings.cluster}",
    f"--project={settings.project}",
    f"--zone={settings.zone}",
    f"--namespace={settings.namespace}",
  )


def workload(
  plan: Plan, name: str, slices: Slices, count: int, command: tuple[str, ...]
) -> tuple[str, ...]:
  """Arguments that all workloads have.

  XPK runs the command in a shell and sends SIGTERM to that: the command must
  take the shell's place.
  """
  settings = plan.settings
  family = FAMILIES[slices.chip]
  options = ["--spot"] if settings.spot else []
  if settings.reservation:
    options = [f"--reservation={settings.reservation}"]
  return (
    f"--workload={name}",
    *cluster(plan),
    f"--tpu-type={family}-{slices.shape}",
    f"--num-slices={count}",
    f"--docker-image={settings.image}",
    f"--storage={settings.storage}",
    f"--max-restarts={settings.restarts}",
    *options,
    f"--command=exec {shlex.join(command)}",
  )


def _create(
  plan: Plan, name: str, slices: Slices, count: int, command: tuple[str, ...]
) -> Step:
  return Step(
    argv=(
      *("xpk", "workload", "create"),
      *workload(plan, name, slices, count, command),
      f"--restart-on-exit-codes={_RETRIED}",
      f"--termination-grace-period-seconds={plan.settings.grace_seconds}",
    )
  )


def _trainer(plan: Plan) -> str:
  return f"{plan.name}-t"


def _generators(plan: Plan) -> list[str]:
  count = plan.generators.count if plan.generators else 0
  return [f"{plan.name}-g{index}" for index in range(count)]
