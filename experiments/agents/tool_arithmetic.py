"""Does SAO teach a small model to use a calculator?

  python -m rl_tpu train --config=experiments/agents/tool_arithmetic.py

A model of 0.1M parameters multiplies numbers of two digits, which it cannot do
by itself: it has to call the calculator, read the result that the environment
writes into its context, and repeat it as the answer. It starts from imitation
whose last batches mostly guess. SAO then trains it with one trajectory a prompt
and a critic that takes two updates a batch; advantages skip the observations.
The last line's `heldout_before` and `heldout_after` are the shares of held-out
questions answered right; `env_tool_calls` and `env_tool_errors` in metrics.csv
are calls and malformed calls per episode. Three to four minutes on two cores
that others used too; `heldout_after` was 0.98 and 1.00 on seeds 0 and 1, from
0.03 and 0.09: expect 0.9 or more. SCHEDULE is async (default), sync or
lockstep(n).
"""

import ml_collections

from rl_tpu import algorithms, critic, envs, learner, parts, sft
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.generation import engine
from rl_tpu.models import transformer
from rl_tpu.types import Sampling


def get_config(schedule: str = "async") -> ml_collections.ConfigDict:
  """SAO on the calculator task under one of the schedules."""
  return to_config_dict(
    parts.Config(
      name="tool_arithmetic",
      schedule=schedule,
      batches=60,
      groups_per_batch=128,
      group_size=1,
      max_staleness=2,
      max_turns=3,
      task=Choice(name="calculator", config=envs.get("calculator").Config()),
      algorithm=Choice(
        name="sao", config=algorithms.get("sao").Config(band="math")
      ),
      critic=critic.Config(
        learning_rate=2e-3, warmup_minibatches=10, pretraining_batches=10
      ),
      model=transformer.sized("tiny"),
      sampling=Sampling(max_tokens=7),
      learner=learner.Config(
        row_length=96,
        microbatch_rows=16,
        learning_rate=5e-4,
        warmup_minibatches=5,
        weight_decay=0.0,
      ),
      engine=engine.Config(
        slots=32,
        context_length=36,
        prefill_buckets=(8, 24, 36),
        prefill_batches=(8, 32),
        steps_per_dispatch=1,
      ),
      warm_start=sft.Config(
        batches=400, wrong_batches=40, wrong_fraction=0.6, learning_rate=3e-3
      ),
    )
  )
