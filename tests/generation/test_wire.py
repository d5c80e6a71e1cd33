import dataclasses

import hypothesis
import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
from bigram import ask

from rl_tpu.generation import wire
from rl_tpu.types import Chunk, Completion

COMPLETION = Completion(
  tokens=np.array([5, 6, 7, 8], np.int32),
  logp=np.array([-0.5, -1.5, -np.inf, 0], np.float32),
  version=np.array([3, 3, 4, 9], np.int32),
  stop_reason="length",
  topk_ids=np.arange(8, dtype=np.int32).reshape(4, 2),
  topk_logp=-np.arange(8, dtype=np.float32).reshape(4, 2),
)
BARE = dataclasses.replace(COMPLETION, topk_ids=None, topk_logp=None)


def assert_equal(one, other):
  assert type(one) is type(other)
  for field in dataclasses.fields(one):
    a, b = (getattr(x, field.name) for x in (one, other))
    if isinstance(a, np.ndarray):
      assert a.dtype == b.dtype
      np.testing.assert_array_equal(a, b)
    else:
      assert a == b


def opened(request, streams=True):
  data = wire.pack_requests([wire.pack_opening(7, request, streams)], [3, 4])
  (opening,), cancelled = wire.unpack_requests(data)
  assert (opening.id, opening.streams, cancelled) == (7, streams, [3, 4])
  return opening.request()


def test_a_request_arrives_as_it_was_sent():
  request = ask(
    *[1, 2, 3],
    index=2**32 - 1,
    member=5,
    seed=9,
    temperature=0.25,
    max_tokens=77,
    stop_ids=(1, 2),
    min_tokens=3,
    top_k=-1,
    top_p=0.5,
    min_p=0.25,
  )
  assert_equal(opened(request), request)


def test_numpy_numbers_and_wide_tokens_may_be_sent():
  request = dataclasses.replace(
    ask(1, stop_ids=(np.int32(4),)),
    tokens=np.array([3, 4], np.int64),
    member=np.int64(2),
  )
  arrived = opened(request, streams=False)
  assert arrived.tokens.dtype == np.int32
  assert arrived.tokens.tolist() == [3, 4]
  assert (arrived.member, arrived.sampling.stop_ids) == (2, (4,))


@pytest.mark.parametrize("completion", [COMPLETION, BARE], ids=["head", "bare"])
def test_a_completion_arrives_as_it_was_sampled(completion):
  chunks = wire.split(completion)
  assert [chunk.version for chunk in chunks] == [3, 4, 9]
  data = wire.pack_answers([(1, chunk) for chunk in chunks])
  arrived = wire.unpack_answers(data)
  for (request_id, chunk), sent in zip(arrived, chunks, strict=True):
    assert request_id == 1
    assert_equal(chunk, sent)
  assert_equal(wire.join([chunk for _, chunk in arrived]), completion)


def test_chunks_of_many_requests_and_failures_share_a_message():
  chunks = wire.split(COMPLETION)
  failure = wire.Failure(code="UNAVAILABLE", message="gone")
  sent = [(2**40, chunks[0]), (1, failure), (5, chunks[2])]
  arrived = wire.unpack_answers(wire.pack_answers(sent))
  assert [request_id for request_id, _ in arrived] == [2**40, 5, 1]
  assert_equal(arrived[1][1], chunks[2])
  assert arrived[2][1] == failure
  assert wire.unpack_answers(wire.pack_answers([(1, failure)])) == [
    (1, failure)
  ]


def test_another_version_of_the_format_is_refused_by_number():
  data = msgpack.packb({"v": 2, "open": [], "cancel": []})
  with pytest.raises(wire.WireError, match=r"version 2; it must be 1"):
    wire.unpack_requests(data)


def changed(**fields):
  opening = msgpack.unpackb(wire.pack_opening(1, ask(1, 2), True))
  for name, value in fields.items():
    part = opening["sampling"] if name in opening["sampling"] else opening
    part[name] = value
  return wire.pack_requests([msgpack.packb(opening)])


@pytest.mark.parametrize(
  "fields, message",
  [
    ({"tokens": b"123"}, "tokens"),
    ({"tokens": [1, 2]}, "tokens is list"),
    ({"id": -1}, "id has -1"),
    ({"id": True}, "id is bool"),
    ({"member": "0"}, "member is str"),
    ({"max_tokens": 2**40}, "max_tokens has 1099511627776"),
    ({"top_k": 2**31}, "top_k has"),
    ({"stop_ids": [1, 2**31]}, "stop_ids has"),
    ({"stop_ids": [1.5]}, "stop_ids has 1.5"),
    ({"temperature": None}, "temperature is NoneType"),
    ({"sampling": {}}, "temperature is NoneType"),
    ({"sampling": 3}, "must be a map"),
  ],
)
def test_a_malformed_request_is_refused_with_the_field(fields, message):
  with pytest.raises(wire.WireError, match=message):
    wire.unpack_requests(changed(**fields))


def test_a_setting_out_of_range_is_the_requests_own_error():
  (opening,), _ = wire.unpack_requests(changed(temperature=-1))
  with pytest.raises(ValueError, match="temperature is -1.0"):
    opening.request()


@pytest.mark.parametrize(
  "fields",
  [
    {"counts": b""},
    {"counts": np.array([1], "<i4").tobytes()},
    {"counts": np.array([2, -1, 3], "<i4").tobytes()},
    {"logp": b""},
    {"versions": None},
    {"ends": b"\x00\x00\x09"},
    {"topk_logp": b"1234"},
    {"errors": [[1, 2, 3]]},
  ],
)
def test_arrays_that_do_not_fit_each_other_are_refused(fields):
  chunks = [(1, chunk) for chunk in wire.split(COMPLETION)]
  message = msgpack.unpackb(wire.pack_answers(chunks))
  with pytest.raises(wire.WireError):
    wire.unpack_answers(msgpack.packb(message | fields))


ANYTHING = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-(2**63), 2**64 - 1)
  | st.floats()
  | st.text(max_size=3)
  | st.binary(max_size=9),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3)
  ),
  max_leaves=6,
)
REQUESTS = wire.pack_requests([wire.pack_opening(1, ask(1, 2), True)], [5])
ANSWERS = wire.pack_answers([(1, chunk) for chunk in wire.split(COMPLETION)])


@st.composite
def damaged(draw, message):
  """The message with a few bytes changed, or cut."""
  data = bytearray(message)
  for _ in range(draw(st.integers(1, 3))):
    data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
  return bytes(data[: draw(st.integers(1, len(data)))])


@st.composite
def odd(draw, message):
  """The message with anything in the place of a field."""
  fields = msgpack.unpackb(message)
  fields[draw(st.sampled_from(sorted(fields)))] = draw(ANYTHING)
  return msgpack.packb(fields)


@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(
  st.binary(max_size=40)
  | ANYTHING.map(msgpack.packb)
  | damaged(REQUESTS)
  | odd(REQUESTS)
)
def test_whatever_arrives_at_the_server_is_read_or_refused(data):
  try:
    openings, cancelled = wire.unpack_requests(data)
  except wire.WireError:
    return
  assert all(isinstance(i, int) for i in cancelled)
  for opening in openings:
    try:
      opening.request()
    except ValueError:
      pass


@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(damaged(ANSWERS) | odd(ANSWERS))
def test_whatever_arrives_at_the_client_is_read_or_refused(data):
  try:
    answers = wire.unpack_answers(data)
  except wire.WireError:
    return
  for _, answer in answers:
    assert isinstance(answer, wire.Failure) or len(answer.tokens)


def test_sizes_are_known_before_packing():
  (chunk,) = wire.split(
    dataclasses.replace(BARE, version=np.zeros(4, np.int32))
  )
  assert isinstance(chunk, Chunk)
  for n in (1, 100):
    data = wire.pack_answers([(i, chunk) for i in range(n)])
    assert len(data) <= 128 + n * wire.size(chunk)
