r"""Final answers: where they are found, and when they are right."""

import asyncio
import concurrent.futures

import pytest

from rl_tpu.rewards.answers import extract
from rl_tpu.rewards.workers import Workers
from rl_tpu.types import EpisodeError

SCORE = "rl_tpu.rewards.answers:math_score"


@pytest.fixture(scope="module")
def score():
  workers = Workers(SCORE, count=1, seconds=5.0)
  yield workers
  workers.close()


@pytest.mark.parametrize(
  ("text", "answer"),
  [
    (r"first \boxed{5}, no: \boxed{7}", "7"),
    (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (r"\boxed{3", None),
    (r"\boxed{5} or \boxed{3", "5"),
    ("the number 42 appears", None),
    (r"<answer>\boxed{42}</answer>", "42"),
    (r"\boxed{}", None),
    (r"\boxed {137}", "137"),
  ],
)
def test_H19_the_answer_is_what_the_last_closed_box_holds(text, answer):
  assert extract(text, "boxed") == answer


def test_H19_tags_may_hold_a_box():
  assert extract(r"<answer>\boxed{42}</answer>", "tags") == "42"
  text = "<answer>1</answer> no, <answer> 137 </answer>"
  assert extract(text, "tags") == "137"
  assert extract(r"\boxed{4}", "tags") is None
  assert extract("<answer></answer>", "tags") is None
  assert extract(" 7 ", "whole") == "7"


def test_H18_a_fraction_is_right_whatever_thread_asks(score):
  # Workers call the verifier from the main thread of their own process.
  def ask():
    return asyncio.run(score(r"\boxed{\frac{1}{3}}", "1/3", "boxed"))

  assert ask() == 1.0
  with concurrent.futures.ThreadPoolExecutor(1) as threads:
    assert threads.submit(ask).result() == 1.0


@pytest.mark.parametrize(
  ("answer", "truth", "right"),
  [
    (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
    (r"\boxed{7}", "8", 0.0),
    (r"\boxed{5, 7}", "7", 0.0),
    (r"7", "7", 0.0),
    (r"\boxed{\frac{}{}}", "7", 0.0),
  ],
)
def test_equal_answers_are_right_and_others_wrong(score, answer, truth, right):
  assert asyncio.run(score(answer, truth, "boxed")) == right


def test_X15_five_answers_have_five_scores_in_their_order(score):
  answers = [r"\boxed{137}", r"\boxed{{", "?", r"\boxed{1}", r"\boxed{137.}"]

  async def main():
    return await asyncio.gather(*(score(a, "137", "boxed") for a in answers))

  assert asyncio.run(main()) == [1.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.slow
def test_H18_an_answer_that_hangs_the_verifier_costs_its_limit_only():
  score = Workers(SCORE, count=1, seconds=3.0)
  texts = ["9^{9^{9^{9}}}", "(10^{9})!", r"\frac{10^{10^{10}}}{3}"]

  async def main():
    return await asyncio.gather(
      *(score(rf"\boxed{{{t}}}", "7", "boxed") for t in texts),
      score(r"\boxed{\frac{14}{2}}", "7", "boxed"),
      return_exceptions=True,
    )

  *bad, good = asyncio.run(main())
  score.close()
  assert good == 1.0
  for one in bad:
    assert one == 0.0 or (
      isinstance(one, EpisodeError)
      and one.kind in ("reward_timeout", "reward_raised")
    )
