"""A server's figures in Prometheus's text format, read when they are asked for.

`GET /metrics` of the HTTP side. Nothing is counted here: the driver's sums and
the service's limits are what they are, and a scrape copies them. Sums that only
rise are counters (`..._total`), the rest gauges; rates and shares are the
reader's, such as rate(rl_tpu_tokens_total[1m]) or
rl_tpu_queue_seconds_total / rl_tpu_requests_started_total.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import prometheus_client
from prometheus_client import core, registry

from rl_tpu.generation.driver import GenerationDriver
from rl_tpu.generation.server import GenerationServer

_SUMS: Mapping[str, tuple[str, str]] = {
  "tokens": ("tokens", "Sampled tokens."),
  "prompts": ("requests_started", "Requests that were given a slot."),
  "completions": ("requests_finished", "Requests that ended by themselves."),
  "cancellations": ("requests_cancelled", "Requests that were withdrawn."),
  "updates": ("weights_received", "Weights put into service."),
  "interruptions": (
    "interruptions",
    "Running sequences that new weights interrupted.",
  ),
  "recomputed_tokens": (
    "recomputed_tokens",
    "Tokens prefilled again after an interruption.",
  ),
  "prefilled_tokens": (
    "prefilled_tokens",
    "Tokens that prefills computed, padding included.",
  ),
  "shared_tokens": (
    "shared_tokens",
    "Tokens whose keys and values another slot had already.",
  ),
  "queue_seconds": (
    "queue_seconds",
    "Seconds that requests_started had waited for their slots, summed.",
  ),
  "busy_seconds": ("busy_seconds", "Seconds in which the devices worked."),
  "idle_seconds": ("idle_seconds", "The other seconds."),
}
"""Of `Counters`: its name here, and what it is."""


def exposition(server: GenerationServer) -> Callable[[], bytes]:
  """What gives the text of a scrape; callable from any thread."""
  collected = registry.CollectorRegistry()
  collected.register(_Collector(server))
  return lambda: prometheus_client.generate_latest(collected)


class _Collector(registry.Collector):
  """The figures of one server as they are now."""

  def __init__(self, server: GenerationServer):
    self._server = server

  def collect(self) -> Iterator[core.Metric]:
    driver = self._server.driver
    sums = dataclasses.asdict(driver.counters())
    for field, (name, text) in _SUMS.items():
      yield core.CounterMetricFamily(f"rl_tpu_{name}", text, value=sums[field])
    for name, text, value in _gauges(driver, self._server):
      yield core.GaugeMetricFamily(f"rl_tpu_{name}", text, value=float(value))
    for name, value in self._server.pulled().items():
      yield core.CounterMetricFamily(
        f"rl_tpu_pulled_{name}", "Of weights from the trainer.", value=value
      )


def _gauges(
  driver: GenerationDriver, server: GenerationServer
) -> Iterator[tuple[str, str, float]]:
  slots, version = driver.engine.config.slots, driver.version
  yield "kv_slots", "Sequences that the cache holds at most.", slots
  yield "kv_slots_in_use", "Sequences that it holds.", slots - driver.free_slots
  yield "requests_waiting", "Requests without a slot.", driver.waiting
  yield (
    "requests_running",
    "Requests that have a slot.",
    slots - driver.free_slots,
  )
  yield (
    "requests_open",
    "Requests of gRPC's clients, running or waiting.",
    server.admission.open,
  )
  yield "requests_allowed", "As many may be open.", server.config.max_requests
  yield "healthy", "1 where a request would be served.", server.healthy
  if version is not None:  # Until then there is no such series.
    yield "version", "Of the weights in service.", version
