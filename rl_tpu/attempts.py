r"""Questions attempted several times, and what that says of a policy.

Each question is attempted n times, c of them right. Of any k attempts

    pass@k = 1 - C(n - c, k) / C(n, k)      is one right? (without bias)
    maj@k  = is what most of them answer right?

pass@k is that of Chen et al. 2021, arXiv:2107.03374, maj@k that of Wang et al.
2022, arXiv:2203.11171, as a mean over the n div k disjoint runs of k attempts;
a tie is worth the share of the tied answers that are right, and an attempt
without an answer has no vote. Both are means over the questions, and so is the
mean reward, whose interval is bootstrapped: questions drawn with replacement.

Every question counts once, and every attempt at it. One that fails (a crash, a
time-out, a question that does not fit) is wrong, and counted by its kind.
"""

import asyncio
import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rl_tpu import metrics
from rl_tpu.agents import Stage
from rl_tpu.envs import Agent, Environment, Limits, Split
from rl_tpu.episode import Generator
from rl_tpu.failures import Failures
from rl_tpu.models.tokenizer import Tokenizer
from rl_tpu.types import (
  Prompt,
  Sampling,
  Trajectory,
)

SEED = 0x5EED
"""Added to the run's seed: held-out draws share no key with training."""
_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What the command `evaluate` asks, and of whom."""

  checkpoint: str | None = None
  """A run's directory (its newest checkpoint), one version in it
  (RUN/checkpoints/40), or a folder in Hugging Face's format, which brings its
  own sizes and tokenizer; None: this config's run."""
  split: Split = "heldout"
  """Whose questions are asked."""
  problems: int | None = None
  """Its first so many, >= 1; None: all of them."""
  attempts: int = 1
  """At each question, >= 1."""
  ks: tuple[int, ...] = (1,)
  """Of pass@k and maj@k, each in [1, attempts]."""
  temperature: float | None = None
  """Of sampling, >= 0; 0: the most likely tokens; None: as in training."""
  right: float = 1.0
  """Least reward of an attempt that counts as right."""
  results: str | None = None
  """JSON-lines file with every attempt; None: evaluations/TASK-VERSION.jsonl
  in the run's directory."""

  def __post_init__(self):
    for name, good, allowed in (
      ("split", self.split in ("train", "heldout"), "'train' or 'heldout'"),
      (
        "problems",
        self.problems is None or self.problems >= 1,
        ">= 1 or None",
      ),
      ("attempts", self.attempts >= 1, ">= 1"),
      (
        "ks",
        all(1 <= k <= self.attempts for k in self.ks),
        f"each in [1, attempts = {self.attempts}]",
      ),
      (
        "temperature",
        self.temperature is None or self.temperature >= 0,
        ">= 0 or None",
      ),
    ):
      if not good:
        raise ValueError(
          f"evaluate.{name} is {getattr(self, name)!r}; it must be {allowed}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
  """One attempt at one question."""

  question: int
  """Its place among those asked."""
  member: int
  """Which attempt at it, 0..n-1."""
  prompt: Prompt
  trajectories: tuple[Trajectory, ...] = ()
  """One, or those of an agent's branches; none where it failed."""
  answer: str | None = None
  """What it came to, where the environment says so."""
  error: str | None = None
  """Why it failed."""
  kind: str | None = None
  """The kind of that error."""

  @property
  def reward(self) -> float:
    """Its outcome; 0 where it failed."""
    return self.trajectories[0].outcome if self.trajectories else 0.0


async def attempt(
  generator: Generator,
  make_environment: Callable[[Prompt], Environment | Agent],
  prompts: Sequence[Prompt],
  *,
  sampling: Sampling,
  seed: int,
  max_turns: int,
  max_trajectory_tokens: int,
  limits: Limits | None = None,
  attempts: int = 1,
  running: int | None = None,
  ended: Callable[[Attempt], None] = lambda attempt: None,
  failures: Failures | None = None,
) -> list[Attempt]:
  """Attempts every prompt `attempts` times; each exactly once, in order.

  Args:
    generator: samples the actions.
    make_environment: one for each attempt.
    prompts: the questions.
    sampling: of each turn.
    seed: the run's.
    max_turns: of each attempt.
    max_trajectory_tokens: of each attempt, prompt included.
    limits: what is taken from environments.
    attempts: at each prompt, >= 1.
    running: most attempts under way at once; None: all.
    ended: told of each one as it ends.
    failures: told of those that failed; None: a new one, closed at the end.
  """
  places = asyncio.Semaphore(running or len(prompts) * attempts)
  stage = Stage()
  told = Failures() if failures is None else failures

  async def one(question: int, member: int) -> Attempt:
    prompt = prompts[question]
    said: dict[str, Any] = {}
    async with places:
      try:
        played = await stage.play(
          generator,
          make_environment(prompt),
          prompt,
          member=member,
          sampling=sampling,
          seed=seed + SEED,
          max_turns=max_turns,
          max_trajectory_tokens=max_trajectory_tokens,
          limits=limits,
        )
        said["trajectories"] = played.trajectories
        said["answer"] = played.answer
      except Exception as error:  # Counted, and wrong.
        said["error"] = str(error) or repr(error)
        said["kind"] = getattr(error, "kind", type(error).__name__)
        told.add(f"question {question} failed ({said['kind']})", error)
    done = Attempt(question=question, member=member, prompt=prompt, **said)
    ended(done)
    return done

  made = await asyncio.gather(
    *(one(q, m) for q in range(len(prompts)) for m in range(attempts))
  )
  if failures is None:
    told.close()
  return made


def pass_at_k(attempts: int, right: int, k: int) -> float:
  """Probability that of k of the attempts, drawn at random, one is right.

  Raises:
    ValueError: there are not k attempts, nor as many right ones.
  """
  if not 1 <= k <= attempts or not 0 <= right <= attempts:
    raise ValueError(
      f"pass@{k} of {right} right ones in {attempts} attempts; k must be in "
      "[1, attempts] and right in [0, attempts]"
    )
  return 1.0 - math.comb(attempts - right, k) / math.comb(attempts, k)


def majority_at_k(
  answers: Sequence[str | None], right: Sequence[bool], k: int
) -> float:
  """Share of runs of k attempts whose most frequent answer is right.

  Equal answers must be equally right. Attempts that fill no run are left out.
  """
  starts = range(0, len(answers) - k + 1, k)
  return sum(_vote(answers[i : i + k], right[i : i + k]) for i in starts) / len(
    starts
  )


def _vote(answers: Sequence[str | None], right: Sequence[bool]) -> float:
  votes = collections.Counter(a for a in answers if a is not None)
  if not votes:
    return 0.0
  most = max(votes.values())
  tied = [answer for answer, count in votes.items() if count == most]
  verdicts = dict(zip(answers, right, strict=True))
  return sum(verdicts[answer] for answer in tied) / len(tied)


def bootstrap(values: Iterable[float], seed: int = 0) -> tuple[float, float]:
  """The 95% interval of a mean: percentiles of means of redrawn values."""
  array = np.asarray(list(values), float)
  rng = np.random.default_rng(seed)
  means = [
    array[rng.integers(0, len(array), len(array))].mean()
    for _ in range(_RESAMPLES)
  ]
  low, high = np.percentile(means, [2.5, 97.5])
  return float(low), float(high)


def figures(attempts: Sequence[Attempt], config: Config) -> dict[str, Any]:
  """What the attempts at all questions, each as often, say.

  Returns:
    mean: of the reward; mean_low, mean_high: its interval.
    pass@K, and maj@K where environments say what was answered.
    questions, attempts: how many of each; failed, and failed_KIND.
    truncated: share of attempts that a budget ended; action_tokens: a mean;
    env_NAME: means of what environments counted.
  """
  rows: dict[int, list[Attempt]] = {}
  for one in attempts:
    rows.setdefault(one.question, []).append(one)
  right = {
    q: [a.reward >= config.right for a in row] for q, row in rows.items()
  }
  means = [float(np.mean([a.reward for a in row])) for row in rows.values()]
  low, high = bootstrap(means)
  found: dict[str, Any] = {
    "mean": float(np.mean(means)),
    "mean_low": low,
    "mean_high": high,
  }
  answered = any(one.answer is not None for one in attempts)
  for k in config.ks:
    found[f"pass@{k}"] = float(
      np.mean([pass_at_k(len(r), sum(r), k) for r in right.values()])
    )
    if answered:
      votes = (
        majority_at_k([a.answer for a in row], right[q], k)
        for q, row in rows.items()
      )
      found[f"maj@{k}"] = float(np.mean(list(votes)))
  good = [trajectory for one in attempts for trajectory in one.trajectories]
  kinds = collections.Counter(a.kind for a in attempts if a.kind is not None)
  found |= {"questions": len(rows), "attempts": len(attempts)}
  found |= {"failed": kinds.total()}
  found |= {f"failed_{kind}": count for kind, count in sorted(kinds.items())}
  if good:
    cut = [trajectory.stop_reason == "length" for trajectory in good]
    lengths = [int(trajectory.action_mask.sum()) for trajectory in good]
    found["truncated"] = float(np.mean(cut))
    found["action_tokens"] = float(np.mean(lengths))
  return found | metrics.describe_environments(good)


def record(attempt: Attempt, tokenizer: Tokenizer) -> dict[str, Any]:
  """One line of the results: the question, what was said in turn, the verdict.

  A turn is a list of who spoke and the text; special ids have none. An agent's
  branches after the first have their turns in `branches`, the prompt included.
  """
  line: dict[str, Any] = {
    "question": attempt.question,
    "attempt": attempt.member,
    "reward": attempt.reward,
    "answer": attempt.answer,
    "error": attempt.error,
    "kind": attempt.kind,
    "prompt": tokenizer.decode(attempt.prompt.tokens),
    "turns": [],
  }
  if not attempt.trajectories:
    return line
  first, *others = attempt.trajectories
  (_, prompt), *turns = _turns(first, tokenizer)
  line |= {"prompt": prompt, "turns": turns}
  if others:
    line["branches"] = [_turns(other, tokenizer) for other in others]
  return line | {
    "stop_reason": first.stop_reason,
    "action_tokens": int(
      sum(t.action_mask.sum() for t in attempt.trajectories)
    ),
    "version": min(t.oldest_version for t in attempt.trajectories),
    "metrics": dict(first.metrics),
  }


def _turns(trajectory: Trajectory, tokenizer: Tokenizer) -> list[list[str]]:
  """Who spoke and what, in turn; the prompt first."""
  mask = trajectory.action_mask
  bounds = [0, *(np.flatnonzero(np.diff(mask)) + 1), len(mask)]
  return [
    [
      "policy" if mask[start] else "environment",
      tokenizer.decode(trajectory.tokens[start:end]),
    ]
    for start, end in itertools.pairwise(bounds)
  ]
