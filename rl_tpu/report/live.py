"""The page of a run that goes on, on this machine alone.

Each answer is read from the run's directory anew; the page asks again until the
run is complete.
"""

import http.server
import os
from collections.abc import Sequence

from rl_tpu.report import page


def make(
  directories: Sequence[str | os.PathLike], port: int
) -> http.server.ThreadingHTTPServer:
  """A server of the page, bound to the loopback address, not yet serving.

  Args:
    directories: one or two runs.
    port: 0 takes a free one.

  Raises:
    FileNotFoundError: a directory holds no run.
  """
  for directory in directories:
    page.read(directory)

  class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with what the directories hold now."""

    def do_GET(self) -> None:
      """The page, or its figures alone."""
      if self.path not in ("/", "/data.json"):
        self.send_error(404)
        return
      runs = [page.read(directory) for directory in directories]
      if self.path == "/":
        kind, text = "text/html", page.page(runs, live=True)
      else:
        kind, text = "application/json", page.as_json(runs)
      body = text.encode()
      self.send_response(200)
      self.send_header("Content-Type", f"{kind}; charset=utf-8")
      self.send_header("Content-Length", str(len(body)))
      self.end_headers()
      self.wfile.write(body)

    def log_message(self, format, *args) -> None:
      """Quiet: it answers one person."""

  return http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
