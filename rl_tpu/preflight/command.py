"""`train --preflight`: every check, a line each, and a verdict.

    ok|failed|not checked  NAME: what was found

A run that would fail after an hour of waiting for chips fails here in seconds,
on any machine that sees the run's storage and reaches its generators. Nothing
is trained, no accelerator is taken, and nothing is left behind but the task's
prepared data in config.cache. Compiling is left to the command `compile`, whose
answer is kept: only with `--preflight=compile` is it found here, in minutes.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_collections

from rl_tpu import parts
from rl_tpu.config import ConfigError, build
from rl_tpu.preflight import here, servers
from rl_tpu.preflight.findings import Finding, NotChecked, look

Compile = Callable[[parts.Config], dict[str, Any]]


def run(
  read: Callable[[], ml_collections.ConfigDict],
  show: Callable[[str], None],
  *,
  chips: int | None,
  prepare: Callable[[parts.Config], None] = lambda config: None,
  compiles: Compile | None = None,
) -> dict[str, Any]:
  """Looks at everything, and says what was found.

  Args:
    read: gives the config as flags left it, not yet built.
    show: gets one line for each check.
    chips: accelerators of this machine; None where the run is on CPUs.
    prepare: is told the config before JAX looks for devices.
    compiles: finds the compile report; None: only a kept one is read.

  Returns:
    `preflight` (passed or failed), `failed` and `not_checked` (names of
    checks), `seconds`.
  """
  began = time.monotonic()
  findings = []
  for finding in _findings(read, chips, prepare, compiles):
    show(str(finding))
    findings.append(finding)
  failed = [f.name for f in findings if f.state == "failed"]
  return {
    "preflight": "failed" if failed else "passed",
    "failed": failed,
    "not_checked": [f.name for f in findings if f.state == "not checked"],
    "seconds": round(time.monotonic() - began, 1),
  }


def _findings(
  read: Callable[[], ml_collections.ConfigDict],
  chips: int | None,
  prepare: Callable[[parts.Config], None],
  compiles: Compile | None,
) -> Iterator[Finding]:
  built: list[parts.Config] = []

  def builds() -> str:
    config = _built(read())
    built.append(config)
    prepare(config)
    return f"{config.name}: {config.algorithm.name} on {config.task.name}"

  yield look("config", builds)
  if not built:
    yield look("everything else", _no_config)
    return
  (config,) = built
  report = None if compiles is None else lambda: compiles(config)
  for name, check in here.checks(config, chips, report):
    yield look(name, check)
  if config.distributed.processes > 1 or config.distributed.coordinator:
    yield look("trainer's other processes", _other_processes)
  if not config.remote.names_any:
    yield look("generators", _no_generators)
    return
  for name, check in servers.checks(config):
    yield look(name, check)


def _built(values: ml_collections.ConfigDict) -> parts.Config:
  """The config; a pretrained folder that is not fit is left to its own check.

  Else one missing file would leave everything else unchecked.
  """
  plain = values.to_dict()
  try:
    return build(parts.Config, plain)
  except ConfigError:
    folder = plain.get("pretrained")
    if folder is None:
      raise
    config = build(parts.Config, {**plain, "pretrained": None})
    object.__setattr__(config, "pretrained", folder)
    return config


def _no_config() -> str:
  raise NotChecked("there is no config to check it by")


def _other_processes() -> str:
  raise NotChecked("run the preflight on each machine; they do not meet here")


def _no_generators() -> str:
  raise NotChecked("config.remote names none: the run has one of its own")
