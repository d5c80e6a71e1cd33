"""What cannot be launched is refused before anything is sent, by name."""

import ast
import re
import subprocess

import launching
import pytest

from launch import __main__ as command_line
from launch import plan
from rl_tpu import __main__ as rl_tpu_command_line
from rl_tpu import parts
from rl_tpu.config import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:the load_module")


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"name": "Run_1"}, r"settings.name is 'Run_1'; it must be a letter"),
    ({"name": "a" * 28}, r"settings.name is 'a+'; .* at most 27"),
    ({"generators": -1}, r"settings.generators is -1; it must be >= 0"),
    ({"mount": "shared"}, r"settings.mount is 'shared'; .* an absolute path"),
    ({"nfs": "10.0.0.2"}, r"settings.nfs is '10.0.0.2'; it must be HOST:/PATH"),
    ({"bucket": "gs://b"}, r"settings.bucket is 'gs://b'; .* without gs://"),
    ({"artifacts": "b/p"}, r"settings.artifacts is 'b/p'; it must be gs://"),
    (
      {"image": "a b"},
      r"settings.image is 'a b'; it must be a container image",
    ),
    (
      {"token_file": "/t"},
      r"settings.token_file is '/t'; .* below settings.mo",
    ),
    ({"port": 0}, r"settings.port is 0; it must be in \[1, 65535\]"),
    ({"restarts": -1}, r"settings.restarts is -1; it must be >= 0"),
    ({"grace_seconds": 0}, r"settings.grace_seconds is 0; it must be >= 1"),
    ({"flags": ["--seed=1"]}, r"settings.flags is .*; it must be a list of"),
    (
      {"spot": True, "reservation": "r"},
      r"settings.reservation is 'r'; it must be None where settings.spot",
    ),
    ({"zones": "a"}, r"settings.zones is not a field"),
    ({"port": "1"}, r"settings.port is '1'; it must be of type int"),
  ],
)
def test_bad_settings_are_refused_by_name(fields, message):
  with pytest.raises(ConfigError, match=message):
    launching.settings(**fields)


@pytest.mark.parametrize(
  ("backend", "fields", "message"),
  [
    (
      "gke",
      {"image": None},
      "settings.image is None; gke needs settings.image",
    ),
    (
      "gke",
      {"nfs": None},
      "settings.nfs and settings.bucket are None; gke need",
    ),
    ("gke", {"bucket": "bb"}, "settings.nfs and settings.bucket are set; gke "),
    ("gke", {"token_secret": None}, "settings.token_secret is None; gke needs"),
    ("tpu_vm", {"zone": None}, "settings.zone is None; tpu_vm needs"),
    ("xpk", {"cluster": None}, "settings.cluster is None; xpk needs"),
    ("pathways", {"artifacts": None}, "settings.artifacts is None; pathways"),
  ],
)
def test_each_backend_says_what_it_lacks(backend, fields, message):
  with pytest.raises(ConfigError, match=message):
    launching.plan(backend, **fields)


@pytest.mark.parametrize(
  ("backend", "flags", "message"),
  [
    (
      "gke",
      ("--topology=v5e:3x3",),
      "config.compile.topology is 'v5e:3x3'; slices of v5e are 1x1, 2x2",
    ),
    (
      "gke",
      ("--topology=v5p:4x8x4",),
      "config.compile.topology is 'v5p:4x8x4'; slices of v5p are .* rising",
    ),
    (
      "gke",
      ("--generator_topology=v5e:4x4",),
      "generator_topology is 'v5e:4x4', 4 hosts; it must be one host",
    ),
    (
      "xpk",
      (),
      "generator_topology is 'v5e:2x4', 2 hosts; it must be one host",
    ),
    ("gke", ("--slices=2",), "config.devices.trainer has 16 .* must have 32"),
    (
      "gke",
      ("--config.devices.generator.data=1",),
      "config.devices.generator has 4 devices; it must have 8",
    ),
    (
      "gke",
      ("--topology=v5e:2x4", "--slices=2"),
      "config.compile.slices is 2; it must be 1 where a slice is one host",
    ),
    ("gke", ("--config.schedule=sync",), "config.schedule is 'sync'; it must"),
    ("gke", ("--config.batchs=1",), "batchs"),
    (
      "gke",
      ("--config.directory=gs://b/runs",),
      "'gs://b/runs' is an address; it must be a path below settings.mount",
    ),
    (
      "pathways",
      (),
      "generator_topology is 'v5e:2x4'; with pathways it must be the trainer's",
    ),
    (
      "pathways",
      ("--generator_topology=v5e:4x4",),
      "config.devices has 24 devices; it must have 80, the chips of 5 slices",
    ),
  ],
)
def test_runs_that_do_not_fit_their_slices_are_refused(backend, flags, message):
  with pytest.raises(ConfigError, match=message):
    plan_of = launching.plan(backend, run=(launching.POD, *flags))
    plan_of.train("--config.remote.addresses=('a:1',)")


def test_a_config_that_the_image_does_not_have_is_refused(tmp_path):
  file = tmp_path / "mine.py"
  file.write_text("")
  with pytest.raises(ConfigError, match="--config is .*mine.py'; it must be a"):
    launching.plan("gke", run=(f"--config={file}",))


def test_a_generator_in_the_trainers_process_has_chips_of_the_same_host():
  small = (
    launching.POD,
    "--topology=v5e:2x4",
    "--config.devices.trainer.fsdp=4",
    "--config.devices.generator.data=1",
  )
  alone = launching.plan("gke", run=small, generators=0, token_secret=None)
  command = alone.train()
  assert not [flag for flag in command if "remote" in flag]
  assert "--coordinator=auto" not in command
  with pytest.raises(ConfigError, match="settings.generators is 0; it must be"):
    launching.plan("gke", generators=0)


def test_processes_can_read_what_they_are_given():
  planned = launching.plan("gke", name="run-2")
  remote = plan.addresses(["a.b:8470", "c.d:8470"])
  train = planned.train(remote, "--config.remote.token_file=/etc/t")
  assert train[:4] == ("python", "-m", "rl_tpu", "train")
  config = rl_tpu_command_line.read_flags(
    "config", parts.Config, ["rl_tpu", *train[4:]]
  )
  assert config.remote.addresses == ("a.b:8470", "c.d:8470")
  assert config.distributed.coordinator == "auto"
  assert config.transport.host == "auto"
  assert config.resume == "auto"
  assert str(config.run_directory).startswith("/shared/runs/qwen3_1p7b_v5e16/")
  serve = planned.serve("--config.serve.token_file=/etc/t")
  assert serve[:4] == ("python", "-m", "rl_tpu", "serve")
  config = rl_tpu_command_line.read_flags(
    "config", parts.Config, ["rl_tpu", *serve[4:]]
  )
  assert (config.serve.host, config.serve.port) == ("0.0.0.0", 8470)
  assert config.serve.weights == "awaited"
  assert ast.literal_eval(remote.partition("=")[2]) == ("a.b:8470", "c.d:8470")


@pytest.mark.parametrize(
  ("topology", "hosts", "chips"),
  [
    ("v5e:2x4", 1, 8),
    ("v5e:4x4", 4, 4),
    ("v6e:1x1", 1, 1),
    ("v5p:2x2x1", 1, 4),
    ("v5p:4x4x8", 32, 4),
  ],
)
def test_hosts_of_a_slice(topology, hosts, chips):
  drafted = plan.draft(
    launching.settings(generators=0), (launching.POD, f"--topology={topology}")
  )
  assert (drafted.trainer.hosts, drafted.trainer.chips) == (hosts, chips)


def test_nothing_is_sent_in_a_dry_run_or_when_refused(monkeypatch, capsys):
  monkeypatch.setattr(subprocess, "run", None)
  given = ["gke", "--settings=launch/example.py", *launching.TWO_SLICES]
  monkeypatch.chdir(launching.ROOT)
  assert command_line.main([*given, "--dry_run"]) == 0
  assert "kind: JobSet" in capsys.readouterr().out
  assert command_line.main([*given, "--settings.port=0"]) == 2
  assert "settings.port is 0" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("given", "message"),
  [
    (["local", "--settings=a"], "'--settings=a' is not for local"),
    (["local", "--do=stop"], "--do is 'stop'; it must be 'start' with local"),
    (["gke"], "--settings is missing"),
  ],
)
def test_what_makes_no_sense_is_refused(given, message, capsys):
  assert command_line.main(given) == 2
  assert re.search(re.escape(message), capsys.readouterr().err)
