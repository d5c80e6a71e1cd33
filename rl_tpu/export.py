"""A run's newest checkpoint as a folder in Hugging Face's format.

The folder appears complete or not at all: config, weights, tokenizer and chat
template, and every id that ends an answer. Weights are restored on the CPU,
without the optimizer's state, so that the command needs no accelerator.
"""

import os
import pathlib
import shutil
import uuid
from typing import Any

import jax

from rl_tpu import checkpoint, parts, sharding
from rl_tpu.config import ConfigError
from rl_tpu.generation import policies
from rl_tpu.models import huggingface, transformer
from rl_tpu.view import View


def run(config: parts.Config, view: View) -> dict[str, Any]:
  """Writes the folder of `config.export`.

  Returns:
    `folder`, `batch` (of the checkpoint), `dtype`, and the `bytes` of all
    files.

  Raises:
    ConfigError: there is no checkpoint, the folder is there already, or no
      architecture that transformers knows is the model's.
  """
  checkpoints = config.run_directory / "checkpoints"
  version = policies.newest(checkpoints)
  if version is None:
    raise ConfigError(f"{checkpoints} holds no checkpoint to export")
  final = pathlib.Path(
    config.export.folder or config.run_directory / "huggingface"
  ).absolute()
  if final.exists():
    raise ConfigError(f"config.export.folder: {final} is there already")
  longest, dtype = config.engine.context_length, "float32"
  if config.pretrained is not None:
    longest, dtype = huggingface.stored(config.pretrained)
  if config.export.dtype != "stored":
    dtype = config.export.dtype
  text = parts.make_tokenizer(config)
  view.note(f"exporting {version} to {final}")
  building = final.with_name(f"building-{uuid.uuid4().hex}")
  try:
    huggingface.save_tokenizer(building, text)
    huggingface.save(
      building,
      _restore(version, transformer.Policy(config.model)),
      config.model,
      text,
      dtype=dtype,
      longest=longest,
      max_file_bytes=config.export.max_file_bytes,
    )
    os.rename(building, final)
  except ValueError as error:
    raise ConfigError(f"config.model: {error}") from error
  finally:
    shutil.rmtree(building, ignore_errors=True)
  return {
    "folder": str(final),
    "batch": int(version.name),
    "dtype": dtype,
    "bytes": sum(file.stat().st_size for file in final.iterdir()),
  }


def _restore(version: pathlib.Path, policy: transformer.Policy) -> Any:
  mesh = sharding.make_mesh(
    sharding.MeshShape(), jax.local_devices(backend="cpu")
  )
  abstract = sharding.placed(
    policy.abstract_params(), policy.param_shardings(mesh)
  )
  return checkpoint.restore_run_params(version, abstract)
