"""PPO around the behavior policy, by hand and against a slow loop."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu import algorithms
from rl_tpu.algorithms import ppo


def slow_loss(target, behavior, advantages, config):
  total = 0.0
  for logp, sampled, advantage in zip(
    target, behavior, advantages, strict=True
  ):
    ratio = math.exp(logp - sampled)
    held = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    loss = max(-ratio * advantage, -held * advantage)
    if config.dual_clip and advantage < 0:
      loss = min(loss, -config.dual_clip * advantage)
    total += loss
  return total


@pytest.mark.parametrize(
  "config",
  [
    ppo.Config(),
    ppo.Config(clip_low=0.4, clip_high=0.1),
    ppo.Config(dual_clip=1.5),
  ],
  ids=str,
)
def test_the_loss_equals_the_slow_loop(build, config):
  generator = np.random.default_rng(0)
  behavior = -generator.uniform(0.1, 3.0, 50)
  target = np.minimum(behavior + generator.normal(0, 0.6, 50), 0.0)
  advantages = generator.normal(size=50)
  numbers = [x.tolist() for x in (target, behavior, advantages)]
  loss, _ = ppo.loss(*build(*numbers), config)
  assert loss.total == pytest.approx(slow_loss(*numbers, config), rel=1e-5)
  assert loss.count == 50


def test_a_stale_token_is_held_back_even_before_the_first_update(
  build, gradient
):
  """Why the clip's centre matters: staleness alone makes it bind."""
  outputs, batch = build([-1.0], [-2.0], [1.0])
  _, metrics = ppo.loss(outputs, batch, ppo.Config())
  assert metrics["clip_fraction"].mean(empty=0.0) == 1.0
  assert gradient(ppo, outputs, batch, ppo.Config()).tolist() == [0.0]


def test_the_entropy_bonus_is_paid_for_action_tokens_only_if_asked(build):
  outputs, batch = build([-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0])
  outputs = dataclasses.replace(outputs, entropy=jnp.array([[9.0, 0.5, 0.7]]))
  config = ppo.Config(entropy_coefficient=0.1)
  assert algorithms.requires(ppo, ppo.Config()) == frozenset()
  assert algorithms.requires(ppo, config) == {"entropy"}
  plain, _ = ppo.loss(outputs, batch, ppo.Config())
  loss, metrics = ppo.loss(outputs, batch, config)
  assert loss.total == pytest.approx(float(plain.total) - 0.12, rel=1e-6)
  assert metrics["entropy"].mean(empty=0.0) == pytest.approx(0.6)

  def total(entropy):
    live = dataclasses.replace(outputs, entropy=entropy)
    return ppo.loss(live, batch, config)[0].total

  slopes = jax.grad(total)(outputs.entropy)
  np.testing.assert_allclose(slopes, [[0.0, -0.1, -0.1]], rtol=1e-6)


@pytest.mark.parametrize(
  ("field", "value", "allowed"),
  [
    ("clip_low", 1.5, r"in \(0, 1\]"),
    ("clip_high", -0.1, "> 0"),
    ("dual_clip", 1.0, "> 1 or None"),
    ("baseline", "critic", "leave_one_out"),
    ("entropy_coefficient", -0.1, ">= 0"),
  ],
)
def test_the_config_names_field_value_and_what_is_allowed(
  field, value, allowed
):
  message = f"ppo.Config.{field} is {value!r}; it must be .*{allowed}"
  with pytest.raises(ValueError, match=message):
    ppo.Config(**{field: value})
