"""A run on Cloud TPU VMs, by queued resources.

One queued resource for the trainer, with a node for each of its slices
(multislice), and one for each generator slice, which computes by itself. What
runs there comes as a startup script, not over SSH: a request may be granted in
the night with nobody there; all workers of all slices start alone, with no SSH
key; and the machine runs the script again when maintenance has restarted it.
The script (worker.sh) mounts the shared storage and runs the image. Generators
leave their addresses in a folder of that storage, from which the trainer reads
them (`config.remote.addresses_file`).

The machines stay, and cost, until `stop` deletes them.
"""

import posixpath
import shlex
import subprocess

from launch.plan import ROOT, Plan, Slices, make
from launch.steps import Step

__all__ = ["NEEDS", "logs", "make", "outcome", "start", "status", "stop"]

NEEDS = ("project", "zone", "image", "nfs", "token_file")
RUNTIMES = {
  "v5e": "v2-alpha-tpuv5-lite",
  "v5p": "v2-alpha-tpuv5",
  "v6e": "v2-alpha-tpuv6e",
}
"""Images of the machines, which have Docker and gcloud."""
_FAMILIES = {"v5e": "v5litepod", "v6e": "v6e"}
"""Of --accelerator-type, whose number is that of the chips."""
_QUEUED = ("gcloud", "compute", "tpus", "queued-resources")


def start(plan: Plan) -> list[Step]:
  """Asks for the slices."""
  state = _state(plan)
  token = f"token_file={plan.settings.token_file}"
  remote: tuple[str, ...] = ()
  steps = []
  if plan.generators is not None:
    remote = (
      f"--config.remote.addresses_file={state}/addresses",
      f"--config.remote.{token}",
    )
    command = plan.serve(f"--config.serve.{token}")
    for index in range(plan.generators.count):
      script = _script(plan, "generator", index, command)
      name = f"{plan.name}-generator-{index}"
      steps.append(_create(plan, name, plan.generators, 1, script))
  script = _script(plan, "trainer", 0, plan.train(*remote))
  count = plan.trainer.count
  name = f"{plan.name}-trainer"
  return [*steps, _create(plan, name, plan.trainer, count, script)]


def status(plan: Plan) -> Step:
  """Asks the trainer's first worker for the exit code."""
  return _ssh(plan, "trainer", f"cat {shlex.quote(_state(plan))}/ended")


def outcome(asked: subprocess.CompletedProcess[str]) -> str:
  """What the answer to `status` means: running, done or failed.

  Where the file is not there yet, or the machine not up, it goes on.
  """
  if asked.returncode:
    return "running"
  return "done" if asked.stdout.strip() == "0" else "failed"


def stop(plan: Plan) -> list[Step]:
  """Ends the trainer with a checkpoint, then deletes all machines."""
  state, grace = shlex.quote(_state(plan)), plan.settings.grace_seconds
  end = f"sudo touch {state}/stop; sudo docker stop --time={grace} rl_tpu"
  names = [f"{plan.name}-trainer"]
  if plan.generators is not None:
    names += [
      f"{plan.name}-generator-{i}" for i in range(plan.generators.count)
    ]
  delete = [
    Step(
      argv=(*_QUEUED, "delete", name, *_where(plan), "--force", "--quiet"),
      may_fail=True,
    )
    for name in names
  ]
  return [_ssh(plan, "trainer", end, workers="all"), *delete]


def logs(plan: Plan) -> list[Step]:
  """Follows the trainer's first process."""
  return [_ssh(plan, "trainer", "sudo docker logs --follow rl_tpu")]


def _create(
  plan: Plan, name: str, slices: Slices, count: int, script: str
) -> Step:
  settings, path = plan.settings, f"runs/launch/{name}.sh"
  nodes = [f"--node-id={name}"]
  if count > 1:
    nodes = [f"--node-count={count}", f"--node-prefix={name}"]
  if slices.chip in _FAMILIES:
    size = slices.hosts * slices.chips
    shape = [f"--accelerator-type={_FAMILIES[slices.chip]}-{size}"]
  else:
    shape = [f"--type={slices.chip}", f"--topology={slices.shape}"]
  options = []
  if settings.spot:
    options.append("--spot")
  if settings.reservation:
    options.append("--reserved")
  if settings.service_account:
    options.append(f"--service-account={settings.service_account}")
  return Step(
    argv=(
      *(*_QUEUED, "create", name, *_where(plan), *nodes, *shape),
      f"--runtime-version={RUNTIMES[slices.chip]}",
      *options,
      f"--metadata-from-file=startup-script={path}",
    ),
    files=((path, script),),
  )


def _script(plan: Plan, role: str, index: int, command: tuple[str, ...]) -> str:
  """What is particular to a role, then what all do."""
  settings = plan.settings
  values = {
    "role": role,
    "index": index,
    "generators": settings.generators,
    "mount": settings.mount,
    "nfs": settings.nfs,
    "state": _state(plan),
    "mark": "/var/lib/rl_tpu",
    "image": settings.image,
    "port": settings.port,
    "restarts": settings.restarts,
    "grace": settings.grace_seconds,
  }
  lines = [
    f"{name}={shlex.quote(str(value))}" for name, value in values.items()
  ]
  body = (ROOT / "launch" / "worker.sh").read_text()
  head = ["#!/usr/bin/env bash", *lines, f"command=({shlex.join(command)})"]
  return "\n".join([*head, body])


def _ssh(plan: Plan, role: str, command: str, workers: str = "0") -> Step:
  where = (f"--node={workers}", f"--worker={workers}", f"--command={command}")
  name = f"{plan.name}-{role}"
  stops = workers == "all"
  return Step(
    argv=(*_QUEUED, "ssh", name, *_where(plan), *where), may_fail=stops
  )


def _where(plan: Plan) -> tuple[str, str]:
  return f"--project={plan.settings.project}", f"--zone={plan.settings.zone}"


def _state(plan: Plan) -> str:
  """The folder by which the machines of a run know of each other."""
  return posixpath.join(plan.settings.mount, "launch", plan.name)
