import pathlib
import subprocess
import sys

import pytest

from rl_tpu import ownership
from rl_tpu.config import ConfigError

ROOT = pathlib.Path(__file__).parent.parent
HOLDER = """
import pathlib, sys
from rl_tpu import ownership
with ownership.held(pathlib.Path(sys.argv[1])):
  print("held", flush=True)
  sys.stdin.read()
"""


def test_a_second_run_is_told_who_holds_the_directory(tmp_path):
  directory = tmp_path / "run"
  with subprocess.Popen(
    [sys.executable, "-c", HOLDER, directory],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as holder:
    assert holder.stdout.readline() == "held\n"
    with (
      pytest.raises(ConfigError, match=f"process {holder.pid} on .* trains in"),
      ownership.held(directory),
    ):
      pass
    holder.kill()
    holder.wait()
    with ownership.held(directory):  # The kernel has freed it.
      pass


def test_a_run_that_ended_leaves_the_directory_free(tmp_path):
  for _ in range(2):
    with ownership.held(tmp_path):
      assert len((tmp_path / "lock").read_text().splitlines()) == 1


@pytest.mark.parametrize(
  ("resume", "newest", "message"),
  [
    ("never", pathlib.Path("20"), "'never', but run holds checkpoint 20"),
    ("must", None, "'must', but run holds no checkpoint"),
    ("never", None, None),
    ("must", pathlib.Path("20"), None),
    ("auto", pathlib.Path("20"), None),
    ("auto", None, None),
  ],
)
def test_resuming_is_refused_where_it_is_not_wanted(resume, newest, message):
  directory = pathlib.Path("run")
  if message is None:
    ownership.check(resume, directory, newest)
    return
  with pytest.raises(ConfigError, match=message):
    ownership.check(resume, directory, newest)
