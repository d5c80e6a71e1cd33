# %% [markdown]
# # 03 Staleness as a dial
#
# `lockstep(n)` makes every token exactly n versions stale, on one machine, the
# same to the last bit each time. So staleness can be turned up until something
# breaks, with nothing else changing. A minute and a half on two cores.

# %%
import here  # noqa: F401  The repository's folder becomes the working directory.
import matplotlib.pyplot as plt

from experiments import training
from experiments.methods import areal
from rl_tpu.figures import drawing

# %%
LAGS = (0, 4, 16)
COLUMNS = ("reward", "behavior_weight", "clip_fraction", "behavior_target_kl")
rows = []
for lag in LAGS:
  config = areal.get_config(f"lockstep({lag})")
  config.batches, config.evaluation.every = 32, 0
  found = training.rows_of(config, COLUMNS, every=2)
  rows += [{"lag": lag} | row for row in found]

# %% [markdown]
# Reward: how fast it learns. KL: how far the policy has moved from the one
# that sampled, nats a token. Clipped: the share of tokens that the update
# would have moved out of its trust region around the proximal policy.

# %%
figure, panels = plt.subplots(1, 3, figsize=(10, 2.8))
labels = ("reward of training", "KL from the sampler, nats", "clipped tokens")
shown = ("reward", "behavior_target_kl", "clip_fraction")
for axes, name, label in zip(panels, shown, labels, strict=True):
  for lag in LAGS:
    own = drawing.where(rows, lag=lag)
    drawing.curve(axes, own, "batch", name, label=f"{lag} versions")
  axes.set(xlabel="batch", ylabel=label)
panels[0].legend(title="staleness")
plt.show()

# %% [markdown]
# The mean of `behavior_weight` (proximal over behavior) should stay near 1: it
# is an expectation of a ratio under its denominator. Where it leaves 1 by
# much, a few tokens carry the batch.

# %%
for lag in LAGS:
  weights = drawing.values(rows, "behavior_weight", lag=lag)
  print(f"staleness {lag:2}: mean weight {drawing.interval(weights)[0]:.3f}")

# %% [markdown]
# Next: [04](04_ablation.ipynb), the same question answered with intervals.
