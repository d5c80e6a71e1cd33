"""Accuracy on held-out questions, from the same generator that training uses.

Every question is asked twice: drawn at the training temperature (the policy as
it is trained) and with the most likely tokens (what it knows best). An episode
that fails stays in the denominator and is counted. The questions and the keys
they are sampled with are the same at every evaluation.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from rl_tpu import attempts, metrics
from rl_tpu.envs import Agent, Environment, Limits
from rl_tpu.episode import Generator
from rl_tpu.failures import Failures
from rl_tpu.types import Prompt, Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """When and on how much to evaluate."""

  every: int = 10
  """Batches between evaluations during training, >= 0; 0: only before and
  after."""
  problems: int = 200
  """Held-out questions asked each time, >= 1."""
  frozen: bool = False
  """Whether an evaluation beside asynchronous training keeps to the version
  that it began with: a second engine, with weights and cache of its own on the
  generator's devices, answers it. Otherwise it shares the generator, and newer
  weights may reach it under way."""

  def __post_init__(self):
    for name, least in (("every", 0), ("problems", 1)):
      if getattr(self, name) < least:
        raise ValueError(
          f"evaluation.{name} is {getattr(self, name)}; it must be >= {least}"
        )


async def evaluate(
  generator: Generator,
  make_environment: Callable[[Prompt], Environment | Agent],
  prompts: Sequence[Prompt],
  *,
  sampling: Sampling,
  seed: int,
  max_turns: int,
  max_trajectory_tokens: int,
  limits: Limits | None = None,
  failures: Failures | None = None,
) -> dict[str, float]:
  """Attempts every prompt, sampled and greedy, and scores the answers.

  `failures` is told of episodes that raised.

  Returns:
    heldout_accuracy: mean reward at `sampling.temperature`.
    heldout_greedy: mean reward of the most likely tokens.
    heldout_failed: episodes that raised; they count as 0 above.
    heldout_env_NAME: means of what the environments of the sampled episodes
      counted.
  """
  greedy = dataclasses.replace(sampling, temperature=0.0)

  async def mean(settings: Sampling) -> tuple[float, int, dict[str, float]]:
    made = await attempts.attempt(
      generator,
      make_environment,
      prompts,
      sampling=settings,
      seed=seed,
      max_turns=max_turns,
      max_trajectory_tokens=max_trajectory_tokens,
      limits=limits,
      failures=failures,
    )
    good = [one for one in made if one.trajectories]
    counted = metrics.describe_environments(
      [trajectory for one in good for trajectory in one.trajectories]
    )
    total = sum(one.reward for one in made)
    return total / len(made), len(made) - len(good), counted

  sampled, most_likely = await asyncio.gather(mean(sampling), mean(greedy))
  accuracy, failed, counted = sampled
  accuracy_greedy, failed_greedy, _ = most_likely
  return {f"heldout_{name}": value for name, value in counted.items()} | {
    "heldout_accuracy": accuracy,
    "heldout_greedy": accuracy_greedy,
    "heldout_failed": float(failed + failed_greedy),
  }
