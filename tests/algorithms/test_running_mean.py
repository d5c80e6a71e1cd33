"""Running means by hand, from the history to the loss."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu.algorithms import running_mean, sao
from rl_tpu.history import History
from rl_tpu.packing import pack
from rl_tpu.types import Group, PolicyOutputs, Prompt, Trajectory

Config = running_mean.Config


def group(index, token, *outcomes):
  """A prompt of one token; each member answers with two."""
  prompt = Prompt(index=index, tokens=np.array([token], np.int32))
  mask = np.array([False, True, True])
  trajectories = tuple(
    Trajectory(
      prompt_id=index,
      group_id=index,
      member=member,
      tokens=np.array([token, 5, 6], np.int32),
      action_mask=mask,
      behavior_logp=np.where(mask, -1.0, 0.0).astype(np.float32),
      token_version=np.where(mask, 0, -1).astype(np.int32),
      rewards=np.array([0.0, 0.0, outcome], np.float32),
    )
    for member, outcome in enumerate(outcomes)
  )
  return Group(prompt=prompt, trajectories=trajectories)


def consume(history, *groups):
  """The batch as the learner gets it; a trajectory a row, in order."""
  trajectories = [t for group in groups for t in group.trajectories]
  baselines = history.consume(groups)
  return pack(trajectories, row_length=3, version=0, baselines=baselines)


def advantages(config, batch):
  """One number a trajectory, all its action tokens having the same."""
  outputs = PolicyOutputs(target_logp=batch.behavior_logp)
  result = np.asarray(running_mean.advantages(batch, outputs, config))
  assert not result[:, 0].any()
  np.testing.assert_array_equal(result[:, 1], result[:, 2])
  order = np.argsort(np.asarray(batch.trajectory_ids)[:, 0])
  padding = int((batch.trajectory_ids[:, 0] < 0).sum())
  return result[order][padding:, 1].tolist()


def run(config, *batches):
  """Advantages of each batch, the history carried from one to the next."""
  history = History(scope=config.scope, window=config.history_window)
  return [advantages(config, consume(history, *groups)) for groups in batches]


def test_a_prompt_is_compared_with_its_own_last_outcomes():
  first, second, third = run(
    Config(scope="prompt", window=2),
    [group(0, 7, 1.0), group(1, 8, 0.0)],
    [group(2, 7, 0.0), group(3, 8, 4.0)],
    [group(4, 7, 3.0), group(5, 8, 1.0)],
  )
  assert first == [0.5, -0.5]  # Both unseen: less the batch's mean.
  assert second == [-1.0, 4.0]
  assert third == [2.5, -1.0]


def test_the_oldest_outcome_leaves_a_full_window():
  outcomes = [8.0, 2.0, 4.0, 0.0]
  batches = [[group(n, 7, outcome)] for n, outcome in enumerate(outcomes)]
  assert run(Config(window=2), *batches)[-1] == [0.0 - 3.0]
  assert run(Config(window=3), *batches)[-1] == [pytest.approx(-14 / 3)]


def test_all_prompts_share_one_window_in_scope_global():
  first, second, third = run(
    Config(scope="global", window=3),
    [group(0, 7, 1.0), group(1, 8, 0.0)],
    [group(2, 9, 0.0), group(3, 8, 4.0)],
    [group(4, 6, 1.0)],
  )
  assert first == [0.5, -0.5]
  assert second == [-0.5, 3.5]
  assert third == [pytest.approx(1.0 - 4.0 / 3.0)]  # Of 0, 0 and 4.


def test_the_papers_windows_are_the_defaults():
  assert Config().history_window == 8
  assert Config(scope="global").history_window == 128
  assert Config(scope="global", window=9).history_window == 9


def test_no_trajectory_is_in_the_baseline_of_its_own_batch():
  first, second = run(
    Config(scope="prompt"),
    [group(0, 7, 1.0)],
    [group(1, 7, 0.0, 4.0), group(2, 7, 2.0)],
  )
  assert first == [0.0]
  assert second == [-1.0, 3.0, 1.0]


def test_what_has_no_history_is_compared_with_its_batch_or_skipped():
  batches = [group(0, 7, 4.0)], [group(1, 7, 5.0), group(2, 8, 2.0)]
  assert run(Config(), *batches)[1] == [1.0, -1.5]
  assert run(Config(unseen="skip"), *batches)[1] == [1.0, 0.0]


def test_unused_places_of_a_batch_are_in_no_mean():
  groups = [group(n, n, float(n)) for n in range(5)]  # N is 6.
  assert run(Config(), groups) == [[-2.0, -1.0, 0.0, 1.0, 2.0]]


def test_whitening_leaves_out_what_is_skipped():
  batches = (
    [group(0, 7, 1.0), group(1, 8, 1.0)],
    [group(2, 7, 1.0), group(3, 8, 5.0), group(4, 9, 3.0)],
  )
  _, second = run(Config(whiten=True, unseen="skip"), *batches)
  np.testing.assert_allclose(second, [-1.0, 1.0, 0.0], rtol=1e-6)
  _, second = run(Config(whiten=True), *batches)
  assert sum(second) == pytest.approx(0.0, abs=1e-6)
  assert second[2] != 0.0


def with_baselines(batch, *baselines):
  return dataclasses.replace(batch, baselines=jnp.array(baselines))


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_outside_the_band_a_token_has_no_gradient_whatever_the_sign(
  build, gradient, advantage
):
  ratios = [0.69, 0.71, 5.9, 6.1]
  behavior = [-1.0 - math.log(ratio) for ratio in ratios]
  outputs, batch = build([-1.0] * 4, behavior, [advantage] * 4)
  batch = with_baselines(batch, 0.0)
  slopes = gradient(running_mean, outputs, batch, Config())
  expected = [-advantage * weight for weight in (0.0, 0.71, 5.9, 0.0)]
  np.testing.assert_allclose(slopes, expected, rtol=1e-5)
  loss, metrics = running_mean.loss(outputs, batch, Config())
  assert loss.count == 4
  assert metrics["clip_fraction"].total == 2
  narrow = Config(epsilon_low=0.2, epsilon_high=3.0)
  slopes = gradient(running_mean, outputs, batch, narrow)
  assert not slopes.any()


def test_with_equal_advantages_the_loss_is_that_of_sao(build, gradient):
  generator = np.random.default_rng(0)
  target, behavior = -generator.uniform(0.1, 4.0, (2, 40))
  advantages = generator.normal(size=40)
  outputs, batch = build(
    target.tolist(), behavior.tolist(), advantages.tolist()
  )
  batch = with_baselines(batch, 0.0)
  expected = gradient(sao, outputs, batch, sao.Config())
  assert 0 < (expected == 0).sum() < 40
  slopes = gradient(running_mean, outputs, batch, Config())
  np.testing.assert_allclose(slopes, expected, rtol=1e-6)
  loss, _ = running_mean.loss(outputs, batch, Config())
  saos, _ = sao.loss(outputs, batch, sao.Config())
  np.testing.assert_allclose(loss.total, saos.total, rtol=1e-6)


def test_how_much_has_a_running_mean_is_measured():
  history = History(scope="prompt", window=8)
  consume(history, group(0, 7, 1.0))
  batch = consume(history, group(1, 7, 1.0), group(2, 8, 1.0), group(3, 9, 1.0))
  outputs = PolicyOutputs(target_logp=batch.behavior_logp)
  batch = dataclasses.replace(batch, advantages=batch.rewards)
  _, metrics = running_mean.loss(outputs, batch, Config())
  known = metrics["known_baseline"]
  assert (float(known.total), float(known.count)) == (2.0, 6.0)


def test_a_batch_that_was_packed_without_baselines_is_refused():
  batch = consume(History(scope="prompt", window=8), group(0, 7, 1.0))
  batch = dataclasses.replace(batch, baselines=None)
  with pytest.raises(ValueError, match=r"batch\.baselines is None"):
    advantages(Config(), batch)


@pytest.mark.parametrize(
  ("field", "value", "allowed"),
  [
    ("scope", "batch", "one of"),
    ("window", 0, ">= 1 or None"),
    ("unseen", "zero", "one of"),
    ("epsilon_low", 1.1, r"in \(0, 1\]"),
    ("epsilon_high", 0.0, "> 0"),
  ],
)
def test_an_impossible_field_is_refused_by_name(field, value, allowed):
  message = rf"running_mean\.Config\.{field} is {value!r}; .*{allowed}"
  with pytest.raises(ValueError, match=message):
    Config(**{field: value})
