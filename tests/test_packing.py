"""Packing loses nothing, invents nothing and gives few shapes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_tpu import ops
from rl_tpu.packing import bucket, pack
from rl_tpu.types import Trajectory

EOS = 2


def make(tokens, prompt=1, **fields):
  """A trajectory with `prompt` given tokens; the rest are actions."""
  tokens = np.asarray(tokens, np.int32)
  mask = np.arange(len(tokens)) >= prompt
  rewards = np.zeros(len(tokens), np.float32)
  rewards[-1] = 1.0
  return Trajectory(
    **{
      "prompt_id": 0,
      "group_id": 0,
      "member": 0,
      "tokens": tokens,
      "action_mask": mask,
      "behavior_logp": np.where(mask, -tokens / 7, 0.0).astype(np.float32),
      "token_version": np.where(mask, 5, -1).astype(np.int32),
      "rewards": rewards,
    }
    | fields
  )


def make_many(lengths):
  return [
    make(np.arange(length) + 100 * n, group_id=10 + n // 3, member=n % 3)
    for n, length in enumerate(lengths)
  ]


@settings(deadline=None, max_examples=60)
@given(
  lengths=st.lists(st.integers(2, 16), min_size=1, max_size=40),
  rows_multiple=st.sampled_from([1, 2, 4]),
  seed=st.none() | st.integers(0, 3),
)
def test_every_token_is_in_the_batch_once_and_in_order(
  lengths, rows_multiple, seed
):
  trajectories = make_many(lengths)
  batch = pack(
    trajectories,
    row_length=16,
    rows_multiple=rows_multiple,
    minibatches=rows_multiple,
    version=7,
    shuffle_seed=seed,
  )
  for n, trajectory in enumerate(trajectories):
    rows, columns = np.nonzero(batch.trajectory_ids == n)
    assert len(set(rows)) == 1
    assert columns.tolist() == list(range(columns[0], columns[-1] + 1))
    assert batch.positions[rows, columns].tolist() == list(range(lengths[n]))
    for field in ("tokens", "action_mask", "behavior_logp", "rewards"):
      stored = getattr(batch, field)[rows, columns]
      assert stored.tolist() == getattr(trajectory, field).tolist()
  padding = batch.trajectory_ids == -1
  assert (~padding).sum() == sum(lengths)
  assert not batch.action_mask[padding].any()
  assert (batch.token_version[padding] == -1).all()
  assert (batch.temperature[padding] == 1).all()
  assert batch.tokens.shape[0] % rows_multiple == 0


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(2, 16), min_size=1, max_size=40))
def test_no_two_rows_would_fit_into_one(lengths):
  batch = pack(make_many(lengths), row_length=16, version=0)
  used = np.sort((batch.trajectory_ids >= 0).sum(1))
  used = used[used > 0]
  assert len(used) == 1 or used[0] + used[1] > 16


def test_groups_are_renumbered_and_unused_places_have_none():
  trajectories = [
    make([9, 5], group_id=group, stop_reason=reason)
    for group, reason in [
      (70, "stop"),
      (31, "length"),
      (70, "env"),
      (8, "error"),
      (31, "stop"),
    ]
  ]
  batch = pack(trajectories, row_length=4, version=3)
  assert batch.group_ids.tolist() == [0, 1, 0, 2, 1, -1]
  assert batch.truncated.tolist() == [False, True, *[False] * 4]
  assert batch.version == 3


def test_baselines_stay_with_their_trajectories_or_are_not_there():
  trajectories = [make([9, 5])] * 5
  batch = pack(
    trajectories, row_length=4, version=0, baselines=np.array([1, 2, 3, 4, 5])
  )
  np.testing.assert_array_equal(batch.baselines, [1, 2, 3, 4, 5, np.nan])
  assert batch.baselines.dtype == np.float32
  assert pack(trajectories, row_length=4, version=0).baselines is None
  with pytest.raises(ValueError, match=r"baselines has 4 .* the 5 traj"):
    pack(trajectories, row_length=4, version=0, baselines=np.zeros(4))


def test_types_and_temperature_are_those_of_the_contract():
  trajectories = [make([9, 5], temperature=0.5), make([9, 5, 6])]
  batch = pack(trajectories, row_length=6, version=0)
  assert batch.trajectory_ids.tolist() == [[1, 1, 1, 0, 0, -1]]
  assert batch.temperature.tolist() == [[1.0, 1.0, 1.0, 0.5, 0.5, 1.0]]
  for field in dataclasses.fields(batch):
    array = getattr(batch, field.name)
    if array is not None:
      assert array.dtype in (np.int32, np.float32, np.bool_), field.name


@pytest.mark.parametrize(
  ("count", "size"),
  [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 8), (9, 12), (13, 16), (17, 24)],
)
def test_counts_are_rounded_up_to_few_sizes(count, size):
  assert bucket(count) == size


def test_a_thousand_counts_have_twenty_sizes_half_too_large_at_most():
  sizes = [bucket(count) for count in range(1, 1001)]
  assert len(set(sizes)) == 20
  assert all(1 <= s / c <= 1.5 for c, s in enumerate(sizes, 1))


def test_dealing_rows_in_turn_balances_tokens_and_spreads_groups():
  lengths = np.random.default_rng(0).integers(2, 60, 200).tolist()
  trajectories = make_many(lengths)
  arguments = {
    "row_length": 64,
    "rows_multiple": 4,
    "minibatches": 4,
    "version": 0,
  }
  parts_of = []
  for seed in (0, 0, 1):
    batch = pack(trajectories, shuffle_seed=seed, **arguments)
    rows = [batch.trajectory_ids[part::4] for part in range(4)]
    used = [(ids >= 0).sum() for ids in rows]
    assert max(used) - min(used) < 64
    parts_of.append([set(np.unique(ids)) - {-1} for ids in rows])
  assert parts_of[0] == parts_of[1] != parts_of[2]
  # Three members of a group share one of four parts 1 time in 16 by chance.
  together = sum(
    {n, n + 1, n + 2} <= part for part in parts_of[0] for n in range(0, 198, 3)
  )
  assert together < 12


def test_which_minibatch_gets_the_longest_is_chance():
  trajectories = make_many([60, 59, 58, 57])
  places = set()
  for seed in range(20):
    batch = pack(
      trajectories,
      row_length=64,
      rows_multiple=4,
      minibatches=4,
      version=0,
      shuffle_seed=seed,
    )
    places.add(int(np.nonzero(batch.trajectory_ids == 0)[0][0]))
  assert places == {0, 1, 2, 3}


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"tokens": range(9)}, "of prompt 6 has 9 tokens; row_length is 8"),
    ({"tokens": [9, 5], "temperature": 0.0}, "temperature 0.0; it must be > 0"),
    (
      {"tokens": [9, 5], "rewards": np.array([1.0, 0.0])},
      "reward 1.0 off its action tokens",
    ),
  ],
)
def test_what_cannot_be_trained_on_is_refused_with_its_prompt(fields, message):
  with pytest.raises(ValueError, match=message):
    pack([make(prompt_id=6, **fields)], row_length=8, version=0)


def test_an_empty_batch_or_uneven_minibatches_are_refused():
  with pytest.raises(ValueError, match="needs at least one"):
    pack([], row_length=8, version=0)
  with pytest.raises(ValueError, match=r"rows_multiple is 3.*minibatches.*2"):
    pack(
      [make([9, 5])], row_length=8, version=0, rows_multiple=3, minibatches=2
    )


def test_H02_a_row_of_two_trajectories_predicts_within_each_only():
  batch = pack([make([10, 11, 12]), make([20, 21])], row_length=5, version=0)
  assert batch.tokens.tolist() == [[10, 11, 12, 20, 21]]
  labels = ops.next_tokens(batch.tokens, batch.trajectory_ids)
  assert labels.tolist() == [[11, 12, -1, 21, -1]]


def test_H03_the_sampled_end_is_trained_though_it_is_also_the_pad_id():
  batch = pack([make([9, 5, 6, EOS])], row_length=7, version=0)
  assert batch.tokens[0, 1:4].tolist() == [5, 6, EOS]
  assert batch.action_mask[0, 1:].tolist() == [True] * 3 + [False] * 3
  assert np.count_nonzero(batch.behavior_logp) == 3


def test_H03_an_end_inside_the_answer_does_not_end_the_mask():
  batch = pack([make([9, 5, EOS, 6, EOS])], row_length=7, version=0)
  assert batch.action_mask[0].tolist() == [False, *[True] * 4, False, False]


def test_X02_a_logp_that_is_not_a_number_stays_so():
  logp = np.array([0.0, -1.0, np.nan], np.float32)
  batch = pack([make([9, 5, 6], behavior_logp=logp)], row_length=3, version=0)
  np.testing.assert_array_equal(batch.behavior_logp[0], logp)


def test_X20_an_outcome_lies_on_the_last_action_not_on_padding():
  batch = pack([make([9, 5, 6])], row_length=8, version=0)
  assert batch.rewards.tolist() == [[0, 0, 1, 0, 0, 0, 0, 0]]


def make_with_head(tokens, size):
  ids = np.arange(len(tokens) * size, dtype=np.int32).reshape(-1, size)
  ids[0] = -1
  logp = np.where(ids < 0, -np.inf, -ids).astype(np.float32)
  return make(tokens, behavior_topk_ids=ids, behavior_topk_logp=logp)


def test_the_samplers_head_stays_with_its_tokens_and_padding_has_none():
  trajectories = [make_with_head([9, 5], 2), make_with_head([9, 5, 6], 2)]
  batch = pack(trajectories, row_length=6, version=0)
  assert batch.trajectory_ids.tolist() == [[1, 1, 1, 0, 0, -1]]
  assert batch.behavior_topk_ids.tolist() == [
    [[-1, -1], [2, 3], [4, 5], [-1, -1], [2, 3], [-1, -1]]
  ]
  np.testing.assert_array_equal(
    batch.behavior_topk_logp,
    np.where(batch.behavior_topk_ids < 0, -np.inf, -batch.behavior_topk_ids),
  )
  assert batch.behavior_topk_ids.dtype == np.int32
  assert batch.behavior_topk_logp.dtype == np.float32


def test_without_heads_a_batch_has_none():
  batch = pack([make([9, 5])], row_length=4, version=0)
  assert batch.behavior_topk_ids is None and batch.behavior_topk_logp is None


@pytest.mark.parametrize(
  "other", [make([9, 5]), make_with_head([9, 5], 3)], ids=["none", "larger"]
)
def test_heads_of_several_sizes_are_refused(other):
  with pytest.raises(ValueError, match=r"K = \[\d, \d\].*behavior_top_k"):
    pack([make_with_head([9, 5], 2), other], row_length=4, version=0)
