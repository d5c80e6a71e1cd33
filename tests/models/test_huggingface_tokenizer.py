import json
import pathlib
import shutil
import unicodedata

import jinja2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_tpu.models import huggingface
from rl_tpu.models.tokenizer import (
  BytesPerToken,
  ByteTokenizer,
  ChatTemplate,
  encode_chat,
  encode_prompt,
)

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "huggingface"
QWEN, LLAMA = GOLDEN / "qwen2_tied_sharded", GOLDEN / "llama_untied_llama3"
BOTH = pytest.mark.parametrize("folder", [QWEN, LLAMA], ids=lambda f: f.name)


def expected(folder):
  return json.loads((folder / "expected_ids.json").read_text())


def changed(folder, below, **settings):
  """A copy of a folder with other values in its tokenizer_config.json."""
  copy = below / folder.name
  shutil.copytree(folder, copy)
  path = copy / "tokenizer_config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | settings))
  return copy


@BOTH
def test_ids_equal_those_of_transformers(folder):
  tokenizer, golden = huggingface.load_tokenizer(folder), expected(folder)
  for text, ids in golden["texts"]:
    assert tokenizer.encode(text).dtype == np.int32
    assert tokenizer.encode(text).tolist() == ids[golden["bos"] is not None :]
    if ids:
      assert encode_prompt(tokenizer, text).tolist() == ids
  for ids, text in golden["decoded"]:
    assert tokenizer.decode(ids) == text


@BOTH
def test_chats_equal_those_of_transformers(folder):
  tokenizer, golden = huggingface.load_tokenizer(folder), expected(folder)
  assert isinstance(tokenizer, ChatTemplate)
  for chat, ids in golden["chats"]:
    assert encode_chat(tokenizer, chat).tolist() == ids
  tools = tokenizer.apply_chat_template(
    golden["chats"][0][0], tools=[{"name": "<é>"}]
  )
  assert tools == golden["tools"]


def test_H05_one_bos_however_the_template_and_the_tokenizer_write_it():
  tokenizer = huggingface.load_tokenizer(LLAMA)
  bos = tokenizer.bos_id
  chat = expected(LLAMA)["chats"][0][0]
  assert tokenizer.apply_chat_template(chat)[:2] != [bos, bos]
  for ids in (
    encode_chat(tokenizer, chat),
    encode_prompt(tokenizer, "hello"),
    encode_prompt(tokenizer, "<|begin|>hello"),
    encode_prompt(tokenizer, "<|begin|><|begin|>hello"),
  ):
    assert ids[0] == bos
    assert bos not in ids[1:]


def test_a_tokenizer_that_puts_no_bos_has_none_though_it_names_one(tmp_path):
  folder = changed(QWEN, tmp_path, bos_token="<|im_start|>")
  tokenizer = huggingface.load_tokenizer(folder)
  assert tokenizer.bos_id is None
  assert (
    encode_prompt(tokenizer, "a").tolist() == tokenizer.encode("a").tolist()
  )


@pytest.mark.parametrize(("adds", "bos"), [(True, 1), (False, None)])
def test_a_stated_choice_about_bos_goes_before_the_file(adds, bos, tmp_path):
  folder = changed(
    LLAMA if bos is None else QWEN,
    tmp_path,
    add_bos_token=adds,
    bos_token="<|im_start|>" if adds else "<|begin|>",
  )
  assert huggingface.load_tokenizer(folder).bos_id == bos


def test_H06_any_listed_id_ends_an_answer_and_the_tokenizers_own_too(tmp_path):
  tokenizer = huggingface.load_tokenizer(LLAMA)
  assert (tokenizer.eos_id, tokenizer.eos_ids) == (2, (2, 4))
  folder = changed(LLAMA, tmp_path, eos_token=None)
  tokenizer = huggingface.load_tokenizer(folder)
  assert (tokenizer.eos_id, tokenizer.eos_ids) == (4, (4,))
  (folder / "generation_config.json").unlink()
  config = folder / "config.json"
  stated = json.loads(config.read_text())
  config.write_text(json.dumps(stated | {"eos_token_id": 3}))
  assert huggingface.load_tokenizer(folder).eos_ids == (3,)
  config.write_text(json.dumps(stated | {"eos_token_id": None}))
  with pytest.raises(ValueError, match="names no eos_token"):
    huggingface.load_tokenizer(folder)


@BOTH
@given(text=st.text())
def test_the_bytes_of_a_texts_tokens_are_its_utf8(folder, text):
  tokenizer = LOADED[folder]
  assert isinstance(tokenizer, BytesPerToken)
  if folder == QWEN:  # which composes letters and accents
    text = unicodedata.normalize("NFC", text)
  ids = tokenizer.encode(text)
  assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode("utf-8")
  assert tokenizer.decode(ids) == text


LOADED = {
  folder: huggingface.load_tokenizer(folder) for folder in (QWEN, LLAMA)
}


def test_ids_beyond_the_vocabulary_and_special_ones_decode_to_nothing():
  tokenizer = huggingface.load_tokenizer(QWEN)
  assert tokenizer.vocab_size == 301
  letter = int(tokenizer.encode("a")[0])
  assert tokenizer.decode([0, 1, letter, 2, 301, 319, -1]) == "a"
  call = tokenizer.encode("<tool_call>")
  assert (len(call), tokenizer.decode(call)) == (1, "<tool_call>")


def test_a_template_may_be_in_the_settings_alone_or_by_name(tmp_path):
  chat = [{"role": "user", "content": "hi"}]
  folder = changed(QWEN, tmp_path, chat_template="{{ messages[0].content }}!")
  assert len(huggingface.load_tokenizer(folder).apply_chat_template(chat)) > 5
  (folder / "chat_template.jinja").unlink()
  tokenizer = huggingface.load_tokenizer(folder)
  assert tokenizer.decode(tokenizer.apply_chat_template(chat)) == "hi!"
  named = [
    {"name": "tool_use", "template": "no"},
    {"name": "default", "template": "{{ messages[0].role }}"},
  ]
  path = folder / "tokenizer_config.json"
  settings = json.loads(path.read_text())
  path.write_text(json.dumps(settings | {"chat_template": named}))
  tokenizer = huggingface.load_tokenizer(folder)
  assert tokenizer.decode(tokenizer.apply_chat_template(chat)) == "user"


def test_without_a_template_a_chat_has_the_plain_one(tmp_path):
  folder = changed(QWEN, tmp_path)
  (folder / "chat_template.jinja").unlink()
  tokenizer = huggingface.load_tokenizer(folder)
  assert not isinstance(tokenizer, ChatTemplate)
  ids = encode_chat(tokenizer, [{"role": "user", "content": "hi"}])
  assert tokenizer.decode(ids) == "user\nhiassistant\n"
  assert tokenizer.eos_id in ids


@pytest.mark.parametrize(
  ("template", "message"),
  [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
  ],
)
def test_what_a_template_refuses_or_must_not_do_is_an_error(
  template, message, tmp_path
):
  folder = changed(QWEN, tmp_path)
  (folder / "chat_template.jinja").write_text(template)
  tokenizer = huggingface.load_tokenizer(folder)
  with pytest.raises(ValueError, match=message) as refused:
    tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
  assert isinstance(refused.value.__cause__, jinja2.TemplateError)


def test_a_template_may_mark_what_the_model_wrote_and_break(tmp_path):
  folder = changed(QWEN, tmp_path)
  (folder / "chat_template.jinja").write_text(
    "{% for m in messages %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% break %}{% endfor %}"
  )
  tokenizer = huggingface.load_tokenizer(folder)
  chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
  assert tokenizer.decode(tokenizer.apply_chat_template(chat)) == "a"


def test_a_template_that_is_none_and_missing_tokens_are_named(tmp_path):
  folder = changed(QWEN, tmp_path, eos_token="<gone>")
  with pytest.raises(ValueError, match="eos_token is '<gone>'"):
    huggingface.load_tokenizer(folder)
  (folder / "chat_template.jinja").write_text("{% if %}")
  (folder / "tokenizer_config.json").unlink()
  with pytest.raises(ValueError, match="the chat template:"):
    huggingface.load_tokenizer(folder)
  (folder / "tokenizer.json").unlink()
  with pytest.raises(FileNotFoundError, match="tokenizer.json is not there"):
    huggingface.load_tokenizer(folder)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path):
  folder = changed(QWEN, tmp_path)
  path = folder / "tokenizer.json"
  stated = json.loads(path.read_text()) | {"decoder": {"type": "Fuse"}}
  path.write_text(json.dumps(stated))
  with pytest.raises(ValueError, match="'Fuse'.*must be ByteLevel"):
    huggingface.load_tokenizer(folder)


@BOTH
def test_a_saved_tokenizer_is_the_same(folder, tmp_path):
  huggingface.save_tokenizer(tmp_path, LOADED[folder])
  for name in ("tokenizer.json", "tokenizer_config.json"):
    assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
  chat = expected(folder)["chats"][1][0]
  again = huggingface.load_tokenizer(tmp_path)
  assert encode_chat(again, chat).tolist() == expected(folder)["chats"][1][1]


def test_bytes_are_saved_as_a_tokenizer_of_the_same_ids(tmp_path):
  own = ByteTokenizer()
  huggingface.save_tokenizer(tmp_path, own)
  read = huggingface.load_tokenizer(tmp_path)
  assert (read.pad_id, read.eos_ids, read.bos_id) == (0, (1,), 2)
  assert read.vocab_size == own.vocab_size
  for i in range(own.vocab_size):
    assert read.token_bytes(i) == own.token_bytes(i)
  for text in ("", "héllo wörld, 你好 🚀\x00\n", "a  b's 12"):
    assert read.encode(text).tolist() == own.encode(text).tolist()
    assert (
      encode_prompt(read, text).tolist() == encode_prompt(own, text).tolist()
    )
  chat = expected(QWEN)["chats"][1][0]
  assert encode_chat(read, chat).tolist() == encode_chat(own, chat).tolist()


def test_transformers_reads_saved_bytes_as_the_same_ids(tmp_path):
  transformers = pytest.importorskip("transformers")
  own = ByteTokenizer()
  huggingface.save_tokenizer(tmp_path, own)
  read = transformers.AutoTokenizer.from_pretrained(tmp_path)
  for text in ("héllo wörld, 你好 🚀\n", "a  b's 12"):
    assert read(text)["input_ids"] == encode_prompt(own, text).tolist()
    assert read.decode(own.encode(text)) == text
  chat = expected(QWEN)["chats"][1][0]
  ids = read.apply_chat_template(
    chat, add_generation_prompt=True, return_dict=False
  )
  assert ids == encode_chat(own, chat).tolist()


def test_another_kind_of_tokenizer_is_not_saved(tmp_path):
  class Other:
    pass

  with pytest.raises(ValueError, match="Other cannot be exported"):
    huggingface.save_tokenizer(tmp_path, Other())
