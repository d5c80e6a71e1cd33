"""The one door to JetStream 0.2.2: imports it and mends what is broken.

JetStream (google-jetstream 0.2.2, 2024-05) is frozen: nothing newer is on
PyPI. Its Engine interface, Driver and gRPC messages are still what serving
code for TPUs speaks, so we implement and subclass them. As shipped it cannot
run beside today's JAX, and it ends the process where it should raise:

- it imports seqio, and with it TensorFlow (half a minute, gigabytes), for
  tokenizers that are not used here. Empty modules stand in for seqio and
  tiktoken while it is imported, and are taken away again;
- `delete_pytree` calls `jax.tree_map`, which JAX removed;
- `JetThread` answers any exception with SIGKILL to its own process;
- importing the orchestrator sets the root logger to DEBUG and adds a handler.

Every other module gets JetStream from here, never by itself.
"""

import contextlib
import importlib.metadata
import logging
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import jax

VERSION = "0.2.2"
"""The release whose private parts are rebound below."""

_STAND_INS: dict[str, dict[str, Any]] = {
  "seqio": {},
  "seqio.vocabularies": {
    "Vocabulary": object,
    "SentencePieceVocabulary": object,
  },
  "tiktoken": {},
  "tiktoken.load": {"load_tiktoken_bpe": None},
}


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
  """Empty modules in the place of those not yet imported, for a while."""
  absent = [name for name in _STAND_INS if name not in sys.modules]
  for name in absent:
    module = types.ModuleType(name)
    vars(module).update(_STAND_INS[name])
    sys.modules[name] = module
  try:
    yield
  finally:
    for name in absent:
      del sys.modules[name]


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
  """Puts the root logger's level and handlers back."""
  root = logging.getLogger()
  level, handlers = root.level, list(root.handlers)
  try:
    yield
  finally:
    root.setLevel(level)
    root.handlers[:] = handlers


class ReportingThread(threading.Thread):
  """A thread that keeps its failure instead of ending the process.

  Whoever owns the thread reads `failure` after it ended; the error is logged
  where it happens.
  """

  failure: BaseException | None = None

  def run(self) -> None:
    """Runs the target and keeps what it raised."""
    try:
      super().run()
    except BaseException as error:
      self.failure = error
      logging.getLogger(__name__).error("%s failed: %r", self.name, error)


def _delete_tree(tree: Any) -> None:
  """Frees the device buffers of every array in a tree."""
  for leaf in jax.tree.leaves(tree):
    if isinstance(leaf, jax.Array):
      leaf.delete()


def _check_version() -> None:
  installed = importlib.metadata.version("google-jetstream")
  if installed != VERSION:
    raise ImportError(
      f"google-jetstream is {installed}; it must be exactly {VERSION}, whose "
      "private parts rl_tpu replaces: pip install google-jetstream==0.2.2"
    )


_check_version()
with _stand_ins(), _root_logger_kept():
  from jetstream.core import orchestrator
  from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
  from jetstream.core.utils import async_multifuture
  from jetstream.core.utils.return_sample import ReturnSample
  from jetstream.engine import engine_api, tokenizer_pb2

setattr(orchestrator, "delete_pytree", _delete_tree)  # noqa: B010
setattr(orchestrator, "JetThread", ReportingThread)  # noqa: B010

__all__ = [
  "VERSION",
  "ReportingThread",
  "ReturnSample",
  "async_multifuture",
  "engine_api",
  "jetstream_pb2",
  "jetstream_pb2_grpc",
  "orchestrator",
  "tokenizer_pb2",
]
