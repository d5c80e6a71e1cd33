import numpy as np
import pytest

from rl_tpu import packing, samples
from rl_tpu.models.tokenizer import ByteTokenizer
from rl_tpu.types import Group, Prompt, Trajectory


def make(member, versions, reward, length=6):
  """A trajectory of two given tokens and then actions."""
  mask = np.arange(length) >= 2
  version = np.full(length, -1, np.int32)
  version[mask] = np.resize(versions, length - 2)
  rewards = np.zeros(length, np.float32)
  rewards[-1] = reward
  return Trajectory(
    prompt_id=0,
    group_id=0,
    member=member,
    tokens=np.arange(97, 97 + length, dtype=np.int32),
    action_mask=mask,
    behavior_logp=np.where(mask, -0.5, 0).astype(np.float32),
    token_version=version,
    rewards=rewards,
  )


TRAJECTORIES = (
  make(0, [3], 0.5),
  make(1, [2, 3], 0.25),
  make(2, [3], 0.0),
  make(3, [3], 1.0),
  make(4, [3], 0.5, length=9),
)


def described():
  prompt = Prompt(index=0, tokens=np.array([97, 98], np.int32))
  groups = [Group(prompt=prompt, trajectories=TRAJECTORIES)]
  batch = packing.pack(
    TRAJECTORIES, row_length=16, version=4, rows_multiple=1, minibatches=1
  )
  # A learner's values that say where they are.
  ids, places = np.asarray(batch.trajectory_ids), np.asarray(batch.positions)
  values = np.where(ids < 0, np.nan, 100 * ids + places)
  return samples.describe(groups, batch, {"advantage": values}, ByteTokenizer())


def test_the_mixed_the_worst_the_best_and_the_longest_are_kept_once_each():
  assert [t["member"] for t in described()] == [1, 2, 3, 4]


def test_a_kept_trajectory_has_the_learners_values_of_its_own_tokens():
  mixed, *_, longest = described()
  assert mixed["advantage"] == [100.0, 101.0, 102.0, 103.0, 104.0, 105.0]
  assert longest["advantage"] == [400.0 + i for i in range(9)]
  assert mixed["version"] == [-1, -1, 2, 3, 2, 3]
  assert mixed["action"] == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("batches", [1, 40, 60, 61, 10_000])
def test_a_run_keeps_those_of_few_batches_the_first_among_them(batches):
  kept = [v for v in range(1, batches + 1) if samples.due(v, batches)]
  assert kept[0] == 1
  assert min(batches, 30) <= len(kept) <= samples.BATCHES
