"""Eight CPU devices for every test, and a compilation cache between runs.

What a module compiled is dropped after it: programs are mapped into memory, and
a process may have so many mappings (65,530 on Linux by default), beyond which
the next program aborts it. The cache on disk brings back what others share.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update(
  "jax_compilation_cache_dir",
  os.environ.get("JAX_COMPILATION_CACHE_DIR", "/tmp/rl_tpu_test_cache"),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@pytest.fixture(autouse=True, scope="module")
def programs_end_with_their_module():
  yield
  jax.clear_caches()
