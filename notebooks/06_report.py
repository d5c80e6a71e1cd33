# %% [markdown]
# # 06 Reading a run: report and timeline
#
# Where did the time go, how stale was the data, is the run healthy? A minute
# on two cores.

# %%
import collections
import subprocess
import sys
import tempfile

import here  # noqa: F401  The repository's folder becomes the working directory.
import matplotlib.pyplot as plt

from experiments import quickstart, training
from rl_tpu import health, metrics
from rl_tpu.report import goodput, page

# %%
directory = tempfile.mkdtemp(prefix="report-")
config = quickstart.get_config("async")
config.batches = 24
training.train_in(config, directory)
report = [sys.executable, "-m", "rl_tpu", "report", directory]
print(subprocess.run(report, check=True, capture_output=True, text=True).stdout)

# %% [markdown]
# `report.html` is one page without network, with all that follows and a
# browser of trajectories; `trace.json` opens in ui.perfetto.dev. On the
# command line it is `python -m rl_tpu report RUN`, with a second run to set
# beside it, or `--serve=8080` while it goes on. The rest of this notebook
# reads the same files by hand.
#
# ## The timeline
#
# Generator and learner over three seconds of the run. Where the learner waits,
# it lacks trajectories; where weights arrive, running sequences are
# interrupted and go on.

# %%
bars = page.bars(directory)
middle = max(end for *_, end in bars) / 2
lanes = sorted({part for part, *_ in bars})
kinds = sorted({kind for _, kind, *_ in bars})
figure, axes = plt.subplots(figsize=(9, 2.2))
for index, kind in enumerate(kinds):
  for lane, part in enumerate(lanes):
    spans = [
      (start, end - start)
      for p, k, start, end in bars
      if (p, k) == (part, kind) and middle - 1.5 < start < middle + 1.5
    ]
    label = kind if lane == 0 else None
    axes.broken_barh(
      spans, (lane - 0.4, 0.8), color=f"C{index}", linewidth=0, label=label
    )
axes.set_yticks(range(len(lanes)), lanes)
axes.set(xlabel="seconds since the loop began")
axes.legend(
  ncols=len(kinds), fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1)
)
plt.show()

# %% [markdown]
# ## Goodput
#
# The learner's and the generator's seconds by what they did.

# %%
rows = page.rows(directory)
account = goodput.account(rows, bars, [])
for part, seconds in account["parts"].items():
  whole = sum(seconds.values())
  shares = (f"{kind} {s / whole:.0%}" for kind, s in seconds.items())
  print(f"{part}: {', '.join(shares)}")
print(f"goodput {account['goodput']:.0%}")

# %% [markdown]
# ## How stale the consumed tokens were

# %%
counts: collections.Counter = collections.Counter()
for entry in metrics.read_jsonl(f"{directory}/batches.jsonl"):
  counts.update({int(age): n for age, n in entry["staleness_tokens"].items()})
figure, axes = plt.subplots(figsize=(4, 2.4))
axes.bar(list(counts), [n / sum(counts.values()) for n in counts.values()])
axes.set(xlabel="staleness, versions", ylabel="share of tokens")
axes.set_xticks(sorted(counts))
plt.show()

# %% [markdown]
# ## Health
#
# Rules that a sound run keeps: mean weights near 1, few clipped tokens,
# staleness within its limit, no skipped update. Each warning names its metric.

# %%
found = health.warnings(rows, metrics.read_json(f"{directory}/config.json"))
for warning in found:
  print(warning)
print(f"{len(found)} warnings")
