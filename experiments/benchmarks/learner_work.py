"""rl_tpu's learner, timed by another process; see `learner`, which starts it.

The first argument is a JSON object of sizes. Its `work` is one of

- update: each line of standard input is a JSON list, the new tokens of each
  trajectory of a batch. Packing and `Learner.train`: GRPO's advantages, loss,
  backward, clip and AdamW, metrics on the host. `layout` says whether
  trajectories share rows (`packed`) or have one each (`padded`); rows have
  `row_length` tokens, `microbatch_rows` of them pass together.
- step: each line lets `train.run` take one batch: sampling by the engine, the
  environment's rewards, packing, update, weights to the engine, log.

Each line of standard output answers one: tokens that count, CPU seconds of the
process, seconds, peak memory in MB.
"""

import contextlib
import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from experiments.benchmarks.peers import answers
from rl_tpu import algorithms, envs, evaluate, packing, parts, sft, sharding
from rl_tpu import learner as learners
from rl_tpu.config import Choice
from rl_tpu.generation import engine
from rl_tpu.models import transformer
from rl_tpu.types import Batch, Sampling, Trajectory
from rl_tpu.view import View

MODEL_FIELDS = tuple(f.name for f in dataclasses.fields(transformer.Config))


def make_model(sizes: dict) -> transformer.Config:
  """The decoder that peers have too; its layers are unrolled, as theirs are."""
  named = {name: sizes[name] for name in MODEL_FIELDS if name in sizes}
  return transformer.Config(**named | {"unroll": sizes["num_layers"]})


def trajectories(
  sizes: dict, lengths: list[int], rng: np.random.Generator
) -> list[Trajectory]:
  """Random tokens, log-probabilities and outcomes; `group` share a prompt."""
  made = []
  for n, new in enumerate(lengths):
    length = sizes["prompt"] + new
    actions = np.arange(length) >= sizes["prompt"]
    rewards = np.zeros(length, np.float32)
    rewards[-1] = rng.standard_normal()
    made.append(
      Trajectory(
        prompt_id=n // sizes["group"],
        group_id=n // sizes["group"],
        member=n % sizes["group"],
        tokens=rng.integers(1, sizes["vocab_size"], length, np.int32),
        action_mask=actions,
        behavior_logp=np.where(actions, -8.0, 0.0).astype(np.float32),
        token_version=np.where(actions, 0, -1).astype(np.int32),
        rewards=rewards,
      )
    )
  return made


def lay_out(sizes: dict, batch: list[Trajectory], rows_multiple: int) -> Batch:
  """Packs them, or gives each a row of its own."""
  how: dict = {"row_length": sizes["row_length"], "version": 0}
  packed = packing.pack(batch, rows_multiple=rows_multiple, **how)
  if sizes["layout"] == "packed":
    return packed
  alone = [packing.pack([trajectory], **how) for trajectory in batch]
  rows: dict = {
    field.name: np.concatenate([getattr(one, field.name) for one in alone])
    for field in dataclasses.fields(Batch)
    if np.ndim(getattr(packed, field.name)) == 2
  }
  own = np.arange(len(batch))[:, None]
  ids = rows["trajectory_ids"]
  rows["trajectory_ids"] = np.where(ids >= 0, own, -1).astype(np.int32)
  return dataclasses.replace(packed, **rows)


def update(sizes: dict) -> None:
  """Answers each batch of lengths after one optimizer step on it."""
  policy = transformer.Policy(make_model(sizes))
  grpo = algorithms.get("grpo")
  config = learners.Config(
    row_length=sizes["row_length"],
    microbatch_rows=sizes["microbatch_rows"],
    learning_rate=1e-3,
  )
  mesh = sharding.make_mesh(sharding.MeshShape(), jax.devices())
  learner = learners.Learner(policy, grpo, grpo.Config(), config, mesh)
  state = learner.init(jax.jit(policy.init)(jax.random.key(0)))
  rng = np.random.default_rng(0)
  for line in sys.stdin:
    lengths = json.loads(line)
    batch = trajectories(sizes, lengths, rng)
    began = answers.now()
    state, _ = learner.train(state, lay_out(sizes, batch, config.rows_multiple))
    jax.block_until_ready(state)
    answers.cost(sum(len(t) for t in batch), began)


class Turns(View):
  """Lets the run go on by a batch for each line, and answers after it."""

  def __init__(self, tokens: int):
    super().__init__(0)
    self._tokens = tokens
    self._began = 0.0, 0.0

  @contextlib.contextmanager
  def open(self) -> Iterator[View]:
    """Waits for the first line."""
    self._wait()
    yield self

  def note(self, text: str) -> None:
    """Standard output is for answers."""
    print(text, file=sys.stderr)

  def batch(
    self, batch: int, metrics: Mapping[str, float], seconds_left: float
  ) -> None:
    """Answers, and waits for the next line."""
    del batch, metrics, seconds_left
    answers.cost(self._tokens, self._began)
    self._wait()

  def _wait(self) -> None:
    if not sys.stdin.readline():
      raise EOFError  # Ends the run.
    self._began = answers.now()


def make_run(sizes: dict, directory: pathlib.Path) -> parts.Config:
  """A synchronous run of GRPO on prompts of one length."""
  # A first token, then spaces, four letters and a sign.
  text = " " * (sizes["prompt"] - 6) + "{word}="
  task = envs.get("reasoning_gym").Config(
    generator="spell_backward",
    generator_config={"min_word_len": 4, "max_word_len": 4},
    template=text,
    size=4000,
  )
  length = sizes["prompt"] + sizes["new"]
  return parts.Config(
    name="benchmark",
    directory=str(directory / "run"),
    cache=str(pathlib.Path(sizes["cache"])),
    schedule="sync",
    batches=1000,
    interruption="keep",
    groups_per_batch=sizes["rows"] // sizes["group"],
    group_size=sizes["group"],
    task=Choice(name="reasoning_gym", config=task),
    algorithm=Choice(name="grpo", config=algorithms.get("grpo").Config()),
    model=make_model(sizes),
    sampling=Sampling(
      max_tokens=sizes["new"], stop_ids=(sizes["vocab_size"] - 1,)
    ),
    learner=learners.Config(
      row_length=sizes["row_length"],
      microbatch_rows=sizes["microbatch_rows"],
      learning_rate=1e-3,
    ),
    engine=engine.Config(
      slots=sizes["rows"],
      context_length=length,
      prefill_buckets=(sizes["prompt"],),
      prefill_batches=(sizes["rows"] // sizes["group"],),
      min_shared_prefix=sizes["prompt"] // 2,
    ),
    warm_start=sft.Config(batches=0, wrong_batches=0),
    evaluation=evaluate.Config(every=0, problems=1),
    checkpoint_every=1000,
  )


def step(sizes: dict) -> None:
  """Trains, a batch for each line."""
  from rl_tpu import train

  with (
    tempfile.TemporaryDirectory() as folder,
    contextlib.suppress(EOFError),
  ):
    config = make_run(sizes, pathlib.Path(folder))
    tokens = sizes["rows"] * (sizes["prompt"] + sizes["new"])
    train.run(config, Turns(tokens))


def main() -> None:
  """Answers line by line."""
  sizes = json.loads(sys.argv[1])
  cache = pathlib.Path(sizes["cache"], "compiled").absolute()
  cache.mkdir(parents=True, exist_ok=True)
  jax.config.update("jax_compilation_cache_dir", str(cache))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
  said = f"rl_tpu, jax {jax.__version__}"
  answers.begin(said)
  {"update": update, "step": step}[sizes["work"]](sizes)


if __name__ == "__main__":
  main()
