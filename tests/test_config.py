import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

import ml_collections
import pytest

from rl_tpu import config
from rl_tpu.config import Choice, ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
  clip: float = 0.2

  def __post_init__(self):
    if self.clip <= 0:
      raise ValueError(f"clip is {self.clip}; it must be > 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
  buckets: tuple[int, ...] = (4, 8)
  empty: tuple[int, ...] = ()


def find(name):
  if name != "clipped":
    raise ValueError(f"loss is {name!r}; it must be one of clipped")
  return SimpleNamespace(Config=Loss)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
  rate: float
  steps: int = 3
  limit: int | None = None
  mode: Literal["a", "b"] = "a"
  inner: Inner = dataclasses.field(default_factory=Inner)
  loss: Choice = dataclasses.field(metadata={"find": find})
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


DEFAULT = Outer(rate=0.1, loss=Choice(name="clipped", config=Loss()))


def changed(**values):
  there = config.to_config_dict(DEFAULT)
  with there.unlocked():
    there.update(values)
  return there


def test_a_config_comes_back_as_it_went():
  assert config.build(Outer, config.to_config_dict(DEFAULT)) == DEFAULT


def test_H21_empty_tuples_and_lists_build_frozen():
  built = config.build(Inner, {"empty": [], "buckets": ()})
  assert built == Inner(empty=(), buckets=())
  built = config.build(
    Outer, changed(settings={"a": (), "b": []})
  )  # FrozenConfigDict asserts on these
  assert built.settings == {"a": (), "b": []}


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"learning_rte": 1}, r"config.learning_rte is not a field"),
    ({"inner": {"bucket": 1}}, r"config.inner.bucket is not a field"),
    ({"loss": {"klip": 1.0}}, r"config.loss.klip is not a field"),
    ({"steps": "3"}, r"config.steps is '3'; it must be of type int"),
    ({"steps": True}, r"config.steps is True"),
    ({"mode": "c"}, r"config.mode is 'c'; it must be one of \('a', 'b'\)"),
    ({"inner": {"buckets": [4, "x"]}}, r"config.inner.buckets\[1\] is 'x'"),
    ({"loss": {"clip": -1.0}}, r"config.loss: clip is -1.0; it must be > 0"),
    ({"loss": {"name": "x"}}, r"config.loss.name: loss is 'x'.*clipped"),
    ({"limit": "many"}, r"config.limit is 'many'"),
  ],
)
def test_H21_a_bad_value_is_refused_by_its_path(values, message):
  plain = ml_collections.ConfigDict(config.to_json(DEFAULT)).to_dict()
  for name, value in values.items():
    if isinstance(value, dict):
      plain[name].update(value)
    else:
      plain[name] = value
  with pytest.raises(ConfigError, match=message):
    config.build(Outer, plain)


def test_H21_a_value_that_was_set_survives_another_default():
  there = config.to_config_dict(DEFAULT)
  there.inner.buckets = (2,)
  there.loss.clip = 0.5
  built = config.build(Outer, there)
  assert built.inner == Inner(buckets=(2,))
  assert built.loss.config.clip == 0.5
  assert built.steps == 3


def test_an_optional_number_can_be_set_by_a_flag_and_is_typed():
  there = config.to_config_dict(DEFAULT)
  there.limit = 7
  assert config.build(Outer, there).limit == 7
  with pytest.raises(TypeError):
    there.limit = "seven"


def test_an_integer_will_do_for_a_float():
  assert config.build(Outer, changed(rate=1)).rate == 1.0


def test_a_missing_field_is_named():
  with pytest.raises(ConfigError, match="config.rate is missing"):
    config.build(Outer, {"loss": {"name": "clipped"}})


def test_differences_name_the_fields():
  other = dataclasses.replace(
    DEFAULT, steps=4, loss=Choice(name="clipped", config=Loss(clip=0.3))
  )
  assert config.differences(config.to_json(DEFAULT), config.to_json(other)) == [
    "config.loss.clip: the run has 0.2, asked for 0.3",
    "config.steps: the run has 3, asked for 4",
  ]
