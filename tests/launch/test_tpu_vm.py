"""The startup script of TPU VM workers, run on machines that only pretend.

Programs that a worker has are scripts of a line; Docker's notes what it was
asked to run and ends with the next exit code of a list.
"""

import os
import pathlib
import re
import subprocess

import launching
import pytest
import yaml

from launch import backends, steps, tpu_vm

pytestmark = pytest.mark.filterwarnings("ignore:the load_module")

DOCKER = """
case "$1" in
  run)
    echo "$@" >> "$HERE/docker.log"
    count=$(wc -l < "$HERE/docker.log")
    until [ -e "$HERE/released" ]; do sleep 1; done
    exit "$(sed -n "${count}p" "$HERE/codes")"
    ;;
esac
"""
CURL = """
case "${@: -1}" in
  */agent-worker-number) echo "$WORKER" ;;
  */tpu-env)
    echo "MEGASCALE_NUM_SLICES: '2'"
    echo "MEGASCALE_SLICE_ID: '$SLICE'"
    ;;
  */ip) echo "$ADDRESS" ;;
esac
"""
PROGRAMS = {
  "docker": DOCKER,
  "curl": CURL,
  "sleep": "/bin/sleep 0.02",
  "mountpoint": "exit 1",
  "mount": 'echo "$@" >> "$HERE/mount.log"',
  "mount.nfs": "",
  "gcloud": 'echo "$@" >> "$HERE/gcloud.log"',
}


@pytest.fixture
def cluster(tmp_path):
  programs = tmp_path / "bin"
  programs.mkdir()
  for name, text in PROGRAMS.items():
    (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (programs / name).chmod(0o755)
  plan = launching.plan(
    "tpu_vm",
    mount=str(tmp_path / "shared"),
    token_file=str(tmp_path / "shared" / "token"),
    restarts=2,
    generators=2,
  )
  return tmp_path, plan


def boot(cluster, name, codes=(0,), worker=0, slice_id=0, released=True):
  """Starts a worker; returns its process and folder."""
  root, plan = cluster
  here = root / f"{name}-{slice_id}-{worker}"
  here.mkdir(exist_ok=True)
  (here / "codes").write_text("".join(f"{code}\n" for code in codes))
  if released:
    (here / "released").touch()
  ((_, script),) = next(
    step.files for step in tpu_vm.start(plan) if step.argv[5] == name
  )
  script = script.replace("mark=/var/lib/rl_tpu", f"mark={here}/mark")
  process = subprocess.Popen(
    ["bash", "-c", script],
    env=os.environ
    | {
      "PATH": f"{root}/bin:{os.environ['PATH']}",
      "HERE": str(here),
      "WORKER": str(worker),
      "SLICE": str(slice_id),
      "ADDRESS": f"10.0.{slice_id}.{sum(map(ord, name)) % 256}",
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  return process, here


def ended(process):
  output, _ = process.communicate(timeout=60)
  assert process.returncode == 0, output


def runs_of(here):
  log = here / "docker.log"
  return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def generators(cluster):
  """Two that serve until the test is over."""
  booted = [
    boot(cluster, f"try1-generator-{i}", released=False) for i in range(2)
  ]
  yield [here for _, here in booted]
  for process, here in booted:
    (here / "released").touch()
    ended(process)


def test_a_trainer_waits_for_generators_and_goes_on_after_a_failure(
  cluster, generators
):
  root, _ = cluster
  process, here = boot(cluster, "try1-trainer", codes=(1, 0))
  ended(process)
  assert len(runs_of(here)) == 2
  state = root / "shared" / "launch" / "try1"
  assert (state / "ended").read_text() == "0\n"
  listed = (state / "addresses").read_text().split()
  assert listed and all(re.fullmatch(r"10\.0\.0\.\d+:8470", a) for a in listed)
  first = runs_of(here)[0]
  assert f"--config.remote.addresses_file={state}/addresses" in first
  assert f"--volume={root}/shared:{root}/shared" in first
  assert f"10.0.0.2:/share {root}/shared" in (here / "mount.log").read_text()


@pytest.mark.parametrize(
  ("codes", "runs"),
  [((2, 0), 1), ((1, 1, 1, 0), 3), ((130, 0), 2)],
  ids=["refused", "failed too often", "a signal that nobody asked for"],
)
def test_what_ends_a_trainer(cluster, generators, codes, runs):
  root, _ = cluster
  process, here = boot(cluster, "try1-trainer", codes=codes)
  ended(process)
  assert len(runs_of(here)) == runs
  state = root / "shared" / "launch" / "try1"
  assert (state / "ended").read_text() == f"{codes[runs - 1]}\n"
  # The machine starts again: what has ended stays so.
  ended(boot(cluster, "try1-trainer", codes=codes)[0])
  assert len(runs_of(here)) == runs


def test_a_stop_that_was_asked_for_is_one(cluster, generators):
  root, _ = cluster
  process, here = boot(cluster, "try1-trainer", codes=(130, 0), released=False)
  while not runs_of(here):  # until it trains
    assert process.poll() is None
  (root / "shared" / "launch" / "try1" / "stop").touch()
  (here / "released").touch()
  ended(process)
  assert len(runs_of(here)) == 1


@pytest.mark.parametrize(("worker", "slice_id"), [(1, 0), (0, 1)])
def test_only_the_first_worker_of_the_first_slice_speaks_for_the_run(
  cluster, worker, slice_id
):
  root, _ = cluster
  state = root / "shared" / "launch" / "try1"
  (state / "generators").mkdir(parents=True)
  (state / "addresses").write_text("10.0.0.1:8470\n")
  process, here = boot(
    cluster, "try1-trainer", worker=worker, slice_id=slice_id
  )
  ended(process)
  assert len(runs_of(here)) == 1
  assert not (state / "ended").exists()


def test_the_script_of_all_steps_passes_shellcheck(tmp_path):
  for name, run in (
    ("tpu_vm", launching.TWO_SLICES),
    ("gke", launching.TWO_SLICES),
    ("xpk", launching.SMALL),
  ):
    plan = launching.plan(name, run=run)
    backend = backends.CLOUDS[name]
    sent = [*backend.start(plan), *backend.stop(plan), *backend.logs(plan)]
    texts = [steps.script(sent)]
    texts += [text for step in sent for _, text in step.files]
    for text in texts:
      checked = subprocess.run(
        [launching.SHELLCHECK, "-"], input=text, capture_output=True, text=True
      )
      assert checked.returncode == 0, checked.stdout


def test_our_own_scripts_pass_shellcheck():
  root = pathlib.Path(launching.ROOT)
  scripts = ["quickstart.sh", "test.sh", "venv.sh"]
  done = subprocess.run(
    [launching.SHELLCHECK, "--shell=bash", "--external-sources", *scripts],
    cwd=root / "launch",
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stdout


def test_the_printed_script_does_what_a_start_does(tmp_path):
  """Both reach a program that stands for kubectl."""
  plan = launching.plan("gke", flags=("--config.pretrained=/a 'b' $(c) \\",))
  (step,) = backends.CLOUDS["gke"].start(plan)
  kubectl = tmp_path / "kubectl"
  kubectl.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"; cat\n')
  kubectl.chmod(0o755)
  path = f"{tmp_path}:{os.environ['PATH']}"
  printed = subprocess.run(
    ["bash", "-c", steps.script([step])],
    env=os.environ | {"PATH": path},
    capture_output=True,
    text=True,
    check=True,
  ).stdout
  words = "".join(f"{word}\n" for word in step.argv[1:])
  assert printed == words + (step.stdin or "")
  assert yaml.safe_load(printed.removeprefix(words))["kind"] == "JobSet"
