"""Writes the checkpoints and expected numbers in tests/golden/huggingface.

  python tests/golden/make_huggingface.py

Needs torch 2.13, transformers 5.24 and tokenizers 0.23, which the tests do not.
Each folder is a random tiny checkpoint that transformers wrote, the logits that
it computes with it in float32, and for two of them a tokenizer with the ids
that it makes of texts and of chats. Norms and biases are random too: fresh ones
are 1 and 0, and hide what is left out. Seeded: it writes the same again.
"""

import json
import pathlib
import shutil

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import (
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
  trainers,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

OUT = pathlib.Path(__file__).parent / "huggingface"
SIZES = {
  "vocab_size": 64,
  "hidden_size": 24,
  "intermediate_size": 40,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 256,
}
LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 500.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 64,
}
YARN = {
  "rope_type": "yarn",
  "rope_theta": 100.0,
  "factor": 4.0,
  "beta_fast": 8.0,
  "original_max_position_embeddings": 64,
}
EXPERTS = {
  "head_dim": 8,
  "num_experts": 4,
  "num_experts_per_tok": 2,
  "moe_intermediate_size": 16,
}
WITH_TOKENIZER = {"vocab_size": 320}

CHECKPOINTS = {
  "qwen2_tied_sharded": (
    transformers.Qwen2Config(
      **SIZES | WITH_TOKENIZER,
      tie_word_embeddings=True,
      rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    {"max_shard_size": "20KB"},
    torch.float32,
  ),
  "qwen2_untied_yarn": (
    transformers.Qwen2Config(
      **SIZES, tie_word_embeddings=False, rope_parameters=YARN
    ),
    {},
    torch.float32,
  ),
  "qwen3_tied_bf16": (
    transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    {},
    torch.bfloat16,
  ),
  "qwen3_untied_sharded": (
    transformers.Qwen3Config(
      **SIZES, head_dim=8, tie_word_embeddings=False, rms_norm_eps=1e-5
    ),
    {"max_shard_size": "20KB"},
    torch.float32,
  ),
  "llama_untied_llama3": (
    transformers.LlamaConfig(
      **SIZES | WITH_TOKENIZER,
      head_dim=12,
      tie_word_embeddings=False,
      rope_parameters=LLAMA3,
      rms_norm_eps=1e-5,
    ),
    {},
    torch.float32,
  ),
  "llama_tied_biases": (
    transformers.LlamaConfig(
      **SIZES,
      tie_word_embeddings=True,
      attention_bias=True,
      rope_parameters=LLAMA3,
    ),
    {},
    torch.float32,
  ),
  "qwen3moe_untied_sharded": (
    transformers.Qwen3MoeConfig(
      **SIZES | EXPERTS,
      norm_topk_prob=True,
      tie_word_embeddings=False,
    ),
    {"max_shard_size": "20KB"},
    torch.float32,
  ),
  "qwen3moe_tied_bf16": (
    transformers.Qwen3MoeConfig(
      **SIZES | EXPERTS,
      norm_topk_prob=False,
      tie_word_embeddings=True,
    ),
    {},
    torch.bfloat16,
  ),
}

TEXTS = [
  "How many apples are 12 and 30?",
  "héllo wörld, 你好 🚀\n\n  two  spaces",
  "it's <tool_call> here",
  "",
]
CHATS = [
  [{"role": "user", "content": "What is 2+2?"}],
  [
    {"role": "system", "content": "  Be brief.  "},
    {"role": "user", "content": "你好"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "again\n"},
  ],
]
CHATML = """\
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {{- message.content + '<|im_end|>' }}
    {% if not loop.last %}
after
    {% endif %}
{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
HEADERS = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception('no role ' + message.role) -}}
    {%- endif -%}
    {{- '<|header|>' + message['role'] + '\\n\\n' -}}
    {{- message['content'] | trim + '<|eot|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|header|>assistant\\n\\n' }}{%- endif -%}
"""


def checkpoint(name, config, how, dtype, seed):
  """A random model and its logits."""
  torch.manual_seed(seed)
  model = transformers.AutoModelForCausalLM.from_config(config)
  with torch.no_grad():
    for weight_name, weight in model.named_parameters():
      noise = torch.randn_like(weight)
      weight.copy_(1 + 0.3 * noise if "norm" in weight_name else 0.3 * noise)
  model.to(dtype).save_pretrained(OUT / name, **how)
  if name == "llama_tied_biases":
    spell_as_before_version_5(OUT / name / "config.json")
  model = transformers.AutoModelForCausalLM.from_pretrained(
    OUT / name, dtype=torch.float32
  )
  tokens = torch.randint(0, config.vocab_size, (2, 40))
  with torch.no_grad():
    logits = model(tokens).logits
  np.savez_compressed(
    OUT / name / "expected.npz",
    tokens=tokens.numpy().astype(np.int32),
    logits=logits.numpy(),
  )


def spell_as_before_version_5(path):
  """The keys of the checkpoints that are out there."""
  config = json.loads(path.read_text())
  rope = config.pop("rope_parameters")
  config["rope_theta"] = rope.pop("rope_theta")
  rope["type"] = rope.pop("rope_type")
  config["rope_scaling"] = rope
  config["torch_dtype"] = config.pop("dtype")
  path.write_text(json.dumps(config, indent=2) + "\n")


def tokenizer(name, template, special, bos, eos, listed_eos):
  """A byte-level BPE with a chat template, and what it makes of texts."""
  bpe = tokenizers.Tokenizer(models.BPE())
  if bos:
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  else:  # As in Qwen2, which transformers gives to every model of that name.
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(
      tokenizers.Regex(PRETOKENIZE_REGEX), behavior="isolated"
    )
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pieces])
  bpe.decoder = decoders.ByteLevel()
  bpe.train_from_iterator(
    [" ".join(TEXTS), "the apples are there", "How many are the others?"] * 4,
    trainers.BpeTrainer(
      vocab_size=300,
      special_tokens=special,
      initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
      show_progress=False,
    ),
  )
  bpe.add_tokens([tokenizers.AddedToken("<tool_call>", special=False)])
  if bos:
    bpe.post_processor = processors.TemplateProcessing(
      single=f"{bos} $A", special_tokens=[(bos, bpe.token_to_id(bos))]
    )
  fast = transformers.PreTrainedTokenizerFast(
    tokenizer_object=bpe,
    bos_token=bos,
    eos_token=eos,
    pad_token=special[0],
    chat_template=template,
    clean_up_tokenization_spaces=False,
  )
  fast.save_pretrained(OUT / name)
  ids = [bpe.token_to_id(token) for token in listed_eos]
  (OUT / name / "generation_config.json").write_text(
    json.dumps({"eos_token_id": ids}) + "\n"
  )
  read = transformers.AutoTokenizer.from_pretrained(OUT / name)
  expected = {
    "texts": [[text, read(text)["input_ids"]] for text in TEXTS],
    "chats": [
      [
        chat,
        list(
          read.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=False
          )
        ),
      ]
      for chat in CHATS
    ],
    "tools": list(
      read.apply_chat_template(
        CHATS[0],
        tools=[{"name": "<é>"}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
      )
    ),
    "decoded": [
      [ids, read.decode(ids, skip_special_tokens=True)]
      for ids in (list(range(300)), [5, 200, 201, 40, 0, 1, 2, 150])
    ],
    "bos": read.bos_token_id if bos else None,
    "eos": read.eos_token_id,
    "eos_ids": sorted(ids),
  }
  (OUT / name / "expected_ids.json").write_text(
    json.dumps(expected, ensure_ascii=False) + "\n"
  )


def main():
  """Writes everything anew."""
  shutil.rmtree(OUT, ignore_errors=True)
  for seed, (name, arguments) in enumerate(CHECKPOINTS.items()):
    checkpoint(name, *arguments, seed)
  tokenizer(
    "qwen2_tied_sharded",
    CHATML,
    ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    None,
    "<|im_end|>",
    ["<|im_end|>", "<|endoftext|>"],
  )
  tokenizer(
    "llama_untied_llama3",
    HEADERS,
    ["<|pad|>", "<|begin|>", "<|end|>", "<|header|>", "<|eot|>"],
    "<|begin|>",
    "<|end|>",
    ["<|eot|>"],
  )


if __name__ == "__main__":
  main()
