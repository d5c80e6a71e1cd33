"""python -m rl_tpu report RUN [RUN2]: the page of one run, or of two."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rl_tpu.config import ConfigError
from rl_tpu.report import figure, live, page


def run(arguments: Sequence[str]) -> dict[str, Any]:
  """Writes the page, and serves it if asked to.

  Returns:
    `report`, `traces`, `figures` (paths), `warnings` (how many).

  Raises:
    ConfigError: a directory holds no run.
  """
  parser = argparse.ArgumentParser(
    prog="python -m rl_tpu report",
    description="One HTML page that needs no network, trace.json for "
    "ui.perfetto.dev, and run.png.",
    allow_abbrev=False,
  )
  parser.add_argument("run", help="directory of a run")
  parser.add_argument("other", nargs="?", help="a run to set beside it")
  parser.add_argument(
    "--out",
    help="file to write (RUN/report.html, or of two RUN/report_with_RUN2.html)",
  )
  parser.add_argument(
    "--serve",
    type=int,
    metavar="PORT",
    help="show it while the run goes on, at 127.0.0.1:PORT, until Ctrl-C",
  )
  given = parser.parse_args(arguments)
  directories = [given.run, *([given.other] if given.other else [])]
  try:
    if given.serve is not None:
      _serve(directories, given.serve)
    written = page.write(directories, given.out, _tell)
  except FileNotFoundError as error:
    raise ConfigError(str(error)) from error
  figures = [str(figure.plot(d)) for d in directories if page.bars(d)]
  return {**written, "figures": figures}


def _tell(line: str) -> None:
  print(line, file=sys.stderr)


def _serve(directories: Sequence[str], port: int) -> None:
  with live.make(directories, port) as server:
    where = f"http://127.0.0.1:{server.server_address[1]}/"
    print(f"rl_tpu: {where} until Ctrl-C", file=sys.stderr, flush=True)
    try:
      server.serve_forever()
    except KeyboardInterrupt:
      return
