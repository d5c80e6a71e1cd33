# %% [markdown]
# # 02 The losses by picture
#
# What does each clip do to a token, and what does centering do to a policy? No
# sampling and no model: the project's own losses, differentiated on a
# vocabulary of three to eight tokens. Seconds.

# %%
import here  # noqa: F401  The repository's folder becomes the working directory.
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from experiments import exact
from rl_tpu import algorithms

# %% [markdown]
# ## The push on a token, by how far the policy has moved
#
# The policy has moved by `target / behavior` since a token was sampled. How
# hard does a loss still push it? Shown is minus the loss's derivative by the
# token's log-probability, for a token that was better (A = +1) or worse (A =
# -1) than expected. A push of 0: the token is out of the trust region.
#
# - **PPO** centred on the behavior policy stops only the moves that go on
#   outward.
# - **SAO** stops on both sides whatever the sign, in (0.7, 6), and keeps the
#   ratio as a weight within.
# - **TIS** never stops, but caps the weight at 2. **MIS** stops outside of
#   [0.5, 5].

# %%
METHODS = {
  "PPO": ("ppo", {}),
  "SAO": ("sao", {"band": "math"}),
  "TIS": ("score_centering", {"correction": "truncate", "centering": False}),
  "MIS": ("score_centering", {"correction": "mask", "centering": False}),
}
ratios = jnp.linspace(0.02, 7.0, 700)


def push(name, fields, advantage, moved=1.0):
  module = algorithms.get(name)
  config = module.Config(**fields)
  return exact.push(module, config, ratios, advantage, moved)


figure, panels = plt.subplots(1, 2, figsize=(9, 3), sharey=True)
for axes, advantage in zip(panels, (1.0, -1.0), strict=True):
  for name, method in METHODS.items():
    axes.plot(ratios, push(*method, advantage), label=name)
  axes.axvline(1, color="#999999", linewidth=0.8, linestyle=":")
  axes.set(
    title=f"A = {advantage:+.0f}", xlabel="target / behavior", ylim=(-6.2, 6.2)
  )
panels[0].set_ylabel("push on the log-probability")
panels[0].legend()
plt.show()

# %% [markdown]
# ## Decoupled PPO: the same clip, around another policy
#
# AReaL clips around the *proximal* policy, the weights before this batch's
# update, and weights a token by proximal over behavior. A token whose sampler
# was stale is then clipped for what *this* update did to it, not for its age.
# Here the proximal policy has already moved from the behavior policy by a
# factor of 1.5.

# %%
figure, axes = plt.subplots(figsize=(5, 3))
axes.plot(ratios, push("ppo", {}, 1.0), label="PPO, around behavior")
axes.plot(
  ratios,
  push("decoupled_ppo", {}, 1.0, 1.5),
  label="decoupled, around proximal",
)
axes.axvline(1.5, color="#999999", linewidth=0.8, linestyle=":")
axes.annotate("proximal", (1.5, 0.1), (1.55, 0.1), fontsize=8)
axes.set(title="A = +1", xlabel="target / behavior", ylabel="push", xlim=(0, 3))
axes.legend(loc="upper left")
plt.show()

# %% [markdown]
# ## Score Centering: where a policy drifts that is rewarded for nothing
#
# Three tokens, every one earns the same reward, so nothing should move. The
# sampler differs a little from the policy (a rounded cache, say). Arrows are
# the expected step of the policy, over all policies: the plain gradient pulls
# each policy towards or away from its sampler, although there is nothing to
# learn. The centered one stays.

# %%
offset = jnp.asarray([0.6, -0.2, -0.4])
corners = np.asarray([[0, 0], [1, 0], [0.5, np.sqrt(3) / 2]])
grid = np.asarray(
  [(a, b, 12 - a - b) for a in range(1, 11) for b in range(1, 12 - a)]
)
policies = jnp.asarray(grid / 12)


def steps(centering, reward):
  """How expected steps of 0.6 move the probabilities of every policy."""
  module = algorithms.get("score_centering")
  config = module.Config(correction="none", centering=centering, top_k=0)
  logits = jnp.log(policies)
  behavior = logits + offset
  slope = exact.gradient(
    module, config, logits, behavior, reward * jax.nn.softmax(behavior)
  )
  return jax.nn.softmax(logits - 0.6 * slope) - policies


figure, panels = plt.subplots(1, 3, figsize=(9, 3))
shown = (
  ("plain, reward +1", False, 1.0),
  ("plain, reward -1", False, -1.0),
  ("centered, reward +1 or -1", True, 1.0),
)
for axes, (title, centering, reward) in zip(panels, shown, strict=True):
  places, moves = policies @ corners, steps(centering, reward) @ corners
  axes.quiver(
    *places.T, *moves.T, angles="xy", scale_units="xy", scale=0.7, width=0.006
  )
  axes.plot(*corners[[0, 1, 2, 0]].T, color="#999999", linewidth=0.8)
  axes.plot(*places.T, ".", markersize=2, color="#d55e00")
  for corner, name in zip(corners, "ABC", strict=True):
    axes.annotate(name, corner, fontsize=9)
  axes.set(title=title, aspect="equal")
  axes.axis("off")
plt.show()
print("largest centered step:", float(jnp.abs(steps(True, 1.0)).max()))

# %% [markdown]
# Change `offset`, or a method's fields above, and run again. Next:
# [03](03_staleness.ipynb), staleness as a dial.
