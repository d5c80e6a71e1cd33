"""The small run with experts and a critic."""

import ml_collections

from rl_tpu import algorithms, parts, sharding
from rl_tpu.config import Choice, to_config_dict
from tests.aot import pod


def get_config() -> ml_collections.ConfigDict:
  config = pod.get_config()
  config.algorithm = to_config_dict(
    Choice(name="sao", config=algorithms.get("sao").Config())
  )
  config.model.d_ff = 256
  config.model.num_experts, config.model.experts_per_token = 4, 2
  config.devices = to_config_dict(
    parts.Devices(
      trainer=sharding.MeshShape(fsdp=2, expert=2),
      generator=sharding.MeshShape(data=2, expert=2),
    )
  )
  return config
