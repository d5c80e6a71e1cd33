"""What a launched run consists of: its slices, and the commands on them.

The same for every cloud. A trainer is one process a host over all hosts of its
slices; a generator is one process, which sees the chips of one host. All that
can be checked before anything is paid for is checked here: the commands' flags
are parsed as the processes will parse them.
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence

from launch.settings import Settings
from rl_tpu import __main__ as command_line
from rl_tpu import parts
from rl_tpu.config import ConfigError
from rl_tpu.topology import Topology

ROOT = pathlib.Path(__file__).resolve().parent.parent
_PROGRAM = ("python", "-m", "rl_tpu")
_HOST = 4
"""Chips of a host in a slice of several."""
MOST_ON_A_HOST = {"v5e": 8, "v5p": 4, "v6e": 8}
"""Chips of a slice that is one host."""
_SMALL = {2: ("1x1", "2x2", "2x4"), 3: ("2x2x1", "2x2x2", "2x2x4", "2x4x4")}
_FLAT = (*_SMALL[2], "4x4", "4x8", "8x8", "8x16", "16x16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slices:
  """Slices of one shape."""

  topology: Topology
  """Of each one."""
  count: int
  """How many."""
  hosts: int
  """Of each one."""
  chips: int
  """Of each host."""

  @property
  def processes(self) -> int:
    """One a host."""
    return self.count * self.hosts

  @property
  def chip(self) -> str:
    """Such as v5e."""
    return self.topology.name.split(":")[0]

  @property
  def shape(self) -> str:
    """Such as 4x4."""
    return self.topology.name.split(":")[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """A run to launch."""

  settings: Settings
  flags: tuple[str, ...]
  """That its config was read from."""
  config: parts.Config
  trainer: Slices
  generators: Slices | None
  """None: the trainer's first process generates too."""

  @property
  def name(self) -> str:
    """Of all that is created."""
    return self.settings.name

  def train(self, *remote: str) -> tuple[str, ...]:
    """The command of every trainer process.

    Args:
      remote: flags that say where the generators are.
    """
    flags = [*self.placed, *remote, "--resume=auto"]
    if self.trainer.processes > 1:
      flags.append("--coordinator=auto")
    if self.generators and self.config.transport.host == "127.0.0.1":
      flags.append("--config.transport.host=auto")
    return self.command((*_PROGRAM, "train"), flags)

  def serve(self, *token: str) -> tuple[str, ...]:
    """The command of every generator.

    Args:
      token: flags that say where its admin token is.
    """
    served = (
      "--config.serve.weights=awaited",
      "--config.serve.host=0.0.0.0",
      f"--port={self.settings.port}",
    )
    flags = [*self.placed, *served, *token]
    return self.command((*_PROGRAM, "serve"), flags)

  @property
  def placed(self) -> tuple[str, ...]:
    """The run's flags, and where it lives: on the shared storage."""
    where = self.settings.below_mount
    return (
      *self.flags,
      f"--config.directory={where(self.config.directory)}",
      f"--config.cache={where(self.config.cache)}",
    )

  def command(
    self, program: Sequence[str], flags: Sequence[str]
  ) -> tuple[str, ...]:
    """A process's command; its flags are parsed first, as it will do.

    Raises:
      ConfigError: it would refuse them.
    """
    read_config(flags)
    return (*program, *flags, *self.settings.flags)


def read_config(flags: Sequence[str]) -> parts.Config:
  """The run's config, as its processes read it from these flags."""
  return command_line.read_flags("config", parts.Config, ["launch", *flags])


def addresses(places: Sequence[str]) -> str:
  """The flag that names generators, each HOST:PORT."""
  listed = "".join(f"'{place}'," for place in places)
  return f"--config.remote.addresses=({listed})"


def make(
  settings: Settings,
  flags: Sequence[str],
  most_on_a_host: dict[str, int] = MOST_ON_A_HOST,
) -> Plan:
  """Plans a run whose trainer and generators are processes of their own.

  Args:
    settings: where to.
    flags: --config=FILE and --config.FIELD=VALUE of the run.
    most_on_a_host: chips of a slice that is one host, by the chip's name.

  Raises:
    ConfigError: the run cannot be launched so; says why.
  """
  plan = draft(settings, flags, most_on_a_host)
  _check_hosts(plan)
  _check_devices(plan)
  return plan


def draft(
  settings: Settings,
  flags: Sequence[str],
  most_on_a_host: dict[str, int] = MOST_ON_A_HOST,
) -> Plan:
  """The same before it is checked that slices and meshes fit each other."""
  flags = tuple(_portable(flag) for flag in flags)
  config = read_config(flags)
  compile_ = config.compile
  trainer = _slices(
    "topology", compile_.trainer().name, compile_.slices, most_on_a_host
  )
  generators = None
  if settings.generators:
    generators = _slices(
      "generator_topology" if compile_.generator_topology else "topology",
      compile_.generator().name,
      settings.generators,
      most_on_a_host,
    )
  return Plan(
    settings=settings,
    flags=flags,
    config=config,
    trainer=trainer,
    generators=generators,
  )


def _portable(flag: str) -> str:
  """The config's file as the image has it: below the repository's root."""
  name, _, value = flag.partition("=")
  if name != "--config":
    return flag
  file, colon, argument = value.partition(":")
  path = pathlib.Path(file).resolve()
  if not path.is_relative_to(ROOT) or not path.exists():
    raise ConfigError(
      f"--config is {file!r}; it must be a file below {ROOT}, as the image has "
      "only this repository"
    )
  return f"--config={path.relative_to(ROOT)}{colon}{argument}"


def _slices(
  field: str, name: str, count: int, most_on_a_host: dict[str, int]
) -> Slices:
  topology = Topology(name=name)
  chip, shape = name.split(":")
  if len(topology.shape) == 2:
    good, allowed = shape in _FLAT, ", ".join(_FLAT)
  else:
    ordered = list(topology.shape) == sorted(topology.shape)
    cubes = ordered and all(length % 4 == 0 for length in topology.shape)
    good = cubes or shape in _SMALL[3]
    allowed = f"{', '.join(_SMALL[3])} or multiples of 4 in rising order"
  if not good:
    raise ConfigError(
      f"config.compile.{field} is {name!r}; slices of {chip} are {allowed}"
    )
  size = math.prod(topology.shape)
  one = size <= most_on_a_host[chip]
  return Slices(
    topology=topology,
    count=count,
    hosts=1 if one else size // _HOST,
    chips=size if one else _HOST,
  )


def _check_hosts(plan: Plan) -> None:
  trainer, generators = plan.trainer, plan.generators
  if generators is None and trainer.processes > 1:
    raise ConfigError(
      f"settings.generators is 0; it must be >= 1 where the trainer has "
      f"{trainer.processes} hosts"
    )
  if generators is not None and generators.hosts > 1:
    raise ConfigError(
      f"config.compile.generator_topology is {generators.topology.name!r}, "
      f"{generators.hosts} hosts; it must be one host, as a generator is one "
      f"process: at most {MOST_ON_A_HOST[generators.chip]} chips of "
      f"{generators.chip} (4 with xpk)"
    )
  if trainer.count > 1 and trainer.hosts == 1:
    raise ConfigError(
      f"config.compile.slices is {trainer.count}; it must be 1 where a slice "
      f"is one host ({trainer.topology.name}): programs span slices of several"
    )


def _check_devices(plan: Plan) -> None:
  """Every chip that is paid for has work."""
  devices, trainer = plan.config.devices, plan.trainer
  chips = trainer.processes * trainer.chips
  needed = devices.trainer.size
  if plan.generators is None:
    needed = plan.config.num_devices
  for field, size, has in (
    ("devices.trainer", needed, chips),
    (
      "devices.generator",
      devices.generator.size,
      plan.generators.chips if plan.generators else devices.generator.size,
    ),
  ):
    if size != has:
      raise ConfigError(
        f"config.{field} has {size} devices; it must have {has}, the chips "
        "that are asked for (config.compile)"
      )
