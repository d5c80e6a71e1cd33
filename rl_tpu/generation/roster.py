"""Which generators belong to a run, how they are reached, what they say.

Their addresses stand in the config, in a file that may change during the run,
or in both. `read_report` is the one place that knows the fields of `Status`.
"""

import dataclasses
import pathlib
from typing import Any

import grpc

from rl_tpu.generation import routing

_WORK = ("tokens", "prompts", "updates", "cancellations")
"""Counters of a generator that rise when it does anything."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(routing.Limits):
  """Where the generators are, and when one counts as broken."""

  addresses: tuple[str, ...] = ()
  """Of the generators, each host:port; they may come up later."""
  addresses_file: str | None = None
  """File with more of them, one a line, `#` starts a comment; read again every
  health_seconds, so generators join and leave during a run. Replace it whole,
  by a rename. While it cannot be read, or names none, the last list holds."""
  token_file: str | None = None
  """File with the generators' admin token; None: the environment variable
  RL_TPU_ADMIN_TOKEN, if it is set."""
  tls_certificate: str | None = None
  """PEM file with our certificate; all three tls files or none."""
  tls_key: str | None = None
  """PEM file with its key."""
  tls_server_ca: str | None = None
  """PEM file with the authority that generators' certificates must be from."""
  timeout_seconds: float = 10.0
  """For the answer to a check, > 0."""
  update_seconds: float = 600.0
  """For a generator to take new weights, > 0."""

  def __post_init__(self):
    super().__post_init__()
    for address in self.addresses:
      _check_address("addresses", address)
    if len(set(self.addresses)) < len(self.addresses):
      raise ValueError(
        f"addresses is {self.addresses}; it must name each generator once"
      )
    for name in ("timeout_seconds", "update_seconds"):
      if not getattr(self, name) > 0:
        raise ValueError(f"{name} is {getattr(self, name)!r}; it must be > 0")
    if len({file is None for file in self.tls_files}) == 2:
      raise ValueError(
        f"tls_certificate, tls_key and tls_server_ca are {self.tls_files}; "
        "they must be all set or all left out"
      )

  @property
  def names_any(self) -> bool:
    """Whether there are generators, or will be."""
    return bool(self.addresses or self.addresses_file)

  @property
  def tls_files(self) -> tuple[str | None, str | None, str | None]:
    """Certificate, key and the generators' authority."""
    return self.tls_certificate, self.tls_key, self.tls_server_ca


def _check_address(name: str, address: str) -> None:
  host, _, port = address.rpartition(":")
  if not (host and port.isascii() and port.isdigit() and int(port) < 2**16):
    raise ValueError(f"{name} has {address!r}; it must be host:port")


def credentials(config: Config) -> grpc.ChannelCredentials | None:
  """For channels to generators with TLS."""
  if config.tls_server_ca is None:
    return None
  try:
    certificate, key, authority = (
      pathlib.Path(file).read_bytes()
      for file in config.tls_files
      if file is not None
    )
  except OSError as error:
    raise ValueError(f"a tls file cannot be read: {error}") from error
  return grpc.ssl_channel_credentials(authority, key, certificate)


def parse_addresses(name: str, text: str) -> tuple[str, ...]:
  """The addresses in a file's text, each once.

  Raises:
    ValueError: one is not host:port, or there is none.
  """
  lines = (line.partition("#")[0].strip() for line in text.splitlines())
  addresses = tuple(dict.fromkeys(line for line in lines if line))
  for address in addresses:
    _check_address(name, address)
  if not addresses:
    raise ValueError(f"{name} names no generator")
  return addresses


def read_report(status: dict[str, Any], life: str) -> routing.Report:
  """What a server's Status means to a run.

  Raises:
    RuntimeError: it is no such status.
  """
  try:
    ours = status["life"] == life
    counters = status["counters"]
    if not status["healthy"] and not status["draining"]:
      raise RuntimeError("its driver failed")
    refusing = [word for word in ("paused", "draining") if status[word]]
    return routing.Report(
      version=status["accepted_version"] if ours else None,
      slots=status["slots"],
      max_requests=status["max_requests"],
      max_prompt_length=status["max_prompt_length"],
      head_size=status["behavior_top_k"],
      records_experts=status["record_experts"],
      refusing=" and ".join(f"it is {word}" for word in refusing),
      busy=status["open_requests"] > 0 and not status["paused"],
      progress=tuple(counters[name] for name in _WORK),
    )
  except (KeyError, TypeError) as error:
    raise RuntimeError(
      f"its status is of another release: {error!r}"
    ) from error
