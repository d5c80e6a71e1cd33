"""The style bandit: styles, preferences, and when they switch."""

import pytest
from attempt import TOKENIZER, attempt, demonstrated

from rl_tpu.data import HELDOUT_INDEX
from rl_tpu.envs import style_bandit
from rl_tpu.envs.style_bandit import Config, Task

ROW = {"word": "dog"}
GOOD = {"academic": "Adog", "cute": "Cdogdog", "chuunibyou": "Ugdo"}
GOOD["classical"] = "Lgod"


@pytest.fixture(scope="module")
def task():
  return Task(Config(phase_prompts=10), TOKENIZER)


@pytest.mark.parametrize(
  ("index", "preferred"),
  [
    (0, "cute"),
    (9, "cute"),
    (10, "chuunibyou"),
    (20, "classical"),
    (999, "classical"),
    (HELDOUT_INDEX, "cute"),
    (HELDOUT_INDEX + 1, "chuunibyou"),
    (HELDOUT_INDEX + 5, "classical"),
  ],
)
def test_the_preference_is_that_of_the_prompts_index(task, index, preferred):
  for style, text in GOOD.items():
    _, step, counted = attempt(task, ROW, text, index=index)
    assert step.reward == float(style == preferred)
    offered = style in style_bandit.CANDIDATES[task.phase(index)]
    assert counted[f"style_{style}"] == float(offered)


def test_the_candidates_change_with_the_third_phase(task):
  shown = [
    set(TOKENIZER.decode(task.prompt(ROW, index).tokens)[:3])
    for index in (0, 10, 20)
  ]
  assert shown == [set("ACU"), set("ACU"), set("LCU")]


def test_a_style_without_quality_earns_nothing(task):
  for text in ("Cdog", "dogdog", "Cdogdog ", ""):
    _, step, counted = attempt(task, ROW, text)
    assert step.reward == 0.0 and not any(counted.values())


def test_demonstrations_prefer_no_style_and_wrong_ones_have_no_quality(task):
  right = {demonstrated(task, ROW, seed)[1] for seed in range(60)}
  assert right == set(GOOD.values())
  for seed in range(30):
    assert demonstrated(task, ROW, seed, wrong=1.0)[1] not in GOOD.values()


def test_values_out_of_range_are_refused():
  with pytest.raises(
    ValueError, match="style_bandit.Config.phase_prompts is 0"
  ):
    Config(phase_prompts=0)
