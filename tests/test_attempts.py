import asyncio
import itertools
import json
import pathlib

import numpy as np
import pytest

from rl_tpu import attempts
from rl_tpu.attempts import Config
from rl_tpu.envs import Step, math
from rl_tpu.models.tokenizer import ByteTokenizer
from rl_tpu.types import Completion, EpisodeError, Prompt, Sampling

BYTES = ByteTokenizer()
GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.mark.parametrize(
  ("n", "c", "k", "value"),
  [
    (4, 2, 1, 1 / 2),
    (4, 2, 2, 5 / 6),  # 1 - C(2,2)/C(4,2)
    (4, 2, 3, 1.0),  # three of them cannot all be wrong
    (10, 3, 5, 1 - 21 / 252),
    (5, 0, 5, 0.0),
    (1, 1, 1, 1.0),
  ],
)
def test_pass_at_k_is_what_is_computed_by_hand(n, c, k, value):
  assert attempts.pass_at_k(n, c, k) == pytest.approx(value, abs=1e-12)


def test_pass_at_k_is_the_mean_over_all_subsets():
  right = [True, False, False, True, False, False]
  for k in range(1, 7):
    subsets = list(itertools.combinations(right, k))
    mean = sum(map(any, subsets)) / len(subsets)
    assert attempts.pass_at_k(6, 2, k) == pytest.approx(mean, abs=1e-12)


def test_pass_at_more_than_there_are_is_refused():
  with pytest.raises(ValueError, match="k must be in"):
    attempts.pass_at_k(3, 1, 4)


@pytest.mark.parametrize(
  ("answers", "right", "k", "value"),
  [
    (["7", "7", "5"], [1, 1, 0], 3, 1.0),
    (["5", "7", "5"], [0, 1, 0], 3, 0.0),
    (["5", "7"], [0, 1], 2, 0.5),  # a tie
    ([None, None, "7"], [0, 0, 1], 3, 1.0),  # those without one do not vote
    ([None, None], [0, 0], 2, 0.0),
    (["7", "7", "5", "5"], [1, 1, 0, 0], 2, 0.5),  # two runs of two
    (["7", "5", "5"], [1, 0, 0], 1, 1 / 3),
    (["7", "7", "5"], [1, 1, 0], 2, 1.0),  # the third fills no run
  ],
)
def test_the_majority_decides(answers, right, k, value):
  verdicts = [bool(r) for r in right]
  assert attempts.majority_at_k(answers, verdicts, k) == pytest.approx(value)


def test_the_interval_covers_the_mean_as_often_as_it_says():
  rng = np.random.default_rng(1)
  covered = 0
  for _ in range(40):
    low, high = attempts.bootstrap(rng.random(80) < 0.3)
    covered += low <= 0.3 <= high
  assert covered >= 34
  assert attempts.bootstrap([1.0] * 5) == (1.0, 1.0)


class Scripted:
  """Says the byte that its table has for a prompt and a member."""

  def __init__(self, table):
    self.table, self.asked = table, []

  async def generate(self, request, progress):
    self.asked.append((request.prompt_index, request.member))
    tokens = BYTES.encode(self.table[request.prompt_index][request.member])
    tokens = np.append(tokens, BYTES.eos_id).astype(np.int32)
    return Completion(
      tokens=tokens,
      logp=np.zeros(len(tokens), np.float32),
      version=np.full(len(tokens), 3, np.int32),
      stop_reason="stop",
    )


class Judge:
  """The right answer is the prompt's; `!` crashes the judge."""

  def __init__(self, prompt):
    self.prompt = prompt

  async def reset(self):
    return self.prompt.tokens

  async def step(self, action, stop_reason):
    text = BYTES.decode(action[:-1])
    if text == "!":
      raise EpisodeError("judge_crashed", "boom")
    if text == "?":
      raise ZeroDivisionError
    return Step(
      observation=np.zeros(0, np.int32),
      reward=float(text == self.prompt.metadata["answer"]),
      end=True,
      metrics={"length": float(len(text))},
      answer=text,
    )


def attempt(table, right, **settings):
  prompts = [
    Prompt(index=i, tokens=BYTES.encode("q"), metadata={"answer": answer})
    for i, answer in enumerate(right)
  ]
  generator = Scripted(table)
  made = asyncio.run(
    attempts.attempt(
      generator,
      Judge,
      prompts,
      sampling=Sampling(max_tokens=8),
      seed=0,
      max_turns=1,
      max_trajectory_tokens=16,
      attempts=len(table[0]),
      **settings,
    )
  )
  return generator, made


def test_H25_every_question_counts_once_and_failures_are_wrong():
  """The outcomes of four problems: right, right, wrong, crashed."""
  _, made = attempt(["a", "a", "b", "!"], "aaaa")
  figures = attempts.figures(made, Config())
  assert figures["mean"] == figures["pass@1"] == 0.5
  assert (figures["questions"], figures["attempts"]) == (4, 4)
  assert (figures["failed"], figures["failed_judge_crashed"]) == (1, 1)


def test_H25_where_all_crash_the_mean_is_zero_and_says_so():
  _, made = attempt(["!", "?"], "aa")
  figures = attempts.figures(made, Config())
  assert figures["mean"] == 0.0
  assert figures["failed"] == 2
  assert (figures["failed_judge_crashed"], figures["failed_raised"]) == (1, 1)


@pytest.mark.parametrize("running", [None, 1, 3])
def test_every_attempt_at_every_question_is_made_exactly_once(running):
  table = ["abab", "bbaa", "!aba"]
  ended = []
  generator, made = attempt(table, "aab", running=running, ended=ended.append)
  everything = [(q, m) for q in range(3) for m in range(4)]
  assert sorted(generator.asked) == everything
  assert [(a.question, a.member) for a in made] == everything
  assert sorted((a.question, a.member) for a in ended) == everything
  figures = attempts.figures(made, Config(attempts=4, ks=(1, 2, 4)))
  # right: 2, 2, 1 (and one crash) of 4
  assert figures["mean"] == pytest.approx(5 / 12)
  assert figures["pass@2"] == pytest.approx((5 / 6 + 5 / 6 + 1 / 2) / 3)
  assert figures["pass@4"] == 1.0
  # Ties in the first two; in the third a, b, a: the wrong one.
  assert figures["maj@4"] == pytest.approx((0.5 + 0.5 + 0.0) / 3)
  assert figures["env_length"] == 1.0


def test_a_line_of_the_results_holds_what_was_said_and_why_it_failed():
  _, made = attempt(["ab", "??"], ["ab", "b"])
  right, wrong = (
    json.loads(json.dumps(attempts.record(a, BYTES)))
    for a in (made[0], made[-1])
  )
  assert right["turns"] == [["policy", "a"]]
  assert (right["reward"], right["answer"]) == (0.0, "a")
  assert (right["prompt"], right["version"]) == ("q", 3)
  assert (wrong["kind"], wrong["reward"]) == ("raised", 0.0)
  assert "ZeroDivisionError" in wrong["error"]


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"attempts": 0}, "evaluate.attempts is 0"),
    ({"attempts": 2, "ks": (1, 3)}, "evaluate.ks is"),
    ({"problems": 0}, "evaluate.problems is 0"),
    ({"temperature": -1.0}, "evaluate.temperature is -1.0"),
    ({"split": "test"}, "evaluate.split is 'test'"),
  ],
)
def test_settings_out_of_range_are_refused(fields, message):
  with pytest.raises(ValueError, match=message):
    Config(**fields)


def test_200_stored_answers_are_judged_as_the_reference_scorer_judges_them(
  tmp_path,
):
  stored = [
    json.loads(line)
    for line in (GOLDEN / "answers.jsonl").read_text().splitlines()
  ]
  path = tmp_path / "questions.jsonl"
  path.write_text(json.dumps({"question": "1?", "answer": "1"}) + "\n")
  task = math.Task(math.Config(path=str(path), verify_seconds=60.0), BYTES)
  prompts = [
    task.prompt({"question": f"{i}?", "answer": row["truth"]}, i)
    for i, row in enumerate(stored)
  ]
  made = asyncio.run(
    attempts.attempt(
      Scripted([[row["text"]] for row in stored]),
      task.environment,
      prompts,
      sampling=Sampling(max_tokens=512),
      seed=0,
      max_turns=1,
      max_trajectory_tokens=1024,
    )
  )
  assert [bool(one.reward) for one in made] == [row["right"] for row in stored]
  figures = attempts.figures(made, Config())
  assert figures["pass@1"] == figures["mean"] == 134 / 200
  assert figures["env_verifier_failed"] == figures["failed"] == 0
