"""Checkpoints: one Orbax composite per version, complete or not at all.

A version holds everything a run resumes from, taken at one moment:
  state  parameters and optimizer, sharded arrays
  host   the buffer's trajectories, the tokens of unfinished episodes and the
         history as flat arrays, and the generator's weights where they are of
         another version
  meta   version, data cursor, unfinished and dropped prompts, counters (JSON)
A run that stops some time after it saved its version has the same state, but
more tokens: `later.npz` in the version holds host and meta of that moment, and
goes before them.

There are no generator states to save: every random draw is keyed by the seed
in the config and by what it is drawn for.

Orbax writes in the background and renames when done. It lists a directory as a
version even if a part is missing, so `restore_latest` looks for all parts and
warns of each version that it passes over.
"""

import dataclasses
import json
import logging
import math
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from rl_tpu import processes
from rl_tpu.types import (
  EXTRAS,
  STOP_REASONS,
  Chunk,
  Group,
  Prompt,
  Trajectory,
  Turn,
)

PARTS = ("state", "host", "meta")
_LATER = "later.npz"
_META = "later_meta"
_PER_TOKEN = {
  "tokens": np.int32,
  "action_mask": np.bool_,
  "behavior_logp": np.float32,
  "token_version": np.int32,
  "rewards": np.float32,
}
_EXTRAS = {
  "behavior_topk_ids": np.int32,
  "behavior_topk_logp": np.float32,
  "behavior_experts": np.int16,
}
_PER_CHUNK = {
  "tokens": np.int32,
  "logp": np.float32,
  "topk_ids": np.int32,
  "topk_logp": np.float32,
  "experts": np.int16,
}
_REASONS = (None, *STOP_REASONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
  """The parts of one version."""

  version: int
  state: Any
  host: dict[str, Any]
  meta: dict[str, Any]


class Checkpointer:
  """Saves and restores versions below one directory."""

  def __init__(self, directory: str | os.PathLike, keep: int = 2):
    self.directory = pathlib.Path(directory).absolute()
    self._held: int | None = None
    self._passed_over: list[int] = []
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True),
    )

  def save(
    self, version: int, state: Any, host: dict[str, Any], meta: dict
  ) -> None:
    """Starts saving; the state may be donated once this returns.

    Of a version that was saved or restored last the state is on disk, and only
    what process 0 holds beside it is saved again, at once; versions that a
    restoration passed over make way.

    Raises:
      Exception: an earlier save failed in the background.
    """
    self._manager.check_for_errors()
    if version == self._held:
      self._save_later(version, host, meta)
      return
    while self._passed_over:
      self._manager.delete(self._passed_over.pop())
    self._manager.save(
      version,
      args=ocp.args.Composite(
        state=ocp.args.PyTreeSave(state),
        host=ocp.args.PyTreeSave(host),
        meta=ocp.args.JsonSave(meta),
      ),
      force=True,
    )
    self._held = version

  def _save_later(self, version: int, host: dict[str, Any], meta: dict) -> None:
    """Replaces host and meta of a version that is on disk, or is soon."""
    if jax.process_index() != 0:
      return
    self._manager.wait_until_finished()
    # What is not flat are the generator's weights, as they were.
    arrays: dict[str, Any] = {
      name: array
      for name, array in host.items()
      if isinstance(array, np.ndarray)
    }
    arrays[_META] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    final = self.directory / str(version) / _LATER
    building = final.with_name(f"building-{uuid.uuid4().hex}.npz")
    np.savez(building, **arrays)
    os.replace(building, final)

  def _restored(self, version: int, parts: Any) -> Restored:
    """The parts of a version, as they were when it was saved last."""
    state, host, meta = (parts[part] for part in PARTS)
    path = self.directory / str(version) / _LATER
    if path.exists():
      with np.load(path) as saved:
        later = dict(saved)
      meta = json.loads(later.pop(_META).tobytes())
      host = host | later
    return Restored(version=version, state=state, host=host, meta=meta)

  def restore_latest(self, abstract_state: Any) -> Restored | None:
    """The newest version that has all its parts; None if there is none.

    Args:
      abstract_state: a tree of ShapeDtypeStruct with the wanted shardings.

    Raises:
      ValueError: what was saved is of another type, as a key of another
        generator of random numbers is.
    """
    for version in sorted(self._manager.all_steps(), reverse=True):
      missing = [
        part
        for part in PARTS
        if not (self.directory / str(version) / part).is_dir()
      ]
      if missing:
        logging.warning(
          "checkpoint %d is passed over: it lacks %s", version, missing
        )
        self._passed_over.append(version)
        continue
      parts = self._manager.restore(
        version,
        args=ocp.args.Composite(
          state=ocp.args.PyTreeRestore(
            abstract_state,
            restore_args=ocp.checkpoint_utils.construct_restore_args(
              abstract_state
            ),
          ),
          host=ocp.args.PyTreeRestore(),
          meta=ocp.args.JsonRestore(),
        ),
      )
      _check_types(parts["state"], abstract_state)
      self._held = version
      return self._restored(version, parts)
    return None

  def close(self) -> None:
    """Waits until what was saved is on disk; raises if a save failed."""
    self._manager.wait_until_finished()
    self._manager.check_for_errors()
    self._manager.close()


def _check_types(restored: Any, abstract: Any) -> None:
  """Refuses arrays of another type than was asked for, by name."""

  def check(path, leaf, like):
    if leaf.dtype != like.dtype:
      raise ValueError(
        f"state{jax.tree_util.keystr(path)} was saved as {leaf.dtype}; it "
        f"must be {like.dtype}"
      )

  jax.tree_util.tree_map_with_path(check, restored, abstract)


def save_params(directory: str | os.PathLike, params: Any) -> None:
  """Writes weights alone, complete or not at all.

  Where the directory is there already, another run was first and its weights
  stay. Every process that has a part of them must call it.
  """
  final = pathlib.Path(directory).absolute()
  unique = processes.agreed(uuid.uuid4().int % 2**31)
  building = final.with_name(f"building-{unique:08x}")
  with ocp.PyTreeCheckpointer() as checkpointer:
    checkpointer.save(building, params)
  if jax.process_index() == 0:
    _rename(building, final)
  processes.agreed(0)  # It is there when this returns.


def _rename(building: pathlib.Path, final: pathlib.Path) -> None:
  try:
    os.rename(building, final)
  except OSError:
    if not final.exists():
      raise
    shutil.rmtree(building)


def restore_params(directory: str | os.PathLike, abstract: Any) -> Any:
  """Reads weights into the shapes, dtypes and shardings of `abstract`."""
  with ocp.PyTreeCheckpointer() as checkpointer:
    return checkpointer.restore(
      pathlib.Path(directory).absolute(),
      args=ocp.args.PyTreeRestore(
        abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
      ),
    )


def restore_run_params(version: str | os.PathLike, abstract: Any) -> Any:
  """Reads the weights alone out of one version of a run."""
  state = pathlib.Path(version).absolute() / "state"
  with ocp.PyTreeCheckpointer() as checkpointer:
    return restore_named(checkpointer, state, {"params": abstract})["params"]


def restore_named(
  checkpointer: ocp.PyTreeCheckpointer, path: pathlib.Path, abstract: Any
) -> Any:
  """Reads the arrays that `abstract` names, and no others."""
  return checkpointer.restore(
    path,
    args=ocp.args.PyTreeRestore(
      abstract,
      restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
      partial_restore=True,
    ),
  )


def pack_groups(groups: Sequence[Group]) -> tuple[dict[str, np.ndarray], list]:
  """Groups as flat arrays and a JSON-able list of what is not an array."""
  trajectories = [t for group in groups for t in group.trajectories]
  arrays = {
    name: _flat((getattr(t, name) for t in trajectories), dtype)
    for name, dtype in _PER_TOKEN.items()
  }
  arrays |= {
    name: _flat(
      (x for t in trajectories if (x := getattr(t, name)) is not None), dtype
    )
    for name, dtype in _EXTRAS.items()
  }
  arrays["prompts"] = _flat((g.prompt.tokens for g in groups), np.int32)
  described = [
    {
      "index": group.prompt.index,
      "prompt_tokens": len(group.prompt.tokens),
      "metadata": dict(group.prompt.metadata),
      "trajectories": [
        {
          "tokens": len(t),
          "extras": _shapes(t, _EXTRAS),
          "prompt_id": t.prompt_id,
          "group_id": t.group_id,
          "member": t.member,
          "temperature": t.temperature,
          "stop_reason": STOP_REASONS.index(t.stop_reason),
          "metrics": dict(t.metrics),
        }
        for t in group.trajectories
      ],
    }
    for group in groups
  ]
  return arrays, described


def _shapes(sampled: Trajectory | Chunk, names: Iterable[str]) -> dict:
  """Of one token's entry in those of these arrays that are there."""
  arrays = {name: getattr(sampled, name) for name in names}
  return {n: x.shape[1:] for n, x in arrays.items() if x is not None}


def _flat(pieces: Iterable[Any], dtype: Any) -> np.ndarray:
  """All entries in a row, after one 0: an empty array cannot be stored."""
  one = np.zeros(1, dtype)
  return np.concatenate([one, *map(np.ravel, pieces)]).astype(dtype)


def unpack_groups(
  arrays: dict[str, np.ndarray], described: list
) -> list[Group]:
  """The groups that `pack_groups` was given."""
  groups, start, prompt_start = [], 1, 1
  extra_starts = dict.fromkeys(_EXTRAS, 1)
  for group in described:
    prompt_end = prompt_start + group["prompt_tokens"]
    prompt = Prompt(
      index=group["index"],
      tokens=np.asarray(arrays["prompts"])[prompt_start:prompt_end],
      metadata=group["metadata"],
    )
    prompt_start = prompt_end
    trajectories = []
    for saved in group["trajectories"]:
      end = start + saved["tokens"]
      fields = {n: np.asarray(arrays[n])[start:end] for n in _PER_TOKEN}
      for name, shape in saved["extras"].items():
        first = extra_starts[name]
        extra_starts[name] += saved["tokens"] * math.prod(shape)
        flat = np.asarray(arrays[name])[first : extra_starts[name]]
        fields[name] = flat.reshape(-1, *shape)
      trajectories.append(
        Trajectory(
          **fields,
          prompt_id=saved["prompt_id"],
          group_id=saved["group_id"],
          member=saved["member"],
          temperature=saved["temperature"],
          stop_reason=STOP_REASONS[saved["stop_reason"]],
          metrics=saved["metrics"],
        )
      )
      start = end
    groups.append(Group(prompt=prompt, trajectories=tuple(trajectories)))
  return groups


Progress = dict[int, list[list[Turn]]]
"""Of each unfinished prompt, by index: the turns of each member."""


def pack_progress(progress: Progress) -> tuple[dict[str, np.ndarray], list]:
  """Turns as flat arrays and a JSON-able list of what is not an array."""
  every = [turns for members in progress.values() for turns in members]
  turns = [turn for some in every for turn in some]
  chunks = [chunk for turn in turns for chunk in turn.chunks]
  arrays = {
    f"progress_{name}": _flat(
      (x for c in chunks if (x := getattr(c, name)) is not None), dtype
    )
    for name, dtype in _PER_CHUNK.items()
  }
  arrays["progress_observations"] = _flat(
    (turn.observation for turn in turns), np.int32
  )
  described = [
    [index, [[_described(turn) for turn in turns] for turns in members]]
    for index, members in progress.items()
  ]
  return arrays, described


def _described(turn: Turn) -> dict[str, Any]:
  return {
    "observation": len(turn.observation),
    "chunks": [
      {
        "tokens": len(chunk.tokens),
        "version": chunk.version,
        "stop_reason": _REASONS.index(chunk.stop_reason),
        "extras": _shapes(chunk, EXTRAS),
      }
      for chunk in turn.chunks
    ],
  }


def unpack_progress(arrays: dict[str, np.ndarray], described: list) -> Progress:
  """The progress that `pack_progress` was given."""
  starts = dict.fromkeys((*_PER_CHUNK, "observations"), 1)

  def take(name: str, count: int) -> np.ndarray:
    start = starts[name]
    starts[name] += count
    return np.asarray(arrays[f"progress_{name}"])[start : start + count]

  def chunk(saved: dict[str, Any]) -> Chunk:
    n = saved["tokens"]
    kept = {
      name: take(name, n * math.prod(shape)).reshape(n, *shape)
      for name, shape in saved["extras"].items()
    }
    return Chunk(
      tokens=take("tokens", n),
      logp=take("logp", n),
      version=saved["version"],
      stop_reason=_REASONS[saved["stop_reason"]],
      **kept,
    )

  def turn(saved: dict[str, Any]) -> Turn:
    observation = take("observations", saved["observation"])
    chunks = [chunk(one) for one in saved["chunks"]]
    return Turn(observation=observation, chunks=chunks)

  return {
    index: [[turn(saved) for saved in turns] for turns in members]
    for index, members in described
  }
