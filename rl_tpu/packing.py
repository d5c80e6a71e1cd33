"""From ragged trajectories to rows of one length, on the host.

A row holds several trajectories, told apart by `trajectory_ids`, so that little
of a fixed shape is padding. Trajectories are placed from the longest to the
shortest, each into the fullest row that still has room (best fit decreasing:
at most 11/9 of the fewest rows possible), in n log n time. Row and trajectory
counts are rounded up to a few sizes, so that few shapes are compiled.

Stored tokens, masks and log-probabilities are copied as they are: masks are
never made by comparing token ids, and a logp that is not a number stays so.
"""

import bisect
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from rl_tpu.types import Batch, Trajectory

# Per-token field of Batch: its type, and what padding holds.
_ROW_FIELDS = {
  "tokens": (np.int32, 0),
  "trajectory_ids": (np.int32, -1),
  "positions": (np.int32, 0),
  "action_mask": (np.bool_, False),
  "behavior_logp": (np.float32, 0.0),
  "token_version": (np.int32, -1),
  "rewards": (np.float32, 0.0),
  "temperature": (np.float32, 1.0),
}
# The same of what samplers may record, in batches whose trajectories have it.
_HEAD_FIELDS = {
  "behavior_topk_ids": (np.int32, -1),
  "behavior_topk_logp": (np.float32, -np.inf),
}
_EXPERT_FIELDS = {"behavior_experts": (np.int16, -1)}


def pack(
  trajectories: Sequence[Trajectory],
  *,
  row_length: int,
  version: int,
  rows_multiple: int = 1,
  minibatches: int = 1,
  shuffle_seed: int | None = None,
  baselines: Float[np.ndarray, " N"] | None = None,
) -> Batch:
  """Packs trajectories into rows of `row_length` tokens; arrays are NumPy.

  Trajectory n of the sequence has id n in the batch; groups are renumbered
  from 0 in order of appearance. R is `rows_multiple` times a size of `bucket`,
  N such a size. Rows are ordered to be dealt in turn, row r to minibatch
  r mod `minibatches`: their token counts then differ by less than a row.

  Args:
    trajectories: at least one.
    row_length: tokens a row, T.
    version: of the weights before this batch is trained.
    rows_multiple: what R must be a multiple of: minibatches times data shards
      times microbatches, say.
    minibatches: how many the rows will be dealt to; divides rows_multiple.
    shuffle_seed: deals trajectories and rows at random; None: in order.
    baselines: what each trajectory's outcome is compared with, in their order;
      NaN where nothing is known. None: the batch has none.

  Raises:
    ValueError: if there is no trajectory, one is longer than a row, sampled
      greedily, or rewarded off its action tokens; or if their samplers' heads
      differ in size, recorded experts in shape, or baselines in number.
  """
  if not trajectories:
    raise ValueError("pack got no trajectories; it needs at least one")
  if minibatches < 1 or rows_multiple % minibatches:
    raise ValueError(
      f"rows_multiple is {rows_multiple}; it must be a multiple of "
      f"minibatches, which is {minibatches}"
    )
  for trajectory in trajectories:
    _check(trajectory, row_length)
  generator = None
  if shuffle_seed is not None:
    generator = np.random.default_rng(shuffle_seed)
  lengths = [len(t) for t in trajectories]
  rows = _order_rows(
    _assign(lengths, row_length, generator), lengths, minibatches, generator
  )
  count = rows_multiple * bucket(-(-len(rows) // rows_multiple))
  extras = _extras(_head_size(trajectories), _routed(trajectories))
  fields = _fill(trajectories, rows, (count, row_length), extras)
  fields |= _per_trajectory(trajectories, baselines)
  return Batch(**fields, version=_i32(version))


def abstract(
  rows: int,
  row_length: int,
  trajectories: int,
  *,
  head_size: int = 0,
  routed: tuple[int, int] | None = None,
  baselines: bool = False,
) -> Batch:
  """Shapes and dtypes of what `pack` makes, for compiling ahead of time.

  Args:
    rows: R.
    row_length: T.
    trajectories: how many are packed; N is a size of `bucket`.
    head_size: K of the sampler's head; 0 where there is none.
    routed: layers and experts of each that samplers record; None: they do not.
    baselines: whether each trajectory brings one.
  """
  kinds = {name: (*kind, ()) for name, kind in _ROW_FIELDS.items()}
  fields: dict[str, Any] = {
    name: jax.ShapeDtypeStruct((rows, row_length, *tail), dtype)
    for name, (dtype, _, tail) in (kinds | _extras(head_size, routed)).items()
  }
  each = (bucket(trajectories),)
  fields["truncated"] = jax.ShapeDtypeStruct(each, np.bool_)
  fields["group_ids"] = jax.ShapeDtypeStruct(each, np.int32)
  if baselines:
    fields["baselines"] = jax.ShapeDtypeStruct(each, np.float32)
  fields["version"] = jax.ShapeDtypeStruct((), np.int32)
  return Batch(**fields)


def bucket(count: int) -> int:
  """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is >= count."""
  power = 1 << max(count - 1, 0).bit_length()
  return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def _check(trajectory: Trajectory, row_length: int) -> None:
  name = f"trajectory {trajectory.member} of prompt {trajectory.prompt_id}"
  if len(trajectory) > row_length:
    raise ValueError(
      f"{name} has {len(trajectory)} tokens; row_length is {row_length}: "
      "raise it, or lower the budget of the episode"
    )
  if not trajectory.temperature > 0:
    raise ValueError(
      f"{name} has temperature {trajectory.temperature}; it must be > 0 to be "
      "trained on (greedy answers are for evaluation)"
    )
  # Not `rewards[~mask] != 0`: NaN in a place that nobody reads is no reward.
  stray = np.nan_to_num(trajectory.rewards[~trajectory.action_mask])
  if stray.any():
    raise ValueError(
      f"{name} has reward {stray.sum()} off its action tokens; an outcome "
      "belongs on the last action token"
    )


def _head_size(trajectories: Sequence[Trajectory]) -> int:
  """K, which all must share; 0 where they have no head."""
  sizes = {
    0 if t.behavior_topk_ids is None else t.behavior_topk_ids.shape[1]
    for t in trajectories
  }
  if len(sizes) > 1:
    raise ValueError(
      f"trajectories of one batch have heads of K = {sorted(sizes)} tokens; "
      "they must be alike: sample them all with one behavior_top_k"
    )
  return sizes.pop()


def _routed(trajectories: Sequence[Trajectory]) -> tuple[int, int] | None:
  """Layers and experts of each, which all must share; None: not recorded."""
  shapes = {
    None if t.behavior_experts is None else t.behavior_experts.shape[1:]
    for t in trajectories
  }
  if len(shapes) > 1:
    raise ValueError(
      f"trajectories of one batch have experts of shapes {shapes}; they must "
      "be alike: sample them all with record_experts, or none"
    )
  return shapes.pop()


def _extras(head_size: int, routed: tuple[int, int] | None) -> dict[str, Any]:
  """Type, padding and further axes of what samplers recorded."""
  heads = _HEAD_FIELDS if head_size else {}
  experts = _EXPERT_FIELDS if routed else {}
  fields: dict[str, Any] = {n: (*k, (head_size,)) for n, k in heads.items()}
  return fields | {n: (*k, routed) for n, k in experts.items()}


def _assign(
  lengths: Sequence[int],
  row_length: int,
  generator: np.random.Generator | None,
) -> list[list[int]]:
  """Which trajectories go into which row: best fit decreasing."""
  order = np.arange(len(lengths))
  if generator is not None:
    order = generator.permutation(order)
  order = sorted(order.tolist(), key=lambda n: -lengths[n])
  rows: list[list[int]] = []
  rooms: list[tuple[int, int]] = []  # (room, row) of rows not full, ascending
  for n in order:
    place = bisect.bisect_left(rooms, (lengths[n], -1))
    if place < len(rooms):
      room, row = rooms.pop(place)
    else:
      room, row = row_length, len(rows)
      rows.append([])
    rows[row].append(n)
    if room > lengths[n]:
      bisect.insort(rooms, (room - lengths[n], row))
  return rows


def _order_rows(
  rows: list[list[int]],
  lengths: Sequence[int],
  minibatches: int,
  generator: np.random.Generator | None,
) -> list[list[int]]:
  """From the fullest row to the emptiest, so that dealing is balanced.

  Each run of `minibatches` rows is shuffled: which minibatch gets which row is
  chance.
  """
  rows = sorted(rows, key=lambda row: -sum(lengths[n] for n in row))
  if generator is None:
    return rows
  ordered = []
  for start in range(0, len(rows), minibatches):
    # A last, incomplete run is padded: its empty rows may go anywhere.
    run = rows[start : start + minibatches]
    run += [[]] * (minibatches - len(run))
    ordered += [run[i] for i in generator.permutation(minibatches)]
  return ordered


def _fill(
  trajectories: Sequence[Trajectory],
  rows: list[list[int]],
  shape: tuple[int, int],
  extras: dict[str, Any],
) -> dict[str, Any]:
  arrays = {
    name: np.full(shape, padding, dtype)
    for name, (dtype, padding) in _ROW_FIELDS.items()
  } | {
    name: np.full((*shape, *tail), padding, dtype)
    for name, (dtype, padding, tail) in extras.items()
  }
  for row, members in enumerate(rows):
    start = 0
    for n in members:
      trajectory = trajectories[n]
      place = (row, slice(start, start + len(trajectory)))
      arrays["trajectory_ids"][place] = n
      arrays["positions"][place] = np.arange(len(trajectory))
      for name in arrays.keys() - {"trajectory_ids", "positions"}:
        arrays[name][place] = getattr(trajectory, name)
      start += len(trajectory)
  return arrays


def _per_trajectory(
  trajectories: Sequence[Trajectory],
  baselines: Float[np.ndarray, " N"] | None,
) -> dict[str, Any]:
  size = bucket(len(trajectories))
  truncated = np.zeros(size, np.bool_)
  group_ids = np.full(size, -1, np.int32)
  numbers: dict[int, int] = {}
  for n, trajectory in enumerate(trajectories):
    truncated[n] = trajectory.stop_reason == "length"
    group_ids[n] = numbers.setdefault(trajectory.group_id, len(numbers))
  fields = {"truncated": truncated, "group_ids": group_ids}
  if baselines is not None:
    if len(baselines) != len(trajectories):
      raise ValueError(
        f"baselines has {len(baselines)} entries; it must have one for each of "
        f"the {len(trajectories)} trajectories"
      )
    padded = np.full(size, np.nan, np.float32)
    padded[: len(baselines)] = baselines
    fields["baselines"] = padded
  return fields


def _i32(number: int) -> Any:
  return np.asarray(number, np.int32)
