"""Prefill: which sequences share a row, and packed rows in the graph.

Prompts are padded to a few lengths, the buckets, since each length is a
program. Where a row may hold several sequences they lie one behind another,
told apart by their ids, as in the learner's batches: no token sees another
sequence, and each has positions of its own. Rows are then nearly full however
the lengths mix, and still a program is a bucket and a number of rows.

Attention over a row costs its length squared where [T, T] is computed (CPUs);
splash on TPUs skips what lies above the diagonal, and the blocks in which no
two tokens belong together cost only their comparison.

Axes: R rows, P padded length (a bucket), N sequences at most, W columns of a
sequence's header.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rl_tpu import sharding
from rl_tpu.generation import decoding
from rl_tpu.models import transformer

_CALL = 4
"""What a prefill costs beside its rows, in rows (measured on CPUs)."""

Rows = list[list[int]]
"""Of each row, the indices of its sequences, in order."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
  """Rows of sequences to insert."""

  rows: Int[Array | np.ndarray, "3 R P"]
  """Tokens, positions, and the number of the sequence in its row; -1: none."""
  headers: Int[Array | np.ndarray, "N W"]
  """As `decoding.pack` lays them out."""
  places: Int[Array | np.ndarray, "N 2"]
  """Row and first column of each sequence."""
  count: Int[Array | np.ndarray, ""]
  """Sequences that are there, the first of N."""


def cheapest_splits(most: int, sizes: Sequence[int]) -> list[tuple[int, ...]]:
  """For 0 to `most` rows, the batches of these sizes that cost least."""

  def cost(split: tuple[int, ...]) -> int:
    return sum(split) + _CALL * len(split)

  splits: list[tuple[int, ...]] = [()]
  for n in range(1, most + 1):
    candidates = [(size, *splits[max(n - size, 0)]) for size in sizes]
    splits.append(min(candidates, key=cost))
  return splits


def batches(
  lengths: Sequence[int],
  buckets: Sequence[int],
  most_in_row: int,
  splits: Sequence[tuple[int, ...]],
) -> list[tuple[int, int, Rows]]:
  """Bucket, number of rows, and those in use, of each prefill to run.

  Of one sequence a row and the packings into rows of each bucket, the one that
  computes fewest tokens, unused rows included; the shorter rows of equals,
  which attention likes.

  Args:
    lengths: of the sequences, each at most the last bucket.
    buckets: lengths of rows, ascending.
    most_in_row: sequences of a row, >= 1.
    splits: of `cheapest_splits`, for as many rows as there are sequences.
  """
  packings = [_alone(lengths, buckets)]
  if most_in_row > 1:
    packings += [_packed(lengths, buckets, aim, most_in_row) for aim in buckets]
  plans = []
  for packing in packings:
    by_bucket: dict[int, Rows] = {}
    for bucket, row in packing:
      by_bucket.setdefault(bucket, []).append(row)
    plans.append(
      [
        (bucket, size, rows[first : first + size])
        for bucket, rows in sorted(by_bucket.items())
        for first, size in _offsets(splits[len(rows)])
      ]
    )
  return min(plans, key=lambda plan: sum(b * size for b, size, _ in plan))


def _offsets(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
  """Where each begins, and the sizes."""
  return zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)


def _bucket_of(length: int, buckets: Sequence[int]) -> int:
  return next(bucket for bucket in buckets if length <= bucket)


def _alone(
  lengths: Sequence[int], buckets: Sequence[int]
) -> list[tuple[int, list[int]]]:
  """A row of its own for each, and the smallest buckets that hold them."""
  return [(_bucket_of(n, buckets), [i]) for i, n in enumerate(lengths)]


def _packed(
  lengths: Sequence[int], buckets: Sequence[int], aim: int, most_in_row: int
) -> list[tuple[int, list[int]]]:
  """Rows and the smallest buckets that hold them.

  First-fit decreasing (Johnson, 1973) into rows of length `aim`, a bucket;
  sequences that are longer begin rows of their own bucket.
  """
  rows: Rows = []
  used: list[int] = []
  for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    for row, full in enumerate(used):
      room = max(aim, _bucket_of(lengths[rows[row][0]], buckets)) - full
      if lengths[i] <= room and len(rows[row]) < most_in_row:
        rows[row].append(i)
        used[row] += lengths[i]
        break
    else:
      rows.append([i])
      used.append(lengths[i])
  return [
    (_bucket_of(n, buckets), row) for n, row in zip(used, rows, strict=True)
  ]


def pack(
  rows: Sequence[Sequence[decoding.Admission]],
  *,
  size: int,
  bucket: int,
  most_in_row: int,
  slots: int,
  max_stop_ids: int,
) -> Packed:
  """Lays out `size` rows, of which the first are given."""
  data = np.zeros((3, size, bucket), np.int32)
  data[2] = -1
  places = np.zeros((size * most_in_row, 2), np.int32)
  members = [one for row in rows for one in row]
  index = 0
  for r, row in enumerate(rows):
    first = 0
    for number, admission in enumerate(row):
      tokens = admission.missing
      columns = slice(first, first + len(tokens))
      data[0, r, columns] = tokens
      data[1, r, columns] = np.arange(len(tokens))
      data[2, r, columns] = number
      places[index] = r, first
      first, index = columns.stop, index + 1
  headers = decoding.headers(
    members, rows=len(places), slots=slots, max_stop_ids=max_stop_ids
  )
  return Packed(
    rows=data,
    headers=headers,
    places=places,
    count=np.asarray(len(members), np.int32),
  )


def insert(
  policy: transformer.Policy,
  params: transformer.Params,
  state: decoding.DecodeState,
  packed: Packed,
) -> decoding.DecodeState:
  """Prefills packed rows, and inserts as many sequences at once as fit a row.

  A slot is written as far as a row is long, as by `decoding.insert`: what
  follows a sequence's last token are others' keys and values, where nothing
  looks before they are overwritten. Where a mesh splits rows and slots, its
  devices exchange the rows of each layer once. (Sequences are at least two: one
  slot alone would be no scatter to the compiler, and have the cache gathered.)
  """
  _, rows, length = packed.rows.shape
  prefilled = policy.prefill(params, *packed.rows)
  at_once = len(packed.places) // rows

  def write(stack, layer, new):
    whole = [sharding.constrain(x, None, None, "kv_heads", None) for x in new]

    def some(turn, stack):
      def take(x):
        return jax.lax.dynamic_slice_in_dim(x, turn * at_once, at_once)

      row, first = take(packed.places).T[..., None]
      entries = jnp.minimum(first + jnp.arange(length), length - 1)
      keys, values = (x[row, entries] for x in whole)
      slots = take(packed.headers)[:, 0]
      return decoding.write_layer(stack, layer, slots, (keys, values))

    turns = (packed.count + at_once - 1) // at_once
    return jax.lax.fori_loop(0, turns, some, stack)

  return decoding.insert_by_layers(
    state, prefilled, jnp.asarray(packed.headers), write
  )
