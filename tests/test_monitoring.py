"""Every row reaches those who were asked to be told."""

import sys
import types
import urllib.request

import pytest
from prometheus_client import parser

from rl_tpu import metrics, monitoring
from rl_tpu.config import ConfigError


def open_writers(config, directory, said=None):
  return monitoring.writers(
    config,
    directory=directory,
    name="named",
    described={"seed": 3},
    note=(said if said is not None else []).append,
  )


def scrape(said):
  with urllib.request.urlopen(said[0].split()[-1]) as answer:
    text = answer.read().decode()
  families = parser.text_string_to_metric_families(text)
  return {s.name: s.value for family in families for s in family.samples}


def test_a_scrape_has_the_newest_value_of_each_metric(tmp_path):
  said = []
  config = monitoring.Config(prometheus_port=0)
  with open_writers(config, tmp_path, said) as writers:
    log = metrics.RunLog(tmp_path, resume_at=None, writers=writers)
    assert scrape(said) == {}
    log.write(1, {"reward": 0.25, "heldout_accuracy": 0.5})
    log.write(2, {"reward": 0.75, "env_a-b": 1.0, "loss": float("nan")})
    log.close()
    assert scrape(said) == {
      "rl_tpu_batch": 2,
      "rl_tpu_reward": 0.75,
      "rl_tpu_heldout_accuracy": 0.5,
      "rl_tpu_env_a_b": 1.0,
    }
  with pytest.raises(OSError):
    scrape(said)  # It ended with the run.


def test_a_port_that_is_taken_is_named(tmp_path):
  said = []
  with open_writers(monitoring.Config(prometheus_port=0), tmp_path, said):
    port = int(said[0].rpartition(":")[2].partition("/")[0])
    with (
      pytest.raises(ConfigError, match=f"prometheus_port is {port}"),
      open_writers(monitoring.Config(prometheus_port=port), tmp_path),
    ):
      pass


class FakeRun:
  """What a run of wandb is told."""

  def __init__(self):
    self.rows, self.defined, self.finished = [], [], 0

  def log(self, row):
    self.rows.append(row)

  def define_metric(self, *names, **where):
    self.defined.append((names, where))

  def finish(self):
    self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
  """In place of the package: what init was called with, and the run."""
  package = types.ModuleType("wandb")
  package.__spec__ = types.SimpleNamespace(name="wandb")
  package.run, package.asked = FakeRun(), []

  def init(**asked):
    package.asked.append(asked)
    return package.run

  package.init = init
  monkeypatch.setitem(sys.modules, "wandb", package)
  return package


def test_weights_and_biases_gets_rows_by_their_batch(tmp_path, wandb):
  section = monitoring.Wandb(project="words", mode="offline")
  with open_writers(monitoring.Config(wandb=section), tmp_path) as writers:
    log = metrics.RunLog(tmp_path, resume_at=None, writers=writers)
    log.write(2, {"reward": 0.5})
    log.write(1, {"heldout_accuracy": 0.25})
    log.close()
    assert not wandb.run.finished
  assert wandb.run.finished == 1
  assert wandb.run.rows == [
    {"batch": 2, "reward": 0.5},
    {"batch": 1, "heldout_accuracy": 0.25},
  ]
  assert wandb.run.defined == [(("*",), {"step_metric": "batch"})]
  (asked,) = wandb.asked
  assert asked["project"] == "words"
  assert asked["mode"] == "offline"
  assert asked["dir"] == str(tmp_path)
  assert asked["config"] == {"seed": 3}


def test_a_directory_that_goes_on_is_the_same_run(tmp_path, wandb):
  config = monitoring.Config(wandb=monitoring.Wandb(project="words"))
  for directory in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
    with open_writers(config, directory):
      pass
  first, again, other = (asked["id"] for asked in wandb.asked)
  assert first == again != other
  assert {asked["resume"] for asked in wandb.asked} == {"allow"}


def test_a_package_that_is_missing_is_named(monkeypatch):
  monkeypatch.setattr(monitoring.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match="package wandb is not installed"):
    monitoring.Wandb(project="words")
  monitoring.Wandb()


@pytest.mark.parametrize(
  ("section", "fields", "message"),
  [
    (monitoring.Config, {"prometheus_port": 2**16}, "prometheus_port is 65536"),
    (monitoring.Wandb, {"project": ""}, "project is ''"),
  ],
)
def test_a_field_out_of_range_is_named(section, fields, message):
  with pytest.raises(ValueError, match=message):
    section(**fields)
