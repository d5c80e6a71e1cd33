"""The learner's benchmark, on a model and batches of next to nothing."""

import json

import pytest

from experiments.benchmarks import learner


@pytest.mark.slow
def test_the_learner_benchmark_measures_itself_without_peers(
  capsys, monkeypatch
):
  monkeypatch.setenv("NPROC", "1")
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  learner.main(
    "--peers=none --model=tiny --rows=4 --group=2 --prompt=8 --new=4 "
    "--most=24 --microbatch=64 --repeats=1 --tails=1".split()
  )
  figures = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert set(figures["fixed"]) == {"rl_tpu", "ceiling"}
  for name in ("ratio_fixed", "ratio_longtail", "ratio_grpo_step"):
    assert figures[name] is None  # There is nothing to compare with.
  assert figures["packed_over_padded"] > 0
  assert 0 < figures["ceiling_share"] < 1
  for part in ("fixed", "longtail"):
    assert figures[part]["rl_tpu"]["tokens_per_cpu_second"] > 0
  assert figures["step"]["rl_tpu"]["first"] > 0


def test_a_ratio_is_to_the_better_peer():
  results = {
    "rl_tpu": {"rate": 3.0, "cpu_seconds": 2.0},
    "hf": {"rate": 2.0, "cpu_seconds": 4.0},
    "tunix": {"rate": 1.0, "cpu_seconds": 5.0},
  }
  fastest = learner.best(results, "rate", max, ["hf", "tunix"])
  assert learner.over(results, "rate", fastest) == 1.5
  least = learner.best(results, "cpu_seconds", min, ["hf", "tunix"])
  assert learner.over(results, "cpu_seconds", least) == 0.5
