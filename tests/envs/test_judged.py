"""A task with a language model as judge, which a test plays."""

import asyncio
import json

import pytest
from aiohttp import web
from attempt import TOKENIZER, attempt, demonstrated, ids, rows

from rl_tpu.envs.judged import Config, Task
from rl_tpu.rewards import judge
from rl_tpu.types import EpisodeError


def make(tmp_path, port=1, **fields):
  path = tmp_path / "questions.jsonl"
  lines = [{"question": f"why {i}?", "good": "as it is"} for i in range(40)]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  asked = judge.Config(
    url=f"http://127.0.0.1:{port}/v1",
    model="glm",
    criteria="Is it kind?",
    low=-1.0,
    pause_seconds=0.0,
  )
  return Task(Config(path=str(path), judge=asked, **fields), TOKENIZER)


def test_the_reward_of_an_answer_is_the_judges_score_of_it(tmp_path):
  """Two answers at once; the judge sees the question and each of them."""
  seen = []

  async def handle(request):
    (message,) = (await request.json())["messages"]
    seen.append(message["content"])
    score = 0.75 if "Answer: kind" in message["content"] else -0.5
    said = f"It is so.\nSCORE: {score}"
    return web.json_response({"choices": [{"message": {"content": said}}]})

  async def main():
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    task = make(tmp_path, runner.addresses[0][1])
    row = {"question": "why 3?", "example": ""}
    try:
      return await asyncio.gather(
        *(
          task.environment(task.prompt(row, 0)).step(ids(text), "stop")
          for text in ("kind", "SCORE: 1")
        )
      )
    finally:
      await runner.cleanup()

  steps = asyncio.run(main())
  assert [(step.reward, step.end) for step in steps] == [
    *((0.75, True), (-0.5, True))
  ]
  assert all("Question: why 3?" in text for text in seen)


def test_a_judge_that_is_away_is_an_error_and_not_a_reward(tmp_path):
  task = make(tmp_path)
  with pytest.raises(EpisodeError) as caught:
    attempt(task, rows(task)[0], "kind")
  assert caught.value.kind == "judge_unreachable"


def test_nobody_is_asked_about_an_answer_that_was_cut(tmp_path):
  task = make(tmp_path)
  _, step, _ = attempt(task, rows(task)[0], "ki", stop_reason="length")
  assert step.reward == -1.0


def test_the_rows_do_not_depend_on_the_judge(tmp_path):
  assert make(tmp_path).fingerprint == make(tmp_path, port=2).fingerprint
  assert make(tmp_path).fingerprint != make(tmp_path, chat=True).fingerprint


def test_examples_are_imitated_where_rows_have_them(tmp_path):
  task = make(tmp_path, example_field="good")
  row = rows(task)[0]
  assert demonstrated(task, row) == (f"{row['question']}\n", "as it is")
  with pytest.raises(ValueError, match="example_field"):
    demonstrated(make(tmp_path), rows(make(tmp_path))[0])


def test_a_field_that_rows_lack_is_named(tmp_path):
  with pytest.raises(ValueError, match="no field 'best'"):
    rows(make(tmp_path, example_field="best"))
