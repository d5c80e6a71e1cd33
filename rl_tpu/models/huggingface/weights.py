"""Weights between safetensors files and a mesh, without a copy on the host.

Reading cuts each device's part of a weight out of the files, layer by layer:
beside what is on the devices, the host holds one part of one weight. (Files are
read, not mapped: mapped pages would count as memory.) Writing holds one file.

Everything is checked against the headers before any of it is read: a tensor
that is missing, left over, of another shape or type is named. A head that is
tied to the embedding may be in the files if it is equal to it.

A weight here has its inputs first and its heads apart, [D, H, h]; a file has
[H h, D], one tensor for each layer and expert. `_WEIGHTS` is the whole
correspondence.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from rl_tpu.models import transformer
from rl_tpu.models.huggingface import config as configs
from rl_tpu.models.tokenizer import Tokenizer

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_DERIVED = ".rotary_emb.inv_freq"
"""Ends the names of tensors that old files have and the config implies."""
_DTYPES = ("F32", "BF16", "F16")
_COMPARED_ROWS = 4096
"""Of a tied head and its embedding, at a time."""
_OURS = ("compute_dtype", "remat", "unroll")
"""Fields of a config that say how to compute, not what."""

_Order = tuple[tuple[int, ...], ...]
"""For each axis of a file's tensor, the axes of ours that it runs over."""
_VECTOR: _Order = ((0,),)
_SAME: _Order = ((0,), (1,))
_TURNED: _Order = ((1,), (0,))
_TO_HEADS: _Order = ((1, 2), (0,))
_FROM_HEADS: _Order = ((2,), (0, 1))
_OF_HEADS: _Order = ((0, 1),)

_BLOCK = "model.layers.{}."
_WEIGHTS: Mapping[str, tuple[str, _Order]] = {
  "embedding": (_EMBEDDING, _SAME),
  "head": (_HEAD, _TURNED),
  "final_norm/scale": ("model.norm.weight", _VECTOR),
  **{
    f"layers/{here}": (_BLOCK + there, order)
    for here, there, order in (
      ("attention_norm/scale", "input_layernorm.weight", _VECTOR),
      ("attention/query", "self_attn.q_proj.weight", _TO_HEADS),
      ("attention/key", "self_attn.k_proj.weight", _TO_HEADS),
      ("attention/value", "self_attn.v_proj.weight", _TO_HEADS),
      ("attention/out", "self_attn.o_proj.weight", _FROM_HEADS),
      ("attention/query_bias", "self_attn.q_proj.bias", _OF_HEADS),
      ("attention/key_bias", "self_attn.k_proj.bias", _OF_HEADS),
      ("attention/value_bias", "self_attn.v_proj.bias", _OF_HEADS),
      ("attention/out_bias", "self_attn.o_proj.bias", _VECTOR),
      ("attention/query_norm/scale", "self_attn.q_norm.weight", _VECTOR),
      ("attention/key_norm/scale", "self_attn.k_norm.weight", _VECTOR),
      ("feed_forward_norm/scale", "post_attention_layernorm.weight", _VECTOR),
      ("feed_forward/gate", "mlp.gate_proj.weight", _TURNED),
      ("feed_forward/up", "mlp.up_proj.weight", _TURNED),
      ("feed_forward/down", "mlp.down_proj.weight", _TURNED),
      ("feed_forward/router", "mlp.gate.weight", _TURNED),
      *(
        (
          f"feed_forward/experts/{name}",
          f"mlp.experts.{{}}.{name}_proj.weight",
          _TURNED,
        )
        for name in ("gate", "up", "down")
      ),
    )
  },
}
"""Our weight -> its name in a file and the order of its axes there. Each {} of
the name is an axis that is stacked here, in front: layer, then expert."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
  """How a folder is written."""

  folder: str | None = None
  """Where, not there yet; None: `huggingface` in the run's directory."""
  dtype: Literal["stored", "float32", "bfloat16"] = "stored"
  """Of the files: float32, or bfloat16, which rounds. `stored` is that of the
  folder that the run started from, or float32 if there was none."""
  max_file_bytes: int = 2 * 2**30
  """Of the tensors in one file, >= 1; the host holds this much."""

  def __post_init__(self):
    if self.max_file_bytes < 1:
      raise ValueError(
        f"max_file_bytes is {self.max_file_bytes}; it must be >= 1"
      )
    if self.dtype not in ("stored", "float32", "bfloat16"):
      raise ValueError(
        f"dtype is {self.dtype!r}; it must be 'stored', 'float32' or 'bfloat16'"
      )


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """One tensor of a file, and where it belongs."""

  name: str
  weight: str
  """The key of `_WEIGHTS`."""
  index: tuple[int, ...]
  """In the weight's stacked axes."""
  shape: tuple[int, ...]


def check(folder: str | PathLike[str], policy: transformer.Policy) -> None:
  """Refuses what `load` would refuse; reads headers, and a tied head.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: the folder's model is another than the policy's, or a tensor is
      missing, unknown, of a wrong shape or type; names it.
  """
  with _open(folder) as files:
    files.check(policy)


def load(
  folder: str | PathLike[str],
  policy: transformer.Policy,
  mesh: jax.sharding.Mesh,
) -> transformer.Params:
  """The folder's weights as those of `policy`, on `mesh`.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: as in `check`, or a weight does not divide over the mesh.
  """
  shardings = policy.param_shardings(mesh)
  with _open(folder) as files:
    files.check(policy)
    return jax.tree_util.tree_map_with_path(
      lambda path, leaf, where: files.place(_key(path), leaf, where),
      policy.abstract_params(),
      shardings,
    )


def fingerprint(folder: str | PathLike[str]) -> list[tuple[str, int, int]]:
  """Name, size and time of each file: what changes when the weights do."""
  files = sorted(pathlib.Path(folder).absolute().iterdir())
  return [
    (str(file), file.stat().st_size, file.stat().st_mtime_ns)
    for file in files
    if file.suffix in (".safetensors", ".json")
  ]


def _key(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def _tensors(config: transformer.Config) -> Iterator[_Tensor]:
  """Every tensor that the files of a decoder hold."""
  abstract = transformer.Policy(config).abstract_params()
  for path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
    weight = _key(path)
    template, order = _WEIGHTS[weight]
    stacked = template.count("{}")
    own = leaf.shape[stacked:]
    shape = tuple(math.prod(own[axis] for axis in axes) for axes in order)
    for index in np.ndindex(*leaf.shape[:stacked]):
      yield _Tensor(template.format(*index), weight, index, shape)


@contextlib.contextmanager
def _open(folder: str | PathLike[str]) -> Iterator["_Files"]:
  """Opens the files of a folder, by the index if there are several."""
  folder = pathlib.Path(folder)
  names = [_FILE]
  if not (folder / _FILE).is_file():
    if not (folder / _INDEX).is_file():
      raise FileNotFoundError(
        f"{folder} has neither {_FILE} nor {_INDEX}: no weights to read"
      )
    index = json.loads((folder / _INDEX).read_text("utf-8"))
    names = sorted(set(index["weight_map"].values()))
  with contextlib.ExitStack() as stack:
    files = {}
    for name in names:
      if not (folder / name).is_file():
        raise FileNotFoundError(
          f"{folder / name} is not there, but {_INDEX} names it"
        )
      try:
        file = safetensors.safe_open(
          folder / name, framework="numpy", backend="pread"
        )
      except safetensors.SafetensorError as error:
        raise ValueError(f"{folder / name} cannot be read: {error}") from error
      stack.enter_context(file)
      files |= dict.fromkeys(file.keys(), file)
    yield _Files(folder, files)


class _Files:
  """The open files of one folder."""

  def __init__(self, folder: pathlib.Path, by_tensor: Mapping[str, Any]):
    self._folder, self._by_tensor = folder, by_tensor

  def _slice(self, name: str) -> Any:
    return self._by_tensor[name].get_slice(name)

  def check(self, policy: transformer.Policy) -> None:
    """Raises ValueError where the files do not hold this policy."""
    self._check_config(policy.config)
    wanted = {tensor.name: tensor for tensor in _tensors(policy.config)}
    missing = sorted(wanted.keys() - self._by_tensor.keys())
    if missing:
      raise ValueError(f"{self._folder} lacks {_some(missing)}")
    left = {n for n in self._by_tensor if not n.endswith(_DERIVED)} - {*wanted}
    if policy.config.tied and _HEAD in left:
      self._check_tied()
      left.remove(_HEAD)
    if left:
      raise ValueError(
        f"{self._folder} has {_some(sorted(left))}, which the model of its "
        "config.json would leave out"
      )
    for name, tensor in wanted.items():
      found = self._slice(name)
      if tuple(found.get_shape()) != tensor.shape:
        raise ValueError(
          f"{self._folder}: {name} is of shape {tuple(found.get_shape())}; by "
          f"config.json it must be {tensor.shape}"
        )
      if found.get_dtype() not in _DTYPES:
        raise ValueError(
          f"{self._folder}: {name} is of type {found.get_dtype()}; it must be "
          f"one of {_DTYPES}"
        )

  def _check_config(self, config: transformer.Config) -> None:
    theirs = configs.read(self._folder)
    for field in dataclasses.fields(config):
      own, other = getattr(config, field.name), getattr(theirs, field.name)
      if own != other and field.name not in _OURS:
        raise ValueError(
          f"{field.name} is {own!r}; {self._folder} has a model with {other!r}"
        )

  def _check_tied(self) -> None:
    """A head beside the embedding that it is tied to must say the same."""
    head, embedding = self._slice(_HEAD), self._slice(_EMBEDDING)
    size = head.get_shape()[0]
    equal = head.get_shape() == embedding.get_shape() and all(
      np.array_equal(head[start:stop], embedding[start:stop])
      for start in range(0, size, _COMPARED_ROWS)
      for stop in [min(start + _COMPARED_ROWS, size)]
    )
    if not equal:
      raise ValueError(
        f"{self._folder}: tie_word_embeddings is true, but {_HEAD} differs "
        f"from {_EMBEDDING}; set it to false if the head is meant"
      )

  def place(
    self, weight: str, leaf: jax.ShapeDtypeStruct, where: jax.sharding.Sharding
  ) -> jax.Array:
    """A weight on its devices, each part read once and alone."""
    parts: dict[tuple, list] = {}
    placed = where.addressable_devices_indices_map(leaf.shape)
    for device, index in placed.items():
      assert index is not None
      bounds = tuple(
        axis.indices(size)[:2]
        for axis, size in zip(index, leaf.shape, strict=True)
      )
      parts.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, devices in parts.items():
      part = self._part(weight, leaf, bounds)
      arrays += [jax.device_put(part, device) for device in devices]
    return jax.make_array_from_single_device_arrays(leaf.shape, where, arrays)

  def _part(
    self,
    weight: str,
    leaf: jax.ShapeDtypeStruct,
    bounds: tuple[tuple[int, int], ...],
  ) -> np.ndarray:
    """The part of a weight that lies within `bounds`."""
    template, order = _WEIGHTS[weight]
    stacked = template.count("{}")
    layers, own = bounds[:stacked], bounds[stacked:]
    rows = tuple(
      _run(axes, own, leaf.shape[stacked:], weight) for axes in order
    )
    flat = [axis for axes in order for axis in axes]
    sizes = [stop - start for start, stop in own]
    part = np.empty([stop - start for start, stop in bounds], leaf.dtype)
    for index in np.ndindex(*part.shape[:stacked]):
      at = [i + start for i, (start, _) in zip(index, layers, strict=True)]
      read = self._slice(template.format(*at))[rows]
      read = read.reshape([sizes[axis] for axis in flat])
      part[index] = read.transpose(np.argsort(flat))
    return part


def _run(axes, bounds, shape, weight: str) -> slice:
  """The indices of a file's axis that runs over several axes of ours."""
  (first, *rest) = axes
  if any(bounds[axis] != (0, shape[axis]) for axis in rest):
    raise ValueError(
      f"{weight} is split along an axis within heads; only whole heads can be "
      "read"
    )
  inner = math.prod(shape[axis] for axis in rest)
  start, stop = bounds[first]
  return slice(start * inner, stop * inner)


def _some(names: list[str]) -> str:
  """The first few of many."""
  more = f" and {len(names) - 3} more" if len(names) > 3 else ""
  return ", ".join(names[:3]) + more


def save(
  folder: str | PathLike[str],
  params: transformer.Params,
  config: transformer.Config,
  tokenizer: Tokenizer,
  *,
  dtype: configs.Dtype,
  longest: int,
  max_file_bytes: int = Export.max_file_bytes,
) -> None:
  """Writes config.json, generation_config.json and the weights.

  The host holds the tensors of one file. Any of the tokenizer's `eos_ids` ends
  what transformers generates.

  Args:
    folder: where to write; made if it is not there.
    params: of the decoder, all of them on this process's devices.
    config: of the decoder.
    tokenizer: knows the special ids.
    dtype: to store; bfloat16 rounds float32 weights.
    longest: positions that the model is good for.
    max_file_bytes: of the tensors in one file, unless a single one is larger.

  Raises:
    ValueError: transformers has no such model, or weights are on devices of
      other processes.
  """
  described = configs.to_json(config, dtype, longest)
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if not leaf.is_fully_addressable:
      raise ValueError(
        f"{_key(path)} is on devices of several processes; export in one"
      )
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  bos = {} if tokenizer.bos_id is None else {"bos_token_id": tokenizer.bos_id}
  special = bos | {"pad_token_id": tokenizer.pad_id}
  _write_json(
    folder / "config.json",
    described | special | {"eos_token_id": tokenizer.eos_id},
  )
  _write_json(
    folder / "generation_config.json",
    special | {"eos_token_id": list(tokenizer.eos_ids)},
  )
  _save_weights(folder, params, config, jnp.dtype(dtype), max_file_bytes)


def _save_weights(
  folder: pathlib.Path,
  params: transformer.Params,
  config: transformer.Config,
  dtype: Any,
  max_file_bytes: int,
) -> None:
  weights = {
    _key(path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }
  files: list[list[_Tensor]] = [[]]
  size, total = 0, 0
  for tensor in _tensors(config):
    own = math.prod(tensor.shape) * dtype.itemsize
    if files[-1] and size + own > max_file_bytes:
      files.append([])
      size = 0
    files[-1].append(tensor)
    size, total = size + own, total + own
  where = {}
  for number, tensors in enumerate(files, 1):
    name = f"model-{number:05}-of-{len(files):05}.safetensors"
    if len(files) == 1:
      name = _FILE
    safetensors.numpy.save_file(
      {t.name: _fetch(weights[t.weight], t, dtype) for t in tensors},
      folder / name,
      metadata={"format": "pt"},
    )
    # It is written for its owner alone, unlike what lies beside it.
    shutil.copymode(folder / "config.json", folder / name)
    where |= {tensor.name: name for tensor in tensors}
  if len(files) > 1:
    index = {"metadata": {"total_size": total}, "weight_map": where}
    _write_json(folder / _INDEX, index)


def _fetch(leaf: jax.Array, tensor: _Tensor, dtype: Any) -> np.ndarray:
  """A tensor as its file holds it."""
  _, order = _WEIGHTS[tensor.weight]
  # A copy: an array keeps what was read of it on the host for as long as it
  # lives itself.
  own = np.asarray(leaf[tensor.index] if tensor.index else jnp.copy(leaf))
  turned = own.transpose([axis for axes in order for axis in axes])
  return np.ascontiguousarray(turned.reshape(tensor.shape), dtype)


def _write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(values, indent=2) + "\n", "utf-8")
