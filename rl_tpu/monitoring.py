"""Where a run's scalars go besides its own directory, while it goes on.

metrics.csv and TensorBoard need nothing and are always there (`metrics`). Two
more are asked for: Weights & Biases, whose package is not installed with this
one, and an HTTP port from which Prometheus scrapes the newest values.
"""

import contextlib
import dataclasses
import importlib.util
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import prometheus_client

from rl_tpu.config import ConfigError, digest
from rl_tpu.metrics import Writer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wandb:
  """Of Weights & Biases."""

  project: str | None = None
  """Where the run appears; None: nowhere. Needs `pip install wandb`."""
  entity: str | None = None
  """Whose project it is; None: that of the login."""
  mode: Literal["online", "offline"] = "online"
  """`offline` needs no network: it writes into the run's directory, from where
  `wandb sync` uploads later."""

  def __post_init__(self):
    if self.project is None:
      return
    if not self.project:
      raise ValueError("project is ''; it must be a name, or None for none")
    if importlib.util.find_spec("wandb") is None:
      raise ValueError(
        f"project is {self.project!r}, but the package wandb is not installed; "
        "pip install wandb, or leave project out"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Who is told of each batch."""

  wandb: Wandb = dataclasses.field(default_factory=Wandb)
  """Weights & Biases."""
  prometheus_port: int | None = None
  """Of an HTTP server with the newest value of every metric at /metrics, in
  [0, 65535]; 0 takes a free one, which the log names; None: there is none."""
  prometheus_host: str = "127.0.0.1"
  """Address that it listens on. Nobody is asked for a secret there."""

  def __post_init__(self):
    if not 0 <= (self.prometheus_port or 0) < 2**16:
      raise ValueError(
        f"prometheus_port is {self.prometheus_port!r}; it must be in [0, 65535]"
      )


@contextlib.contextmanager
def writers(
  config: Config,
  *,
  directory: pathlib.Path,
  name: str,
  described: Mapping[str, Any],
  note: Callable[[str], None],
) -> Iterator[list[Writer]]:
  """The writers that a config asks for, until the run ends.

  Args:
    config: who is told.
    directory: of the run; the same directory goes on as the same run.
    name: of the experiment.
    described: the run's config, as JSON keeps it.
    note: is told where the figures are.

  Raises:
    ConfigError: the port is taken.
  """
  found: list[Writer] = []
  with contextlib.ExitStack() as stack:
    if config.wandb.project is not None:
      found.append(_WandbWriter(config.wandb, directory, name, described))
    if config.prometheus_port is not None:
      found.append(_PrometheusWriter(config, note))
    for writer in found:
      stack.callback(writer.close)
    yield found


class _WandbWriter:
  """Rows by their batch, which is the x axis: they may come out of order.

  A run that goes on from a checkpoint goes on there too. What was logged of
  batches that it trains again stays: such a batch has two points.
  """

  def __init__(
    self,
    config: Wandb,
    directory: pathlib.Path,
    name: str,
    described: Mapping[str, Any],
  ):
    wandb: Any = importlib.import_module("wandb")
    place = str(directory.absolute())
    self._run = wandb.init(
      project=config.project,
      entity=config.entity,
      mode=config.mode,
      name=f"{name} {directory.name}",
      id=digest(place),
      resume="allow",
      dir=place,
      config=dict(described),
    )
    self._run.define_metric("*", step_metric="batch")

  def write(self, batch: int, metrics: Mapping[str, float]) -> None:
    """Adds a row."""
    self._run.log({"batch": batch, **metrics})

  def close(self) -> None:
    """Waits until everything is written, or sent."""
    self._run.finish()


class _PrometheusWriter:
  """The newest value of each metric, as a gauge."""

  def __init__(self, config: Config, note: Callable[[str], None]):
    self._registry = prometheus_client.CollectorRegistry()
    self._gauges: dict[str, prometheus_client.Gauge] = {}
    assert config.prometheus_port is not None
    try:
      self._server, self._thread = prometheus_client.start_http_server(
        config.prometheus_port, config.prometheus_host, self._registry
      )
    except OSError as error:
      raise ConfigError(
        f"config.logging.prometheus_port is {config.prometheus_port}, which "
        f"cannot be taken on {config.prometheus_host}: {error.strerror}"
      ) from error
    host, port = self._server.server_address[:2]
    note(f"metrics for Prometheus are on http://{host}:{port}/metrics")

  def write(self, batch: int, metrics: Mapping[str, float]) -> None:
    """Puts the row's values in place of those before."""
    for name, value in {"batch": batch, **metrics}.items():
      if math.isfinite(value):
        self._gauge(name).set(value)

  def _gauge(self, name: str) -> prometheus_client.Gauge:
    if name not in self._gauges:
      plain = "rl_tpu_" + re.sub(r"\W", "_", name)
      text = f"{name} of the last batch that has one; see metrics.csv."
      self._gauges[name] = prometheus_client.Gauge(
        plain, text, registry=self._registry
      )
    return self._gauges[name]

  def close(self) -> None:
    """Stops listening."""
    self._server.shutdown()
    self._server.server_close()
    self._thread.join()
