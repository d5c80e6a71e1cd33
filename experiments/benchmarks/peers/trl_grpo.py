"""TRL's GRPO, timed by another process.

Runs under the Python of the peer's own environment, which knows nothing of
rl_tpu (see `experiments.benchmarks.learner`). The first argument is a JSON
object of sizes; its `work` is one of

- update: each line of standard input is a JSON list, the new tokens of each
  trajectory of a batch, which is padded to the longest, as the trainer does.
  One `compute_loss` of the trainer (policy, log-probabilities of the
  completions, entropy, clipped loss), backward, gradient clip and AdamW.
- step: each line lets `GRPOTrainer.train` take one step: `generate`, reward,
  loss, backward, clip, AdamW and its own logging.

Each line of standard output answers one: tokens that count, CPU seconds of the
process, seconds, peak memory in MB. No gradient checkpointing: it is slower.
"""

import importlib.metadata
import json
import os
import sys
import tempfile

os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import answers
import datasets
import tokenizers
import torch
import transformers
import trl
from hf_generate import make_model


def make_tokenizer(vocab_size: int) -> transformers.PreTrainedTokenizerFast:
  """Whose tokens are words, one for each id."""
  words = {f"w{i}": i for i in range(vocab_size)}
  model = tokenizers.models.WordLevel(words, unk_token="w1")
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    pad_token="w0",
    eos_token=f"w{vocab_size - 1}",
  )


def reward(prompts, completions, completion_ids, **_) -> list[float]:
  """The share of even tokens."""
  del prompts, completions
  return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


class Turns(transformers.TrainerCallback):
  """Takes a step for each line, and answers when it is done."""

  def __init__(self, tokens: int):
    self._tokens = tokens
    self._began: tuple[float, float] | None = None

  def on_step_begin(self, args, state, control, **_):
    """Times the first step from the start of training."""
    if self._began is None:
      sys.stdin.readline()
      self._began = answers.now()

  def on_step_end(self, args, state, control, **_):
    """Answers, and waits for the next line."""
    assert self._began
    answers.cost(self._tokens, self._began)
    if not sys.stdin.readline():
      control.should_training_stop = True
    self._began = answers.now()


def make_trainer(sizes: dict, folder: str, *turns) -> trl.GRPOTrainer:
  """The trainer of a batch of prompts, its advice on speed taken."""
  words = torch.randint(1, sizes["vocab_size"], (256, sizes["prompt"]))
  prompts = [" ".join(f"w{i}" for i in row) for row in words.tolist()]
  return trl.GRPOTrainer(
    model=make_model(sizes).train(),
    reward_funcs=reward,
    args=trl.GRPOConfig(
      output_dir=folder,
      per_device_train_batch_size=sizes["rows"],
      gradient_accumulation_steps=1,
      num_generations=sizes["group"],
      max_completion_length=sizes["new"],
      temperature=1.0,
      beta=0.0,
      loss_type="grpo",
      learning_rate=1e-3,
      lr_scheduler_type="constant",
      max_steps=10_000,
      gradient_checkpointing=False,
      use_vllm=False,
      use_cpu=True,
      bf16=False,
      report_to=[],
      save_strategy="no",
      disable_tqdm=True,
      logging_steps=1,
    ),
    train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
    processing_class=make_tokenizer(sizes["vocab_size"]),
    callbacks=list(turns),
  )


def update(trainer: trl.GRPOTrainer, sizes: dict) -> None:
  """Answers each batch of lengths after one optimizer step on it."""
  model, optimizer = trainer.model, trainer.create_optimizer()
  trainer.current_gradient_accumulation_steps = 1
  for line in sys.stdin:
    lengths = torch.tensor(json.loads(line))
    rows, longest = len(lengths), int(lengths.max())
    began = answers.now()
    most = sizes["vocab_size"]
    prompts = torch.randint(1, most, (rows, sizes["prompt"]))
    inputs = {
      "prompt_ids": prompts,
      "prompt_mask": torch.ones_like(prompts),
      "completion_ids": torch.randint(1, most, (rows, longest)),
      "completion_mask": (torch.arange(longest) < lengths[:, None]).long(),
      "advantages": torch.randn(rows),
      "num_items_in_batch": lengths.sum(),
    }
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    answers.cost(int(lengths.sum()) + rows * sizes["prompt"], began)


def main() -> None:
  """Answers line by line."""
  sizes = json.loads(sys.argv[1])
  torch.set_num_threads(sizes["threads"])
  torch.manual_seed(0)
  version = importlib.metadata.version("trl")
  said = f"trl {version}, transformers {transformers.__version__}, "
  said += f"torch {torch.__version__}, {torch.get_num_threads()} threads"
  with tempfile.TemporaryDirectory() as folder:
    tokens = sizes["rows"] * (sizes["prompt"] + sizes["new"])
    stepping = sizes["work"] == "step"
    turns = [Turns(tokens)] if stepping else []
    trainer = make_trainer(sizes, folder, *turns)
    answers.begin(said)
    if stepping:
      trainer.train()
    else:
      update(trainer, sizes)


if __name__ == "__main__":
  main()
