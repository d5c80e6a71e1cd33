"""Eight CPU devices for every test, and a compilation cache between runs."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update(
  "jax_compilation_cache_dir",
  os.environ.get("JAX_COMPILATION_CACHE_DIR", "/tmp/rl_tpu_test_cache"),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
