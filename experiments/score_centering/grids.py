"""Which corrections hold when the sampler is not the policy that is trained?

  python -m rl_tpu figures score_centering/grids

The paper's methods under rounded weights and caches (Fig. 1), noise on the
weights (Fig. 3), milder rounding and old weights (Fig. 4): `coin`, 480 steps of
128 trajectories by SGD, three seeds. The sampler's reward is what is drawn, as
in the paper. At scale paper each is a run of the paper's model on its task.

On the quickstart's task, where every letter of a short answer can spoil it,
plain policy gradient learned as well as Score Centering did with noise of 0.1
(reward 0.97 and 0.98 after 40 batches, one seed): nothing collapses there, and
only PPO, which masks what differs, stays behind (0.27). Rules were written
before the sweep, after some runs with one seed or two.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import training
from experiments.score_centering import coin, methods, settings
from rl_tpu import algorithms
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing
from rl_tpu.models import quantization

STEPS, SEEDS, PARTS = 480, 3, 16
METRICS = ("reward", "entropy", "engine_mismatch")


@dataclasses.dataclass(frozen=True)
class Setting:
  """One panel of a figure."""

  figure: str
  here: Mapping[str, Any]
  """Fields of `engine.mismatch` on `coin`."""
  paper: Mapping[str, Any]
  """The same in the paper."""
  model: str
  """The paper's."""
  batches: int
  """The paper's."""


def _quantized(weights: str, cache: str, paper: tuple[str, str]) -> Setting:
  here = {"weights": weights, "kv": cache}
  there = dict(zip(("weights", "kv"), paper, strict=True))
  return Setting("Fig. 1", here, there, "qwen3-30b-a3b", 800)


def _noisy(here: float, paper: float) -> Setting:
  noises = {"weight_noise": here}, {"weight_noise": paper}
  return Setting("Fig. 3", *noises, "qwen3-0.6b", 300)


_INT8 = {"weights": "int8", "kv": "int8"}
SETTINGS = {
  "fp8, fp8 cache": _quantized("fp8", "fp8", ("fp8", "fp8")),
  "fp8, int4 cache": _quantized("fp8", "int4", ("fp8", "int4")),
  "int4, int4 cache": _quantized("int4", "int4", ("int8", "int4")),
  "noise 0.1": _noisy(0.1, 0.01),
  "noise 0.2": _noisy(0.2, 0.02),
  "noise 0.5": _noisy(0.5, 0.05),
  "int8, int8 cache": Setting("Fig. 4", _INT8, _INT8, "qwen3-0.6b", 1200),
  "64 steps old": Setting(
    "Fig. 4",
    {"refresh_period": 65},
    {"refresh_period": 65},
    "qwen3-0.6b",
    1200,
  ),
}
