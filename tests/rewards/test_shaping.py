"""Shaping, worked by hand."""

import dataclasses

import numpy as np
import pytest

from rl_tpu.rewards.shaping import Config, shape, turn_ends
from rl_tpu.types import Trajectory


def trajectory(mask, rewards):
  mask = np.array(mask, bool)
  return Trajectory(
    prompt_id=0,
    group_id=0,
    member=0,
    tokens=np.zeros(len(mask), np.int32),
    action_mask=mask,
    behavior_logp=np.zeros(len(mask), np.float32),
    token_version=np.where(mask, 0, -1),
    rewards=np.array(rewards, np.float32),
  )


TWO_TURNS = trajectory([0, 1, 1, 0, 1], [0, 0, 0.5, 0, 1])


def shaped(one, **fields):
  return shape(one, Config(**fields)).rewards.tolist()


def test_as_it_stands_nothing_changes():
  assert shape(TWO_TURNS, Config()) is TWO_TURNS
  assert shaped(TWO_TURNS, high=9.0) == TWO_TURNS.rewards.tolist()


def test_every_turn_is_shifted_scaled_then_clipped():
  assert shaped(TWO_TURNS, bias=-0.75, scale=4.0, low=-0.5, high=2) == [
    *(0, 0, -0.5, 0),
    1.0,
  ]


@pytest.mark.parametrize(
  ("tokens", "penalty"), [(4, 0.0), (5, 0.25), (6, 0.5), (8, 1.0), (9, 1.0)]
)
def test_the_overlong_penalty_grows_to_all_of_it_and_lies_on_the_last_action(
  tokens, penalty
):
  one = trajectory([0] + [1] * tokens, [0] * tokens + [1])
  got = shaped(one, overlong_penalty=1.0, overlong_from=4, overlong_to=8)
  assert got == [0] * tokens + [1 - penalty]


def test_the_penalty_counts_the_actions_of_all_turns_and_nothing_else():
  got = shaped(TWO_TURNS, overlong_penalty=1.0, overlong_from=2, overlong_to=4)
  assert got == [0, 0, 0.5, 0, 0.5]


def test_a_turn_gets_a_discounted_share_of_what_came_after_it():
  three = trajectory([0, 1, 0, 1, 0, 1], [0, 1, 0, 0, 0, 4])
  assert shaped(three, turn_discount=0.5) == [0, 2, 0, 2, 0, 4]
  assert shaped(three, turn_discount=0.0) == three.rewards.tolist()


def test_X20_an_outcome_stays_on_the_last_action_token():
  cut = trajectory([0, 1, 1, 0, 0], [0, 0, 1, 0, 0])
  assert turn_ends(cut.action_mask).tolist() == [2]
  assert shaped(cut, scale=3.0) == [0, 0, 3, 0, 0]


def test_nothing_but_the_rewards_is_touched():
  after = shape(TWO_TURNS, Config(scale=2.0))
  for field in dataclasses.fields(Trajectory):
    if field.name not in ("rewards", "metrics"):
      assert getattr(after, field.name) is getattr(TWO_TURNS, field.name)
  assert TWO_TURNS.rewards[-1] == 1
  assert after.metrics == {"unshaped_reward": 1.5}


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"scale": 0.0}, "shaping.scale is 0.0"),
    ({"bias": float("nan")}, "shaping.bias"),
    ({"low": 1.0, "high": 0.0}, "shaping.high is 0.0; it must be >= low"),
    ({"overlong_penalty": -1.0}, "overlong_penalty is -1.0"),
    ({"overlong_penalty": 1.0}, "overlong_to is 0; it must be > overlong_from"),
    ({"turn_discount": 1.5}, "turn_discount is 1.5"),
  ],
)
def test_values_out_of_range_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    Config(**fields)
