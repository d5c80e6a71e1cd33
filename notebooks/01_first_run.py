# %% [markdown]
# # 01 The first run
#
# A config in, a learning curve out: a model of 0.13M parameters learns to
# spell words backward by asynchronous RL. A minute on two cores, less the
# second time.

# %%
import tempfile

import here  # noqa: F401  The repository's folder becomes the working directory.
import matplotlib.pyplot as plt

from experiments import quickstart, training
from rl_tpu import metrics

# %% [markdown]
# ## The config
#
# `get_config` returns all that a run is. Every field can be set here, or as
# `--config.FIELD=VALUE` on the command line; an unknown name or a bad value is
# refused with the names and values that are allowed.

# %%
config = quickstart.get_config("async")
config.batches = 30
config.max_staleness = 2
print(config.algorithm)

# %% [markdown]
# ## The run
#
# What `python -m rl_tpu train --config=experiments/quickstart.py` does. A
# generator keeps sampling while the learner updates, at most two versions
# behind.

# %%
directory = tempfile.mkdtemp(prefix="first-run-")
summary = training.train_in(config, directory)
for name in ("heldout_before", "heldout_after", "max_staleness_consumed"):
  print(name, summary[name])

# %% [markdown]
# ## What it left
#
# `metrics.csv`, a row a batch. The reward rises, staleness stays within its
# limit.

# %%
rows = metrics.read_csv(f"{directory}/metrics.csv")
trained = [row for row in rows if "reward" in row]
batches = [row["batch"] for row in trained]

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8))
left.plot(batches, [row["reward"] for row in trained])
left.set(xlabel="batch", ylabel="reward of training", ylim=(0, 1))
right.plot(batches, [row["staleness_mean"] for row in trained], label="mean")
right.plot(batches, [row["staleness_max"] for row in trained], label="largest")
right.set(xlabel="batch", ylabel="staleness, versions", ylim=(-0.1, 3))
right.legend()
plt.show()

# %% [markdown]
# ## One trajectory, token by token
#
# `samples.jsonl` has some of every batch. An action token carries the version
# that sampled it and the log-probability it was sampled with. Where new
# weights came while a sequence was running, its tokens are of two versions.

# %%
sampled = metrics.read_jsonl(f"{directory}/samples.jsonl")
trajectories = [t for entry in sampled for t in entry["trajectories"]]
mixed = [
  t for t in trajectories if len({v for v in t["version"] if v >= 0}) > 1
]
shown = (mixed or trajectories)[-1]
print("reward", shown["reward"])
print(f"{'token':8}{'version':>8}{'logp':>9}{'advantage':>11}")
for text, action, version, logp, advantage in zip(
  shown["text"],
  shown["action"],
  shown["version"],
  shown["behavior_logp"],
  shown["advantage"],
  strict=True,
):
  if action:
    print(f"{text!r:8}{version:8}{logp:9.3f}{advantage:11.3f}")

# %% [markdown]
# Next: [02](02_losses.ipynb), what the losses do.
