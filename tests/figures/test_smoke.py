"""All studies at scale smoke: measured, judged and drawn from nothing."""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from rl_tpu import figures

REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_every_study_is_measured_judged_and_drawn(tmp_path):
  (tmp_path / "experiments").symlink_to(REPOSITORY / "experiments")
  done = subprocess.run(
    [sys.executable, "-m", "rl_tpu", "figures", "all", "--scale=smoke"],
    cwd=tmp_path,
    env=os.environ
    | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  result = json.loads(done.stdout.splitlines()[-1])
  studies = figures.find(REPOSITORY / "experiments")
  assert result["unfinished"] == []
  judged = itertools.chain.from_iterable(result["artefacts"].values())
  assert sorted(judged) == sorted(
    f"{study.folder} {name}" for study in studies for name in study.claims
  )
  for study in studies:
    picture = tmp_path / study.picture("smoke").with_suffix(".png")
    assert picture.stat().st_size > 1000
