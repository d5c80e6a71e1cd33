"""The command line: python -m rl_tpu COMMAND --config=FILE[:ARG] ...

Every command reads the same kind of config, and ends with one JSON object on
the last line of stdout: its headline figures. The exit code is 0 only if the
command did what it was asked; 130 if a signal stopped it.
"""

import difflib
import importlib
import json
import logging
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

USAGE = """\
usage: python -m rl_tpu COMMAND --config=FILE[:ARG] [--config.FIELD=VALUE ...]

commands:
  train     train, or go on from the newest checkpoint of the same run
  sft       only the supervised warm start that train begins with, cached
  value     only the value pretraining after it (sao, vapo), cached
  evaluate  attempts at a task's questions by any checkpoint: pass@k, maj@k
  serve     the generator as a network service, with the newest checkpoint
  export    the newest checkpoint as a folder that transformers loads
  compile   what a run would take on TPUs, found on a CPU: memory, time, network
  simulate  what a pod would do, on a virtual clock: throughput, staleness, idle
  report    RUN [RUN2]: runs as a page, a trace and a picture; see report --help
  figures   remake the papers' figures; takes no --config, see figures --help

FILE defines get_config(ARG); see experiments/quickstart.py. Any field can be
set, for example --config.seed=1 --config.learner.learning_rate=1e-4.
--port=N is short for --config.serve.port=N; --topology=v5p:4x4x4, --slices=N
and --generator_topology=... for fields of --config.compile; --resume=never (or
must, or auto) for --config.resume. `train --preflight` trains nothing: it says
what would fail, a line a check; --preflight=compile compiles for
--topology first, which takes minutes. A trainer of N processes is `train` run N
times with --coordinator=HOST:PORT --processes=N --process=I, which are fields
of --config.distributed, or with --coordinator=auto on a TPU pod.

Exit codes: 0 done, 1 failed, 2 refused, 130 stopped by a signal; where that
left a checkpoint, the same command goes on from it.
"""

_SHORT = {
  "port": "serve.port",
  "topology": "compile.topology",
  "slices": "compile.slices",
  "generator_topology": "compile.generator_topology",
  "resume": "resume",
  "coordinator": "distributed.coordinator",
  "processes": "distributed.processes",
  "process": "distributed.process",
}
"""Flags that stand for a field of the config."""


def main(arguments: list[str]) -> int:
  """Runs one command; returns the exit code."""
  if len(arguments) > 1 and arguments[1] in WITHOUT_CONFIG:
    return _without_config(*arguments[1:])
  asked = {"-h", "--help"} & {*arguments[1:]} or arguments[1:2] == ["help"]
  if len(arguments) < 2 or asked:
    print(USAGE, end="")
    return 0 if len(arguments) > 1 else 2
  mode = _preflight_mode(arguments)
  if mode is not None:
    return _preflight(mode, arguments)
  command = COMMANDS.get(arguments[1])
  if command is None:
    names = sorted([*COMMANDS, *WITHOUT_CONFIG])
    close = difflib.get_close_matches(arguments[1], names, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    print(
      f"rl_tpu: command is {arguments[1]!r}; it must be one of {names}{hint}",
      file=sys.stderr,
    )
    return 2
  if command is _compile:
    _describe_tpus()
  from rl_tpu.config import ConfigError

  try:
    config = _read_config([arguments[0], *arguments[2:]])
    if config.distributed.coordinator and command is not _train:
      raise ConfigError(
        f"config.distributed.coordinator is {config.distributed.coordinator!r};"
        f" only train may have several processes, not {arguments[1]}"
      )
  except ConfigError as error:
    print(f"rl_tpu: {error}", file=sys.stderr)
    return 2
  if command is not _compile:
    _prepare_jax(config)
  from rl_tpu import failures, ownership, processes

  try:
    figures = command(config)
  except ConfigError as error:
    print(f"rl_tpu: {error}", file=sys.stderr)
    # A launcher tries again what failed, and never what was refused.
    return 1 if isinstance(error, ownership.Held) else 2
  except processes.Stopped as error:
    print(f"rl_tpu: {error}", file=sys.stderr)
    return processes.INTERRUPTED
  except KeyboardInterrupt:
    print("rl_tpu: stopped at once", file=sys.stderr)
    return processes.INTERRUPTED
  except RuntimeError as error:
    ended = failures.ending(error)
    if ended is None:
      raise
    print(f"rl_tpu: {ended}", file=sys.stderr)
    return 1
  print(json.dumps(figures))
  return 0 if figures.get("fits", True) else 1


def _read_config(arguments: list[str]):
  """Parses flags into a checked parts.Config.

  Raises:
    ConfigError: a flag or field is unknown, of a wrong type or out of range.
  """
  from rl_tpu import parts

  return read_flags("config", parts.Config, arguments)


def read_flags(name: str, cls: type, arguments: list[str]) -> Any:
  """Parses --NAME=FILE[:ARG] and --NAME.FIELD=VALUE into a checked dataclass.

  Args:
    name: of the flag; errors name fields NAME.FIELD.
    cls: the dataclass that FILE describes.
    arguments: a program's name, then nothing but these flags.

  Raises:
    ConfigError: a flag or field is unknown, of a wrong type or out of range.
  """
  from rl_tpu.config import build

  return build(cls, _read_values(name, arguments), name)


def _read_values(name: str, arguments: list[str]):
  """Parses flags into the ConfigDict that they describe.

  Raises:
    ConfigError: a flag is unknown or of a wrong type, or the file fails.
  """
  from absl import flags
  from ml_collections import config_flags

  from rl_tpu import config_file
  from rl_tpu.config import ConfigError

  values = flags.FlagValues()
  arguments = [_in_full(argument) for argument in arguments]
  try:
    file = config_flags.DEFINE_config_file(
      name, lock_config=True, flag_values=values, sys_argv=arguments
    )
    rest = values(arguments)[1:]
    found = file.value
    if found is not None:
      found.keys()  # Of a file that failed, nothing can be asked.
  except Exception as error:
    # Whatever the file raises comes through here, and what the library makes
    # of it is about itself.
    fault = config_file.explain(name, arguments)
    if fault is None and not isinstance(error, flags.Error | OSError):
      raise
    raise fault or ConfigError(f"--{name}: {error}") from error
  if rest:
    raise ConfigError(f"{rest[0]!r} is not a flag; see --help")
  if found is None:
    raise ConfigError(f"--{name} is missing; see --help")
  return found


def _in_full(argument: str) -> str:
  """A flag by its whole name."""
  name, equals, value = argument.partition("=")
  field = _SHORT.get(name.removeprefix("--"))
  if field is None or not name.startswith("--"):
    return argument
  return f"--config.{field}{equals}{value}"


def _describe_tpus() -> None:
  """Before JAX is imported: a CPU here, and a compiler for TPUs elsewhere."""
  os.environ["JAX_PLATFORMS"] = "cpu"
  for name, value in (
    ("TPU_SKIP_MDS_QUERY", "1"),  # no query for the TPU that is not there
    ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),  # several compilations at a time
    ("TPU_WORKER_HOSTNAMES", "localhost"),  # these keep the compiler quiet
    ("TPU_ACCELERATOR_TYPE", "v5litepod-16"),
    ("TPU_WORKER_ID", "0"),
  ):
    os.environ.setdefault(name, value)


def _as_compiled() -> None:
  """Before a TPU's compiler is loaded: the options that `compile` gives it."""
  from rl_tpu.topology import OPTIONS

  options = [f"--{name}={value}" for name, value in OPTIONS.items()]
  given = os.environ.get("LIBTPU_INIT_ARGS", "").split()
  os.environ["LIBTPU_INIT_ARGS"] = " ".join(options + given)


def _prepare_jax(config) -> None:
  """As many CPU devices as the run needs, and a cache of compiled programs.

  The processes of a trainer meet here.
  """
  import jax

  from rl_tpu import processes

  jax.config.update("jax_num_cpu_devices", config.num_devices)
  cache = pathlib.Path(config.cache).absolute() / "compiled"
  cache.mkdir(parents=True, exist_ok=True)
  jax.config.update("jax_compilation_cache_dir", str(cache))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  processes.join(config.distributed)


def _train(config) -> dict[str, Any]:
  import jax

  from rl_tpu import train, trainer
  from rl_tpu.report import figure
  from rl_tpu.view import View

  if jax.process_index() > 0:
    return trainer.follow(config)
  figures = train.run(config, View(config.batches))
  figure.plot(config.run_directory)
  return figures


def _preflight_mode(arguments: list[str]) -> str | None:
  """What follows --preflight: "" or "compile"; None: train trains."""
  modes = [
    argument.partition("=")[2]
    for argument in arguments
    if argument.partition("=")[0] == "--preflight"
  ]
  return modes[-1] if modes and arguments[1] == "train" else None


def _preflight(mode: str, arguments: list[str]) -> int:
  """Checks what a run needs, without a device; see rl_tpu.preflight."""
  if mode not in ("", "compile"):
    print(
      f"rl_tpu: --preflight is {mode!r}; it must be without a value, or "
      "'compile'",
      file=sys.stderr,
    )
    return 2
  chips = None if os.environ.get("JAX_PLATFORMS") == "cpu" else len(_chips())
  _describe_tpus()
  from rl_tpu.preflight import command

  rest = [a for a in arguments[2:] if a.partition("=")[0] != "--preflight"]
  figures = command.run(
    lambda: _read_values("config", [arguments[0], *rest]),
    lambda line: print(line, flush=True),
    chips=chips,
    prepare=_describe_cpus,
    compiles=_compile_aside if mode else None,
  )
  print(json.dumps(figures))
  return 1 if figures["failed"] else 0


def _describe_cpus(config) -> None:
  """As many CPU devices as the larger mesh has, to divide things over."""
  import jax

  shapes = config.devices
  needed = max(shapes.trainer.size, shapes.generator.size)
  jax.config.update("jax_num_cpu_devices", needed)


def _chips() -> list[pathlib.Path]:
  """The accelerators that this machine shows."""
  return [
    *pathlib.Path("/dev").glob("accel*"),
    *pathlib.Path("/dev/vfio").glob("[0-9]*"),
  ]


def _sft(config) -> dict[str, Any]:
  from rl_tpu import parts
  from rl_tpu.view import View

  trainer, _ = parts.meshes(config)
  task, rows = parts.make_task(config)
  parts.start_params(config, task, rows, trainer, View(0))
  return {"batches": config.warm_start.batches, "cache": config.cache}


def _value(config) -> dict[str, Any]:
  from rl_tpu import train
  from rl_tpu.view import View

  return train.pretrain_value(config, View(0))


def _evaluate(config) -> dict[str, Any]:
  from rl_tpu import assess
  from rl_tpu.view import View

  return assess.run(config, View(0))


def _serve(config) -> dict[str, Any]:
  from rl_tpu import serve
  from rl_tpu.view import View

  return serve.run(config, View(0))


def _export(config) -> dict[str, Any]:
  from rl_tpu import export
  from rl_tpu.view import View

  return export.run(config, View(0))


def _compile(config) -> dict[str, Any]:
  from rl_tpu.aot import report

  return report.run(config, print, _note)


def _compile_aside(config) -> dict[str, Any]:
  """The same where stdout is for something else."""
  from rl_tpu.aot import report

  return report.run(config, _note, _note)


def _note(line: str) -> None:
  print(f"rl_tpu: {line}", file=sys.stderr, flush=True)


def _simulate(config) -> dict[str, Any]:
  from rl_tpu import simulate

  return simulate.run(config, print)


def _without_config(name: str, *arguments: str) -> int:
  """A command with arguments of its own: run directories, studies."""
  from rl_tpu.config import ConfigError

  command = importlib.import_module(f"rl_tpu.{name}.command")
  try:
    print(json.dumps(command.run(arguments)))
  except ConfigError as error:
    print(f"rl_tpu: {error}", file=sys.stderr)
    return 2
  return 0


WITHOUT_CONFIG = ("figures", "report")
COMMANDS: dict[str, Callable[[Any], dict[str, Any]]] = {
  "train": _train,
  "sft": _sft,
  "value": _value,
  "evaluate": _evaluate,
  "serve": _serve,
  "export": _export,
  "compile": _compile,
  "simulate": _simulate,
}


if __name__ == "__main__":
  # Looking for TPUs with libtpu takes seconds and warns where there are none.
  here = _chips()
  os.environ.setdefault("JAX_PLATFORMS", "" if here else "cpu")
  if here:
    _as_compiled()
  logging.getLogger("absl").setLevel(logging.WARNING)
  # Orbax misses this file in every checkpoint of weights alone.
  logging.getLogger("absl").addFilter(
    lambda record: "_CHECKPOINT_METADATA" not in record.getMessage()
  )
  sys.exit(main(sys.argv))
