import dataclasses
import io
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import rich.console
import tiny_run

from rl_tpu import checkpoint, export, parts, sft, sharding, train
from rl_tpu.config import ConfigError
from rl_tpu.models import huggingface, transformer
from rl_tpu.models.tokenizer import ByteTokenizer
from rl_tpu.view import View

ROOT = pathlib.Path(__file__).parent.parent
LLAMA = ROOT / "tests" / "golden" / "huggingface" / "llama_untied_llama3"


def quiet():
  return View(0, rich.console.Console(file=io.StringIO()))


def from_llama(below, folder=LLAMA, **changes):
  """A tiny run that starts from a pretrained model."""
  return tiny_run.get_config(
    below,
    model=huggingface.read_config(folder),
    pretrained=str(folder),
    batches=2,
    **changes,
  )


def newest_params(config):
  """The weights in a run's newest checkpoint."""
  policy = transformer.Policy(config.model)
  mesh = parts.meshes(config)[0]
  abstract = sharding.placed(
    policy.abstract_params(), policy.param_shardings(mesh)
  )
  version = config.run_directory / "checkpoints" / str(config.batches)
  return checkpoint.restore_run_params(version, abstract)


def assert_equal(params, expected):
  jax.tree.map(np.testing.assert_array_equal, params, expected)


def imported(folder):
  policy = transformer.Policy(huggingface.read_config(folder))
  mesh = sharding.make_mesh(sharding.MeshShape(), jax.devices())
  return policy, huggingface.load(folder, policy, mesh)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A finished run from a pretrained model, on two devices."""
  config = from_llama(
    tmp_path_factory.mktemp("runs"),
    devices=parts.Devices(trainer=sharding.MeshShape(fsdp=2)),
  )
  train.run(config, quiet())
  return config


def test_a_run_starts_from_pretrained_weights_and_their_tokenizer(run):
  task, rows = parts.make_task(run)
  assert task.tokenizer.eos_ids == (2, 4)
  assert parts.sampling(run, task).stop_ids == (2, 4)
  prompt = task.prompt(rows["train"][0], 0)
  assert prompt.tokens[0] == task.tokenizer.bos_id == 1
  trainer = parts.meshes(run)[0]
  start = parts.start_params(run, task, rows, trainer, quiet())
  _, pretrained = imported(LLAMA)
  assert_equal(start, pretrained)
  assert start["embedding"].sharding.device_set == set(trainer.devices.flat)
  moved = jax.tree.map(
    lambda new, old: np.abs(np.asarray(new) - old).max(),
    newest_params(run),
    pretrained,
  )
  assert moved["embedding"] > 0


def test_an_export_holds_the_newest_weights_and_all_that_they_came_with(run):
  figures = export.run(run, quiet())
  folder = run.run_directory / "huggingface"
  assert figures["folder"] == str(folder)
  assert (figures["batch"], figures["dtype"]) == (2, "float32")
  assert figures["bytes"] == sum(f.stat().st_size for f in folder.iterdir())
  policy, params = imported(folder)
  assert policy.config == run.model
  assert huggingface.stored(folder) == huggingface.stored(LLAMA)
  assert_equal(params, newest_params(run))
  for name in ("tokenizer.json", "tokenizer_config.json"):
    assert (folder / name).read_bytes() == (LLAMA / name).read_bytes()
  assert huggingface.load_tokenizer(folder).eos_ids == (2, 4)
  with pytest.raises(ConfigError, match="huggingface is there already"):
    export.run(run, quiet())
  assert [p.name for p in run.run_directory.glob("building-*")] == []


def test_a_pretrained_model_may_be_imitated_with_first(tmp_path):
  folder = tmp_path / "model"
  shutil.copytree(LLAMA, folder)
  warm = sft.Config(batches=1, wrong_batches=0, trajectories_per_batch=8)
  config = from_llama(tmp_path / "runs", folder, warm_start=warm)
  config = dataclasses.replace(config, cache=str(tmp_path / "cache"))
  task, rows = parts.make_task(config)
  mesh = parts.meshes(config)[0]

  def start():
    return parts.start_params(config, task, rows, mesh, quiet())

  kept = pathlib.Path(config.cache) / "warm_start"
  first = start()
  change = np.abs(first["embedding"] - imported(folder)[1]["embedding"]).max()
  assert 0 < change <= 1.1 * warm.learning_rate
  assert_equal(start(), first)
  assert len(list(kept.iterdir())) == 1
  policy, params = imported(folder)
  huggingface.save(
    folder,
    jax.tree.map(lambda x: 2 * x, params),
    policy.config,
    ByteTokenizer(),
    dtype="float32",
    longest=256,
  )
  again = start()  # The same path with other weights is another start.
  assert len(list(kept.iterdir())) == 2
  assert np.abs(again["embedding"] - first["embedding"]).max() > 0.1


def test_a_model_of_bytes_is_exported_by_the_command(tmp_path):
  config = tiny_run.get_config(tmp_path, batches=1)
  train.run(config, quiet())
  file = tmp_path / "config.py"
  file.write_text(
    f"import pathlib, sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
    "import tiny_run\n"
    "from rl_tpu.config import to_config_dict\n\n\n"
    "def get_config():\n"
    f"  below = pathlib.Path({str(tmp_path)!r})\n"
    "  return to_config_dict(tiny_run.get_config(below, batches=1))\n"
  )
  done = subprocess.run(
    [
      sys.executable,
      *("-m", "rl_tpu", "export", f"--config={file}"),
      f"--config.export.folder={tmp_path / 'out'}",
      "--config.export.dtype=bfloat16",
      "--config.export.max_file_bytes=5000",
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  figures = json.loads(done.stdout.splitlines()[-1])
  assert (figures["batch"], figures["dtype"]) == (1, "bfloat16")
  assert (tmp_path / "out" / "model.safetensors.index.json").exists()
  policy, params = imported(tmp_path / "out")
  assert policy.config == config.model
  expected = jax.tree.map(
    lambda x: x.astype("bfloat16").astype("float32"), newest_params(config)
  )
  assert_equal(params, expected)
  read = huggingface.load_tokenizer(tmp_path / "out")
  assert read.encode("a?").tolist() == ByteTokenizer().encode("a?").tolist()


def test_a_run_without_a_checkpoint_has_nothing_to_export(tmp_path):
  with pytest.raises(ConfigError, match="holds no checkpoint to export"):
    export.run(tiny_run.get_config(tmp_path), quiet())


def test_what_cannot_be_exported_leaves_nothing_behind(run, tmp_path):
  target = huggingface.Export(folder=str(tmp_path / "out"))
  broken = dataclasses.replace(run, export=target)
  object.__setattr__(
    broken,
    "model",
    dataclasses.replace(run.model, qk_norm=True, attention_bias="qkv"),
  )
  with pytest.raises((ConfigError, ValueError)):
    export.run(broken, quiet())
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"pretrained": "nowhere"},
      "config.pretrained: nowhere has neither model.safetensors",
    ),
    (
      {"model": tiny_run.get_config(ROOT).model},
      "config.pretrained: vocab_size is 384; .* has a model with 320",
    ),
  ],
)
def test_a_pretrained_model_that_does_not_fit_is_refused_at_once(
  changes, message, tmp_path
):
  with pytest.raises(ConfigError, match=message):
    dataclasses.replace(from_llama(tmp_path), **changes)


def test_a_pretrained_model_without_a_tokenizer_is_refused(tmp_path):
  folder = tmp_path / "model"
  shutil.copytree(LLAMA, folder)
  (folder / "tokenizer.json").unlink()
  with pytest.raises(ConfigError, match="config.pretrained: .*tokenizer.json"):
    parts.make_task(from_llama(tmp_path, folder))


@pytest.mark.parametrize(
  ("field", "value"), [("dtype", "float16"), ("max_file_bytes", 0)]
)
def test_an_impossible_export_names_its_field(field, value):
  with pytest.raises(ValueError, match=f"{field} is {value!r}"):
    huggingface.Export(**{field: value})
