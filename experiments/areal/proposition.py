r"""Is an answer of several weights an ordinary sample of one policy?

  python -m rl_tpu figures areal/proposition

Proposition 1: if tokens [t_j, t_{j+1}) are sampled by weights theta_j, there is
one behavior policy, pi(. | s) = pi_{theta_j}(. | s) for states s of those
lengths, of which the whole answer is a sample; so the log-probabilities that
were recorded are all that an importance weight needs.

`toy`: all answers of four tokens from a vocabulary of five, three random tables
of logits taking turns; sums over all answers, so that nothing is estimated.

    mass      = sum_y exp(sum_t recorded_t)                      (1: a policy)
    recorded  = sum_y behavior(y) prod_t target / recorded f(y) - E_target[f]
    rescored  = the same with behavior scored again by the newest weights

`engine`: the generator itself, new weights in the middle of its answers, which
are interrupted and go on; the largest gap between the recorded log-probability
of a token and that of the policy so constructed, by a forward pass over the
whole answer, and the mean gap to the newest weights.
"""

import asyncio
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rl_tpu import ops, sharding
from rl_tpu.figures import Cell, Claim, Row, Verdict, drawing
from rl_tpu.generation import driver as drivers
from rl_tpu.generation import engine as engines
from rl_tpu.models import transformer
from rl_tpu.types import Completion, Request, Sampling

VOCABULARY, LENGTH, SWITCHES = 5, 4, (1, 3)
"""Of the toy; the tokens before which its weights change."""
CONTEXT, PROMPT, ANSWERS = 48, 4, 8
"""Of the engine: tokens, tokens, and answers beside each other."""
TURNS = (4, 8)
"""Dispatches of two tokens after which new weights come."""
SIZE = (7.0, 2.8)


def cells(scale: str) -> list[Cell]:
  """Both checks by seeds."""
  seeds = (0,) if scale == "smoke" else (0, 1, 2)
  return [
    {"check": check, "seed": seed}
    for check in ("toy", "engine")
    for seed in seeds
  ]


def measure(cell: Cell, scale: str) -> list[Row]:
  """One of the checks."""
  del scale
  return [toy(cell["seed"]) if cell["check"] == "toy" else served(cell["seed"])]


def toy(seed: int) -> Row:
  """Sums over all answers, in float64."""
  rng = np.random.default_rng(seed)
  answers = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
  tables = [_table(rng) for _ in range(len(SWITCHES) + 1)]
  target, worth = _table(rng), rng.normal(size=len(answers))

  def logp(table, answer):
    return np.array([table[answer[:t]][answer[t]] for t in range(LENGTH)])

  whole = np.array([logp(target, y).sum() for y in answers])
  newest = np.array([logp(tables[-1], y).sum() for y in answers])
  acting = [
    tables[np.searchsorted(SWITCHES, t, "right")] for t in range(LENGTH)
  ]
  recorded = np.array(
    [sum(acting[t][y[:t]][y[t]] for t in range(LENGTH)) for y in answers]
  )
  sampled, wanted = np.exp(recorded), np.exp(whole) @ worth
  return {
    "mass_error": abs(float(sampled.sum()) - 1),
    "recorded_error": abs(
      float(sampled @ (np.exp(whole - recorded) * worth) - wanted)
    ),
    "rescored_error": abs(
      float(sampled @ (np.exp(whole - newest) * worth) - wanted)
    ),
  }


def _table(rng: np.random.Generator) -> dict[tuple[int, ...], np.ndarray]:
  """Random log-probabilities after every beginning of an answer."""
  table = {}
  for length in range(LENGTH):
    for beginning in itertools.product(range(VOCABULARY), repeat=length):
      logits = rng.normal(0.0, 1.0, VOCABULARY)
      table[beginning] = logits - np.log(np.exp(logits).sum())
  return table


def served(seed: int) -> Row:
  """Answers of the generator, sampled by three weights one after another."""
  policy = transformer.Policy(transformer.sized("tiny"))
  init = jax.jit(policy.init)
  weights = [init(jax.random.key(100 * seed + v)) for v in range(3)]
  config = engines.Config(
    slots=ANSWERS,
    context_length=CONTEXT,
    prefill_buckets=(8, CONTEXT),
    prefill_batches=(ANSWERS,),
    steps_per_dispatch=2,
  )
  mesh = sharding.make_mesh(sharding.MeshShape(), jax.devices()[:1])
  engine = engines.PolicyEngine(policy, mesh, config)
  driver = drivers.GenerationDriver(engine)
  rng = np.random.default_rng(seed)
  prompts = rng.integers(
    0, policy.config.vocab_size, (ANSWERS, PROMPT), np.int32
  )
  answers = asyncio.run(_answer(driver, weights, prompts))
  recorded = np.stack([answer.logp for answer in answers])
  version = np.stack([answer.version for answer in answers])
  tokens = np.stack([answer.tokens for answer in answers])
  whole = np.concatenate([prompts, tokens], axis=1)
  score = jax.jit(functools.partial(_scored, policy))
  scored = np.stack([score(w, whole)[:, PROMPT:] for w in weights])
  own = np.take_along_axis(scored, version[None], axis=0)[0]
  return {
    "versions": min(len(set(row)) for row in version.tolist()),
    "constructed_gap": float(np.abs(recorded - own).max()),
    "newest_gap": float(np.abs(recorded - scored[-1]).mean()),
  }


async def _answer(
  driver: drivers.GenerationDriver, weights: Sequence, prompts: np.ndarray
) -> list[Completion]:
  """Lets all prompts be answered while weights arrive."""
  driver.update(driver.engine.load_params(weights[0], 0))
  length = CONTEXT - PROMPT
  tasks = [
    asyncio.ensure_future(
      driver.generate(
        Request(
          prompt_index=index,
          member=0,
          tokens=prompt,
          sampling=Sampling(max_tokens=length),
        )
      )
    )
    for index, prompt in enumerate(prompts)
  ]
  turn = 0
  while not all(task.done() for task in tasks):
    await asyncio.sleep(0)
    if turn in TURNS:
      version = driver.version + 1
      driver.update(driver.engine.load_params(weights[version], version))
    driver.step()
    turn += 1
  return list(await asyncio.gather(*tasks))


def _scored(policy: transformer.Policy, weights, tokens):
  """Log-probability of every token under some weights, [N, T]."""
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  hidden = policy.hidden(weights, tokens, positions, jnp.zeros_like(tokens))
  return ops.token_logp(policy.logits(weights, hidden), tokens, 1.0)


def _ordinary(rows: Sequence[Row]) -> Verdict:
  """Recorded log-probabilities are enough, scoring again is not."""
  toys, real = (drawing.where(rows, check=c) for c in ("toy", "engine"))
  exact = max(
    max(drawing.values(toys, name)) for name in ("mass_error", "recorded_error")
  )
  biased = min(drawing.values(toys, "rescored_error"))
  gap = max(drawing.values(real, "constructed_gap"))
  newest = min(drawing.values(real, "newest_gap"))
  mixed = min(drawing.values(real, "versions"))
  seen = (
    f"recorded: wrong by at most {exact:.0e}, scored again by {biased:.2f} or "
    f"more; engine, {mixed:.0f} weights an answer: {gap:.0e} from the policy "
    f"so constructed, {newest:.2f} from the newest"
  )
  passed = exact < 1e-12 and biased > 1e-3 and gap < 1e-4 and mixed >= 2
  return Verdict(
    outcome="passed" if passed and newest > 0.01 else "not_seen", seen=seen
  )


ARTEFACTS = {
  "Proposition 1": Claim(
    shows="proved: an answer sampled by several weights is a sample of one "
    "behavior policy",
    rule="over all answers of a toy, mass 1 and the importance-weighted mean "
    "exact to 1e-12 by the recorded log-probabilities, off by over 1e-3 by "
    "those of the newest weights; the engine's recorded ones within 1e-4 of "
    "the constructed policy's, each answer by two weights or more",
    judge=_ordinary,
  )
}


def draw(rows: Sequence[Row], figure) -> None:
  """How wrong each way to score the behavior policy is."""
  panels = figure.subplots(1, 2)
  shown = {
    "toy": {
      "recorded": "recorded_error",
      "newest weights": "rescored_error",
    },
    "engine": {
      "policy of Prop. 1": "constructed_gap",
      "newest weights": "newest_gap",
    },
  }
  for axes, (check, columns) in zip(panels, shown.items(), strict=True):
    for place, (name, column) in enumerate(columns.items()):
      found = drawing.values(rows, column, check=check)
      axes.plot([place] * len(found), np.maximum(found, 1e-17), "o", label=name)
    axes.set_xticks(range(len(columns)), list(columns))
    axes.set(yscale="log", xlim=(-0.5, 1.5), xlabel="behavior scored by")
  panels[0].set_ylabel("error of the weighted mean")
  panels[1].set_ylabel("gap to the recorded, nats")
