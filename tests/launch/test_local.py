"""The local launcher: parts that pretend, then one real trainer of two."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import trainer_process

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAKE = pathlib.Path(__file__).parent / "fake_run.py"
WORKS = "print('trained'); print('{\"done\": 1}')"
CONFIG = """
import pathlib
import tiny_run
from rl_tpu import algorithms, config, parts, sharding, transport

def get_config():
  mesh = sharding.MeshShape(data=2)
  loss = algorithms.get({algorithm!r}).Config(**{settings})
  return config.to_config_dict(
    tiny_run.get_config(
      pathlib.Path({below!r}),
      cache={cache!r},
      batches=1,
      schedule="async",
      devices=parts.Devices(trainer=mesh),
      algorithm=config.Choice(name={algorithm!r}, config=loss),
      transport=transport.Config(kind={transport!r}),
    )
  )
"""
SERVES = "print('serving'); forever()"


def start(trainers, generators=(), restarts=0, grace=60):
  return subprocess.Popen(
    [
      *(sys.executable, FAKE, str(restarts), str(grace)),
      *(json.dumps(list(trainers)), json.dumps(list(generators))),
    ],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def launch(*arguments, **settings):
  """Exit code and lines of a run of parts that pretend."""
  process = start(*arguments, **settings)
  lines = process.communicate(timeout=60)[0].splitlines()
  return process.returncode, lines


def pids_in(lines):
  return [int(pid) for line in lines for pid in re.findall(r"pid (\d+)", line)]


def alive(pid):
  try:
    status = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return False
  return status.rpartition(")")[2].split()[0] != "Z"


def test_lines_have_names_and_the_last_is_the_trainers_json():
  code, lines = launch([WORKS, "print('followed')"], [SERVES])
  assert code == 0
  assert lines[-1] == '{"done": 1}'
  for line in ("[trainer 0] trained", "[trainer 1] followed"):
    assert line in lines


@pytest.mark.parametrize(
  ("end", "code"),
  [
    ("sys.exit(3)", 3),
    ("os.kill(os.getpid(), 9)", 137),
    ("sys.exit(130)", 130),
  ],
)
def test_the_first_failures_exit_code_is_the_launchers(end, code):
  # The other one ends because this one did, as processes of a trainer do.
  ends_too = "time.sleep(0.5); sys.exit(1)"
  assert launch([ends_too, end], [SERVES])[0] == code


def test_no_process_stays_that_a_part_has_started():
  child = "c = subprocess.Popen([sys.executable, '-c', 'import time; "
  child += "time.sleep(3600)'], stdout=subprocess.DEVNULL, "
  child += "stderr=subprocess.DEVNULL); print('pid', c.pid, flush=True)"
  code, lines = launch([f"{child}; {WORKS}"], [f"{child}; forever()"] * 2)
  assert code == 0
  pids = pids_in(lines)
  assert pids and not any(map(alive, pids))


def test_a_dead_generator_is_started_again():
  dies_once = "first() and sys.exit(5); print('again', flush=True); forever()"
  trains = "time.sleep(2); " + WORKS
  code, lines = launch([trains], [dies_once], restarts=1)
  assert code == 0
  assert "[generator 0] again" in lines
  assert "[launcher] generator 0 ended with exit code 5" in lines


def test_a_generator_that_dies_too_often_stops_the_trainer():
  stops = "signal.signal(15, lambda *_: (print('saved'), sys.exit(130)))"
  code, lines = launch(
    [f"{stops}\nforever()"], ["time.sleep(1); sys.exit(5)"], restarts=1
  )
  assert code == 5
  assert "[trainer 0] saved" in lines


def test_a_dead_trainer_goes_on_as_a_whole():
  dies_once = f"first() and sys.exit(1)\n{WORKS}"
  leaves = "first() and sys.exit(1)\nprint('followed')"
  code, lines = launch([leaves, dies_once], [SERVES], restarts=1)
  assert code == 0
  assert "[trainer 0] followed" in lines and "[trainer 1] trained" in lines


def test_a_generator_that_dies_while_the_trainer_does_is_not_forgotten():
  slow = f"first() and (time.sleep(1), sys.exit(1))\n{WORKS}"
  dies = "first() and (time.sleep(0.3), sys.exit(5))\nforever()"
  trainers = [f"first() and sys.exit(1)\n{WORKS}", slow]
  code, lines = launch(trainers, [dies], restarts=1)
  assert code == 0
  assert "[launcher] generator 0 ended with exit code 5" in lines


def test_what_is_refused_is_not_started_again():
  code, lines = launch(["first() or print('again')\nsys.exit(2)"], restarts=3)
  assert code == 2
  assert "[trainer 0] again" not in lines


def read_until(process, wanted):
  lines = []
  for line in process.stdout:
    lines.append(line.rstrip("\n"))
    if sum(wanted in line for line in lines) == 2:
      return lines
  raise AssertionError(lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_trainer_then_the_generators(number):
  stops = (
    "signal.signal(15, lambda *_: (print('saved'), sys.exit(130)))\n"
    "print('pid', os.getpid(), flush=True)\nforever()"
  )
  serves = "print('pid', os.getpid(), flush=True); forever()"
  process = start([stops], [serves])
  lines = read_until(process, "pid")
  process.send_signal(number)
  lines += process.communicate(timeout=60)[0].splitlines()
  assert process.returncode == 130
  assert "[trainer 0] saved" in lines
  assert not any(map(alive, pids_in(lines)))


def test_what_does_not_end_is_killed():
  deaf = (
    "signal.signal(15, signal.SIG_IGN)\n"
    "print('pid', os.getpid(), flush=True)\nforever()"
  )
  process = start([deaf, deaf], grace=1)
  lines = read_until(process, "pid")
  process.send_signal(signal.SIGTERM)
  lines += process.communicate(timeout=60)[0].splitlines()
  assert process.returncode == 130
  assert "[launcher] trainer 1 does not end; it is killed" in lines
  assert not any(map(alive, pids_in(lines)))


def test_a_second_signal_kills():
  deaf = (
    "signal.signal(15, signal.SIG_IGN)\n"
    "print('pid', os.getpid(), flush=True)\nforever()"
  )
  process = start([deaf], [deaf], grace=10_000)
  lines = read_until(process, "pid")
  process.send_signal(signal.SIGTERM)
  with process:
    for line in process.stdout:
      lines.append(line)
      if "once more kills" in line:
        process.send_signal(signal.SIGINT)
  assert process.returncode == 130
  assert not any(map(alive, pids_in(lines)))


FOLLOWS = "print('pid', os.getpid(), flush=True); forever()"
DEAF = "signal.signal(15, signal.SIG_IGN)\n" + FOLLOWS


@pytest.mark.parametrize(
  ("trainers", "generators", "named"),
  [
    ([DEAF, "sys.exit(3)"], [DEAF], "trainer 1 ended with exit code 3"),
    (["time.sleep(0.5); sys.exit(3)"], [], "trainer 0 ended with exit code 3"),
    ([FOLLOWS], ["sys.exit(3)"], "generator 0 ended with exit code 3"),
    (
      ["atexit.register(lambda: os._exit(3))\nprint('{}')"],
      [SERVES],
      "trainer 0 ended with exit code 3",
    ),
  ],
)
def test_H27_a_part_that_fails_ends_the_run_which_names_it_last(
  trainers, generators, named
):
  process = start(trainers, generators)
  # The others' own ends may take 12 seconds each; never for ever.
  lines = process.communicate(timeout=30)[0].splitlines()
  assert process.returncode == 3
  assert lines[-1] == f"[launcher] the run ended because {named}"
  assert not any(map(alive, pids_in(lines)))


@pytest.mark.parametrize(
  ("transport", "algorithm", "settings"),
  [
    ("transfer", "decoupled_ppo", {}),
    pytest.param(
      *("orbax", "grpo", {"kl_coefficient": 0.1}), marks=pytest.mark.slow
    ),
    pytest.param(*("orbax", "sao", {}), marks=pytest.mark.slow),
  ],
  ids=["as usual", "with a reference", "with a critic"],
)
def test_two_real_trainers_and_a_generator_finish_a_run(
  tmp_path, transport, algorithm, settings
):
  file = tmp_path / "tiny.py"
  cache = trainer_process.shared_cache()
  file.write_text(
    CONFIG.format(
      below=str(tmp_path / "runs"),
      cache=cache,
      transport=transport,
      algorithm=algorithm,
      settings=settings,
    )
  )
  command = [sys.executable, ROOT / "launch" / "local.py", f"--config={file}"]
  command += ["--trainers=2", "--generators=1", "--resume=never"]
  environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "tests")}
  done = subprocess.run(
    command,
    capture_output=True,
    text=True,
    env=os.environ | environment,
    timeout=300,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert json.loads(done.stdout.splitlines()[-1])["batches"] == 1
  assert '[trainer 1] {"process": 1, "version": 1}' in done.stdout
  assert re.search(r"\[generator 0\] .*\"version\": 1", done.stdout)
