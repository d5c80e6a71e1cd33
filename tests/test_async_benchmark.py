"""What the benchmark of async against sync reads out of a run."""

import asyncio

import numpy as np
import pytest

from experiments.benchmarks import async_vs_sync, async_vs_sync_part
from rl_tpu.types import Request, Sampling


@pytest.fixture(scope="module")
def config():
  run = async_vs_sync_part.Run(
    schedule="sync", directory="nowhere", latency=True, batches=8
  )
  return async_vs_sync_part.make_config(run)


def test_each_act_takes_its_mean_with_a_share_of_the_hosts_time(config):
  events = [
    ("generate", 0.0, 1.0),  # Of the warm-up.
    ("weights", 10.0, 10.5),
    ("prefill", 10.501, 10.901),
    ("generate", 10.902, 11.102),
    ("generate", 12.0, 12.4),  # After a while of idleness.
    ("generate", 19.5, 20.5),  # Ends too late.
  ]
  window = async_vs_sync.Window(9.0, 20.0)
  batch, steps = config.engine.prefill_batches[-1], 4
  assert config.engine.steps_per_dispatch == steps
  # Two calls for the first, none for those that weights interrupted.
  admitted = [batch + 1, 0]
  working, times = async_vs_sync.generator_times(
    config, window, events, admitted
  )
  assert working == pytest.approx(0.5 + 0.4 + 0.2 + 0.4 + 2e-3)
  host = 2e-3 / 4
  assert times == pytest.approx(
    {
      "decode_step": (0.3 + host) / steps,
      "prefill_call": (0.4 + host) / 2,
      "swap": 0.5 + host,
    }
  )


def test_answers_are_as_long_as_their_identity_says(config):
  asked = []

  class Generator:
    async def generate(self, request, progress=None):
      asked.append(request.sampling)

  lengths = async_vs_sync_part.Lengths(Generator(), config)

  async def ask():
    for index in [*range(400), 0]:
      await lengths.generate(
        Request(
          prompt_index=index,
          member=0,
          tokens=np.arange(5, dtype=np.int32),
          sampling=Sampling(max_tokens=96, stop_ids=(1,)),
        )
      )

  asyncio.run(ask())
  assert all(sampling.stop_ids == () for sampling in asked)
  tokens = [sampling.max_tokens for sampling in asked]
  assert tokens[0] == tokens[-1]
  assert max(tokens) == async_vs_sync_part.LONGEST
  assert 1 <= min(tokens) < 5
  assert 18 < np.mean(tokens) < 27  # 24, before the longest are cut.
