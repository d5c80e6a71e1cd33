"""Models as Hugging Face stores them: a folder's config, weights and tokenizer.

`read_config` and `check` read headers only, `load` puts the weights on a mesh,
`load_tokenizer` turns text into ids. `save` and `save_tokenizer` write a folder
that transformers loads. Nothing is downloaded.
"""

from rl_tpu.models.huggingface.config import read as read_config
from rl_tpu.models.huggingface.config import stored
from rl_tpu.models.huggingface.tokenizer import load as load_tokenizer
from rl_tpu.models.huggingface.tokenizer import save as save_tokenizer
from rl_tpu.models.huggingface.weights import (
  Export,
  check,
  fingerprint,
  load,
  save,
)

__all__ = [
  "Export",
  "check",
  "fingerprint",
  "load",
  "load_tokenizer",
  "read_config",
  "save",
  "save_tokenizer",
  "stored",
]
