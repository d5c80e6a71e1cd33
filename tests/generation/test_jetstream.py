import subprocess
import sys
import threading

import jax.numpy as jnp
import pytest

from rl_tpu.generation import jetstream

_FRESH_PROCESS = """
import logging, sys
level, handlers = logging.getLogger().level, list(logging.getLogger().handlers)
from rl_tpu.generation import jetstream
assert "tensorflow" not in sys.modules
assert not {"seqio", "tiktoken"} & set(sys.modules), "a stand-in stayed behind"
assert logging.getLogger().level == level
assert logging.getLogger().handlers == handlers
"""


def test_import_brings_no_tensorflow_and_leaves_the_root_logger_alone():
  done = subprocess.run(
    [sys.executable, "-c", _FRESH_PROCESS], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr


def test_another_release_is_refused_by_name(monkeypatch):
  monkeypatch.setattr(
    jetstream.importlib.metadata, "version", lambda _: "0.3.0"
  )
  with pytest.raises(ImportError, match=r"0\.3\.0.*exactly 0\.2\.2"):
    jetstream._check_version()


def test_a_failing_driver_thread_keeps_its_error_and_the_process_lives(caplog):
  def fail():
    raise ValueError("broken")

  thread = jetstream.orchestrator.JetThread(target=fail, name="one")
  thread.start()
  thread.join()
  assert isinstance(thread.failure, ValueError)
  assert "one failed" in caplog.text
  assert threading.main_thread().is_alive()


def test_delete_pytree_frees_arrays_under_this_jax():
  array = jnp.ones(3)
  jetstream.orchestrator.delete_pytree({"a": array, "b": 1})
  assert array.is_deleted()
