"""What generator and clients say to each other: msgpack maps, flat arrays.

A message per token and request costs more than sampling a token of a small
model. So a connection carries many requests, and one message holds what a
dispatch sampled for all of them: every field is one little-endian array over
the chunks (`ids`, `counts`, `versions`, `ends`) or over all their tokens
(`tokens`, `logp`, `topk_ids`, `topk_logp`, `experts`), as bytes.

    to the server   {v, open: [{id, streams, tokens, ...}], cancel: [id]}
    to the client   {v, ids, counts, ..., errors: [[id, code, message]]}

Ids are the client's, unique on their connection. Only chunks travel: a
Completion is split into chunks of one version each and joined at the other
end. Whatever bytes arrive, unpacking returns or raises WireError.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgpack
import numpy as np

from rl_tpu.messages import (
  WireError,
  check_fields,
  check_integers,
  pack_map,
  unpack_map,
)
from rl_tpu.types import (
  STOP_REASONS,
  Chunk,
  Completion,
  Request,
  Sampling,
  extras,
)

CHUNK_BYTES = 32
"""What a chunk takes beside its tokens, about."""

MAX_MESSAGE_BYTES = 4 * 2**20
"""Messages are kept to about this size where they can be split."""

_IDENTITY = ("prompt_index", "member", "seed")
_SAMPLING = {
  "temperature": float,
  "max_tokens": int,
  "stop_ids": list,
  "min_tokens": int,
  "top_k": int,
  "top_p": float,
  "min_p": float,
}
_LARGEST = 2**30
"""Integers that end up as int32 on a device leave room for a sum of two."""


class OverloadedError(RuntimeError):
  """The generator has as many requests as it may; try again later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
  """Why a request has no answer, or ends without one."""

  code: str
  """The name of a gRPC status."""
  message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opening:
  """A request as it arrived: well formed, but not yet known to be valid."""

  id: int
  streams: bool
  """Whether every dispatch's tokens are wanted, or all at the end."""
  tokens: np.ndarray
  identity: Mapping[str, int]
  sampling: Mapping[str, Any]

  def request(self) -> Request:
    """The request.

    Raises:
      ValueError: a sampling setting is out of its range.
    """
    sampling = Sampling(
      **{**self.sampling, "stop_ids": tuple(self.sampling["stop_ids"])}
    )
    return Request(tokens=self.tokens, sampling=sampling, **self.identity)


def _array(name: str, data: Any, dtype: str) -> np.ndarray:
  kind = np.dtype(dtype)
  if not isinstance(data, bytes) or len(data) % kind.itemsize:
    raise WireError(f"{name} does not hold whole numbers of type {kind}")
  return np.frombuffer(data, kind)


# To the server.


def pack_opening(request_id: int, request: Request, streams: bool) -> bytes:
  """One request, to be joined with others by `pack_requests`."""
  how = dataclasses.asdict(request.sampling)
  message = {
    "id": request_id,
    "streams": streams,
    "tokens": np.asarray(request.tokens).astype("<i4").tobytes(),
    **{name: int(getattr(request, name)) for name in _IDENTITY},
    "sampling": {**how, "stop_ids": [int(i) for i in how["stop_ids"]]},
  }
  return cast(bytes, msgpack.packb(message))


def pack_requests(
  openings: Sequence[bytes] = (), cancelled: Sequence[int] = ()
) -> bytes:
  """A message that opens some requests, then withdraws some."""
  return pack_map(open=list(openings), cancel=list(cancelled))


def unpack_requests(data: bytes) -> tuple[list[Opening], list[int]]:
  """The requests that a message opens, and the ids that it withdraws.

  Raises:
    WireError: the message does not follow the format.
  """
  message = unpack_map(data, open=list, cancel=list)
  check_integers("cancel", message["cancel"], 0, 2**63)
  return [_opening(one) for one in message["open"]], message["cancel"]


def _opening(data: Any) -> Opening:
  if not isinstance(data, bytes):
    raise WireError(f"a request is {type(data).__name__}; it must be bytes")
  try:
    message = msgpack.unpackb(data)
  except ValueError as error:
    raise WireError(f"a request is not msgpack: {error}") from error
  whole = dict.fromkeys(("id", *_IDENTITY), int)
  check_fields(message, {**whole, "streams": bool, "tokens": bytes})
  check_integers("id", [message["id"]], 0, 2**63)
  given = message.get("sampling")
  sampling = check_fields(given, _SAMPLING)
  if set(sampling) != set(_SAMPLING):
    raise WireError(f"sampling has {sorted(sampling)} in a message")
  check_integers("stop_ids", sampling["stop_ids"], 0, _LARGEST)
  for name in ("max_tokens", "min_tokens", "top_k"):
    check_integers(name, [sampling[name]], -1, _LARGEST)
  return Opening(
    id=message["id"],
    streams=message["streams"],
    tokens=_array("tokens", message["tokens"], "<i4"),
    identity={name: message[name] for name in _IDENTITY},
    sampling=sampling,
  )


# To the client.


def split(completion: Completion) -> list[Chunk]:
  """The chunks of a completion, one for each run of equal versions."""
  cuts = np.flatnonzero(np.diff(completion.version)) + 1
  bounds = [0, *cuts.tolist(), len(completion.tokens)]
  return [
    Chunk(
      tokens=completion.tokens[start:end],
      logp=completion.logp[start:end],
      version=int(completion.version[start]),
      stop_reason=completion.stop_reason if end == bounds[-1] else None,
      **{name: x[start:end] for name, x in extras(completion).items()},
    )
    for start, end in itertools.pairwise(bounds)
  ]


def join(chunks: Sequence[Chunk]) -> Completion:
  """The completion of a request whose chunks are all there.

  Where the last one does not say why it ended, its budget did: it was larger
  when the chunk was sampled.
  """
  counts = [len(chunk.tokens) for chunk in chunks]
  versions = np.array([chunk.version for chunk in chunks], np.int32)
  return Completion(
    tokens=np.concatenate([chunk.tokens for chunk in chunks]),
    logp=np.concatenate([chunk.logp for chunk in chunks]),
    version=np.repeat(versions, counts),
    stop_reason=chunks[-1].stop_reason or "length",
    **{name: _concatenated(chunks, name) for name in extras(chunks[0])},
  )


def remainder(request: Request, chunks: Sequence[Chunk]) -> Request | None:
  """What of a request is still to be sampled; None if nothing is.

  The next token stands where it would have stood, so its key is the same.
  """
  if not chunks:
    return request
  count = sum(len(chunk.tokens) for chunk in chunks)
  sampling = request.sampling
  left = sampling.max_tokens - count
  if chunks[-1].stop_reason is not None or left < 1:
    return None
  return dataclasses.replace(
    request,
    tokens=np.concatenate([request.tokens, *(c.tokens for c in chunks)]),
    sampling=dataclasses.replace(
      sampling,
      max_tokens=left,
      min_tokens=max(0, sampling.min_tokens - count),
    ),
  )


def size(chunk: Chunk) -> int:
  """Bytes of a chunk in a message, to within a few."""
  kept = sum(array.nbytes for array in extras(chunk).values())
  return CHUNK_BYTES + 8 * len(chunk.tokens) + kept


def pack_answers(answers: Sequence[tuple[int, Chunk | Failure]]) -> bytes:
  """A message with chunks and failures; chunks have the same extras."""
  ids, chunks, errors = [], [], []
  for request_id, answer in answers:
    if isinstance(answer, Chunk):
      ids.append(request_id)
      chunks.append(answer)
    else:
      errors.append((request_id, answer.code, answer.message))
  fields: dict[str, Any] = {"errors": errors}
  if chunks:
    ends = [_ENDS[chunk.stop_reason] for chunk in chunks]
    fields |= {
      "ids": np.array(ids, "<i8").tobytes(),
      "counts": np.array([len(c.tokens) for c in chunks], "<i4").tobytes(),
      "versions": np.array([c.version for c in chunks], "<i4").tobytes(),
      "ends": bytes(ends),
      "tokens": _bytes(chunks, "tokens", "<i4"),
      "logp": _bytes(chunks, "logp", "<f4"),
    }
    for name, array in extras(chunks[0]).items():
      fields[name] = _bytes(chunks, name, _EXTRAS[name])
      fields[f"{name}_shape"] = list(array.shape[1:])
  return pack_map(**fields)


_EXTRAS = {"topk_ids": "<i4", "topk_logp": "<f4", "experts": "<i2"}
_ENDS = {None: 0} | {r: i for i, r in enumerate(STOP_REASONS, 1)}
_REASONS = (None, *STOP_REASONS)


def _concatenated(chunks: Sequence[Chunk], name: str) -> np.ndarray:
  return np.concatenate([getattr(chunk, name) for chunk in chunks])


def _bytes(chunks: Sequence[Chunk], name: str, dtype: str) -> bytes:
  return _concatenated(chunks, name).astype(dtype, copy=False).tobytes()


def unpack_answers(data: bytes) -> list[tuple[int, Chunk | Failure]]:
  """The chunks and failures of a message, by request id.

  Raises:
    WireError: the message does not follow the format.
  """
  message = unpack_map(data, errors=list)
  answers: list[tuple[int, Chunk | Failure]] = []
  if "ids" in message:
    answers += _chunks(message)
  for error in message["errors"]:
    if not isinstance(error, list) or [*map(type, error)] != [int, str, str]:
      raise WireError(f"errors has {error!r} in a message")
    answers.append((error[0], Failure(code=error[1], message=error[2])))
  return answers


def _chunks(message: dict[str, Any]) -> list[tuple[int, Chunk]]:
  ids, counts, versions, ends, tokens, logp = (
    _array(name, message.get(name), dtype)
    for name, dtype in (
      ("ids", "<i8"),
      ("counts", "<i4"),
      ("versions", "<i4"),
      ("ends", "u1"),
      ("tokens", "<i4"),
      ("logp", "<f4"),
    )
  )
  kept = _kept(message, len(tokens))
  stops = np.cumsum(counts)
  alike = len({len(ids), len(counts), len(versions), len(ends)}) == 1
  whole = len(counts) and counts.min() > 0 and stops[-1] == len(tokens)
  if not (alike and whole and len(logp) == len(tokens)):
    raise WireError("the arrays of a message do not fit each other")
  if ends.max() >= len(_REASONS):
    raise WireError(f"ends has {ends.max()} in a message")
  answers, start = [], 0
  for request_id, stop, version, end in zip(
    ids.tolist(), stops.tolist(), versions.tolist(), ends.tolist(), strict=True
  ):
    chunk = Chunk(
      tokens=tokens[start:stop],
      logp=logp[start:stop],
      version=version,
      stop_reason=_REASONS[end],
      **{name: array[start:stop] for name, array in kept.items()},
    )
    answers.append((request_id, chunk))
    start = stop
  return answers


def _kept(message: dict[str, Any], tokens: int) -> dict[str, np.ndarray]:
  """What a message has of `types.EXTRAS`, by name."""
  arrays: dict[str, np.ndarray] = {}
  for name, dtype in _EXTRAS.items():
    if name not in message:
      continue
    array = _array(name, message[name], dtype)
    shape = message.get(f"{name}_shape")
    if not isinstance(shape, list):
      raise WireError(f"{name}_shape is {shape!r} in a message")
    check_integers(f"{name}_shape", shape, 1, _LARGEST)
    if math.prod(shape) * tokens != len(array):
      raise WireError(f"{name} of a message does not fit its tokens")
    arrays[name] = array.reshape(tokens, *shape)
  if ("topk_ids" in arrays) != ("topk_logp" in arrays):
    raise WireError("the heads of a message lack ids or logp")
  return arrays
