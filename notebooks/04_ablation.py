# %% [markdown]
# # 04 Ablate one choice
#
# Does a choice matter? Run it both ways over seeds, and read the difference
# with its interval. Change `ARMS` to ask your own question. Under two minutes
# on two cores with three seeds.

# %%
import here  # noqa: F401  The repository's folder becomes the working directory.
import matplotlib.pyplot as plt

from experiments import training
from experiments.methods import areal
from rl_tpu.figures import drawing

# %% [markdown]
# An arm is a name and the fields that it sets. **This is the line to change**,
# for example to `{"learner.minibatches": 1}` or `{"learner.learning_rate":
# 2e-4}`.

# %%
ARMS = {
  "group baseline": {"algorithm.baseline": "group"},
  "batch baseline": {"algorithm.baseline": "batch"},
}
SEEDS, LAG = (0, 1, 2), 2

# %%
rows = []
for arm, fields in ARMS.items():
  for seed in SEEDS:
    config = areal.get_config(f"lockstep({LAG})")
    config.seed, config.batches, config.evaluation.every = seed, 20, 0
    config.update_from_flattened_dict(fields)
    found = training.rows_of(config, ("reward", "heldout_accuracy"), every=2)
    rows += [{"arm": arm, "seed": seed} | row for row in found]

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
final = {}
for place, arm in enumerate(ARMS):
  own = drawing.where(rows, arm=arm)
  drawing.curve(left, own, "batch", "reward", label=arm)
  last = drawing.where(own, batch=max(row["batch"] for row in own))
  final[arm] = drawing.values(last, "heldout_accuracy")
  mean, half = drawing.interval(final[arm])
  right.errorbar(mean, place, xerr=half, fmt="o", capsize=3)
  right.plot(final[arm], [place + 0.15] * len(final[arm]), "k.", markersize=4)
left.set(xlabel="batch", ylabel="reward of training", ylim=(0, 1))
left.legend()
right.set_yticks(range(len(ARMS)), ARMS)
right.set(xlabel="held-out accuracy, 95% interval", ylim=(-0.5, 1.5))
plt.show()

# %% [markdown]
# Pairs share a seed, and so their prompts and first weights; the interval is
# that of the differences. If it holds 0, these seeds do not tell the arms
# apart: say so, or run more.

# %%
first, second = ARMS
mean, half = drawing.difference(final[first], final[second])
print(f"{first}: {drawing.said(final[first], 3)}")
print(f"{second}: {drawing.said(final[second], 3)}")
print(f"difference {mean:+.3f} ± {half:.3f}:", end=" ")
print("told apart" if abs(mean) > half else "not told apart")

# %% [markdown]
# Next: [05](05_your_method.ipynb), a method of your own.
