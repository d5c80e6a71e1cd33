"""Hugging Face `generate`, timed by another process.

Runs under the Python of the peer's own environment, which knows nothing of
rl_tpu (see `experiments.benchmarks.serving`). The first argument is a JSON
object of sizes. Each line of standard input is a JSON list: new tokens of each
row of one batch. `generate` is a static batch: all rows run until the longest
has ended, as they do when rows end by a stop token. Each line of standard
output answers one: tokens that count, CPU seconds of the process, seconds.

Sampling at temperature 1 without filters; log-probabilities of the sampled
tokens from the logits that `generate` returns; the cache grows with the
sequence. Random weights: time does not depend on them.
"""

import json
import os
import sys
import time

os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import torch
import transformers


def make_model(sizes: dict) -> torch.nn.Module:
  """The architecture of rl_tpu's decoder: Qwen3."""
  config = transformers.Qwen3Config(
    vocab_size=sizes["vocab_size"],
    hidden_size=sizes["d_model"],
    num_hidden_layers=sizes["num_layers"],
    num_attention_heads=sizes["num_heads"],
    num_key_value_heads=sizes["num_kv_heads"],
    head_dim=sizes["head_dim"],
    intermediate_size=sizes["d_ff"],
    tie_word_embeddings=True,
    attn_implementation="sdpa",
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
  )
  return transformers.Qwen3ForCausalLM(config).eval()


@torch.inference_mode()
def generate(model: torch.nn.Module, prompts: torch.Tensor, steps: int) -> None:
  """Samples a batch with log-probabilities, as a trainer would need it."""
  out = model.generate(
    prompts,
    attention_mask=torch.ones_like(prompts),
    max_new_tokens=steps,
    do_sample=True,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    output_logits=True,
    return_dict_in_generate=True,
  )
  sampled = out.sequences[:, prompts.shape[1] :]
  assert sampled.shape[1] == steps, f"{sampled.shape[1]} steps, not {steps}"
  for step, logits in enumerate(out.logits):
    torch.log_softmax(logits, -1).gather(1, sampled[:, step : step + 1])


def main() -> None:
  """Answers line by line."""
  sizes = json.loads(sys.argv[1])
  torch.set_num_threads(sizes["threads"])
  torch.manual_seed(0)
  model = make_model(sizes)
  print(
    json.dumps(
      {
        "version": f"transformers {transformers.__version__}, "
        f"torch {torch.__version__}, sdpa, "
        f"{torch.get_num_threads()} threads"
      }
    ),
    flush=True,
  )
  for line in sys.stdin:
    lengths = json.loads(line)
    shape = (len(lengths), sizes["prompt"])
    prompts = torch.randint(1, sizes["vocab_size"], shape)
    began = time.perf_counter(), time.process_time()
    generate(model, prompts, max(lengths))
    answer = {
      "tokens": sum(lengths),
      "cpu_seconds": time.process_time() - began[1],
      "seconds": time.perf_counter() - began[0],
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
  main()
