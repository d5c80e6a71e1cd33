"""The soak, for as long as a test may take."""

import asyncio
import dataclasses

import pytest

from experiments.benchmarks import soak, soak_samples, soak_server
from experiments.benchmarks.soak_plan import MAY_END, WAYS


@pytest.mark.slow
def test_200_requests_with_cancels_disconnects_and_updates_leave_nothing(
  tmp_path,
):
  figures = asyncio.run(soak.soak(200, seed=1, directory=tmp_path))
  assert figures["faults"] == []
  assert figures["requests"] >= 200
  assert set(figures["ways"]) == set(WAYS)
  assert set(figures["reasons"]) == {r for may in MAY_END.values() for r in may}
  assert set(figures["meddled"]) == {"update", "spoil", "pause"}
  assert figures["checked"] > 50
  (_, first), *_, (_, last) = figures["memory"]
  assert last - first < 32 * 1024


def test_a_line_through_the_second_half_gives_the_slope():
  flat = [(n, 5000 - n) for n in range(0, 100, 10)]
  rising = [(n, 2 * n) for n in range(100, 210, 10)]
  assert round(soak.slope(flat + rising), 6) == 2000


def test_what_is_held_at_the_end_is_a_fault():
  service = dict.fromkeys(
    ("busy_slots", "waiting", "open", "ended_again", "cancellations"), 0
  )
  held = {
    "files": 9,
    "services": {"keep": {**service, "taken": 3, "completions": 3}},
  }
  assert soak.leaks(held, {"files": 9}) == []
  held["services"]["keep"] |= {"busy_slots": 1, "taken": 4}
  assert soak.leaks(held, {"files": 8}) == [
    "files are 9; they were 8",
    "keep: busy_slots is 1",
    "keep: 4 were taken, 3 ended",
  ]


def test_an_answer_of_other_weights_or_another_text_is_a_fault(tmp_path):
  weights = soak.Weights(tmp_path)
  tokens = [50, 60, 70]
  logp, _ = soak_samples.forward(
    weights.params[1], soak_samples.padded([2, *tokens]), 1.0
  )
  told = soak_samples.Sample(
    service="recompute",
    prompt=[2],
    tokens=tokens,
    logp=logp[0, 1:4].tolist(),
    versions=[1] * 3,
    temperature=1.0,
    stop=(),
    text=soak_server.TOKENIZER.decode(tokens),
  )
  assert soak_samples.fault(told, weights.params) is None
  for change in ({"versions": [1, 2, 1]}, {"text": "x"}):
    wrong = dataclasses.replace(told, **change)
    assert soak_samples.fault(wrong, weights.params) is not None
