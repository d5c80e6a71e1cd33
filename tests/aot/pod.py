"""A run small enough to be compiled for TPUs in a test."""

import ml_collections

from rl_tpu import algorithms, envs, learner, parts, sft, sharding, topology
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.generation import engine
from rl_tpu.models import transformer
from rl_tpu.types import Sampling


def get_config() -> ml_collections.ConfigDict:
  return to_config_dict(
    parts.Config(
      name="pod",
      groups_per_batch=4,
      group_size=4,
      task=Choice(
        name="reasoning_gym", config=envs.get("reasoning_gym").Config()
      ),
      algorithm=Choice(
        name="decoupled_ppo", config=algorithms.get("decoupled_ppo").Config()
      ),
      model=transformer.Config(
        vocab_size=1024,
        d_model=256,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=128,
        d_ff=512,
        compute_dtype="bfloat16",
      ),
      sampling=Sampling(max_tokens=128),
      learner=learner.Config(microbatch_rows=4, row_length=256),
      engine=engine.Config(
        slots=8,
        context_length=256,
        prefill_buckets=(256,),
        prefill_batches=(2,),
        prompts_per_row=4,
      ),
      devices=parts.Devices(
        trainer=sharding.MeshShape(fsdp=2, tensor=2),
        generator=sharding.MeshShape(data=2, tensor=2),
      ),
      warm_start=sft.Config(batches=0, wrong_batches=0),
      compile=topology.Config(topology="v5e:2x2"),
    )
  )
