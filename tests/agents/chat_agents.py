"""Agents as a user writes them, with the official client or another."""

import asyncio

import openai

from rl_tpu.envs import Outcome

TOOL = {
  "type": "function",
  "function": {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {}},
  },
}


def client(endpoint):
  return openai.AsyncOpenAI(
    base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0
  )


async def ask(endpoint, messages, **settings):
  async with client(endpoint) as api:
    answer = await api.chat.completions.create(
      model=endpoint.model, messages=messages, **settings
    )
  return answer.choices[0]


async def planner(endpoint, row):
  """Two turns with a tool, then two parallel sub-calls, then a summary."""
  messages = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": row["question"]},
  ]
  first = await ask(endpoint, messages, tools=[TOOL], max_tokens=4)
  messages.append(first.message.model_dump(exclude_none=True))
  for call in first.message.tool_calls or ():
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    messages.append(result)
  messages.append({"role": "user", "content": "on"})
  second = await ask(endpoint, messages, tools=[TOOL], max_tokens=4)
  messages.append(second.message.model_dump(exclude_none=True))
  helpers = [
    ask(endpoint, [*messages, {"role": "user", "content": part}], tools=[TOOL])
    for part in ("l", "r")
  ]
  parts = await asyncio.gather(*helpers)
  said = "".join(part.message.content or "" for part in parts)
  odd = sum(map(ord, said)) % 2
  return Outcome(
    reward=float(odd),
    metrics={"letters": float(len(said))},
    answer=str(odd),
  )


async def loner(endpoint, row):
  """One call."""
  choice = await ask(endpoint, [{"role": "user", "content": row["question"]}])
  return float(bool(choice.message.content))


def blocking(endpoint, row):
  """One that does not await."""
  with openai.OpenAI(
    base_url=endpoint.base_url, api_key=endpoint.api_key
  ) as api:
    answer = api.chat.completions.create(
      model=endpoint.model,
      messages=[{"role": "user", "content": row["question"]}],
    )
  return float(bool(answer.choices))


async def silent(endpoint, row):
  """One that never calls."""
  return 1.0


async def crashing(endpoint, row):
  """One with a fault."""
  await loner(endpoint, row)
  raise KeyError("plan")


async def hanging(endpoint, row):
  """One that never ends."""
  await loner(endpoint, row)
  await asyncio.Event().wait()


async def undecided(endpoint, row):
  """One whose reward is no number."""
  await loner(endpoint, row)
  return float("nan")


async def endless(endpoint, row):
  """One that calls until it is told to stop."""
  messages = [{"role": "user", "content": "go"}]
  while True:
    choice = await ask(endpoint, messages)
    messages.append({"role": "assistant", "content": choice.message.content})
    messages.append({"role": "user", "content": "on"})


async def moody(endpoint, row):
  """One that crashes, hangs or does its work, by its question."""
  number = int(row["question"].removesuffix("?"))
  act = (loner, crashing, hanging)[number % 3]
  return await act(endpoint, row)
