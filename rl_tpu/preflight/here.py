"""Checks of what can be seen from this machine alone.

No accelerator is touched: meshes are of described chips where the config names
a topology, else of as many CPU devices.
"""

import pathlib
import tempfile
from collections.abc import Callable, Sequence

import jax

from rl_tpu import ownership, parts, sharding, topology
from rl_tpu.config import ConfigError
from rl_tpu.generation import policies
from rl_tpu.models import huggingface, transformer
from rl_tpu.preflight.findings import NotChecked

Check = tuple[str, Callable[[], str]]
_GIB = 2**30


def checks(
  config: parts.Config, chips: int | None, compiles: Callable[[], dict] | None
) -> Sequence[Check]:
  """The checks, by name, in the order in which they are shown.

  Args:
    config: of the run.
    chips: accelerators of this machine; None where the run is on CPUs, of
      which it gets as many devices as it needs.
    compiles: what finds the compile report; None: only a kept one is read.
  """
  return (
    ("mesh", lambda: mesh(config, chips)),
    ("compile report", lambda: compile_report(config, compiles)),
    ("paths", lambda: paths(config)),
    ("weights", lambda: weights(config)),
    ("tokenizer", lambda: tokenizer(config)),
    ("task", lambda: task(config)),
  )


def mesh(config: parts.Config, chips: int | None) -> str:
  """Both meshes exist, and weights, rows and slots divide over them."""
  shapes = config.devices
  if config.compile.topology is None:
    where = _count_devices(config, chips)
    devices = jax.devices("cpu")
    with parts.refusing("config.devices"):
      trainer = sharding.make_mesh(shapes.trainer, devices)
      generator = sharding.make_mesh(shapes.generator, devices)
  else:
    from rl_tpu.aot import programs

    sides = config.compile.trainer(), config.compile.generator()
    _check_hosts(config, sides[0], chips)
    trainer = programs.mesh_for(
      "config.devices.trainer", shapes.trainer, sides[0]
    )
    generator = programs.mesh_for(
      "config.devices.generator", shapes.generator, sides[1]
    )
    where = f"trainer on {sides[0]}, generator on {sides[1]}"
  parts.make_learner(config, trainer)
  parts.make_engine(config, generator)
  return f"weights, rows and slots divide; {where}"


def _count_devices(config: parts.Config, chips: int | None) -> str:
  """Refuses a run that needs more devices than its processes have."""
  shapes, processes = config.devices, config.distributed.processes
  if shapes.trainer.size % processes:
    raise ConfigError(
      f"config.devices.trainer has {shapes.trainer.size} devices; it must be "
      f"a multiple of the {processes} processes"
    )
  each = shapes.trainer.size // processes
  if not config.remote.names_any:
    each = config.devices_needed(processes)
  if chips is None:
    return f"{each} CPU devices in each of {processes} processes"
  if chips < each:
    raise ConfigError(
      f"config.devices and schedule {config.schedule!r} need {each} devices "
      f"in each process; this machine has {chips}"
    )
  return f"{each} of the {chips} chips of this machine"


def _check_hosts(
  config: parts.Config, trainer: topology.Topology, chips: int | None
) -> None:
  """Refuses a trainer that has not the chips of its topology."""
  distributed = config.distributed
  if chips is None or distributed.coordinator == "auto":
    return
  if not config.remote.names_any:
    return  # The generator's chips are here too.
  if distributed.processes * chips != trainer.size:
    raise ConfigError(
      f"config.compile.topology is {trainer}, {trainer.size} chips; "
      f"{distributed.processes} processes with {chips} chips, as this machine "
      f"has, have {distributed.processes * chips}"
    )


def compile_report(
  config: parts.Config, compiles: Callable[[], dict] | None
) -> str:
  """The run's programs fit their chips, by the TPU's own compiler."""
  if config.compile.topology is None:
    raise NotChecked("config.compile.topology names none to compile for")
  from rl_tpu.aot import answers

  figures = answers.read(config)
  if figures is None:
    if compiles is None:
      raise NotChecked(
        "this config and code were not compiled, which takes minutes; run "
        "python -m rl_tpu compile, or --preflight=compile"
      )
    figures = compiles()
  if not figures["fits"]:
    too_large = [n for n, one in figures["programs"].items() if not one["fits"]]
    raise ConfigError(
      f"{', '.join(too_large)} do not fit config.compile.topology "
      f"{config.compile.topology}; python -m rl_tpu compile says why"
    )
  return (
    f"fits, {figures['hbm_gib']:.1f} GiB of HBM where it is tightest, "
    f"{figures['headroom']:.0%} free"
  )


def paths(config: parts.Config) -> str:
  """The run's directory is free for it, and can be written."""
  directory = config.run_directory
  if parts.claim(config) is not None:
    raise ConfigError(
      f"{directory} is complete; choose another config.directory or remove it"
    )
  newest = policies.newest(directory / "checkpoints")
  ownership.check(config.resume, directory, newest)
  if (directory / "lock").exists():
    with ownership.held(directory):
      pass
  kept = {"config.directory": directory, "config.cache": config.cache}
  kept["checkpoints"] = directory / "checkpoints"
  if config.remote.names_any and config.transport.kind == "orbax":
    kept["weights that generators read"] = directory / "weights"
  for name, path in kept.items():
    writable(name, pathlib.Path(path).absolute())
  begins = "begins" if newest is None else f"goes on at batch {newest.name}"
  return f"{directory} is writable, the run {begins} there"


def writable(name: str, path: pathlib.Path) -> None:
  """Refuses a directory in which no file can be made; leaves none behind."""
  there = next(p for p in (path, *path.parents) if p.exists())
  if not there.is_dir():
    raise ConfigError(f"{name} is {path}, but {there} is a file")
  try:
    with tempfile.NamedTemporaryFile(dir=there):
      pass
  except OSError as error:
    raise ConfigError(
      f"{name} is {path}; {there} cannot be written: {error.strerror}"
    ) from error


def weights(config: parts.Config) -> str:
  """All shards of the pretrained folder are there and of the model's shapes."""
  if config.pretrained is None:
    return "config.pretrained is None: random ones, then the warm start"
  folder = config.pretrained
  with parts.refusing("config.pretrained"):
    huggingface.check(folder, transformer.Policy(config.model))
  files = [*pathlib.Path(folder).glob("*.safetensors")]
  size = sum(file.stat().st_size for file in files) / _GIB
  return f"{len(files)} files of {folder}, {size:.2f} GiB, hold config.model"


def tokenizer(config: parts.Config) -> str:
  """It can be read, speaks, and its ids are the model's."""
  found = parts.make_tokenizer(config)
  if found.vocab_size > config.model.vocab_size:
    raise ConfigError(
      f"config.model.vocab_size is {config.model.vocab_size}; the tokenizer "
      f"needs >= {found.vocab_size}"
    )
  found.decode(found.encode("1 + 2 = 3"))
  return f"{found.vocab_size} ids; any of {found.eos_ids} ends an answer"


def task(config: parts.Config) -> str:
  """Its questions can be read, and fit generator and evaluation."""
  made, rows = parts.make_task(config)
  counts = ", ".join(f"{len(some)} {split}" for split, some in rows.items())
  found = f"{config.task.name} has {counts} questions"
  return "; but ".join([found, *parts.doubts(config, made, rows)])
