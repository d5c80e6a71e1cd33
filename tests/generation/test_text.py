import asyncio
import contextlib
import dataclasses
import itertools
import random

import numpy as np
import pytest
from bigram import CONFIG, ask, make_engine, script
from hypothesis import given
from hypothesis import strategies as st

from rl_tpu.generation import driver as drivers
from rl_tpu.generation import text
from rl_tpu.generation.text import Detokenizer, StopStrings
from rl_tpu.models.tokenizer import ByteTokenizer
from rl_tpu.types import Chunk

TEXT = "plain ascii, 中文字符 and 日本, 🚀🎉 née 한국어 done. " * 3


class Pieces(ByteTokenizer):
  """Id i stands for the i-th piece of text; one past the end has no text."""

  def __init__(self, *pieces):
    self.pieces = pieces
    self.token_bytes = None

  def decode(self, ids):
    known = (i for i in ids if i < len(self.pieces))
    return "".join(self.pieces[i] for i in known)


class Lossy:
  """Bytes without `token_bytes`; counts the ids it has to decode."""

  def __init__(self):
    self.decoded = 0

  def decode(self, ids):
    self.decoded += len(ids)
    return ByteTokenizer().decode(ids)


class Fallback:
  """As HuggingFace's ByteFallback: a run of bytes is UTF-8, or each unknown."""

  def decode(self, ids):
    data = bytes(i - 3 for i in ids if i >= 3)
    try:
      return data.decode()
    except UnicodeDecodeError:
      return "\ufffd" * len(data)


class Stripping:
  """Like SentencePiece: the first word of a text loses its space."""

  def decode(self, ids):
    words = [f" {chr(97 + i % 26)}" for i in ids if i >= 0]
    return "".join(words).removeprefix(" ")


class Scripted:
  """Streams given chunks, and notes when the stream was closed."""

  def __init__(self, *chunks):
    self.chunks = chunks
    self.taken = 0
    self.closed = False

  async def stream(self, request):
    try:
      for chunk in self.chunks:
        self.taken += 1
        yield chunk
    finally:
      self.closed = True


def chunks_of(*runs, end="length", version=0):
  """One chunk for each run of ids; logp is minus the id."""
  return [
    Chunk(
      tokens=np.asarray(run, np.int32),
      logp=-np.asarray(run, np.float32),
      version=version + i,
      stop_reason=end if i == len(runs) - 1 else None,
    )
    for i, run in enumerate(runs)
  ]


def streamed(generator, tokenizer, stop=(), request=None, **arguments):
  request = request or ask(1, max_tokens=99)

  async def main():
    pieces = text.stream_text(generator, request, tokenizer, stop, **arguments)
    return [piece async for piece in pieces]

  return asyncio.run(main())


def completed(generator, tokenizer, stop=(), request=None, **arguments):
  request = request or ask(1, max_tokens=99)
  work = text.complete(generator, request, tokenizer, stop, **arguments)
  return asyncio.run(work)


def deltas(tokenizer, ids, cuts=None):
  """What a detokenizer gives for ids pushed in pieces, the flush last."""
  cuts = range(1, len(ids)) if cuts is None else cuts
  detokenizer = Detokenizer(tokenizer)
  pieces = itertools.pairwise([0, *cuts, len(ids)])
  given = [detokenizer.push(ids[a:b]) for a, b in pieces]
  return [*given, detokenizer.flush()]


# Characters.


@pytest.mark.parametrize("kind", [ByteTokenizer, Lossy, Fallback])
def test_H12_a_sign_of_four_tokens_comes_with_the_last_one(kind):
  ids = [0xF0 + 3, 0x9F + 3, 0x9A + 3, 0x80 + 3]
  assert deltas(kind(), ids) == ["", "", "", "🚀", ""]


@pytest.mark.parametrize("kind", [ByteTokenizer, Lossy, Fallback])
def test_H12_joined_deltas_equal_one_decode_for_1000_random_splits(kind):
  ids = ByteTokenizer().encode(TEXT).tolist()
  draw = random.Random(0)
  for _ in range(1000 if kind is ByteTokenizer else 50):
    cuts = sorted(draw.sample(range(1, len(ids)), draw.randrange(1, 80)))
    given = deltas(kind(), ids, cuts)
    assert "".join(given) == TEXT
    assert not any("\ufffd" in delta for delta in given)


@pytest.mark.parametrize("kind", [ByteTokenizer, Lossy])
def test_H12_cut_inside_a_character_one_unknown_sign_comes_at_the_end(kind):
  ids = [97 + 3, 0xF0 + 3, 0x9F + 3]
  assert deltas(kind(), ids) == ["a", "", "", "\ufffd"]


@given(st.lists(st.integers(0, 260), max_size=60))
def test_H12_what_is_no_utf8_comes_out_as_one_decode_would_have_it(ids):
  whole = ByteTokenizer().decode(ids)
  assert "".join(deltas(ByteTokenizer(), ids)) == whole
  assert "".join(deltas(Lossy(), ids)) == whole


def test_bytes_that_never_become_a_character_are_not_held_for_ever():
  assert "".join(deltas(Lossy(), [0xFF + 3] * 20)[:-1]) == "\ufffd" * 17


def test_what_a_decoder_does_to_the_first_word_happens_once():
  ids = [*range(60), *[-1] * 60, *range(60)]
  assert "".join(deltas(Stripping(), ids)) == Stripping().decode(ids)


@pytest.mark.parametrize("ids", [[100], [0xFF + 3], [0], [100] + [0] * 99])
def test_decoding_is_linear_in_the_number_of_ids(ids):
  tokenizer = Lossy()
  deltas(tokenizer, ids * (4000 // len(ids)))
  assert tokenizer.decoded < 4000 * 40


# Stop strings.


def test_H11a_a_stop_string_is_found_across_and_inside_pieces():
  generator = Scripted(*chunks_of([0], [1], [2]))
  done = completed(generator, Pieces("AB", "CDEF", "G"), ["DE"])
  assert (done.text, done.finish_reason, done.stop) == ("ABC", "stop", "DE")
  assert done.completion.stop_reason == "stop"
  assert done.completion.tokens.tolist() == [0, 1]
  assert done.completion.logp.tolist() == [0, -1]
  assert done.completion.version.tolist() == [0, 1]
  assert done.offsets.tolist() == [0, 2]
  assert generator.taken == 2 and generator.closed


def test_H11b_nothing_of_a_stop_string_is_emitted_on_the_way():
  tokenizer = Pieces("DEF", "G", "HI", "J")
  generator = Scripted(*chunks_of([0], [1], [2], [3], [0]))
  pieces = streamed(generator, tokenizer, ["DEFGHIJ"])
  assert [piece.text for piece in pieces] == ["", "", "", ""]
  assert [piece.chunk.stop_reason for piece in pieces] == [None] * 3 + ["stop"]
  assert text.join(pieces).completion.tokens.tolist() == [0, 1, 2, 3]


def test_H11c_held_text_is_flushed_when_the_budget_ends_it():
  tokenizer = Pieces("DEF", "X")
  done = completed(Scripted(*chunks_of([0], [1])), tokenizer, ["DEFGHIJ"])
  assert (done.text, done.finish_reason) == ("DEFX", "length")
  assert len(done.completion.tokens) == len(done.completion.logp) == 2
  cut = completed(Scripted(*chunks_of([0])), tokenizer, ["DEFGHIJ"])
  assert (cut.text, cut.finish_reason, cut.stop) == ("DEF", "length", None)


def test_X11_ids_stay_as_sampled_where_encoding_the_text_gives_others():
  done = completed(Scripted(*chunks_of([0, 1], end="stop")), Pieces("a", "b"))
  assert done.text == "ab"
  assert done.completion.tokens.tolist() == [0, 1]
  assert len(done.completion.logp) == 2


def test_tokens_after_the_stop_string_in_its_dispatch_are_dropped_with_heads():
  chunk = Chunk(
    tokens=np.arange(4, dtype=np.int32),
    logp=-np.arange(4, dtype=np.float32),
    version=7,
    stop_reason="length",
    topk_ids=np.arange(8, dtype=np.int32).reshape(4, 2),
    topk_logp=-np.arange(8, dtype=np.float32).reshape(4, 2),
  )
  done = completed(Scripted(chunk), Pieces("a", "b", "c", "d"), ["bc"])
  assert done.text == "a"
  assert done.completion.tokens.tolist() == [0, 1, 2]
  assert done.completion.version.tolist() == [7, 7, 7]
  assert done.completion.stop_reason == "stop"
  assert done.completion.topk_ids.tolist() == [[0, 1], [2, 3], [4, 5]]
  assert done.completion.topk_logp.shape == (3, 2)


def test_include_stop_keeps_the_string_and_drops_what_its_token_adds():
  generator = Scripted(*chunks_of([0], [1], [2]))
  tokenizer = Pieces("AB", "CDEF", "G")
  done = completed(generator, tokenizer, ["DE"], include_stop=True)
  assert (done.text, done.stop) == ("ABCDE", "DE")


def test_a_stop_string_whose_last_bytes_come_with_the_end_still_counts():
  ids = [97 + 3, 0xF0 + 3]
  done = completed(Scripted(*chunks_of(ids)), ByteTokenizer(), ["a\ufffd"])
  assert (done.text, done.finish_reason) == ("", "stop")
  assert done.completion.tokens.tolist() == ids


def test_stop_strings_do_not_count_before_min_tokens():
  request = ask(1, max_tokens=9, min_tokens=2)
  tokenizer = Pieces("D", "E")
  generator = Scripted(*chunks_of([0, 1], [0, 0, 1, 0]))
  done = completed(generator, tokenizer, ["DE"], request)
  assert done.text == "DED"
  assert done.completion.tokens.tolist() == [0, 1, 0, 0, 1]
  over = Scripted(*chunks_of([0, 0, 1, 0]))
  assert completed(over, tokenizer, ["DE"], request).text == "D"


def first_stop(whole, stops):
  """Reads a text one character at a time: (text, stop) or (text, None)."""
  for end in range(1, len(whole) + 1):
    there = [stop for stop in stops if whole[:end].endswith(stop)]
    if there:
      stop = max(there, key=len)
      return whole[: end - len(stop)], stop
  return whole, None


WORDS = st.text("ab", min_size=1, max_size=5)


@given(st.lists(st.text("ab", max_size=6)), st.lists(WORDS, max_size=3))
def test_the_pieces_that_text_comes_in_change_nothing(pieces, stops):
  expected = first_stop("".join(pieces), stops)
  matcher, shown = StopStrings(stops), []
  for piece in pieces:
    shown.append(matcher.push(piece))
    # What was shown can never be the beginning of a stop string.
    assert expected[0].startswith("".join(shown))
    if matcher.found is not None:
      break
  shown.append(matcher.flush())
  assert ("".join(shown), matcher.found) == expected


def test_a_stop_string_that_begins_twice_is_found_at_its_second_beginning():
  for size in range(1, 8):
    for stop in map("".join, itertools.product("ab", repeat=size)):
      for begun in range(size):
        whole = stop[:begun] + stop
        matcher = StopStrings([stop])
        assert matcher.push(whole) == whole[: whole.find(stop)]


def test_no_more_is_held_than_could_still_become_a_stop_string():
  matcher = StopStrings(["abc", "bd"])
  given = [matcher.push(c) for c in "xababd"]
  assert (given, matcher.found) == (["x", "", "", "ab", "", "a"], "bd")


@pytest.mark.parametrize("stop", ["DE", ["DE", ""]])
def test_one_string_or_an_empty_one_is_refused(stop):
  with pytest.raises(ValueError, match="sequence of strings"):
    StopStrings(stop)


def test_a_stream_that_ends_without_a_reason_is_an_error():
  generator = Scripted(*chunks_of([0], end=None))
  with pytest.raises(RuntimeError, match="without a stop reason"):
    completed(generator, Pieces("a"))


# With the driver.


@contextlib.contextmanager
def running(driver):
  driver.start()
  try:
    yield driver
  finally:
    driver.stop()


def make_driver(table, config=CONFIG):
  served = make_engine(config)
  driver = drivers.GenerationDriver(served)
  driver.update(served.load_params(table, 3))
  return driver


def test_a_stop_string_frees_the_slot_and_no_stop_string_changes_nothing():
  # Room enough that the answer is not over before it is told to stop.
  room = dataclasses.replace(
    CONFIG, context_length=2048, prefill_buckets=(4, 2048)
  )
  driver = make_driver(script(*range(16), 0), room)
  tokenizer = Pieces(*"0123456789abcdef")
  request = ask(1, max_tokens=12)

  async def main():
    endless = ask(1, max_tokens=2000)
    cut = await text.complete(driver, endless, tokenizer, ["56"])
    whole = await text.complete(driver, request, tokenizer)
    return cut, whole, await driver.generate(request)

  with running(driver):
    cut, whole, plain = asyncio.run(main())
  assert (cut.text, cut.completion.tokens.tolist()) == ("234", [2, 3, 4, 5, 6])
  assert cut.completion.version.tolist() == [3] * 5
  assert (whole.text, whole.finish_reason) == ("23456789abcd", "length")
  for name in ("tokens", "logp", "version"):
    np.testing.assert_array_equal(
      getattr(whole.completion, name), getattr(plain, name)
    )
  assert whole.completion.stop_reason == plain.stop_reason
  assert driver.counters().cancellations == 1
  assert (driver.free_slots, driver.waiting) == (4, 0)


def test_H06_a_second_stop_id_ends_the_text_and_stays_in_the_ids():
  driver = make_driver(script(4, 5, 6, 7, 8))
  tokenizer = Pieces(*"01234567")
  request = ask(4, max_tokens=9, stop_ids=(2, 7))
  with running(driver):
    done = completed(driver, tokenizer, ["z"], request)
  assert done.completion.tokens.tolist() == [5, 6, 7]
  assert (done.finish_reason, done.stop) == ("stop", None)


def test_closing_a_text_stream_frees_the_slot():
  driver = make_driver(script(*range(16), 0))

  async def main():
    pieces = text.stream_text(
      driver, ask(1, max_tokens=14), Pieces(*"0123456789abcdef")
    )
    async with contextlib.aclosing(pieces):
      first = asyncio.ensure_future(anext(pieces))
      while not first.done():
        await asyncio.sleep(0)
        driver.step()
        await asyncio.sleep(0)
      assert driver.free_slots == 3
    driver.step()

  asyncio.run(main())
  assert driver.free_slots == 4
