"""A folder's tokenizer and chat template.

`tokenizers` reads `tokenizer.json`, the very code that transformers runs below;
Jinja, in its sandbox, renders chat templates, which come with a model and are
not to be trusted. Importing transformers for these two would take seconds and
bring torch's world along.

Whether a model has a BOS is what its tokenizer does by itself: Llama 3 puts one
before every text, Qwen none, though its config names an id. Texts are encoded
as transformers does: what looks like a special token is one. Only byte-level
tokenizers (Qwen, Llama 3 and most since GPT-2) are read, of whose tokens the
exact bytes are known.
"""

import json
import pathlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from rl_tpu.models.tokenizer import ByteTokenizer, Tokenizer

_FILE = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_COPIED = (
  _FILE,
  _SETTINGS,
  _TEMPLATE,
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
)


class FolderTokenizer:
  """A byte-level tokenizer from `tokenizer.json` and the files beside it."""

  def __init__(self, folder: str | PathLike[str]):
    """Reads the files; see `load`."""
    self.folder = pathlib.Path(folder)
    path = self.folder / _FILE
    if not path.is_file():
      raise FileNotFoundError(f"{path} is not there: no tokenizer to read")
    self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
    self._tokenizer.no_padding()
    self._tokenizer.no_truncation()
    if "ByteLevel" not in json.dumps(_read(path).get("decoder")):
      raise ValueError(
        f"{path}: the decoder is {_read(path).get('decoder')}; it must be "
        "ByteLevel"
      )
    self._settings = _read(self.folder / _SETTINGS)
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    self.vocab_size = max(vocabulary.values()) + 1
    self._bytes = self._bytes_of_tokens()
    self.eos_id, self.eos_ids = self._stops()
    pad = self._special("pad_token")
    self.pad_id = self.eos_id if pad is None else pad
    self.bos_id = self._bos()

  def _bytes_of_tokens(self) -> list[bytes]:
    """By id; special tokens and holes have none."""
    alphabet = _byte_alphabet()
    table = [b""] * self.vocab_size
    for token, i in self._tokenizer.get_vocab(with_added_tokens=False).items():
      whole = all(char in alphabet for char in token)
      table[i] = bytes(alphabet[c] for c in token) if whole else token.encode()
    for i, added in self._tokenizer.get_added_tokens_decoder().items():
      table[i] = b"" if added.special else added.content.encode("utf-8")
    return table

  def _special(self, name: str) -> int | None:
    """The id of a token that the settings name."""
    token = self._settings.get(name)
    if isinstance(token, Mapping):
      token = token["content"]
    if token is None:
      return None
    found = self._tokenizer.token_to_id(token)
    if found is None:
      raise ValueError(
        f"{self.folder / _SETTINGS}: {name} is {token!r}, which {_FILE} lacks"
      )
    return found

  def _stops(self) -> tuple[int, tuple[int, ...]]:
    """What ends a supervised answer, and all that end a sampled one."""
    generation = _read(self.folder / "generation_config.json")
    model = _read(self.folder / "config.json")
    listed = generation.get("eos_token_id", model.get("eos_token_id"))
    if listed is None:
      listed = []
    listed = listed if isinstance(listed, list) else [listed]
    own = self._special("eos_token")
    if own is None:
      if not listed:
        raise ValueError(
          f"{self.folder} names no eos_token in {_SETTINGS} and no "
          "eos_token_id in generation_config.json: nothing ends an answer"
        )
      own = listed[0]
    return own, (own, *sorted(set(listed) - {own}))

  def _bos(self) -> int | None:
    """BOS if the tokenizer itself puts it before a text."""
    bos = self._special("bos_token")
    adds = self._settings.get("add_bos_token")
    if adds is None:
      adds = self._tokenizer.encode("", add_special_tokens=True).ids[:1] == [
        bos
      ]
    return bos if adds else None

  def encode(self, text: str) -> np.ndarray:
    """Returns i32[n]; what the text itself holds, nothing added."""
    ids = self._tokenizer.encode(text, add_special_tokens=False).ids
    return np.array(ids, np.int32)

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text; special ids are left out, bad bytes become U+FFFD."""
    data = b"".join(self.token_bytes(int(i)) for i in ids)
    return data.decode("utf-8", errors="replace")

  def token_bytes(self, token: int) -> bytes:
    """Returns the bytes of an id; ids that pad the vocabulary have none."""
    return self._bytes[token] if 0 <= token < self.vocab_size else b""


class ChatTokenizer(FolderTokenizer):
  """A tokenizer with a chat template."""

  def __init__(self, folder: str | PathLike[str], template: str):
    """Compiles the template; raises ValueError if it is none."""
    super().__init__(folder)
    try:
      self._template = _environment().from_string(template)
    except jinja2.TemplateError as error:
      raise ValueError(f"{folder}: the chat template: {error}") from error

  def apply_chat_template(
    self, messages: Sequence[Mapping[str, Any]], **variables: Any
  ) -> list[int]:
    """Returns ids that ask for the answer to `messages`.

    Args:
      messages: with `role` and `content`, and what else the template reads.
      **variables: of the template, such as `tools` or `enable_thinking`.

    Raises:
      ValueError: the template refuses the messages.
    """
    special = {
      name: self._tokenizer.id_to_token(token)
      for name in ("bos_token", "eos_token", "pad_token")
      if (token := self._special(name)) is not None
    }
    try:
      text = self._template.render(
        messages=messages,
        add_generation_prompt=True,
        **special | variables,
      )
    except (jinja2.TemplateError, TypeError) as error:
      raise ValueError(f"{self.folder}: the chat template: {error}") from error
    return self._tokenizer.encode(text, add_special_tokens=False).ids


def load(folder: str | PathLike[str]) -> FolderTokenizer:
  """The tokenizer of a folder; a `ChatTokenizer` if it has a template.

  Raises:
    FileNotFoundError: there is no tokenizer.json.
    ValueError: it is not byte-level, or names tokens that it lacks.
  """
  path = pathlib.Path(folder) / _TEMPLATE
  if path.is_file():
    return ChatTokenizer(folder, path.read_text("utf-8"))
  template = _read(pathlib.Path(folder) / _SETTINGS).get("chat_template")
  if isinstance(template, list):
    named = {entry["name"]: entry["template"] for entry in template}
    template = named.get("default")
  if template is None:
    return FolderTokenizer(folder)
  return ChatTokenizer(folder, template)


def save(folder: str | PathLike[str], tokenizer: Tokenizer) -> None:
  """Writes files from which transformers makes the same tokenizer.

  Raises:
    ValueError: there is no such form of the tokenizer.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  if isinstance(tokenizer, FolderTokenizer):
    for name in _COPIED:
      if (tokenizer.folder / name).is_file():
        shutil.copyfile(tokenizer.folder / name, folder / name)
  elif isinstance(tokenizer, ByteTokenizer):
    _save_bytes(folder, tokenizer)
  else:
    raise ValueError(
      f"{type(tokenizer).__name__} cannot be exported; ByteTokenizer and the "
      "tokenizer of a folder can"
    )


def _save_bytes(folder: pathlib.Path, tokenizer: ByteTokenizer) -> None:
  """Bytes as a byte-level tokenizer that merges nothing."""
  pad, eos, bos = "<pad>", "</s>", "<s>"
  vocabulary = {
    pad: tokenizer.pad_id,
    eos: tokenizer.eos_id,
    bos: tokenizer.bos_id,
  }
  vocabulary |= {
    char: byte + tokenizer.first_byte_id
    for char, byte in _byte_alphabet().items()
  }
  out = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
  out.add_special_tokens([pad, eos, bos])
  out.pre_tokenizer = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  out.decoder = decoders.ByteLevel()
  out.post_processor = processors.TemplateProcessing(
    single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_id)]
  )
  out.save(str(folder / _FILE))
  template = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] + '\\n' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
  )
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": bos,
    "eos_token": eos,
    "pad_token": pad,
    "clean_up_tokenization_spaces": False,
    "chat_template": template,
  }
  (folder / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")


def _read(path: pathlib.Path) -> dict[str, Any]:
  """A JSON file's values; none if it is not there."""
  return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def _byte_alphabet() -> dict[str, int]:
  """The printable character that stands for each byte, as in GPT-2.

  Printable bytes stand for themselves; the others follow from U+0100 on.
  """
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  alphabet = {chr(byte): byte for byte in printable}
  others = sorted(set(range(256)) - set(printable))
  return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class _Generation(jinja2.ext.Extension):
  """`{% generation %}`: marks what the model wrote; renders what is in it."""

  tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

  def parse(self, parser: Any) -> Any:
    """Keeps the body."""
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
  """What chat templates expect, without access to anything but their input.

  The date is left out, so that a run's prompts do not depend on the day: Llama
  3 templates then use the one they name.
  """
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[jinja2.ext.loopcontrols, _Generation],
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _refuse
  return environment


def _to_json(value: Any, indent: int | None = None) -> str:
  """Plain JSON: Jinja's own escapes HTML."""
  return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)
