import asyncio
import contextlib
import dataclasses
import json
import re
import string

import aiohttp
import numpy as np
import openai
import pytest
from bigram import CONFIG, make_engine, script

from rl_tpu.generation import driver as drivers
from rl_tpu.generation import openai_api, wire
from rl_tpu.models.tokenizer import ByteTokenizer, encode_chat
from rl_tpu.types import Chunk, Request, Sampling

TOKENIZER = ByteTokenizer()
VOCAB = TOKENIZER.vocab_size
ENGINE = dataclasses.replace(
  CONFIG, context_length=64, prefill_buckets=(16, 64), behavior_top_k=3
)
LIMITS = openai_api.Config(
  context_length=64, max_prompt_length=63, behavior_top_k=3
)
SECONDS = 60  # No test waits for this; it ends those that would hang.


def letters():
  """Any letter or sign may follow; sometimes half of a character, or eos."""
  likely = TOKENIZER.encode(string.ascii_letters + " é").tolist()
  table = np.full((VOCAB, VOCAB), -1e4, np.float32)
  draw = np.random.default_rng(0)
  table[:, likely] = draw.normal(size=(VOCAB, len(likely)))
  table[:, TOKENIZER.eos_id] = -1
  return {"table": table}


def alphabet():
  """The letters in turn, then eos."""
  ids = TOKENIZER.encode(string.ascii_lowercase).tolist()
  return script(*ids, TOKENIZER.eos_id, vocab_size=VOCAB)


def make_driver(table, version=7):
  served = make_engine(ENGINE, VOCAB)
  driver = drivers.GenerationDriver(served)
  driver.update(served.load_params(table, version))
  return driver


@pytest.fixture(scope="module")
def random_driver():
  driver = make_driver(letters())
  driver.start()
  yield driver
  driver.stop()


@pytest.fixture(scope="module")
def sure_driver():
  driver = make_driver(alphabet())
  driver.start()
  yield driver
  driver.stop()


@contextlib.asynccontextmanager
async def serving(generator, config=LIMITS, tokenizer=TOKENIZER):
  """A server; gives its address."""
  app = openai_api.make_app(
    generator, tokenizer, model_name="policy", config=config
  )
  runner = await openai_api.start(app, "127.0.0.1", 0, shutdown_timeout=1)
  try:
    host, port = runner.addresses[0]
    yield f"http://{host}:{port}"
  finally:
    await runner.cleanup()


def client_of(address, key="any", kind=openai.AsyncOpenAI):
  return kind(base_url=f"{address}/v1", api_key=key, max_retries=0)


def ask_of(generator, work, config=LIMITS, tokenizer=TOKENIZER, key="any"):
  """Runs `await work(client)` against a server of its own."""

  async def main():
    async with asyncio.timeout(SECONDS):
      async with serving(generator, config, tokenizer) as address:
        async with client_of(address, key) as client:
          return await work(client)

  return asyncio.run(main())


def sampled_by(driver, prompt, *, seed, member=0, index=0, **sampling):
  """What the driver itself says to a prompt's ids."""
  request = Request(
    prompt_index=index,
    member=member,
    seed=seed,
    tokens=np.asarray(prompt, np.int32),
    sampling=Sampling(stop_ids=TOKENIZER.eos_ids, **sampling),
  )
  return asyncio.run(driver.generate(request))


def prompt_ids(text):
  return [TOKENIZER.bos_id, *TOKENIZER.encode(text).tolist()]


def complete(**fields):
  return lambda client: client.completions.create(model="policy", **fields)


def chat(*messages, **fields):
  messages = messages or ({"role": "user", "content": "hi"},)
  return lambda client: client.chat.completions.create(
    model="policy", messages=list(messages), **fields
  )


def streamed(work):
  async def read(client):
    return [event async for event in await work(client)]

  return read


async def until(condition):
  while not condition():
    await asyncio.sleep(0)


# Completions.


def test_a_completion_is_what_the_driver_samples_with_its_logp(random_driver):
  done = ask_of(
    random_driver,
    complete(
      prompt="ab",
      max_tokens=20,
      seed=5,
      logprobs=2,
      extra_body={"return_token_ids": True},
    ),
  )
  plain = sampled_by(random_driver, prompt_ids("ab"), seed=5, max_tokens=20)
  (choice,) = done.choices
  assert choice.text == TOKENIZER.decode(plain.tokens)
  assert choice.finish_reason == plain.stop_reason
  assert choice.token_ids == plain.tokens.tolist()
  assert choice.token_versions == [7] * len(plain.tokens)
  assert choice.prompt_token_ids == prompt_ids("ab")
  logprobs = choice.logprobs
  assert logprobs.token_logprobs == plain.logp.tolist()
  tops = [list(top.values()) for top in logprobs.top_logprobs]
  assert tops == plain.topk_logp[:, :2].tolist()
  names = list(logprobs.top_logprobs[0])
  assert [names[0]] == [_name(plain.topk_ids[0, 0])]
  assert logprobs.tokens == [_name(token) for token in plain.tokens]
  assert done.usage.prompt_tokens == 3
  assert done.usage.completion_tokens == len(plain.tokens)
  assert done.usage.total_tokens == 3 + len(plain.tokens)


def _name(token):
  text = TOKENIZER.decode([token])
  return text if text.isascii() and text else f"token_id:{token}"


def test_text_offsets_say_where_each_token_begins(sure_driver):
  done = ask_of(sure_driver, complete(prompt="a", max_tokens=4, logprobs=0))
  assert done.choices[0].logprobs.text_offset == [0, 1, 2, 3]
  assert done.choices[0].logprobs.tokens == list("bcde")
  assert done.choices[0].logprobs.top_logprobs is None


def test_a_seed_gives_the_same_answers_and_none_gives_others(random_driver):
  async def work(client):
    ask = complete(prompt="a", max_tokens=20, seed=3)
    free = complete(prompt="a", max_tokens=20)
    answers = [await one(client) for one in (ask, ask, free, free)]
    return [answer.choices[0].text for answer in answers]

  first, again, one, other = ask_of(random_driver, work)
  assert first == again
  assert len({first, one, other}) == 3


def test_n_choices_are_the_members_of_each_prompt_in_order(random_driver):
  done = ask_of(
    random_driver, complete(prompt=["a", "bc"], n=2, max_tokens=9, seed=1)
  )
  assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
  expected = [
    TOKENIZER.decode(
      sampled_by(
        random_driver,
        prompt_ids(prompt),
        seed=1,
        index=index,
        member=member,
        max_tokens=9,
      ).tokens
    )
    for index, prompt in enumerate(["a", "bc"])
    for member in range(2)
  ]
  assert [choice.text for choice in done.choices] == expected
  assert len(set(expected)) == 4
  assert done.usage.prompt_tokens == 2 + 3


@pytest.mark.parametrize("prompt", [[100, 101], [[100, 101]]])
def test_token_ids_are_taken_as_they_are_without_a_bos(sure_driver, prompt):
  done = ask_of(
    sure_driver,
    complete(
      prompt=prompt, max_tokens=2, extra_body={"return_token_ids": True}
    ),
  )
  assert done.choices[0].prompt_token_ids == [100, 101]
  assert done.choices[0].text == "cd"


def test_streamed_text_joined_is_the_text_at_once(random_driver):
  fields = {"prompt": "a", "max_tokens": 30, "n": 2, "seed": 11, "logprobs": 1}
  whole = ask_of(random_driver, complete(**fields))
  options = {"include_usage": True}
  events = ask_of(
    random_driver,
    streamed(complete(**fields, stream=True, stream_options=options)),
  )
  assert events[-1].choices == [] and events[-1].usage == whole.usage
  assert all(event.usage is None for event in events[:-1])
  assert len({event.id for event in events}) == 1
  for choice in whole.choices:
    mine = [
      event.choices[0]
      for event in events[:-1]
      if event.choices[0].index == choice.index
    ]
    assert len(mine) > 1
    assert "".join(piece.text for piece in mine) == choice.text
    assert [m.finish_reason for m in mine[:-1]] == [None] * (len(mine) - 1)
    assert mine[-1].finish_reason == choice.finish_reason
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
      joined = [x for m in mine for x in getattr(m.logprobs, name)]
      assert joined == getattr(choice.logprobs, name)


def test_H11_a_stop_string_ends_the_text_and_the_ids_stay_whole(sure_driver):
  fields = {
    "prompt": "a",
    "max_tokens": 20,
    "stop": ["zz", "cdefg"],
    "extra_body": {"return_token_ids": True},
  }
  (choice,) = ask_of(sure_driver, complete(**fields)).choices
  assert (choice.text, choice.finish_reason) == ("b", "stop")
  assert choice.token_ids == TOKENIZER.encode("bcdefg").tolist()
  events = ask_of(sure_driver, streamed(complete(**fields, stream=True)))
  pieces = [event.choices[0] for event in events]
  assert [piece.text for piece in pieces] == ["b", "", ""]
  assert pieces[-1].finish_reason == "stop"
  assert [i for p in pieces for i in p.token_ids] == choice.token_ids
  assert hasattr(pieces[0], "prompt_token_ids")
  assert not any(hasattr(p, "prompt_token_ids") for p in pieces[1:])


def test_H06_any_eos_id_ends_an_answer_and_counts(sure_driver):
  class Two(ByteTokenizer):
    eos_ids = (1, TOKENIZER.encode("d").item())

  done = ask_of(
    sure_driver, complete(prompt="a", max_tokens=20), tokenizer=Two()
  )
  assert done.choices[0].finish_reason == "stop"
  assert done.choices[0].text == "bcd"
  assert done.usage.completion_tokens == 3
  done = ask_of(sure_driver, complete(prompt="y", max_tokens=20))
  assert (done.choices[0].text, done.choices[0].finish_reason) == ("z", "stop")
  assert done.usage.completion_tokens == 2


def test_the_budget_is_16_tokens_or_what_is_asked_or_what_fits(sure_driver):
  async def lengths(client):
    asks = [{}, {"max_tokens": 5}, {"prompt": "a" * 60}]
    done = [await complete(**{"prompt": "a", **ask})(client) for ask in asks]
    return [(d.choices[0].text, d.choices[0].finish_reason) for d in done]

  assert ask_of(sure_driver, lengths) == [
    ("bcdefghijklmnopq", "length"),
    ("bcdef", "length"),
    ("bcd", "length"),
  ]


def test_sampling_fields_reach_the_engine(random_driver):
  extra = {"top_k": 1, "min_p": 0.5, "min_tokens": 20}
  done = ask_of(
    random_driver,
    complete(
      prompt="a",
      max_tokens=20,
      temperature=0.5,
      top_p=0.9,
      logprobs=3,
      extra_body=extra,
    ),
  )
  tops = done.choices[0].logprobs.top_logprobs
  assert [list(top.values()) for top in tops] == [[0.0]] * 20
  best = sampled_by(
    random_driver, prompt_ids("a"), seed=0, temperature=0.0, max_tokens=20
  )
  assert done.choices[0].text == TOKENIZER.decode(best.tokens)


# Chat.


def test_a_chat_is_answered_after_the_template(random_driver):
  messages = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
  ]
  done = ask_of(
    random_driver,
    chat(
      *messages,
      max_completion_tokens=9,
      seed=2,
      logprobs=True,
      top_logprobs=2,
      extra_body={"return_token_ids": True},
    ),
  )
  messages[1]["content"] = "hi"
  prompt = encode_chat(TOKENIZER, messages).tolist()
  plain = sampled_by(random_driver, prompt, seed=2, max_tokens=9)
  (choice,) = done.choices
  assert choice.prompt_token_ids == prompt
  assert choice.message.role == "assistant"
  assert choice.message.content == TOKENIZER.decode(plain.tokens)
  content = choice.logprobs.content
  assert [entry.logprob for entry in content] == plain.logp.tolist()
  data = bytes(byte for entry in content for byte in entry.bytes)
  assert data.decode(errors="replace") == choice.message.content
  tops = [[top.logprob for top in entry.top_logprobs] for entry in content]
  assert tops == plain.topk_logp[:, :2].tolist()


def test_a_streamed_chat_joins_to_the_whole_answer(random_driver):
  fields = {"seed": 4, "n": 2, "logprobs": True, "max_tokens": 12}
  whole = ask_of(random_driver, chat(**fields))
  events = ask_of(random_driver, streamed(chat(**fields, stream=True)))
  for choice in whole.choices:
    mine = [
      event.choices[0]
      for event in events
      if event.choices[0].index == choice.index
    ]
    roles = [piece.delta.role for piece in mine]
    assert roles == ["assistant"] + [None] * (len(mine) - 1)
    text = "".join(piece.delta.content for piece in mine)
    assert text == choice.message.content
    assert mine[-1].finish_reason == choice.finish_reason
    entries = [entry for piece in mine for entry in piece.logprobs.content]
    assert entries == choice.logprobs.content


def test_a_chat_goes_on_to_the_end_of_the_context(random_driver):
  ask = chat(
    {"role": "user", "content": "q" * 20}, extra_body={"min_tokens": 27}
  )
  done = ask_of(random_driver, ask)
  assert done.choices[0].finish_reason == "length"
  assert done.usage.total_tokens == 64
  error = refused(
    chat({"role": "user", "content": "q" * 20}, extra_body={"min_tokens": 28})
  )
  assert "[0, 27]" in error.message


def test_H05_templates_that_write_bos_get_no_second_one(sure_driver):
  class Templated(ByteTokenizer):
    def apply_chat_template(self, messages):
      text = "".join(message["content"] for message in messages)
      return [self.bos_id, self.bos_id, *self.encode(text)]

  ask = chat(max_tokens=1, extra_body={"return_token_ids": True})
  done = ask_of(sure_driver, ask, tokenizer=Templated())
  assert done.choices[0].prompt_token_ids == prompt_ids("hi")
  done = ask_of(sure_driver, ask)
  assert done.choices[0].prompt_token_ids.count(TOKENIZER.bos_id) == 1


# The other client, and what needs no client.


def test_the_client_without_asyncio_and_the_list_of_models(sure_driver):
  def talk(address):
    with client_of(address, kind=openai.OpenAI) as client:
      models = [model.id for model in client.models.list()]
      done = complete(prompt="a", max_tokens=3)(client)
      events = list(complete(prompt="a", max_tokens=3, stream=True)(client))
    texts = [event.choices[0].text for event in events]
    return models, done.choices[0].text, "".join(texts)

  async def main():
    async with serving(sure_driver) as address:
      return await asyncio.to_thread(talk, address)

  assert asyncio.run(main()) == (["policy"], "bcd", "bcd")


# Refusals.


def refused(work, generator=None, **arguments):
  with pytest.raises(openai.APIStatusError) as caught:
    ask_of(generator or Gate(), work, **arguments)
  return caught.value


BAD_FIELDS = [
  ({"temperature": 3}, r"temperature is 3; .* in \[0, 2\]"),
  ({"temperature": "warm"}, 'temperature is "warm"; .* number'),
  ({"top_p": 0}, r"top_p is 0; .* in \(0, 1\]"),
  ({"top_p": True}, "top_p is true"),
  ({"n": 0}, r"n is 0; .* integer in \[1, 1024\]"),
  ({"seed": 2**32}, r"seed is 4294967296; .* \[0, 4294967295\]"),
  ({"seed": 10**400}, "seed is 1000"),
  ({"temperature": 10**400}, "temperature is 1000"),
  ({"max_tokens": 62}, r"max_tokens is 62; .* \[1, 61\], as 3 of .* 64"),
  ({"max_tokens": 0}, "max_tokens is 0"),
  ({"stop": ["a", ""]}, "stop is .* none of them empty"),
  ({"stop": ["a"] * 17}, "stop is .* at most 16"),
  ({"logprobs": 4}, r"logprobs is 4; .* \[0, 3\]"),
  ({"logprobs": True}, "logprobs is true; .* integer"),
  ({"echo": True}, "echo is true; it must be false or null"),
  ({"best_of": 2}, "best_of is 2; it must be null"),
  ({"suffix": "x"}, 'suffix is "x"; it must be null'),
  ({"presence_penalty": 0.5}, "presence_penalty is 0.5; it must be 0 or null"),
  ({"frequency_penalty": False}, "frequency_penalty is false"),
  ({"logit_bias": {"1": 2}}, "logit_bias is "),
  ({"stream_options": {"include_usage": True}}, "where stream is true"),
  ({"stream": 1}, "stream is 1; it must be true or false"),
  ({"top_k": -2}, "top_k is -2"),
  ({"min_p": 1}, r"min_p is 1; .* in \[0, 1\)"),
  ({"min_tokens": 17}, r"min_tokens is 17; .* \[0, 16\]"),
  ({"temprature": 1}, "temprature is 1; .* no such field"),
  ({"prompt": []}, "prompt is "),
  ({"prompt": [[]]}, "prompt is "),
  ({"prompt": ["a", [1]]}, "prompt is "),
  ({"prompt": [1, -1]}, "prompt is "),
  ({"prompt": [True]}, "prompt is "),
  ({"prompt": None}, "prompt is "),
  ({"prompt": {}}, "prompt is "),
]


@pytest.mark.parametrize("fields, message", BAD_FIELDS)
def test_a_wrong_field_is_named_with_its_value_and_what_is_allowed(
  fields, message
):
  body = {"model": "policy", "prompt": "ab", **fields}
  error = refused(
    lambda client: client.post("/completions", body=body, cast_to=object)
  )
  assert isinstance(error, openai.BadRequestError)
  assert error.param == next(iter(fields))
  assert error.type == "invalid_request_error"
  assert re.search(message, error.body["message"])


PICTURE = {"role": "user", "content": [{"type": "image_url"}]}
CHAT_FIELDS = [
  ({"tools": [{"type": "function"}]}, "tools"),
  ({"response_format": {"type": "json_object"}}, "response_format"),
  ({"tool_choice": "auto"}, "tool_choice"),
  ({"top_logprobs": 1}, "top_logprobs"),
  ({"logprobs": 1}, "logprobs"),
  ({"logprobs": True, "top_logprobs": 4}, "top_logprobs"),
  ({"messages": []}, "messages"),
  ({"messages": [{"role": "user"}]}, "messages"),
  ({"messages": [{"role": "robot", "content": "a"}]}, "messages"),
  ({"messages": [PICTURE]}, "messages"),
  ({"max_tokens": 1, "max_completion_tokens": 2}, None),
  ({"prompt": "a"}, "prompt"),
]


@pytest.mark.parametrize("fields, param", CHAT_FIELDS)
def test_a_wrong_field_of_a_chat_is_named(fields, param):
  messages = [{"role": "user", "content": "hi"}]
  body = {"model": "policy", "messages": messages, **fields}
  error = refused(
    lambda client: client.post("/chat/completions", body=body, cast_to=object)
  )
  assert isinstance(error, openai.BadRequestError)
  assert error.param == param


def test_fields_that_ask_for_nothing_pass(sure_driver):
  nothing = {
    "echo": False,
    "best_of": None,
    "suffix": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "stop": None,
    "top_k": -1,
    "stream_options": None,
  }
  done = ask_of(
    sure_driver, complete(prompt="a", max_tokens=1, extra_body=nothing)
  )
  assert done.choices[0].text == "b"


def test_an_over_long_prompt_is_refused_with_both_lengths(sure_driver):
  error = refused(complete(prompt="a" * 63))
  assert error.code == "context_length_exceeded"
  assert "64 tokens" in error.message and "at most 63" in error.message
  fits = complete(prompt="a" * 62, max_tokens=1)
  assert ask_of(sure_driver, fits).choices[0].text == "b"
  error = refused(chat({"role": "user", "content": "a" * 48}))
  assert "messages has 65 tokens" in error.message


def test_what_the_generator_refuses_is_a_bad_request(random_driver):
  for stream in (False, True):
    error = refused(
      complete(prompt=[5, 999], stream=stream), generator=random_driver
    )
    assert isinstance(error, openai.BadRequestError)
    assert "999" in error.message
  assert random_driver.free_slots == 4


def test_another_model_is_not_found():
  error = refused(
    lambda client: client.completions.create(model="other", prompt="a")
  )
  assert isinstance(error, openai.NotFoundError)
  assert error.code == "model_not_found"


async def answer_to(address, method, path, **arguments):
  async with aiohttp.ClientSession() as session:
    async with session.request(method, address + path, **arguments) as got:
      return got.status, await got.json()


HALF = b'{"model": "policy", "prompt": "a", "stop": "\\ud800"}'  # Surrogate.


@pytest.mark.parametrize(
  "method, path, body, status",
  [
    ("POST", "/v1/completions", b"{", 400),
    ("POST", "/v1/completions", b"[]", 400),
    ("POST", "/v1/completions", b"\xff", 400),
    ("POST", "/v1/completions", b"[" * 50_000, 400),
    ("POST", "/v1/completions", HALF, 400),
    ("POST", "/v1/completions", b'"' + b"a" * 60_000 + b'"', 413),
    ("GET", "/v1/completions", None, 405),
    ("GET", "/v1/nothing", None, 404),
  ],
)
def test_what_is_no_request_gets_an_error_object(method, path, body, status):
  config = dataclasses.replace(LIMITS, max_body_bytes=60_000)

  async def main():
    async with serving(Gate(), config) as address:
      return await answer_to(address, method, path, data=body)

  got, error = asyncio.run(main())
  assert got == status
  assert error["error"]["message"]
  assert set(error["error"]) == {"message", "type", "param", "code"}


def test_a_bearer_token_is_asked_for_but_not_for_health(sure_driver):
  config = dataclasses.replace(LIMITS, bearer_token="secret-ü")
  ask = complete(prompt="a", max_tokens=1)

  async def keys(address):
    health, _ = await answer_to(address, "GET", "/health")
    given = ("secret-ü", "secret", "")
    statuses = [
      await answer_to(
        address, "GET", "/v1/models", headers={"Authorization": f"Bearer {key}"}
      )
      for key in given
    ]
    return health, [status for status, _ in statuses]

  async def main():
    async with serving(sure_driver, config) as address:
      return await keys(address)

  assert asyncio.run(main()) == (200, [200, 401, 401])
  config = dataclasses.replace(LIMITS, bearer_token="secret")
  done = ask_of(sure_driver, ask, config=config, key="secret")
  assert done.choices[0].text == "b"
  error = refused(ask, config=config, key="wrong")
  assert isinstance(error, openai.AuthenticationError)
  assert error.code == "invalid_api_key"
  assert "secret" not in repr(config)


@pytest.mark.parametrize(
  "fields, name",
  [
    ({"context_length": 1}, "context_length"),
    ({"max_prompt_length": 64}, "max_prompt_length"),
    ({"behavior_top_k": -1}, "behavior_top_k"),
    ({"max_open_requests": 0}, "max_open_requests"),
    ({"max_body_bytes": 0}, "max_body_bytes"),
    ({"bearer_token": ""}, "bearer_token"),
  ],
)
def test_limits_that_make_no_sense_are_refused(fields, name):
  with pytest.raises(ValueError, match=f"^{name} is .*; it must be"):
    dataclasses.replace(LIMITS, **fields)


# Load, failure and clients that hang up.


class Gate:
  """A generator that samples nothing before it is told to."""

  def __init__(self, *chunks):
    self.chunks = chunks
    self.entered = asyncio.Semaphore(0)
    self.left = asyncio.Semaphore(0)
    self.open = asyncio.Event()
    self.failure = None

  async def stream(self, request):
    self.entered.release()
    try:
      for chunk in self.chunks:
        yield chunk
      await self.open.wait()
      if self.failure is not None and request.member == 0:
        raise self.failure
      while self.failure is not None:
        await self.entered.acquire()
      yield chunk_of(2)
      yield chunk_of(2, stop_reason="length")
    finally:
      self.left.release()


def chunk_of(count, first=100, stop_reason=None):
  return Chunk(
    tokens=np.arange(first, first + count, dtype=np.int32),
    logp=np.zeros(count, np.float32),
    version=0,
    stop_reason=stop_reason,
  )


def test_too_many_open_sequences_get_429_until_one_ends():
  gate = Gate()

  async def work(client):
    first = asyncio.create_task(complete(prompt="a", n=2)(client))
    await gate.entered.acquire()
    await gate.entered.acquire()
    with pytest.raises(openai.RateLimitError) as caught:
      await complete(prompt="b", n=2)(client)
    assert caught.value.response.headers["Retry-After"] == "1"
    assert caught.value.code == "rate_limit_exceeded"
    third = asyncio.create_task(complete(prompt="b")(client))
    await gate.entered.acquire()
    gate.open.set()
    texts = [(await task).choices[0].text for task in (first, third)]
    last = await complete(prompt="c", n=3)(client)
    return texts, len(last.choices)

  config = dataclasses.replace(LIMITS, max_open_requests=3)
  assert ask_of(gate, work, config=config) == (["abab", "abab"], 3)
  error = refused(complete(prompt=["a", "b"], n=2), config=config)
  assert isinstance(error, openai.BadRequestError)
  assert "n is 2 for 2 prompts" in error.message


def test_a_stopped_driver_is_503_and_not_healthy():
  driver = make_driver(alphabet())

  async def main():
    async with serving(driver) as address:
      healthy = await answer_to(address, "GET", "/health")
      driver.stop()
      return healthy, await answer_to(address, "GET", "/health")

  healthy, dead = asyncio.run(main())
  assert healthy == (200, {"status": "ok"})
  assert dead[0] == 503
  for stream in (False, True):
    error = refused(complete(prompt="a", stream=stream), generator=driver)
    assert (error.status_code, error.type) == (503, "server_error")


@pytest.mark.parametrize("stream", [False, True])
def test_a_generator_that_has_no_room_is_429(stream):
  """Such as a server behind a gRPC client."""
  gate = Gate()
  gate.failure = wire.OverloadedError("12 requests are open")
  gate.open.set()
  error = refused(complete(prompt="a", stream=stream), generator=gate)
  assert isinstance(error, openai.RateLimitError)
  assert error.response.headers["Retry-After"] == "1"
  assert (error.code, error.type) == (
    "rate_limit_exceeded",
    "rate_limit_error",
  )


def test_a_failure_in_a_stream_is_told_and_ends_the_other_choices():
  gate = Gate(chunk_of(1))
  gate.failure = RuntimeError("the generation driver failed")
  texts = []

  async def work(client):
    with pytest.raises(openai.APIError, match="the generation driver failed"):
      async with await complete(prompt="a", n=2, stream=True)(client) as events:
        async for event in events:
          texts.append(event.choices[0].text)
          gate.open.set()
    await gate.left.acquire()
    await gate.left.acquire()

  ask_of(gate, work)
  assert texts == ["a", "a"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_slots(stream):
  driver = make_driver(alphabet())

  async def work(client):
    task = asyncio.create_task(
      complete(prompt="a", max_tokens=40, n=3, stream=stream)(client)
    )
    await until(lambda: driver.waiting == 3)
    assert driver.step()
    assert driver.free_slots == 1
    if stream:
      events = await task
      await anext(aiter(events))
      await events.close()
    else:
      task.cancel()
      await asyncio.gather(task, return_exceptions=True)
    await until(lambda: driver.counters().cancellations == 3)
    driver.step()
    return driver.free_slots, driver.waiting

  assert ask_of(driver, work) == (4, 0)


def test_a_client_that_hangs_up_while_it_waits_leaves_the_queue():
  driver = make_driver(alphabet())

  async def work(client):
    task = asyncio.create_task(complete(prompt="a", stream=True)(client))
    await until(lambda: driver.waiting == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: driver.waiting == 0)
    return driver.free_slots

  assert ask_of(driver, work) == 4


def test_logp_that_json_cannot_write_stays_valid_json():
  gate = Gate()
  gate.open.set()
  logp = np.array([-np.inf, np.nan], np.float32)
  gate.chunks = (
    dataclasses.replace(chunk_of(2, stop_reason="stop"), logp=logp),
  )

  async def work(client):
    raw = await client.completions.with_raw_response.create(
      model="policy", prompt="a", logprobs=0
    )
    return raw.text

  def strict(constant):
    raise AssertionError(f"{constant} is no JSON")

  body = json.loads(ask_of(gate, work), parse_constant=strict)
  assert body["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0, None]
