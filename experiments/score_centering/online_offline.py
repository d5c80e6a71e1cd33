"""Does the same loss hold online that holds offline?

  python -m rl_tpu figures score_centering/online_offline

Plain policy gradient on what the current weights sample (online) or on what the
first weights sampled for all batches (offline), with rewards of 1 and 0, of 1
and -1, or less the mean of the group, as in the paper: the quickstart's task,
60 batches of 128 trajectories, three seeds. Offline the sampler never learns,
so that what is drawn is the accuracy of the learner on 64 held-out words. The
rules were written before the sweep.
"""

from collections.abc import Sequence

import numpy as np

from experiments import training
from experiments.score_centering import methods, settings
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing

FORMS = {
  "+1/0": ({}, "none"),
  "+1/-1": (settings.ONE_OR_MINUS_ONE, "none"),
  "group mean": (settings.ONE_OR_MINUS_ONE, "group_mean"),
}
"""Shaping of the rewards and the baseline."""
SAMPLERS = {"online": 1, "offline": 10_001}
"""Steps that the sampler keeps its weights."""
NOISE = 0.001
"""The paper's, of the sampler's weights."""
RATE = 1e-3
"""Of Adam: high enough that a run can fail within its 60 batches."""
COLUMNS = ("heldout_accuracy", "entropy", "grad_norm")
SIZE = (7.5, 3.2)


def cells(scale: str) -> list[Cell]:
  """Samplers by forms by seeds."""
  seeds = (0,) if scale == "smoke" else (0, 1, 2)
  return [
    {"sampler": sampler, "form": form, "seed": seed}
    for sampler in SAMPLERS
    for form in FORMS
    for seed in seeds
  ]


def measure(cell: Cell, scale: str) -> list[Row]:
  """Means over the batches since the last evaluation."""
  seed = int(cell["seed"])
  if scale == "paper":
    config = settings.paper("qwen3-1.7b", 600, seed)
    config.evaluation.every = 20
  else:
    config = settings.small(seed, scale)
    config.evaluation.every = 2 if scale == "smoke" else 10
    config.learner.learning_rate = RATE
  shaping, baseline = FORMS[str(cell["form"])]
  config.shaping.bias = shaping.get("bias", 0.0)
  config.shaping.scale = shaping.get("scale", 1.0)
  methods.set_method(config, "PG", baseline=baseline)
  period = SAMPLERS[str(cell["sampler"])]
  settings.differ(config, {"weight_noise": NOISE, "refresh_period": period})
  return training.rows_of(config, COLUMNS, config.evaluation.every)


def _final(rows: Sequence[Row], sampler: str) -> dict[str, list[float]]:
  """Held-out accuracy at the end by form, in order of seeds."""
  last = max(row["batch"] for row in rows if "heldout_accuracy" in row)
  own = drawing.where(rows, sampler=sampler, batch=last)
  return {
    form: drawing.values(own, "heldout_accuracy", form=form) for form in FORMS
  }


def _ranked(rows: Sequence[Row], sampler: str, pairs) -> Verdict:
  """Whether each first form of the pairs ends above the second."""
  final = _final(rows, sampler)
  seen = ", ".join(f"{form} {drawing.said(v)}" for form, v in final.items())
  found = [drawing.difference(final[a], final[b]) for a, b in pairs]
  if all(mean > np.nan_to_num(half) for mean, half in found):
    return Verdict(outcome="passed", seen=seen)
  right = all(mean > 0 for mean, _ in found)
  return Verdict(outcome="weaker" if right else "not_seen", seen=seen)


ARTEFACTS = {
  "Fig. 2: offline": Claim(
    shows="only +1/0 is stable; where rewards are negative, logp of what was "
    "wrong runs to minus infinity and training collapses",
    rule="held-out accuracy at the end: +1/0 above +1/-1 and the group's mean, "
    "by more than the interval of the difference",
    judge=lambda rows: _ranked(
      rows, "offline", [("+1/0", "+1/-1"), ("+1/0", "group mean")]
    ),
  ),
  "Fig. 2: online": Claim(
    shows="the order is reversed: +1/0 is the least stable, the group's mean "
    "the most",
    rule="held-out accuracy at the end: the group's mean above +1/-1, and that "
    "above +1/0, by more than the interval of the difference",
    judge=lambda rows: _ranked(
      rows, "online", [("group mean", "+1/-1"), ("+1/-1", "+1/0")]
    ),
  ),
}


def draw(rows: Sequence[Row], figure) -> None:
  """Accuracy by batch, online and offline."""
  panels = figure.subplots(1, 2, sharey=True)
  rows = [row for row in rows if "heldout_accuracy" in row]
  for axes, sampler in zip(panels, SAMPLERS, strict=True):
    for form, style in zip(FORMS, ("-", "--", ":"), strict=True):
      own = drawing.where(rows, sampler=sampler, form=form)
      drawing.curve(
        axes, own, "batch", "heldout_accuracy", label=form, ls=style
      )
    axes.set_title(sampler, fontsize=9)
    axes.set(xlabel="batch", ylim=(0, 1))
  panels[0].set_ylabel("held-out accuracy")
  panels[0].legend(title="reward", fontsize=7)
