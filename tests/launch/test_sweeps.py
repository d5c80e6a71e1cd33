"""Sweeps: which runs there are, how many at once, what a second start skips."""

import argparse
import collections
import json
import os
import signal

import launching
import pytest
import trainer_process

from launch import sweeps
from launch.steps import Step
from rl_tpu.config import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:the load_module")

CONFIG = """
import pathlib
import tiny_run
from rl_tpu import config

def get_config():
  run = tiny_run.get_config(pathlib.Path({below!r}), cache={cache!r}, batches=1)
  return config.to_config_dict(run)

def sweep(add):
  for seed in ({seeds}):
    add(seed=seed, **{{"learner.learning_rate": 1e-4}})
"""


@pytest.fixture
def config_file(tmp_path):
  def make(seeds="1, 2"):
    file = tmp_path / "tiny.py"
    file.write_text(
      CONFIG.format(
        below=str(tmp_path / "runs"),
        cache=trainer_process.shared_cache(),
        seeds=f"{seeds},",
      )
    )
    return f"--config={file}"

  return make


def test_runs_follow_from_their_fields(config_file):
  runs = sweeps.read([config_file("1, 2")])
  assert [run.fields["seed"] for run in runs] == [1, 2]
  for run in runs:
    assert f"--config.seed={run.fields['seed']}" in run.flags
    assert "--config.learner.learning_rate=0.0001" in run.flags
    (directory,) = launching.flags_of(run.flags, "--config.directory")
    assert directory.endswith(f"-{run.id}")
  others = {run.id: run.fields for run in sweeps.read([config_file("2, 3")])}
  assert others[runs[1].id] == runs[1].fields


@pytest.mark.parametrize(
  ("seeds", "message"),
  [("1, 1", "adds .* twice"), ("", "adds no run"), ("'a'", "seed")],
)
def test_sweeps_that_make_no_sense_are_refused(config_file, seeds, message):
  flags = [config_file(seeds or "*[]")]
  with pytest.raises(ConfigError, match=message):
    for run in sweeps.read(flags):
      sweeps.Here().check(run)


def test_a_config_without_a_sweep_is_refused():
  with pytest.raises(ConfigError, match="must define sweep"):
    sweeps.read(["--config=experiments/pods/qwen3_8b_v5p64.py"])


class Pretended:
  """Runs that are what a script says, look by look."""

  name, poll_seconds = "pretended", 0.0

  def __init__(self, **outcomes):
    self.outcomes = outcomes  # by seed: how often it runs, and what then
    self.started = collections.Counter()
    self.resumed = []
    self.running, self.most = 0, 0

  def check(self, run):
    pass

  def steps(self, run):
    return [Step(argv=("run", str(run.fields["seed"])))]

  def start(self, run, log, resumed):
    seed = f"seed{run.fields['seed']}"
    self.started[seed] += 1
    if resumed:
      self.resumed.append(seed)
    self.running += 1
    self.most = max(self.most, self.running)
    looks, outcome = self.outcomes.get(seed, (2, "done"))
    return _Pretended(self, iter(["running"] * looks + [outcome]))


class _Pretended:
  def __init__(self, launcher, outcomes):
    self._launcher, self._outcomes = launcher, outcomes

  def outcome(self):
    outcome = next(self._outcomes)
    if outcome == "signal":
      os.kill(os.getpid(), signal.SIGTERM)
      return "running"
    self._launcher.running -= outcome != "running"
    return outcome

  def interrupt(self):
    self._outcomes = iter(["stopped"])
    return True


def run(launcher, flags, path, concurrency=2, dry_run=False):
  options = argparse.Namespace(
    do="start", concurrency=concurrency, state=str(path), dry_run=dry_run
  )
  return sweeps.command(launcher, options, flags)


def states(path):
  runs = json.loads(path.read_text())["runs"].values()
  return {run["fields"]["seed"]: run["state"] for run in runs}


def test_no_more_run_at_once_than_allowed_and_all_run(config_file, tmp_path):
  flags, path = [config_file("1, 2, 3, 4, 5")], tmp_path / "state.json"
  launcher = Pretended()
  assert run(launcher, flags, path, concurrency=2) == 0
  assert launcher.most == 2
  assert states(path) == dict.fromkeys(range(1, 6), "done")


def test_what_is_done_is_skipped_and_what_failed_is_tried_again(
  config_file, tmp_path, capsys
):
  flags, path = [config_file("1, 2, 3")], tmp_path / "state.json"
  assert run(Pretended(seed2=(1, "failed")), flags, path) == 1
  assert states(path) == {1: "done", 2: "failed", 3: "done"}
  capsys.readouterr()
  again = Pretended()
  assert run(again, flags, path) == 0
  assert again.started == {"seed2": 1}
  last = capsys.readouterr().out.splitlines()[-1]
  assert json.loads(last) == {"done": 3, "skipped": 2}
  # Runs that the sweep has now, too.
  more = Pretended()
  assert run(more, [config_file("3, 4")], path) == 0
  assert more.started == {"seed4": 1}


def test_a_launcher_that_was_killed_watches_what_it_had_started(
  config_file, tmp_path
):
  flags, path = [config_file("1, 2, 3")], tmp_path / "state.json"
  described = {"to": "pretended", "flags": flags}
  state = sweeps.State.read(path, described)
  state.set(sweeps.read(flags)[2], "running")
  launcher = Pretended()
  assert run(launcher, flags, path, concurrency=1) == 0
  assert launcher.resumed == ["seed3"]
  assert launcher.started == {"seed1": 1, "seed2": 1, "seed3": 1}


def test_a_signal_stops_and_the_same_command_goes_on(config_file, tmp_path):
  flags, path = [config_file("1, 2, 3")], tmp_path / "state.json"
  assert run(Pretended(seed2=(1, "signal")), flags, path, concurrency=1) == 130
  assert states(path) == {1: "done", 2: "stopped"}
  again = Pretended()
  assert run(again, flags, path) == 0
  assert again.started == {"seed2": 1, "seed3": 1}


def test_a_state_file_of_another_sweep_is_refused(config_file, tmp_path):
  flags, path = [config_file()], tmp_path / "state.json"
  assert run(Pretended(), flags, path) == 0
  with pytest.raises(ConfigError, match="--state is .* choose another file"):
    run(Pretended(), [*flags, "--config.batches=2"], path)


def test_two_launchers_of_one_sweep_do_not_both_start_it(config_file, tmp_path):
  flags, path = [config_file("1")], tmp_path / "state.json"

  class Nested(Pretended):
    def start(self, *arguments):
      with pytest.raises(ConfigError, match="another launcher works on it"):
        run(Pretended(), flags, path)
      return super().start(*arguments)

  nested = Nested()
  assert run(nested, flags, path) == 0
  assert nested.started == {"seed1": 1}


def test_a_run_that_is_refused_keeps_all_others_from_starting(
  config_file, tmp_path
):
  class Refusing(Pretended):
    def check(self, run):
      if run.fields["seed"] == 3:
        raise ConfigError("config.seed is 3")

  launcher, path = Refusing(), tmp_path / "state.json"
  with pytest.raises(ConfigError, match="config.seed is 3"):
    run(launcher, [config_file("1, 2, 3")], path)
  assert not launcher.started and not path.exists()


def test_a_dry_run_prints_what_is_left_and_touches_nothing(
  config_file, tmp_path, capsys
):
  flags, path = [config_file("1, 2, 3")], tmp_path / "state.json"
  run(Pretended(seed2=(1, "failed")), flags, path)
  before = path.read_text()
  capsys.readouterr()
  launcher = Pretended()
  assert run(launcher, flags, path, dry_run=True) == 0
  out = capsys.readouterr().out
  assert "run 2" in out and "run 1" not in out
  assert not launcher.started and path.read_text() == before


def test_runs_of_a_sweep_on_a_cloud_have_names_and_folders_of_their_own():
  cloud = sweeps.Cloud("gke", launching.settings())
  directory = "--config.directory=runs/{name}-abcd0123"
  run = sweeps.Run(
    id="abcd0123",
    fields={"seed": 1},
    flags=(*launching.TWO_SLICES, "--config.seed=1", directory),
  )
  start, status, stop = cloud.steps(run)
  assert "name: try1-abcd0123\n" in start.stdin
  assert "try1-abcd0123-generator-3-0.try1-abcd0123:8470" in start.stdin
  assert "--config.directory=/shared/runs/{name}-abcd0123" in start.stdin
  assert "try1-abcd0123" in status.argv and "try1-abcd0123" in stop.argv


KUBECTL = """#!/usr/bin/env bash
case "$*" in
  *' apply '*) cat > /dev/null; echo apply >> "$LOG"; echo 2 > "$LOG.left" ;;
  *' get '*)
    echo get >> "$LOG"
    left=$(($(cat "$LOG.left") - 1)); echo "$left" > "$LOG.left"
    if [ "$left" = 0 ]; then echo "$END"; fi
    ;;
  *' delete '*) echo delete >> "$LOG" ;;
esac
"""


@pytest.mark.parametrize(
  ("end", "code", "state"), [("Completed", 0, "done"), ("Failed", 1, "failed")]
)
def test_a_run_on_a_cloud_is_watched_to_its_end_and_deleted(
  tmp_path, monkeypatch, end, code, state
):
  kubectl, log = tmp_path / "kubectl", tmp_path / "log"
  kubectl.write_text(KUBECTL)
  kubectl.chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
  monkeypatch.setenv("LOG", str(log))
  monkeypatch.setenv("END", end)
  path = tmp_path / "state.json"
  cloud = sweeps.Cloud("gke", launching.settings())
  cloud.poll_seconds = 0.0
  only = sweeps.Run(
    id="abcd0123", fields={"seed": 1}, flags=launching.TWO_SLICES
  )
  known = sweeps.State.read(path, {})
  assert sweeps.Sweep(cloud, [only], known, 1).run() == code
  assert log.read_text().split() == ["apply", "get", "get", "delete"]
  assert states(path) == {1: state}


@pytest.mark.slow
def test_a_real_sweep_here_is_done_once(config_file, tmp_path):
  command = ["local", "--sweep", config_file("1"), "--generators=0"]
  tests = {"PYTHONPATH": str(launching.ROOT / "tests"), "JAX_PLATFORMS": "cpu"}
  for expected in ({"done": 1, "skipped": 0}, {"done": 1, "skipped": 1}):
    done = launching.launch(
      *command, f"--state={tmp_path}/s.json", env=os.environ | tests
    )
    logs = "".join(log.read_text() for log in tmp_path.glob("s/*.log"))
    assert done.returncode == 0, done.stderr + logs
    assert json.loads(done.stdout.splitlines()[-1]) == expected
  assert logs.count('"batches": 1') >= 1
