r"""Starts a run on a cloud or here: python -m launch BACKEND --config=FILE ...

  python -m launch gke --settings=launch/example.py \
    --config=experiments/pods/qwen3_8b_v5p64.py --dry_run

BACKEND is local (processes here, see local.py), tpu_vm (Cloud TPU VMs by queued
resources), gke (a JobSet), xpk (the same by way of XPK) or pathways (a single
controller). --config and --config.FIELD=VALUE are the run's, as for
`python -m rl_tpu`; --settings and --settings.FIELD=VALUE say where to, see
settings.py. With --dry_run nothing is sent: what would be is printed, as a
shell script that does the same. Local flags that are not listed go to local.py.

--do=start starts the run, or goes on with it; status and logs look at it; stop
ends it with a checkpoint and deletes what was created. --sweep starts the runs
of the config file's `sweep(add)`, see sweeps.py.

Exit codes: 0 done, 1 failed, 2 refused, 130 stopped by a signal, else that of
the command that failed.
"""

import argparse
import sys
from collections.abc import Sequence

from launch import backends, here, sweeps
from launch.settings import Settings
from launch.steps import Step, run, script
from rl_tpu import __main__ as command_line
from rl_tpu.config import ConfigError

DOES = ("start", "status", "logs", "stop")


def main(arguments: list[str]) -> int:
  """Launches; returns the exit code."""
  parser = _parser()
  options, flags = parser.parse_known_args(arguments)
  settings = [flag for flag in flags if flag.startswith("--settings")]
  settings.sort(key=lambda flag: not flag.startswith("--settings="))
  flags = [flag for flag in flags if not flag.startswith("--settings")]
  try:
    if options.backend == "local":
      return _local(options, settings, flags)
    chosen = command_line.read_flags(
      "settings", Settings, ["launch", *settings]
    )
    if options.sweep:
      launcher = sweeps.Cloud(options.backend, chosen)
      return sweeps.command(launcher, options, flags)
    plan = backends.plan_on(options.backend, chosen, flags)
    backend = backends.CLOUDS[options.backend]
    if options.do == "status":
      return _status(backend, plan, options.dry_run)
    does = {"start": backend.start, "logs": backend.logs, "stop": backend.stop}
    return _send(does[options.do](plan), options.dry_run)
  except ConfigError as error:
    print(f"launch: {error}", file=sys.stderr)
    return 2


def _local(
  options: argparse.Namespace, settings: Sequence[str], flags: list[str]
) -> int:
  if settings:
    raise ConfigError(f"{settings[0]!r} is not for local, which needs none")
  if options.do != "start":
    raise ConfigError(
      f"--do is {options.do!r}; it must be 'start' with local, whose processes "
      "end with the command; its output is the log"
    )
  if options.sweep:
    return sweeps.command(sweeps.Here(), options, flags)
  return here.run(flags, options.dry_run)


def _status(backend: backends.Backend, plan, dry_run: bool) -> int:
  step = backend.status(plan)
  if dry_run:
    return _send([step], dry_run)
  print(backend.outcome(step.ask()))
  return 0


def _send(steps: list[Step], dry_run: bool) -> int:
  if dry_run:
    print(script(steps))
    return 0
  return run(steps)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="python -m launch",
    usage="%(prog)s BACKEND --config=FILE[:ARG] [options]",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("backend", choices=["local", *backends.CLOUDS])
  parser.add_argument("--do", choices=DOES, default="start")
  parser.add_argument("--dry_run", action="store_true")
  parser.add_argument("--sweep", action="store_true")
  parser.add_argument(
    "--concurrency", type=int, default=1, help="runs of a sweep at once (1)"
  )
  parser.add_argument(
    "--state", help="file of a sweep's runs (runs/sweeps/CONFIG.json)"
  )
  return parser


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
