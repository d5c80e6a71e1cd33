"""The generator as a process of its own: from a config to a network service.

Weights are those of the newest checkpoint in the run's directory, or else the
ones that training would start from; later ones come by `UpdateWeights` or
`PullWeights`. A generator of a training run elsewhere (`config.remote`) starts
without any, and requests wait until the trainer has brought some. Only
the generator's mesh is used, on this process's first devices. The mismatch of
`config.engine` is served too: these are the answers that training would see.

SIGTERM or SIGINT drains: new requests are refused, those that are open have
`serve.grace_seconds` to end. A second signal ends the wait.
"""

import asyncio
import concurrent.futures
import contextlib
import signal
import ssl
import sys
import time
from typing import Any

import jax

from rl_tpu import identity, parts, sharding
from rl_tpu.config import ConfigError
from rl_tpu.generation import policies
from rl_tpu.generation import server as servers
from rl_tpu.generation.driver import GenerationDriver
from rl_tpu.models import tokenizer
from rl_tpu.types import VersionedParams
from rl_tpu.view import View

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(config: parts.Config, view: View) -> dict[str, Any]:
  """Serves until a signal comes; that the address is ready goes to stderr.

  Returns:
    `requests` that were answered, `tokens` that were sampled, the `version` of
    the weights that were served last (null for none), `seconds`.

  Raises:
    ConfigError: the address must not or cannot be served, or parts of the
      config do not fit each other.
    Exception: the generator failed; its error, after clients were told.
  """
  try:
    token = servers.admin_token(config.serve)
    key = servers.api_key(config.serve, token)
  except ValueError as error:
    raise ConfigError(f"config.serve: {error}") from error
  text = parts.make_tokenizer(config)
  if len(text.eos_ids) > config.engine.max_stop_ids:
    raise ConfigError(
      f"config.engine.max_stop_ids is {config.engine.max_stop_ids}; it must be "
      f">= {len(text.eos_ids)}, as any of the tokenizer's eos_ids "
      f"{text.eos_ids} ends an answer"
    )
  failed: concurrent.futures.Future[None] = concurrent.futures.Future()
  mesh = sharding.make_mesh(config.devices.generator, jax.devices())
  driver = parts.make_driver(
    config, mesh, failed.set_exception, decode_stop_ids=text.eos_ids
  )
  weights = _weights(config, driver, view)
  if weights is not None:
    driver.update(weights)
  driver.warm_up()
  began = time.monotonic()
  driver.start()
  try:
    asyncio.run(_serve(config, driver, text, (token, key), failed))
  finally:
    driver.stop()
  return {
    "requests": driver.counters().completions,
    "tokens": driver.counters().tokens,
    "version": driver.version,
    "seconds": round(time.monotonic() - began, 1),
  }


def _weights(
  config: parts.Config, driver: GenerationDriver, view: View
) -> VersionedParams | None:
  """What a run of this config would generate with now; None: it is awaited."""
  engine = driver.engine
  path = policies.newest(config.run_directory / "checkpoints")
  params, awaited = None, config.serve.weights == "awaited"
  if (path is None and not awaited) or config.engine.mismatch.weight_noise:
    task, rows = parts.make_task(config)
    params = parts.start_params(config, task, rows, engine.mesh, view)
    engine.set_starting_params(params)
  if awaited:
    return None
  if path is not None:
    view.note(f"serving the weights of {path}")
    return policies.load(engine, path, int(path.name))
  view.note(
    f"{config.run_directory} has no checkpoint; serving the weights that "
    "training would start from, as version 0"
  )
  return engine.load_params(params, version=0)


async def _serve(
  config: parts.Config,
  driver: GenerationDriver,
  text: tokenizer.Tokenizer,
  secrets: tuple[str | None, str | None],
  failed: concurrent.futures.Future[None],
) -> None:
  """Serves from the first request to the last.

  `secrets` are the token of admin calls and the key of HTTP clients.

  Raises:
    BaseException: what ended the driver.
  """
  signals: asyncio.Queue[int] = asyncio.Queue()
  loop = asyncio.get_running_loop()
  broken = asyncio.wrap_future(failed)
  token, key = secrets
  server = servers.GenerationServer(
    driver, config.serve, token, identity.describe(config, text)
  )
  async with contextlib.AsyncExitStack() as stack:
    try:
      await server.start()
      stack.push_async_callback(server.stop)
      runner = await _start_http(config, server, text, key, stack)
    except (OSError, RuntimeError) as error:
      raise ConfigError(f"config.serve: {error}") from error
    for number in _SIGNALS:
      loop.add_signal_handler(number, signals.put_nowait, number)
    host, grace = config.serve.host, config.serve.grace_seconds
    ports = [f"{host}:{server.port}"]
    if runner is not None:
      ports.append(f"http on {host}:{runner.addresses[0][1]}")
    _, version = driver.accepted
    what = "nothing yet" if version is None else f"version {version}"
    _say(f"{what} is served on {', '.join(ports)}")
    await _first(signals.get(), broken)
    if not broken.done():
      _say(f"draining, for {grace:g} s at most; once more ends at once")
      await _first(
        _drain(server, runner), signals.get(), broken, asyncio.sleep(grace)
      )
    await asyncio.to_thread(driver.stop)  # What is still open fails now.
  if broken.done():
    broken.result()


async def _drain(server: servers.GenerationServer, runner: Any) -> None:
  """Waits for the requests of both interfaces; new ones are refused."""
  await asyncio.gather(server.drain(), *([runner.cleanup()] if runner else []))


async def _first(*events: Any) -> None:
  """Waits for one of several; coroutines among the others are cancelled."""
  tasks = [asyncio.ensure_future(event) for event in events]
  await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
  for event, task in zip(events, tasks, strict=True):
    if asyncio.iscoroutine(event):
      task.cancel()


async def _start_http(
  config: parts.Config,
  server: servers.GenerationServer,
  text: tokenizer.Tokenizer,
  key: str | None,
  stack: contextlib.AsyncExitStack,
) -> Any:
  """The runner of the OpenAI-compatible interface; None: it is not wanted."""
  if config.serve.http_port is None:
    return None
  from rl_tpu.generation import exposition, openai_api

  app = openai_api.make_app(
    server.driver,
    text,
    model_name=config.name,
    config=openai_api.Config(
      context_length=config.engine.context_length,
      max_prompt_length=config.engine.max_prompt_length,
      behavior_top_k=config.engine.behavior_top_k,
      record_experts=config.engine.record_experts,
      max_open_requests=config.serve.max_requests,
      bearer_token=key,
    ),
    exposition=exposition.exposition(server),
  )
  runner = await openai_api.start(
    app,
    config.serve.host,
    config.serve.http_port,
    ssl_context=_ssl(config.serve),
    shutdown_timeout=config.serve.grace_seconds,
  )
  stack.push_async_callback(runner.cleanup)
  return runner


def _ssl(config: servers.Config) -> ssl.SSLContext | None:
  """The same certificates as gRPC's."""
  certificate, key, authority = config.tls_files
  if certificate is None:
    return None
  context = ssl.create_default_context(
    ssl.Purpose.CLIENT_AUTH, cafile=authority
  )
  context.load_cert_chain(certificate, key)
  context.verify_mode = ssl.CERT_REQUIRED
  return context


def _say(text: str) -> None:
  print(f"rl_tpu: {text}", file=sys.stderr, flush=True)
