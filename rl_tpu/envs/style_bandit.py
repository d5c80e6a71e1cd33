"""The style bandit of SAO's figure 5: a preference that switches on the way.

SAO (arXiv:2607.07508, figure 5) trains a policy to write in one
of three styles, of which a judge rewards one; the preferred style goes from
cute to chuunibyou to classical, and the policy has to follow. Reward = quality
times style, each 0 or 1. The candidates are academic, cute and chuunibyou, and
from the third phase on classical in place of academic, so that the prompt
changes too.

The paper's judge is a language model. Here a style is a way to write the
prompt's word that a rule can see, in its first letter (`A C U L`) and in how
the word follows: academic as it is, cute doubled, chuunibyou with the last
letter first, classical backward. Quality is that the word is written as the
letter says; style is that the letter is the preferred one.

    AUC:dog=        Cdogdog       quality 1, style 1 in phase 1

The phase is that of the prompt's index, so it depends on nothing but how far
the run is: `phase_prompts` prompts each, the last one for ever. A held-out
prompt has the phase that its number says, one after another; `env_style_NAME`
is the share of good texts in each style, which is what the figure shows.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from rl_tpu.envs import Reply, Split, TextEnvironment, encode_action, of_split
from rl_tpu.models.tokenizer import Tokenizer, encode_prompt
from rl_tpu.ops import check_fields
from rl_tpu.types import Prompt

STYLES: Mapping[str, tuple[str, Callable[[str], str]]] = {
  "academic": ("A", lambda word: word),
  "cute": ("C", lambda word: word + word),
  "chuunibyou": ("U", lambda word: word[-1] + word[:-1]),
  "classical": ("L", lambda word: word[::-1]),
}
"""The first letter of each style, and how it writes a word."""
PREFERRED = ("cute", "chuunibyou", "classical")
_FIRST = ("academic", "cute", "chuunibyou")
CANDIDATES = (_FIRST, _FIRST, ("classical", "cute", "chuunibyou"))
_HELDOUT_INDEX = 2**30
"""Where `data.heldout` begins to count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The words, and how long a preference lasts."""

  phase_prompts: int = 19_200
  """Prompts of one phase, >= 1 (the paper's figure switches after some 150
  batches of 128)."""
  letters: int = 3
  """Of a word, in [2, 8]."""
  size: int = 8_000
  """Words drawn, >= 2; repeated ones are then used once."""
  seed: int = 0
  """Of the words, >= 0."""
  heldout_fraction: float = 0.1
  """Share of the words kept for evaluation, in (0, 1)."""

  def __post_init__(self):
    check_fields(
      self,
      ("phase_prompts", self.phase_prompts >= 1, ">= 1"),
      ("letters", 2 <= self.letters <= 8, "in [2, 8]"),
      ("size", self.size >= 2, ">= 2"),
      ("seed", self.seed >= 0, ">= 0"),
      ("heldout_fraction", 0 < self.heldout_fraction < 1, "in (0, 1)"),
    )


class Task:
  """The words; see `rl_tpu.envs.Task`."""

  name = "style_bandit"
  fields: Mapping[str, type] = {"word": str}

  def __init__(self, config: Config, tokenizer: Tokenizer):
    self.config = config
    self.tokenizer = tokenizer

  @property
  def fingerprint(self) -> str:
    """The config."""
    return json.dumps(dataclasses.asdict(self.config), sort_keys=True)

  def records(self, split: Split) -> Iterator[Mapping[str, Any]]:
    """Yields each word of the split once."""
    return of_split(self._rows(), split, self.config.heldout_fraction)

  def _rows(self) -> Iterator[tuple[str, dict[str, str]]]:
    rng = np.random.default_rng(self.config.seed)
    letters = list("abcdefghijklmnopqrstuvwxyz")
    for _ in range(self.config.size):
      word = "".join(rng.choice(letters, self.config.letters, replace=False))
      yield word, {"word": word}

  def phase(self, index: int) -> int:
    """Returns the phase of a prompt's index, from 0."""
    last = len(PREFERRED) - 1
    if index >= _HELDOUT_INDEX:
      return (index - _HELDOUT_INDEX) % len(PREFERRED)
    return min(index // self.config.phase_prompts, last)

  def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
    """Renders a word, with the candidates of its phase in an order drawn."""
    phase = self.phase(index)
    order = np.random.default_rng([self.config.seed, index]).permutation(3)
    letters = "".join(STYLES[CANDIDATES[phase][i]][0] for i in order)
    return Prompt(
      index=index,
      tokens=encode_prompt(self.tokenizer, f"{letters}:{row['word']}="),
      metadata={"word": row["word"], "phase": phase},
    )

  def environment(self, prompt: Prompt) -> "Environment":
    """Starts an attempt at a prompt which `prompt` made."""
    return Environment(self.tokenizer, prompt)

  def demonstration(
    self, row: Mapping[str, Any], rng: np.random.Generator, wrong: float = 0.0
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompt and a text in any candidate's style; none is preferred.

    A wrong one is written as another style would.
    """
    phase = int(rng.integers(len(PREFERRED)))
    index = phase * self.config.phase_prompts
    index += int(rng.integers(self.config.phase_prompts))
    style = CANDIDATES[phase][rng.integers(3)]
    letter, write = STYLES[style]
    if rng.random() < wrong:
      others = [name for name in STYLES if name != style]
      write = STYLES[others[rng.integers(len(others))]][1]
    text = letter + write(row["word"])
    return self.prompt(row, index).tokens, encode_action(self.tokenizer, text)


class Environment(TextEnvironment):
  """One word, one text."""

  async def answer(self, text: str) -> Reply:
    """Judges quality and style."""
    asked = self.prompt.metadata
    candidates = CANDIDATES[asked["phase"]]
    style = next(
      (
        name
        for name in candidates
        if text == STYLES[name][0] + STYLES[name][1](asked["word"])
      ),
      None,
    )
    reward = float(style == PREFERRED[asked["phase"]])
    return Reply(reward=reward, end=True, metrics=_written(style))

  def cut(self) -> Reply:
    """A text without an end has no quality."""
    return Reply(end=True, metrics=_written(None))


def _written(style: str | None) -> dict[str, float]:
  return {f"style_{name}": float(name == style) for name in STYLES}
