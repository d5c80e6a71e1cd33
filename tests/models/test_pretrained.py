"""Imported models generate what they are known to generate."""

import asyncio
import json
import os
import pathlib

import jax
import numpy as np
import pytest

from rl_tpu import sharding
from rl_tpu.generation import driver as drivers
from rl_tpu.generation import engine as engines
from rl_tpu.models import huggingface, transformer
from rl_tpu.models.tokenizer import encode_chat, encode_prompt
from rl_tpu.types import Request, Sampling

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
SMOLLM2 = os.environ.get("RL_TPU_SMOLLM2")
"""A folder that golden/make_smollm2.py wrote."""


def greedy(policy, params, prompts, max_tokens, stop_ids=()):
  """The most likely tokens after each prompt, by the generator."""
  mesh = sharding.make_mesh(sharding.MeshShape(), jax.devices())
  longest = max(map(len, prompts))
  engine = engines.PolicyEngine(
    policy,
    mesh,
    engines.Config(
      slots=len(prompts),
      context_length=longest + max_tokens,
      prefill_buckets=(longest,),
      prefill_batches=(len(prompts),),
    ),
  )
  driver = drivers.GenerationDriver(engine, interruption="drain")
  driver.update(engine.load_params(params))
  sampling = Sampling(temperature=0.0, max_tokens=max_tokens, stop_ids=stop_ids)

  async def complete():
    requests = (
      Request(prompt_index=i, member=0, seed=0, tokens=ids, sampling=sampling)
      for i, ids in enumerate(prompts)
    )
    return await asyncio.gather(*map(driver.generate, requests))

  driver.start()
  try:
    return [completion.tokens for completion in asyncio.run(complete())]
  finally:
    driver.stop()


def imported(folder):
  policy = transformer.Policy(huggingface.read_config(folder))
  mesh = sharding.make_mesh(sharding.MeshShape(), jax.devices())
  return policy, huggingface.load(folder, policy, mesh)


@pytest.mark.parametrize("name", ["llama_tied_biases", "qwen2_untied_yarn"])
def test_cached_decoding_has_the_biases_and_the_rope_scaling_too(name):
  policy, params = imported(GOLDEN / "huggingface" / name)
  expected = np.load(GOLDEN / "huggingface" / name / "expected.npz")
  prompts = expected["tokens"][:, :30]
  written = greedy(policy, params, list(prompts), max_tokens=12)
  whole = np.concatenate([prompts, np.stack(written)], axis=1)
  places = np.broadcast_to(np.arange(whole.shape[1]), whole.shape)
  hidden = policy.hidden(params, whole, places, np.zeros_like(whole))
  likely = np.argmax(policy.logits(params, hidden), axis=-1)
  assert np.array_equal(whole[:, 30:], likely[:, 29:-1])
  assert whole[:, 30].tolist() == expected["logits"][:, 29].argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 is None, reason="RL_TPU_SMOLLM2 names no folder")
def test_smollm2_writes_the_same_greedy_text_as_with_transformers(tmp_path):
  policy, params = imported(SMOLLM2)
  tokenizer = huggingface.load_tokenizer(SMOLLM2)
  golden = json.loads((GOLDEN / "smollm2_greedy.json").read_text())
  prompts = [
    encode_chat(tokenizer, prompt["chat"])
    if "chat" in prompt
    else encode_prompt(tokenizer, prompt["text"])
    for prompt in golden
  ]
  assert [ids.tolist() for ids in prompts] == [p["ids"] for p in golden]
  written = greedy(policy, params, prompts, 48, tokenizer.eos_ids)
  for prompt, new in zip(golden, written, strict=True):
    assert tokenizer.decode(new) == prompt["new_text"]
    assert new.tolist() == prompt["new_ids"]
  huggingface.save(
    tmp_path, params, policy.config, tokenizer, dtype="float32", longest=8192
  )
  jax.tree.map(np.testing.assert_array_equal, imported(tmp_path)[1], params)
