"""Does simulated time show what AReaL measured: Fig. 5c and Table 1?

  python -m rl_tpu simulate --config=experiments/areal/simulated_pod.py:ARG

ARG is `staleness` (Fig. 5c: throughput by staleness limit, answers up to 8k
tokens), or `async` and `sync` (Table 1's 1.5B row: answers up to 27k). It is a
sixteenth of the paper's 16 nodes of 8 GPUs, with a sixteenth of its batch of
512 prompts, so that a batch takes as long and tokens/s are a sixteenth. Seconds
for one simulation on one core.

Assumed (arXiv:2505.24298 states none of these): a GPU of 3.35 TB/s and 990
TFLOP/s serves a model of 1.5B parameters (1.54e9; 28 layers, 2 key-value heads
of 128, 16 bits). One GPU is one generator.

- A decode step: 5 ms of host and launches, and 3.1 GB of weights, 0.9 ms.
- Per sequence: 3.1 GFLOP at 400 TFLOP/s. Per cached token: 28.7 kB at 60% of
  the memory's speed. At 128 sequences of 4k tokens a GPU makes 9k tokens/s; the
  paper's Fig. 6b has 231k for 32 GPUs, 7.2k each.
- Prefill: 3.1 GFLOP a token at half the peak.
- Training: 4 passes of 3.1 GFLOP (proximal, forward, backward twice) at 400
  TFLOP/s (Fig. 6a has 427), half as much again for attention and padding.
- Weights go through a disk: 8 s in which the learner waits, 4 s in which a
  generator loads; resharding one set of GPUs takes 8 s each way.
- Lengths: log-normal, mean 9k (async, sync) or 5k, sigma 1.

Found, and the paper's. Throughput by staleness limit over that of limit 0:

| limit | 0 | 1 | 2 | 4 | 8 | none |
|---|---|---|---|---|---|---|
| simulated | 1 | 1.89 | 2.27 | 2.27 | 2.27 | 2.27 |
| Fig. 5c | 1 | 2.09 | 2.77 | 2.77 | 2.89 | 3.08 |

Async over sync on as many GPUs: 2.27 simulated, 2.77 in Table 1 (1.64 to 2.77
over its models). From 2 on it is the trainer that limits the simulated pod, so
that its plateau is flat; limit 1 waits for the longest answers of each batch.
"""

import ml_collections

from rl_tpu import algorithms, envs, learner, parts, sft
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.generation import engine
from rl_tpu.models import transformer
from rl_tpu.types import Sampling
from rl_tpu.virtual.config import Config, Distribution, Service

GPUS = 8
GENERATORS = 6
"""Of the GPUs, in async training: the paper's 75%."""
OPERATIONS = 2 * 1.54e9
"""Of one token in one forward pass."""


def get_config(arg: str = "staleness") -> ml_collections.ConfigDict:
  """The pod of one of the paper's experiments."""
  serial = arg == "sync"
  longest, mean = (8192, 5000) if arg == "staleness" else (27648, 9000)
  trainers = GPUS if serial else GPUS - GENERATORS
  loss = algorithms.get("decoupled_ppo").Config()
  return to_config_dict(
    parts.Config(
      name=f"areal_simulated_{arg}",
      schedule="sync" if serial else "async",
      groups_per_batch=32,
      group_size=16,
      max_staleness=8,
      max_running_groups=4 * 32,
      task=Choice(
        name="reasoning_gym", config=envs.get("reasoning_gym").Config()
      ),
      algorithm=Choice(name="decoupled_ppo", config=loss),
      model=transformer.sized("qwen3-1.7b"),
      sampling=Sampling(max_tokens=longest),
      learner=learner.Config(minibatches=4, row_length=1024 + longest),
      engine=engine.Config(
        slots=128,
        context_length=1024 + longest,
        prefill_buckets=(1024 + longest,),
        prefill_batches=(1,),
      ),
      warm_start=sft.Config(batches=0, wrong_batches=0),
      simulate=Config(
        service=Service(
          decode_step=5e-3 + 0.9e-3,
          decode_per_sequence=OPERATIONS / 400e12,
          decode_per_cached_token=28.7e3 / (0.6 * 3.35e12),
          prefill_per_token=OPERATIONS / (0.5 * 990e12),
          update_per_token=1.5 * 4 * OPERATIONS / 400e12 / trainers,
          publish=8.0,
          swap=4.0,
          reshard=8.0,
        ),
        generators=GPUS if serial else GENERATORS,
        prompt_tokens=256,
        lengths=Distribution(kind="lognormal", mean=mean, sigma=1.0, least=64),
        batches=24,
        warm_up=12,
        grain=64,
        sweep_staleness=(0, 1, 2, 4, 8, None) if arg == "staleness" else (),
      ),
    )
  )
