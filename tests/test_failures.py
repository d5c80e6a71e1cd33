"""A failure is shown once, with the lines of whoever can mend it."""

import pytest

from rl_tpu.failures import EpisodesFailed, Failures, ending
from rl_tpu.types import EpisodeError


def failed(call):
  with pytest.raises(Exception) as caught:
    call()
  return caught.value


def scorer(row):
  return {}[row]


def test_a_failure_is_shown_once_with_its_lines_and_then_counted(caplog):
  told = Failures()
  for number, row in enumerate("abc"):
    told.add(f"prompt {number}", failed(lambda row=row: scorer(row)))
  told.add("prompt 3", failed(lambda: 1 // 0))
  assert caplog.text.count("return {}[row]") == 1
  assert "prompt 0: KeyError('a')" in caplog.text
  assert "prompt 3: ZeroDivisionError" in caplog.text
  assert "more times" not in caplog.text
  told.close()
  assert caplog.text.count("more times") == 1
  assert "the same 2 more times: KeyError('a')" in caplog.text
  assert told.first == "KeyError('a')"


def test_an_error_of_an_episode_says_itself_what_is_the_same(caplog):
  told = Failures()
  for answer in "xy":
    told.add(
      answer,
      EpisodeError("kind", f"of {answer}", same="line 3", detail="  line 3"),
    )
  told.add("z", EpisodeError("kind", "of z", same="line 4"))
  assert "x: kind: of x\n  line 3" in caplog.text
  assert "of y" not in caplog.text and "of z" in caplog.text


def test_what_ended_a_run_is_found_behind_other_errors():
  cause = EpisodesFailed("8 groups")
  outer = RuntimeError("no batch will come")
  outer.__cause__ = cause
  assert ending(outer) is cause
  assert ending(RuntimeError("other")) is None
