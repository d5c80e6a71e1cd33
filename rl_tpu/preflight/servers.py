"""Checks of the generators that a run names, by asking each of them.

Every generator is asked at once, and once: whether it serves, what it is
(`rl_tpu.identity`), what time it has, and whether it reaches back to where the
weights would come from. The answers are then judged one question at a time, so
that a fault of one generator hides no other.
"""

import asyncio
import contextlib
import dataclasses
import functools
import pathlib
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from rl_tpu import identity, parts
from rl_tpu import transport as transports
from rl_tpu.config import ConfigError, differences
from rl_tpu.generation import roster
from rl_tpu.generation import server as servers
from rl_tpu.generation.client import GenerationClient
from rl_tpu.preflight.findings import NotChecked, words

MOST_SKEW_SECONDS = 5.0
"""Between two clocks: beyond it, times in logs mislead, and credentials of
storage begin to be refused."""

_FAULTS = (OSError, RuntimeError, ValueError)
"""What a generator that is not there, or not well, raises."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  """What one generator said."""

  address: str
  fault: str = ""
  """Why it said nothing; "" if it did."""
  identity: dict[str, Any] = dataclasses.field(default_factory=dict)
  device_kind: str = ""
  skew: float = 0.0
  """Seconds that its clock is ahead of ours."""
  doubt: float = 0.0
  """Seconds by which that may be wrong."""
  back: str = ""
  """What is wrong with the way back; "" if nothing is."""


def checks(
  config: parts.Config,
) -> Sequence[tuple[str, Callable[[], str]]]:
  """The checks, by name, in the order in which they are shown."""

  @functools.cache
  def answers() -> list[Answer]:
    return asyncio.run(ask_all(config))

  @functools.cache
  def ours() -> dict[str, Any]:
    return identity.describe(config, parts.make_tokenizer(config))

  code = functools.cache(lambda: identity.of_code())

  def judged(judge: Callable[[Answer], str]) -> Callable[[], str]:
    return lambda: _every(answers(), judge)

  return (
    ("generators answer", lambda: reached(answers())),
    (
      "generators reach the trainer",
      judged(lambda a: reaches_back(config, a)),
    ),
    ("generators' config", judged(lambda a: same_config(ours(), a))),
    (
      "generators' topology",
      judged(lambda a: same_topology(config, a)),
    ),
    ("versions", judged(lambda a: same_versions(code(), a))),
    ("clocks", judged(same_time)),
  )


def reached(answers: Sequence[Answer]) -> str:
  """Each serves."""
  faults = [answer.fault for answer in answers if answer.fault]
  if faults:
    raise ConfigError("config.remote: " + "; ".join(faults))
  return f"{len(answers)} serve"


def _every(answers: Sequence[Answer], judge: Callable[[Answer], str]) -> str:
  """What a judge finds of all that answered; its faults, each with whose."""
  faults, found = [], []
  for answer in answers:
    if answer.fault:
      continue
    try:
      found.append(judge(answer))
    except ConfigError as error:
      faults.append(f"{answer.address}: {error}")
  if faults:
    raise ConfigError("; ".join(faults))
  if not found:
    raise NotChecked("no generator answers")
  return "; ".join(dict.fromkeys(found))


def reaches_back(config: parts.Config, answer: Answer) -> str:
  """Weights would find their way."""
  if answer.back:
    raise ConfigError(f"config.transport: {answer.back}")
  if config.transport.kind == "orbax":
    return "they see the run's storage under the same path"
  return (
    "they reach the trainer's address (the weights' own ports are free ones)"
  )


def same_config(ours: dict[str, Any], answer: Answer) -> str:
  """It would sample what this run trains on; `ours` as of `identity`."""
  theirs = answer.identity
  lines = differences(
    theirs["config"], ours["config"], says="it has {!r}, this config {!r}"
  )
  if theirs["tokenizer"] != ours["tokenizer"]:
    lines.append("its tokenizer is another")
  if lines:
    raise ConfigError(", ".join(lines))
  return "model, engine and tokenizer are the same"


def same_topology(config: parts.Config, answer: Answer) -> str:
  """It is on the chips that the config names."""
  if config.compile.topology is None:
    return f"a mesh as config.devices.generator has it, on {answer.device_kind}"
  wanted = config.compile.generator()
  if answer.device_kind not in wanted.chip.kinds:
    raise ConfigError(
      f"it is on {answer.device_kind!r}; config.compile.generator_topology is "
      f"{wanted}, whose chips are {wanted.chip.kinds}"
    )
  return f"they are on {wanted}"


def same_versions(ours: dict[str, str], answer: Answer) -> str:
  """It runs this code, on these packages."""
  theirs = answer.identity["code"]
  lines = [
    f"{name} is {theirs.get(name)}, here {version}"
    for name, version in ours.items()
    if theirs.get(name) != version
  ]
  if lines:
    raise ConfigError(", ".join(lines))
  return ", ".join(f"{name} {version}" for name, version in ours.items())


def same_time(answer: Answer) -> str:
  """Its clock says what ours does."""
  if abs(answer.skew) - answer.doubt > MOST_SKEW_SECONDS:
    raise ConfigError(
      f"its clock is {answer.skew:+.1f} s from this one's; at most "
      f"{MOST_SKEW_SECONDS:g} s are allowed"
    )
  return f"within {MOST_SKEW_SECONDS:g} s of this machine's"


async def ask_all(config: parts.Config) -> list[Answer]:
  """What every generator that the config names says.

  Raises:
    ConfigError: addresses, secrets or the trainer's own address are not fit.
  """
  with parts.refusing("config.remote"):
    addresses = addresses_of(config.remote)
    token = servers.secret(
      "token_file", config.remote.token_file, servers.TOKEN_VARIABLE
    )
    credentials = roster.credentials(config.remote)
  word = secrets.token_hex(16)
  clients = [
    GenerationClient(address, token=token, credentials=credentials)
    for address in addresses
  ]
  async with contextlib.AsyncExitStack() as stack:
    for client in clients:
      stack.push_async_callback(client.close)
    try:
      target = await stack.enter_async_context(_trainer(config, token, word))
    except (OSError, ValueError) as error:
      target = f"the trainer cannot offer weights: {words(error)}"
    return await asyncio.gather(
      *(_ask(config, client, target, word) for client in clients)
    )


def addresses_of(config: roster.Config) -> tuple[str, ...]:
  """All that the config and its file name, each once."""
  listed: tuple[str, ...] = ()
  if config.addresses_file is not None:
    text = pathlib.Path(config.addresses_file).read_text()
    name = f"addresses_file {config.addresses_file}"
    listed = roster.parse_addresses(name, text)
  return tuple(dict.fromkeys((*config.addresses, *listed)))


_Target = dict[str, str] | str
"""Where weights would come from, `address` or `path`; or why they cannot."""


@contextlib.asynccontextmanager
async def _trainer(
  config: parts.Config, token: str | None, word: str
) -> AsyncIterator[dict[str, str]]:
  """Says the word where weights would come from, while this lasts."""
  if config.transport.kind == "orbax":
    directory = config.run_directory.absolute()
    there = next(p for p in (directory, *directory.parents) if p.is_dir())
    with tempfile.NamedTemporaryFile("w", dir=there) as file:
      file.write(word)
      file.flush()
      yield {"address": "", "path": file.name}
    return

  async def answer(_: Any, writer: asyncio.StreamWriter) -> None:
    writer.write(word.encode())
    await writer.drain()
    writer.close()

  host = transports.listening_host(config.transport, token)
  listening = await asyncio.start_server(answer, host, config.transport.port)
  async with listening:
    port = listening.sockets[0].getsockname()[1]
    yield {"address": f"{host}:{port}", "path": ""}


async def _ask(
  config: parts.Config, client: GenerationClient, target: _Target, word: str
) -> Answer:
  """Asks one generator everything."""
  address, seconds = client.address, config.remote.timeout_seconds
  try:
    async with asyncio.timeout(seconds):
      if not await client.health():
        raise RuntimeError(f"{address} is not there, or does not serve")
      roster.read_report(await client.status(), life="")
      asked, began = time.time(), time.monotonic()
      said = await client.identity()
      doubt = (time.monotonic() - began) / 2
    return Answer(
      address=address,
      identity=said["identity"],
      device_kind=said["device_kind"],
      skew=said["unix_time"] - (asked + doubt),
      doubt=doubt,
      back=await _way_back(client, target, word, seconds),
    )
  except TimeoutError:
    fault = f"{address} does not answer within {seconds:g} s"
  except _FAULTS as error:
    fault = words(error)
  return Answer(address=address, fault=fault)


async def _way_back(
  client: GenerationClient, target: _Target, word: str, seconds: float
) -> str:
  """What is wrong with it; "" if nothing is."""
  if isinstance(target, str):
    return target
  try:
    found = await client.probe(**target, word=word, timeout_seconds=seconds)
  except _FAULTS as error:  # A token that it does not know, among others.
    return words(error)
  return found["address"] or found["path"]
