"""Each fault that this machine can see is found, and named."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import pytest
import tiny_run

from rl_tpu import __main__ as command_line
from rl_tpu import metrics, ownership, parts, sharding, topology
from rl_tpu.aot import answers
from rl_tpu.config import to_config_dict
from rl_tpu.models import huggingface
from rl_tpu.preflight import command

command_line._describe_tpus()  # the compiler is loaded once in a process

ROOT = pathlib.Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests/golden/huggingface"
POD = topology.Config(topology="v5e:2x2", generator_topology="v5e:2x2")
FSDP = parts.Devices(
  trainer=sharding.MeshShape(fsdp=4), generator=sharding.MeshShape(fsdp=4)
)
NAMES = ["mesh", "compile report", "paths", "weights", "tokenizer", "task"]


@pytest.fixture
def config(tmp_path):
  return tiny_run.get_config(tmp_path / "runs")


def preflight(config, *, chips=None, compiles=None, change=lambda values: None):
  """The verdict, and what was said of each name."""
  said = {}

  def show(line):
    state, _, rest = line.partition("  ")
    name, _, text = rest.strip().partition(": ")
    said[name] = (state.strip(), text)

  def read():
    values = to_config_dict(config)
    with values.unlocked():
      change(values)
    return values

  verdict = command.run(read, show, chips=chips, compiles=compiles)
  assert verdict["failed"] == [n for n, (s, _) in said.items() if s == "failed"]
  assert verdict["preflight"] == ("failed" if verdict["failed"] else "passed")
  assert verdict["seconds"] < 60
  return verdict, said


def assert_fails(config, name, *words, also=(), **given):
  verdict, said = preflight(config, **given)
  assert verdict["failed"] == [name, *also], said
  for word in words:
    assert word in said[name][1]
  return said


def test_a_good_config_passes_and_what_nobody_can_tell_is_said(config):
  verdict, said = preflight(config)
  assert verdict["failed"] == []
  assert verdict["not_checked"] == ["compile report", "generators"]
  assert list(said) == ["config", *NAMES, "generators"]
  assert not config.run_directory.exists()


def test_a_config_that_does_not_build(config):
  def misspell(values):
    values.learner.learning_rat = 1e-3

  verdict, said = preflight(config, change=misspell)
  assert verdict["failed"] == ["config"]
  assert "config.learner.learning_rat is not a field" in said["config"][1]
  assert verdict["not_checked"] == ["everything else"]


def test_a_config_file_that_raises():
  def read():
    raise KeyError("whatever a user's file does")

  said = []
  verdict = command.run(read, said.append, chips=None)
  assert verdict["failed"] == ["config"]
  assert 'KeyError: "whatever a user\'s file does"' in said[0]


def test_a_mesh_that_heads_do_not_divide_over(config):
  shape = parts.Devices(trainer=sharding.MeshShape(tensor=4))
  assert_fails(
    dataclasses.replace(config, devices=shape), "mesh", "config.learner", "4"
  )


def test_a_mesh_that_slots_do_not_divide_over(config):
  shape = parts.Devices(generator=sharding.MeshShape(data=3))
  assert_fails(dataclasses.replace(config, devices=shape), "mesh", "slots is 8")


def test_fewer_chips_than_the_run_needs(config):
  config = dataclasses.replace(config, schedule="async", devices=FSDP)
  assert_fails(config, "mesh", "need 8 devices", "has 4", chips=4)
  verdict, _ = preflight(config, chips=8)
  assert not verdict["failed"]


def test_a_mesh_of_another_size_than_its_topology(config):
  config = dataclasses.replace(config, compile=POD)
  assert_fails(config, "mesh", "config.devices.trainer", "4 chips")


def test_a_topology_that_does_not_exist(config):
  nowhere = topology.Config(topology="v5e:2x2x2")
  assert_fails(
    dataclasses.replace(config, compile=nowhere),
    "mesh",
    "v5e:2x2x2",
    also=[],
  )


def test_a_compile_report_that_does_not_fit(config):
  config = dataclasses.replace(config, compile=POD, devices=FSDP)
  verdict, said = preflight(config)
  assert "compile report" in verdict["not_checked"]
  assert "--preflight=compile" in said["compile report"][1]

  figures = {"fits": True, "hbm_gib": 12.25, "headroom": 0.22}
  answers.write(config, figures)
  _, said = preflight(config)
  assert said["compile report"] == (
    "ok",
    "fits, 12.2 GiB of HBM where it is tightest, 22% free",
  )
  other = dataclasses.replace(config, group_size=8)
  assert "compile report" in preflight(other)[0]["not_checked"]

  programs = {"update": {"fits": False}, "decode": {"fits": True}}
  answers.write(config, {"fits": False, "programs": programs})
  assert_fails(config, "compile report", "update do not fit", "v5e:2x2")


def test_it_compiles_where_that_is_asked_for(config):
  config = dataclasses.replace(config, compile=POD, devices=FSDP)
  programs = {"update": {"fits": False}}
  asked = []

  def compiles(given):
    asked.append(given)
    return {"fits": False, "programs": programs}

  assert_fails(config, "compile report", "update", compiles=compiles)
  assert asked == [config]


@pytest.mark.parametrize("field", ["directory", "cache"])
def test_a_path_below_a_file(config, tmp_path, field):
  (tmp_path / "taken").write_text("a file")
  below = str(tmp_path / "taken" / "run")
  broken = dataclasses.replace(config, **{field: below})
  also = ["task"] if field == "cache" else []  # It lies there.
  assert_fails(broken, "paths", f"config.{field}", "taken is a file", also=also)


def test_a_directory_that_cannot_be_written(config):
  broken = dataclasses.replace(config, directory="/proc/run")
  assert_fails(broken, "paths", "config.directory", "/proc cannot be written")


def test_a_directory_of_another_config(config):
  parts.record(
    dataclasses.replace(config, seed=1, directory=str(config.run_directory))
  )
  (config.run_directory / "metrics.csv").write_text("batch,reward\n1,0.5\n")
  broken = dataclasses.replace(config, directory=str(config.run_directory))
  assert_fails(broken, "paths", "config.seed: the run has 1, asked for 0")


def test_a_directory_in_which_another_process_trains(config):
  with ownership.held(config.run_directory):
    assert_fails(config, "paths", "trains in it")


def test_a_run_that_must_resume_and_has_no_checkpoint(config):
  config = dataclasses.replace(config, resume="must")
  assert_fails(config, "paths", "holds no checkpoint")


def test_a_run_that_is_complete(config):
  parts.record(config)
  metrics.write_json(config.run_directory / "summary.json", {})
  assert_fails(config, "paths", "is complete")


@pytest.fixture
def folder(tmp_path):
  shutil.copytree(GOLDEN / "qwen2_tied_sharded", tmp_path / "pretrained")
  return tmp_path / "pretrained"


def pretrained(config, folder):
  """The config with a folder, whatever state that is in."""
  model = huggingface.read_config(GOLDEN / "qwen2_tied_sharded")
  config = dataclasses.replace(config, model=model)

  def start_from(values):
    values.pretrained = str(folder)

  return {"config": config, "change": start_from}


def test_a_pretrained_folder_that_is_whole(config, folder):
  verdict, said = preflight(**pretrained(config, folder))
  assert verdict["failed"] == []
  assert "3 files" in said["weights"][1]


def test_a_shard_that_is_missing(config, folder):
  (folder / "model-00002-of-00003.safetensors").unlink()
  given = pretrained(config, folder)
  assert_fails(given.pop("config"), "weights", "model-00002-of-00003", **given)


def test_weights_of_another_model(config, folder):
  given = pretrained(config, folder)
  model = dataclasses.replace(given["config"].model, d_ff=8)
  wider = dataclasses.replace(given.pop("config"), model=model)
  assert_fails(wider, "weights", "d_ff is 8", **given)


def test_a_tokenizer_that_is_missing(config, folder):
  (folder / "tokenizer.json").unlink()
  given = pretrained(config, folder)
  assert_fails(
    given.pop("config"), "tokenizer", "tokenizer", also=["task"], **given
  )


def test_a_task_whose_data_cannot_be_read(config, tmp_path):
  def reads_a_file(values):
    values.task = {"name": "math", "path": str(tmp_path / "missing.jsonl")}

  assert_fails(config, "task", "missing.jsonl", change=reads_a_file)


def test_a_task_whose_questions_are_too_long(config):
  engine = dataclasses.replace(
    config.engine, context_length=5, prefill_buckets=(5,)
  )
  config = dataclasses.replace(config, engine=engine)
  assert_fails(config, "task", "allow prompts of 4 tokens")


def run_command(*flags):
  return subprocess.run(
    [sys.executable, "-m", "rl_tpu", "train", *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )


@pytest.mark.slow
def test_the_quickstart_passes_and_a_broken_one_exits_non_zero(tmp_path):
  flags = [
    "--config=experiments/quickstart.py",
    f"--config.cache={tmp_path}/cache",
    f"--config.directory={tmp_path}/run",
    "--preflight",
  ]
  good = run_command(*flags)
  assert good.returncode == 0, good.stderr
  assert json.loads(good.stdout.splitlines()[-1])["preflight"] == "passed"
  assert not (tmp_path / "run").exists()

  bad = run_command(*flags, "--config.directory=/proc/run")
  assert bad.returncode == 1
  assert json.loads(bad.stdout.splitlines()[-1])["failed"] == ["paths"]
  assert bad.stdout.count("\nfailed") == 1

  wrong = run_command(*flags, "--preflight=maybe")
  assert wrong.returncode == 2
  assert "--preflight is 'maybe'" in wrong.stderr
