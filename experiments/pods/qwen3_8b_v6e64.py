"""AReaL's loss on Qwen3 8B: 64 chips of v6e train, slices of 8 generate.

  python -m rl_tpu compile --config=experiments/pods/qwen3_8b_v6e64.py

shows what it takes, on a CPU; the report lies beside this file. AReaL's sizes
(arXiv:2505.24298) but for the context, which is 16k tokens: batches of 512
prompts of 16 trajectories in 4 minibatches, staleness up to 8.
"""

import ml_collections

from experiments.pods import qwen3_8b_v5p64
from rl_tpu import sharding, topology
from rl_tpu.config import to_config_dict


def get_config() -> ml_collections.ConfigDict:
  """The run's config; give `--config.pretrained` to start from weights."""
  config = qwen3_8b_v5p64.get_config()
  config.name = "qwen3_8b_v6e64"
  config.sampling.max_tokens = 15360
  config.learner.row_length, config.learner.logit_chunk = 16384, 4096
  config.engine.context_length = 16384
  config.engine.prefill_buckets = (1024, 4096, 16384)
  config.engine.prefill_batches = (2,)
  config.devices.generator = to_config_dict(
    sharding.MeshShape(data=2, tensor=4)
  )
  config.compile = to_config_dict(
    topology.Config(topology="v6e:8x8", generator_topology="v6e:2x4")
  )
  return config
