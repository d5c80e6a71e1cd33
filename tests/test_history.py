"""The history is a window per scope, and comes back from a checkpoint."""

import collections

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_tpu import checkpoint, sharding
from rl_tpu.history import History
from rl_tpu.types import Group, Prompt, Trajectory

TEXTS = ([7], [7, 8], [8, 7], [300])


def make_group(index, text, outcomes):
  prompt = Prompt(index=index, tokens=np.array(TEXTS[text], np.int32))
  trajectories = tuple(
    Trajectory(
      prompt_id=index,
      group_id=index,
      member=member,
      tokens=np.array([*TEXTS[text], 5], np.int32),
      action_mask=np.arange(len(TEXTS[text]) + 1) == len(TEXTS[text]),
      behavior_logp=np.zeros(len(TEXTS[text]) + 1, np.float32),
      token_version=np.zeros(len(TEXTS[text]) + 1, np.int32),
      rewards=np.array([0.0] * len(TEXTS[text]) + [outcome], np.float32),
    )
    for member, outcome in enumerate(outcomes)
  )
  return Group(prompt=prompt, trajectories=trajectories)


def make_batches(described):
  """Groups whose index is never used twice, as in a stream of prompts."""
  numbers = iter(range(10_000))
  return [
    [make_group(next(numbers), *group) for group in batch]
    for batch in described
  ]


OUTCOMES = st.lists(
  st.floats(-4, 4, width=32, allow_subnormal=False), min_size=1, max_size=3
)
GROUPS = st.tuples(st.integers(0, len(TEXTS) - 1), OUTCOMES)
BATCHES = st.lists(
  st.lists(GROUPS, min_size=1, max_size=5), min_size=2, max_size=6
).map(make_batches)
SCOPES = st.sampled_from(["prompt", "global"])


def brute_force(batches, scope, window):
  seen = collections.defaultdict(lambda: collections.deque(maxlen=window))
  result = []
  for batch in batches:
    result.append([])
    for group in batch:
      key = tuple(group.prompt.tokens) if scope == "prompt" else None
      mean = sum(seen[key]) / len(seen[key]) if seen[key] else np.nan
      result[-1] += [mean] * len(group.trajectories)
    for group in batch:
      key = tuple(group.prompt.tokens) if scope == "prompt" else None
      seen[key].extend(t.outcome for t in group.trajectories)
  return result


@settings(deadline=None, max_examples=60)
@given(batches=BATCHES, scope=SCOPES, window=st.integers(1, 5))
def test_baselines_are_the_means_of_a_deque_per_scope(batches, scope, window):
  history = History(scope=scope, window=window)
  for batch, expected in zip(
    batches, brute_force(batches, scope, window), strict=True
  ):
    baselines = history.consume(batch)
    assert baselines.dtype == np.float32
    np.testing.assert_allclose(baselines, expected, rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(batches=BATCHES, scope=SCOPES, window=st.integers(1, 5), data=st.data())
def test_a_restored_history_goes_on_to_the_bit(batches, scope, window, data):
  cut = data.draw(st.integers(1, len(batches) - 1))
  history = History(scope=scope, window=window)
  for batch in batches[:cut]:
    history.consume(batch)
  restored = History(scope=scope, window=window)
  restored.restore(history.state() | {"tokens": np.zeros(3)})
  for batch in batches[cut:]:
    np.testing.assert_array_equal(
      restored.consume(batch), history.consume(batch)
    )


def test_a_checkpoint_keeps_it_beside_the_groups(tmp_path):
  history = History(scope="prompt", window=2)
  history.consume([make_group(0, 0, [1.0, 2.0, 4.0]), make_group(1, 3, [0.5])])
  arrays, _ = checkpoint.pack_groups([])
  where = sharding.named(
    sharding.make_mesh(sharding.MeshShape(), jax.devices())
  )
  state = {"w": jax.device_put(np.ones(2, np.float32), where)}
  abstract = {"w": jax.ShapeDtypeStruct((2,), np.float32, sharding=where)}
  saver = checkpoint.Checkpointer(tmp_path)
  saver.save(1, state, arrays | history.state(), {})
  saver.close()
  saver = checkpoint.Checkpointer(tmp_path)
  host = saver.restore_latest(abstract).host
  saver.close()
  restored = History(scope="prompt", window=2)
  restored.restore(host)
  again = [make_group(n, text, [0.0]) for n, text in enumerate(range(4), 2)]
  np.testing.assert_array_equal(
    restored.consume(again), [3.0, np.nan, np.nan, 0.5]
  )


@pytest.mark.parametrize(("scope", "expected"), [("prompt", 4), ("global", 1)])
def test_memory_grows_with_distinct_prompts_alone(scope, expected):
  history = History(scope=scope, window=3)
  for epoch in range(5):
    groups = [make_group(10 * epoch + n, n, [1.0, 0.0]) for n in range(4)]
    history.consume(groups)
  state = history.state()
  assert state["history_counts"].tolist() == [3] * expected
  assert state["history_outcomes"].shape == (3 * expected,)
  assert state["history_keys"].shape == (16 * expected,)
