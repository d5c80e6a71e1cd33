"""Does the paper's run here have the paper's numbers, and all of its parts?

  python -m rl_tpu figures areal/tables

Table 3's settings, field by field of the config that `settings.py` builds for
each of the four models, and the parts of the architecture in Fig. 2, each with
the name that stands for it. Nothing is trained. Not in a config, because the
algorithm has no such choice: gamma and lambda of 1, and a learning rate that is
constant after its warm-up. The share of devices that generate (75%) is that of
the launch. The picture of the architecture is "The loop" in the README.
"""

import importlib
import pathlib
from collections.abc import Sequence

from experiments import stated
from experiments.areal import settings
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing

ALL = {
  "seed": 1,
  "groups_per_batch": 512,
  "group_size": 16,
  "algorithm.name": "decoupled_ppo",
  "algorithm.config.clip_low": 0.2,
  "algorithm.config.clip_high": 0.2,
  "algorithm.config.baseline": "batch",
  "algorithm.config.behavior_weight_cap": None,
  "interruption": "recompute",
  "learner.kind": "adamw",
  "learner.minibatches": 4,
  "learner.learning_rate": 2e-5,
  "learner.weight_decay": 0.05,
  "learner.beta1": 0.9,
  "learner.beta2": 0.95,
  "learner.epsilon": 1e-5,
  "learner.max_grad_norm": 1.0,
  "model.compute_dtype": "float16",
  "sampling.temperature": 1.0,
  "sampling.top_p": 1.0,
  "sampling.top_k": 0,
  "sampling.max_tokens": 27_648,
  "engine.context_length": 1024 + 27_648,
}
"""Of all models."""
OWN = {
  "1.5b": {"batches": 250, "max_staleness": 8, "learner.warmup_minibatches": 1},
  "7b": {"batches": 250, "max_staleness": 8, "learner.warmup_minibatches": 1},
  "14b": {"batches": 80, "max_staleness": 4, "learner.warmup_minibatches": 0},
  "32b": {"batches": 60, "max_staleness": 4, "learner.warmup_minibatches": 0},
}
"""Of one; warm-up is 0.001 of the minibatches, rounded."""
PARTS = {
  "interruptible rollout worker": "rl_tpu.generation.driver:GenerationDriver",
  "update_weights": "rl_tpu.generation.driver:GenerationDriver.update",
  "generate": "rl_tpu.generation.driver:GenerationDriver.generate",
  "reward service": "rl_tpu.rewards.worker",
  "rollout controller": "rl_tpu.actor:Actor",
  "staleness control": "rl_tpu.staleness:Admission",
  "replay buffer": "rl_tpu.buffer:Buffer",
  "trainer workers": "rl_tpu.learner:Learner",
  "dynamic batching": "rl_tpu.packing:pack",
  "parameter storage": "rl_tpu.transfer",
}
"""Of Fig. 2, and what stands for each."""
README = pathlib.Path(__file__).resolve().parents[2] / "README.md"
SIZE = (10.0, 5.0)


def cells(scale: str) -> list[Cell]:
  """Fields by models, and parts."""
  del scale
  fields = [
    {"item": "Table 3", "model": model, "field": field}
    for model in settings.MODELS
    for field in {**ALL, **OWN[model]}
  ]
  return fields + [
    {"item": "Fig. 2", "model": "", "field": part} for part in PARTS
  ]


def measure(cell: Cell, scale: str) -> list[Row]:
  """The paper's value and ours; of a part, what it is here."""
  del scale
  if cell["item"] == "Fig. 2":
    return [{"paper": cell["field"], "here": _found(PARTS[cell["field"]])}]
  model = cell["model"]
  fields = {**ALL, **OWN[model]}
  config = settings.get_config(model)
  return [stated.row(config, cell["field"], fields)]


def _found(path: str) -> str:
  """The path, after it was followed.

  Raises:
    ImportError, AttributeError: nothing has that name.
  """
  module, _, names = path.partition(":")
  part = importlib.import_module(module)
  for name in filter(None, names.split(".")):
    part = getattr(part, name)
  return path


def _settings(rows: Sequence[Row]) -> Verdict:
  """All but the format of 16-bit floats, which is the TPU's."""
  own = drawing.where(rows, item="Table 3")
  formats = drawing.where(own, field="model.compute_dtype")
  verdict = stated.agree([row for row in own if row not in formats])
  names = sorted({f"{row['here']}" for row in formats})
  return Verdict(
    outcome=verdict.outcome, seen=f"{verdict.seen}; floats {', '.join(names)}"
  )


def _architecture(rows: Sequence[Row]) -> Verdict:
  """Every part was found, and the README draws the loop."""
  own = drawing.where(rows, item="Fig. 2")
  drawn = "## The loop" in README.read_text()
  seen = f"{len(own)} of {len(PARTS)} parts have a name here; "
  seen += "drawn in the README" if drawn else "drawn nowhere"
  whole = len(own) == len(PARTS) and drawn
  return Verdict(outcome="passed" if whole else "weaker", seen=seen)


ARTEFACTS = {
  "Table 3": Claim(
    shows="settings: 512 prompts of 16 answers, 4 minibatches, clip 0.2, Adam "
    "2e-5 (0.9, 0.95, 1e-5), decay 0.05, norm 1, answers up to 27,648 tokens",
    rule="every stated field of the four models' configs has the paper's "
    "value; 16-bit floats are bfloat16 in place of float16",
    judge=_settings,
  ),
  "Fig. 2": Claim(
    shows="architecture: interruptible rollout workers, reward service, "
    "controller, trainers, weights by version",
    rule="a diagram, with nothing to measure: each of its parts exists here "
    "under the name in areal/tables.py, and the README draws the loop",
    judge=_architecture,
  ),
}


def draw(rows: Sequence[Row], figure) -> None:
  """Both tables, the first of the smallest model."""
  left, right = figure.subplots(1, 2)
  first = next(iter(settings.MODELS))
  stated.draw(
    drawing.where(rows, item="Table 3", model=first),
    left,
    {"field": "field", "the paper": "paper", "here": "here"},
  )
  left.set_title(f"Table 3, {first}", fontsize=9)
  stated.draw(
    drawing.where(rows, item="Fig. 2"),
    right,
    {"part of the architecture": "field", "here": "here"},
  )
  right.set_title("Fig. 2", fontsize=9)
