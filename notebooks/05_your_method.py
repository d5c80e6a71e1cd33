# %% [markdown]
# # 05 From figures to your own method, in three steps
#
# A method is one file with a loss. Here it is written beside the project; to
# keep it, put the same file into `rl_tpu/algorithms/`, where nothing else
# changes. A minute on two cores.

# %%
import pathlib
import tempfile

import here  # noqa: F401  The repository's folder becomes the working directory.
import jax.numpy as jnp
import matplotlib.pyplot as plt

from experiments import exact, quickstart, training
from rl_tpu import algorithms
from rl_tpu.config import Choice, to_config_dict
from rl_tpu.figures import drawing

# %% [markdown]
# ## 1. Write the file
#
# [02](02_losses.ipynb) shows clips with edges: a token counts fully, or not at
# all. The idea to try is a weight that falls smoothly as the ratio leaves 1. A
# file says what it needs of the learner (`REQUIRES`), what may be varied
# (`Config`), what an outcome is worth (`advantages`), and the loss, as a sum
# with its count.

# %%
SOURCE = '''
"""Smooth weights: target/behavior times exp(-(log ratio / width)^2)."""

import dataclasses

import jax
import jax.numpy as jnp

from rl_tpu import ops

REQUIRES = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  width: float = 1.0
  """Of the bell, nats, > 0."""

  def __post_init__(self):
    ops.check_fields(self, ("width", self.width > 0, "> 0"))


def advantages(batch, outputs, config):
  return ops.outcome_advantages(batch, "group_mean")


def loss(outputs, batch, config):
  mask = batch.action_mask
  log_ratio = ops.log_ratio(outputs.target_logp, batch.behavior_logp, mask)
  ratio = ops.ratio(log_ratio)
  bell = jnp.exp(-((log_ratio / config.width) ** 2))
  weight = jax.lax.stop_gradient(ratio * bell)
  negative = -weight * ops.action_advantages(batch) * outputs.target_logp
  return ops.estimate(negative, mask), {"ratio": ops.estimate(ratio, mask)}
'''
folder = pathlib.Path(tempfile.mkdtemp(prefix="methods-"))
(folder / "smooth.py").write_text(SOURCE)
algorithms.__path__.append(str(folder))
print("smooth" in algorithms.names())

# %% [markdown]
# ## 2. Look at what it does
#
# The push on a token by how far the policy has moved, as in 02.

# %%
ratios = jnp.linspace(0.02, 7.0, 700)


def push(name, fields):
  module = algorithms.get(name)
  return exact.push(module, module.Config(**fields), ratios, 1.0)


figure, axes = plt.subplots(figsize=(5, 2.8))
for width in (0.5, 1.0, 2.0):
  axes.plot(ratios, push("smooth", {"width": width}), label=f"width {width}")
mask = {"correction": "mask", "centering": False}
axes.plot(ratios, push("score_centering", mask), "k:", label="mask [0.5, 5]")
axes.set(title="A = +1", xlabel="target / behavior", ylabel="push")
axes.legend()
plt.show()

# %% [markdown]
# ## 3. Train with it
#
# Name it in a config. Every token is four versions stale.

# %%
ARMS = {
  "smooth": ("smooth", {"width": 1.0}),
  "mask": ("score_centering", mask),
}
rows = []
for arm, (name, fields) in ARMS.items():
  config = quickstart.get_config("lockstep(4)")
  config.batches, config.evaluation.every = 24, 0
  loss = algorithms.get(name).Config(**fields)
  config.algorithm = to_config_dict(Choice(name=name, config=loss))
  found = training.rows_of(config, ("reward",), every=2)
  rows += [{"arm": arm} | row for row in found]

figure, axes = plt.subplots(figsize=(5, 2.8))
for arm in ARMS:
  drawing.curve(
    axes, drawing.where(rows, arm=arm), "batch", "reward", label=arm
  )
axes.set(xlabel="batch", ylabel="reward of training", ylim=(0, 1))
axes.legend()
plt.show()

# %% [markdown]
# One seed says that it trains, not that it is better: [04](04_ablation.ipynb)
# is how to ask that. Before you trust it, copy the file to
# `rl_tpu/algorithms/smooth.py` and run `pytest
# tests/algorithms/test_contract.py -k smooth`: padding, packing, micro-
# batching, NaN off the mask and finite differences are checked without another
# line.
#
# Next: [06](06_report.ipynb), reading a run.
