import asyncio
import json
import threading

import aiohttp
import browser
import pytest

from rl_tpu import health, metrics
from rl_tpu.config import to_json
from rl_tpu.generation import engine
from rl_tpu.models import quantization
from rl_tpu.report import command, goodput, live, page, series, trace

needs_browser = pytest.mark.skipif(
  browser.BROWSER is None, reason="no Chromium here (apt-get install chromium)"
)
CONFIG = {
  "name": "made",
  "schedule": "async",
  "seed": 0,
  "batches": 12,
  "max_staleness": 2,
  "learner": {"minibatches": 4},
}


def make_run(directory, batches=12, **metric):
  """A run's files, as the trainer writes them."""
  log = metrics.RunLog(directory, resume_at=None)
  log.write(0, {"heldout_accuracy": 0.25})
  for batch in range(1, batches + 1):
    row = {"reward": batch / batches, "behavior_weight": 1.0, "truncated": 0.0}
    row |= {"action_tokens": 80.0, "generated_tokens_per_second": 100.0}
    log._rows.append({"batch": batch, **row, "seconds": float(batch)} | metric)
  log._columns = list(dict.fromkeys(k for row in log.rows for k in row))
  log._rewrite()
  lines = [
    {
      "batch": batch,
      "staleness_tokens": {"0": 30, "1": 50},
      "intervals": [
        ["learner", "wait", batch - 1.0, batch - 0.75],
        ["learner", "train", batch - 0.75, float(batch)],
        ["generator", "generate", batch - 1.0, batch - 0.5],
      ],
    }
    for batch in range(1, batches + 1)
  ]
  lines[0]["intervals"][2][2] = -0.25  # What begins before the loop.
  for name in ("batches", "events"):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    metrics.write_text(log.directory / f"{name}.jsonl", text)
  log.record("starts", 0, {"unix_time": 0.0, "lost_seconds": 4.0})
  trajectory = {
    "prompt": 3,
    "member": 1,
    "reward": 1.0,
    "stop_reason": "stop",
    "length": 4,
    "tokens": [60, 97, 98, 0],
    "text": ["</script>", "a", "b", ""],
    "action": [0, 1, 1, 1],
    "version": [-1, 4, 4, 5],
    "behavior_logp": [0.0, -0.5, -0.25, -0.125],
    "advantage": [0.0, 1.5, 1.5, 1.5],
    "proximal_logp": [None, -0.4, -0.3, -0.125],
  }
  failed = trajectory | {"reward": 0.0, "prompt": 7, "stop_reason": "length"}
  failed |= {"tokens": [2, 97, 98, 0], "text": ["", "a", "b", ""]}
  log.record("samples", 6, {"trajectories": [trajectory]})
  log.record("samples", 12, {"trajectories": [trajectory, failed, trajectory]})
  log.close()
  metrics.write_json(log.directory / "config.json", CONFIG)
  metrics.write_json(log.directory / "environment.json", {"python": "3.11"})
  return log.directory


def test_thinning_keeps_the_extremes_of_every_column():
  xs = list(range(10_000))
  ys = [0.0] * 10_000
  ys[1234], ys[8765] = 7.0, -3.0
  kept_xs, kept_ys = series.thin(xs, ys, columns=100)
  assert len(kept_xs) <= 2 * 101
  assert kept_ys[kept_xs.index(1234)] == 7.0
  assert kept_ys[kept_xs.index(8765)] == -3.0
  assert kept_xs == sorted(kept_xs)
  assert series.thin([0, 1], [5.0, 6.0]) == ([0, 1], [5.0, 6.0])


def test_merged_bars_cover_what_the_bars_did():
  bars = [("generate", i / 10, i / 10 + 0.09) for i in range(5_000)]
  joined, gap = series.merge(bars, 100)
  assert len(joined) <= 100
  assert gap > 0
  assert joined[0][1] == 0.0
  assert joined[-1][2] == bars[-1][2]
  assert series.merge(bars[:50], 100) == (bars[:50], 0.0)


def test_goodput_counts_seconds_that_a_crash_lost(tmp_path):
  run = make_run(tmp_path)
  found = goodput.account(
    page.rows(run), page.bars(run), [{"lost_seconds": 4.0}]
  )
  assert found["parts"]["learner"]["train"] == pytest.approx(9.0)
  assert found["parts"]["learner"]["wait"] == pytest.approx(3.0)
  assert found["parts"]["generator"]["idle"] == pytest.approx(6.0)
  assert found["goodput"] == pytest.approx(9.0 / 16.0)
  assert found["shares"]["wait"] == pytest.approx(3.0 / 16.0)
  assert found["shares"]["lost"] == pytest.approx(4.0 / 16.0)
  assert sum(found["shares"].values()) == pytest.approx(1.0)
  assert found["token_goodput"] == pytest.approx(0.8)


@pytest.mark.parametrize(
  ("row", "config", "rule"),
  [
    ({"behavior_weight": 1.2}, {}, "behavior_weight"),
    ({"ratio": 0.8}, {}, "ratio"),
    ({"truncated": 0.06}, {}, "truncated"),
    ({"nonfinite_updates": 1.0}, {}, "nonfinite_updates"),
    ({"staleness_max": 3.0}, {"max_staleness": 2}, "staleness_max"),
    ({}, {"max_staleness": 9}, "max_staleness"),
    ({}, {"max_staleness": None}, "max_staleness"),
    (
      {"staleness_max": 0.0, "behavior_proximal_kl": 0.02},
      {},
      "behavior_proximal_kl",
    ),
    (
      {"staleness_max": 0.0, "behavior_proximal_kl": 0.02},
      {"engine": to_json(engine.Config())},
      "behavior_proximal_kl",
    ),
    (
      {"ratio": 1.01},
      {"learner": {"minibatches": 1}, "algorithm": {"proximal": "recompute"}},
      "ratio",
    ),
  ],
)
def test_a_broken_health_rule_is_named(row, config, rule):
  rows = [{"batch": 1, "ratio": 1.0, "truncated": 0.05}, {"batch": 2, **row}]
  usual = {"schedule": "async", "max_staleness": 8}
  (warning,) = health.warnings(rows, usual | config)
  assert warning.rule == rule
  assert health.warnings(rows[:1], usual) == []


@pytest.mark.parametrize("field", [{"weights": "int4"}, {"weight_noise": 0.1}])
def test_a_mismatch_that_was_asked_for_is_no_warning(field):
  mismatch = quantization.Config(**field)
  asked = {"engine": to_json(engine.Config(mismatch=mismatch))}
  rows = [{"batch": 1, "staleness_max": 0.0, "behavior_proximal_kl": 0.02}]
  usual = {"schedule": "async", "max_staleness": 8}
  assert health.warnings(rows, usual | asked) == []


def test_a_warning_is_a_sentence():
  rows = [{"batch": 1, "truncated": 0.711}, {"batch": 2, "ratio": 1.5}]
  share, weight = health.warnings(
    rows, {"schedule": "sync", "max_staleness": 2}
  )
  if share.rule != "truncated":
    share, weight = weight, share
  assert share.said.startswith("71% of trajectories end without a stop token")
  assert share.said.endswith(". In 1 batches, first in 1.")
  assert weight.said.startswith("1.5 at worst: ")


def test_a_reward_that_collapsed_is_a_warning():
  up = [{"batch": b, "reward": 0.9} for b in range(1, 31)]
  down = [{"batch": b, "reward": 0.1} for b in range(31, 41)]
  config = {"schedule": "async", "max_staleness": 2}
  (warning,) = health.warnings(up + down, config)
  assert warning.rule == "reward"
  assert warning.worst == pytest.approx(0.1)
  assert health.warnings(down + up, config) == []


@pytest.mark.parametrize(
  ("reward", "more", "found"),
  [
    (0.9, {}, ["heldout_accuracy"]),
    (0.6, {}, []),
    (-0.9, {}, []),  # no score from 0 to 1
    (0.9, {"env_unshaped_reward": 0.5}, []),
  ],
)
def test_training_questions_known_by_heart_are_a_warning(reward, more, found):
  rows = [
    {"batch": 0, "heldout_accuracy": 0.1},
    {"batch": 1, "reward": 0.1},
    {"batch": 1, "heldout_accuracy": 0.4},
    {"batch": 2, "reward": reward, **more},
    {"batch": 3, "reward": reward, **more},
    {"batch": 3, "heldout_accuracy": 0.4},
  ]
  config = {"schedule": "async", "max_staleness": 2}
  warned = health.warnings(rows, config)
  assert [warning.rule for warning in warned] == found
  assert all(w.worst == pytest.approx(0.5) for w in warned)


def test_the_trace_has_every_interval_in_microseconds(tmp_path):
  run = make_run(tmp_path)
  path = trace.write(run / "trace.json", page.bars(run), page.rows(run))
  events = json.loads(path.read_text())["traceEvents"]
  spans = [event for event in events if event["ph"] == "X"]
  assert len(spans) == 36
  assert {(e["cat"], e["name"]) for e in spans} >= {("learner", "train")}
  assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(12e6)
  names = [e["args"]["name"] for e in events if e["ph"] == "M"]
  assert sorted(names) == ["generator", "learner"]


def test_a_page_of_ten_thousand_batches_stays_small(tmp_path):
  run = make_run(tmp_path, batches=10_000)
  text = page.page([page.read(run)], live=False)
  assert len(text) < 3_000_000


def test_a_page_refers_to_nothing_outside_it(tmp_path):
  text = page.page([page.read(make_run(tmp_path))], live=False)
  for outside in ("src=", "@import", "url(", '<link rel="stylesheet'):
    assert outside not in text
  assert text.count("</script>") == 2, "a token's text must not end the script"


def test_a_directory_without_a_run_is_refused(tmp_path, capsys):
  from rl_tpu import __main__ as command_line

  assert command_line.main(["rl_tpu", "report", str(tmp_path)]) == 2
  assert "holds no run" in capsys.readouterr().err


def test_the_command_names_what_it_wrote(tmp_path, capsys):
  one, two = make_run(tmp_path / "a"), make_run(tmp_path / "b", truncated=0.5)
  written = command.run([str(one), str(two), f"--out={tmp_path}/both.html"])
  assert written["warnings"] == 1
  (warning,) = capsys.readouterr().err.splitlines()
  assert warning.startswith(f"{two}: truncated 50% of trajectories")
  assert "made async seed 0 and made" in (tmp_path / "both.html").read_text()
  assert len(written["traces"]) == len(written["figures"]) == 2


@needs_browser
def test_a_browser_reads_the_page_by_keyboard_without_complaint(tmp_path):
  run = make_run(tmp_path / "run", truncated=0.5, env_tool_calls=2.0)
  page.write([run])

  async def look():
    async with browser.page(tmp_path / "browser") as tab:
      await tab.open((run / "report.html").as_uri())
      body = await tab.value("document.body.innerText")
      assert "50% of trajectories end without a stop token" in body
      assert "versions 4, 5" in body
      assert "Task: tool calls" in body
      spent = (
        "[...document.querySelectorAll('.plain tr')].map(r => r.innerText)"
      )
      spent = [row.split("\t") for row in await tab.value(spent)]
      assert spent[0] == ["part", "what", "seconds", "share"]
      learner = [row for row in spent if row[0] == "learner"]
      shares = [float(row[3].rstrip("%")) for row in learner]
      assert sum(shares) == pytest.approx(100, abs=0.2)
      assert learner[-1][1].startswith("lost") and shares[-1] == 25.0
      await tab.value("document.querySelector('svg[tabindex]').focus()")
      await tab.press("Home", 36)
      read = "document.querySelector('.chart .read').textContent"
      assert "batch 1: reward 0.08333" in await tab.value(read)
      await tab.value("document.querySelector('canvas').focus()")
      await tab.press("+")
      start = "Number(document.querySelector('canvas').dataset.from)"
      assert await tab.value(start) > 0
      await tab.press("0")
      assert await tab.value(start) == 0
      await tab.press("+")
      end = "Number(document.querySelector('canvas').dataset.to)"
      assert await tab.value(end) < 12
      text = "document.querySelector('.tokens').innerText"
      assert "batch 12; 4 tokens; reward 0;" in body
      assert await tab.value(text) == "⟨begin⟩ab⟨0⟩", "it was cut"
      await tab.value("document.querySelector('.tokens').focus()")
      await tab.press("End", 35)
      token = await tab.value("document.getElementById('token').textContent")
      assert "version 5" in token
      assert "gap 0, advantage 1.5" in token
      next_one = "[...document.querySelectorAll('button')].find("
      next_one += "b => b.innerText === 'Next').click()"
      await tab.value(next_one)
      assert await tab.value(text) == "</script>ab⟨stop⟩"
      for width in (1280, 390):
        await tab.resize(width)
        wide = await tab.value("document.documentElement.scrollWidth")
        assert wide <= width
      assert tab.complaints == []

  asyncio.run(look())


@needs_browser
def test_two_runs_stand_side_by_side_and_differences_are_marked(tmp_path):
  one, two = make_run(tmp_path / "a"), make_run(tmp_path / "b")
  metrics.write_json(two / "config.json", CONFIG | {"max_staleness": 4})
  assert page.write([one, two])["report"] == str(one / "report_with_b.html")

  async def look():
    async with browser.page(tmp_path / "browser") as tab:
      await tab.open((one / "report_with_b.html").as_uri())
      rows = "[...document.querySelectorAll('.differs')].map(r => r.innerText)"
      opened = (
        "document.querySelectorAll('details').forEach(d => d.open = true)"
      )
      await tab.value(opened)
      (row,) = await tab.value(rows)
      assert row.split() == ["max_staleness", "2", "4"]
      assert tab.complaints == []

  asyncio.run(look())


def test_a_live_page_answers_with_the_batches_that_there_are_now(tmp_path):
  run = make_run(tmp_path, batches=3)
  with live.make([run], 0) as server:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"

    async def fetch(path):
      async with (
        aiohttp.ClientSession() as session,
        session.get(url + path) as answer,
      ):
        return answer.status, await answer.text()

    try:
      status, text = asyncio.run(fetch("/"))
      assert status == 200
      assert "const LIVE = true" in text
      make_run(tmp_path, batches=5)
      _, text = asyncio.run(fetch("/data.json"))
      (figures,) = json.loads(text)
      assert figures["series"]["reward"][0][-1] == 5
      assert asyncio.run(fetch("/etc"))[0] == 404
    finally:
      server.shutdown()
      thread.join()


def test_nothing_that_is_not_finite_reaches_the_page(tmp_path):
  run = make_run(tmp_path, loss=float("nan"))
  assert "loss" not in page.read(run)["series"]
  json.loads(page.as_json([page.read(run)]))
  endless = CONFIG | {"learner": {"clip": float("inf")}}
  metrics.write_json(run / "config.json", endless)
  (figures,) = json.loads(page.as_json([page.read(run)]))
  assert figures["config"]["learner"] == {"clip": "inf"}
