"""A scrape says what the driver did, in a form that Prometheus reads."""

import asyncio

import aiohttp
from bigram import ask
from prometheus_client import parser
from test_server import serving, table_driver, until

from rl_tpu.generation import exposition, openai_api
from rl_tpu.models.tokenizer import ByteTokenizer


async def scrape(session, port):
  url = f"http://127.0.0.1:{port}/metrics"
  async with session.get(url) as response:
    assert response.status == 200
    assert response.content_type == "text/plain"
    text = await response.text()
  families = list(parser.text_string_to_metric_families(text))
  assert all(family.documentation for family in families)
  return {s.name: s.value for family in families for s in family.samples}


async def scrapes(driver, during):
  """What a server exposes before, while and after it serves requests."""
  async with serving(driver) as (served, client):
    app = openai_api.make_app(
      driver,
      ByteTokenizer(),
      model_name="counting",
      config=openai_api.Config(
        context_length=16, max_prompt_length=8, bearer_token="a key" * 4
      ),
      exposition=exposition.exposition(served),
    )
    runner = await openai_api.start(app, "127.0.0.1", 0)
    port = runner.addresses[0][1]
    try:
      async with aiohttp.ClientSession() as session:
        return await during(client, served, lambda: scrape(session, port))
    finally:
      await runner.cleanup()


def test_a_scrape_follows_the_requests():
  driver = table_driver(slots=2)

  async def during(client, served, look):
    found = [await look()]
    tasks = [
      asyncio.ensure_future(client.generate(ask(1, index=n, max_tokens=4)))
      for n in range(3)
    ]
    await until(lambda: served.admission.open == 3)
    driver.step()
    found.append(await look())
    await until(lambda: all(task.done() for task in tasks), driver)
    found.append(await look())
    return found

  before, running, after = asyncio.run(scrapes(driver, during))
  assert before["rl_tpu_kv_slots"] == 2
  assert before["rl_tpu_requests_running"] == 0
  assert "rl_tpu_version" not in before  # Its weights are not in service yet.
  assert running["rl_tpu_requests_running"] == 2
  assert running["rl_tpu_kv_slots_in_use"] == 2
  assert running["rl_tpu_requests_waiting"] == 1
  assert running["rl_tpu_requests_open"] == 3
  assert running["rl_tpu_requests_finished_total"] == 0
  assert running["rl_tpu_version"] == 0
  assert after["rl_tpu_requests_finished_total"] == 3
  assert after["rl_tpu_requests_started_total"] == 3
  assert after["rl_tpu_tokens_total"] == 12
  assert after["rl_tpu_weights_received_total"] == 1
  assert after["rl_tpu_requests_open"] == 0
  assert (
    after["rl_tpu_queue_seconds_total"]
    > (running["rl_tpu_queue_seconds_total"])
  )
  assert after["rl_tpu_healthy"] == 1


def test_a_server_without_figures_has_no_such_page():
  app = openai_api.make_app(
    table_driver(),
    ByteTokenizer(),
    model_name="counting",
    config=openai_api.Config(context_length=16, max_prompt_length=8),
  )
  assert "/metrics" not in {r.canonical for r in app.router.resources()}
