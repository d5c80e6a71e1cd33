"""Undisturbed answers, and what a plain forward pass says of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import soak_server
from rl_tpu import ops
from rl_tpu.models import transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
  """An answer that nothing disturbed (n tokens)."""

  service: str
  prompt: list[int]
  tokens: list[int]
  logp: list[float]
  versions: list[int]
  temperature: float
  stop: tuple[str, ...] = ()
  text: str | None = None


def padded(context: list[int]) -> np.ndarray:
  """One row as long as any sequence."""
  tokens = np.zeros((1, soak_server.ENGINE.context_length), np.int32)
  tokens[0, : len(context)] = context
  return tokens


@jax.jit
def forward(params, tokens, temperature):
  """Each token's logp, and the most likely token in its place."""
  policy: transformer.Policy = soak_server.POLICY
  positions = jnp.arange(tokens.shape[1])[None]
  hidden = policy.hidden(params, tokens, positions, jnp.zeros_like(tokens))
  logits = policy.logits(params, hidden)
  best = jnp.roll(logits.argmax(-1), 1, axis=1)
  return ops.token_logp(logits, tokens, temperature), best


def fault(sample: Sample, params: list[Any]) -> str | None:
  """What is wrong with an answer; None: it is what a forward pass says.

  Under `keep` an interrupted answer has keys of older weights, which a forward
  pass does not know; its tokens since the weights changed are left out.
  """
  context = [*sample.prompt, *sample.tokens]
  tokens = padded(context)
  versions = np.array(sample.versions)
  places = np.arange(len(sample.prompt), len(context))
  greedy = sample.temperature == 0.0
  for version in np.unique(versions):
    if sample.service == "keep" and version != versions[0]:
      continue
    logp, best = forward(
      params[version % len(params)],
      tokens,
      1.0 if greedy else sample.temperature,
    )
    of = versions == version
    if greedy:
      right = (tokens[0] == np.asarray(best)[0])[places[of]].all()
      right &= not np.any(sample.logp)
    else:
      told = np.array(sample.logp)[of]
      expected = np.asarray(logp)[0, places[of]]
      right = np.allclose(told, expected, atol=1e-4, rtol=0)
    if not right:
      return f"version {version} did not sample {sample}"
  if sample.service == "drain" and len(set(sample.versions)) > 1:
    return f"two versions of a service that drains sampled {sample}"
  return _check_text(sample)


def _check_text(sample: Sample) -> str | None:
  """Stop strings of one character, the text before the first of them."""
  if sample.text is None:
    return None
  whole = soak_server.TOKENIZER.decode(sample.tokens)
  places = [whole.index(stop) for stop in sample.stop if stop in whole]
  if sample.text != whole[: min(places, default=len(whole))]:
    return f"the text is not that of the tokens in {sample}"
  return None
