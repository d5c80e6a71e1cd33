"""The simulated pod against what can be worked out by hand, and the paper."""

import asyncio
import dataclasses
import importlib.util
import itertools
import json
import pathlib
import shlex
import subprocess
import sys

import pytest
from tiny_run import get_config

from experiments.areal import simulated_pod
from rl_tpu import config as configs
from rl_tpu import parts, simulate
from rl_tpu.types import Sampling
from rl_tpu.virtual import clock
from rl_tpu.virtual.config import Config, Distribution, Service

ROOT = pathlib.Path(__file__).parent.parent
SERVICE = Service(
  decode_step=1.0,
  prefill_per_token=0.0,
  update_per_token=0.0,
  update_per_batch=10.0,
)


@pytest.fixture
def pod(tmp_path):
  """Makes a config of one generator; `engine` and `simulate` take changes."""

  def make(*, slots=1, steps=1, context_length=64, simulated=(), **changes):
    config = get_config(tmp_path)
    engine = dataclasses.replace(
      config.engine,
      slots=slots,
      steps_per_dispatch=steps,
      context_length=context_length,
      prefill_buckets=(context_length,),
    )
    learner = dataclasses.replace(config.learner, row_length=context_length)
    settings = {
      "service": SERVICE,
      "prompt_tokens": 1,
      "lengths": Distribution(mean=5),
      "batches": 6,
      "warm_up": 0,
    }
    return dataclasses.replace(
      config,
      **{
        "schedule": "async",
        "max_staleness": 1,
        "groups_per_batch": 1,
        "group_size": 1,
        "sampling": Sampling(max_tokens=32),
        "engine": engine,
        "learner": learner,
        "simulate": Config(**(settings | dict(simulated))),
      }
      | changes,
    )

  return make


def outcome(config):
  return simulate.simulate(config, simulate.service_times(config))


def rate(config):
  return outcome(config).figures()["tokens_per_second"]


LONG_TAIL = {
  "lengths": Distribution(kind="lognormal", mean=8, sigma=1.0, least=1),
  "service": dataclasses.replace(
    SERVICE, update_per_batch=3.0, prefill_per_token=0.01, publish=0.5, swap=0.2
  ),
  "batches": 30,
  "warm_up": 10,
}


# The clock.


def test_a_day_passes_as_fast_as_its_events_are_computed():
  async def day():
    loop = asyncio.get_running_loop()
    await asyncio.gather(asyncio.sleep(86_400), asyncio.sleep(3_600))
    return loop.time()

  assert clock.run(day()) == pytest.approx(86_400)


def test_timers_fire_in_the_order_of_their_times():
  seen = []

  async def note(seconds):
    await asyncio.sleep(seconds)
    seen.append((seconds, asyncio.get_running_loop().time()))

  async def main():
    await asyncio.gather(*(note(s) for s in (3.0, 1.0, 2.5, 1e6)))

  clock.run(main())
  assert seen == [(s, pytest.approx(s)) for s in (1.0, 2.5, 3.0, 1e6)]


def test_waiting_for_nobody_is_a_deadlock_and_not_a_hang():
  async def main():
    await asyncio.get_running_loop().create_future()

  with pytest.raises(RuntimeError, match="deadlock at 0 virtual seconds"):
    clock.run(main())


# Exact times.


def test_synchronous_training_takes_generation_training_and_both_reshards(pod):
  service = dataclasses.replace(
    SERVICE,
    prefill_call=0.25,
    prefill_per_token=0.5,
    update_per_token=2.0,
    publish=3.0,
    reshard=4.0,
  )
  found = outcome(pod(schedule="sync", simulated={"service": service}))
  # A prompt of 1 and an answer of 5 tokens, in one slot.
  generation = 0.25 + 0.5 + 5 * 1.0
  training = 10.0 + 6 * 2.0 + 3.0 + 2 * 4.0
  assert [b.taken - b.asked for b in found.batches] == pytest.approx(
    [generation] * 6
  )
  assert [b.trained - b.taken for b in found.batches] == pytest.approx(
    [training] * 6
  )
  assert found.figures()["tokens_per_second"] == pytest.approx(
    5 / (generation + training)
  )


def test_a_trainer_slower_than_its_generators_never_waits_after_the_first(pod):
  found = outcome(pod())
  assert [b.asked for b in found.batches] == pytest.approx(
    [0, 15, 25, 35, 45, 55]
  )
  assert [b.taken - b.asked for b in found.batches] == pytest.approx(
    [5, 0, 0, 0, 0, 0]
  )
  # Sampled while the batch before was trained.
  assert [b.staleness for b in found.batches] == [{0: 5}, *[{1: 5}] * 5]


def test_shares_are_those_after_the_warm_up(pod):
  figures = outcome(pod(simulated={"warm_up": 2})).figures()
  # A batch every 10 seconds, 5 of which the generator decodes for.
  assert figures["batch_seconds"] == pytest.approx(10)
  assert figures["learner_idle_share"] == pytest.approx(0)
  assert figures["generator_idle_share"] == pytest.approx(0.5)
  assert figures["slots_used_share"] == pytest.approx(1)


def test_intervals_are_what_the_generators_seconds_are_made_of(pod):
  found = outcome(pod(slots=4, simulated=LONG_TAIL | {"warm_up": 0}))
  assert {i.kind for i in found.intervals[0]} > {"decode", "recompute", "swap"}
  for kind in ("decode", "prefill", "recompute", "swap"):
    spent = sum(i.end - i.start for i in found.intervals[0] if i.kind == kind)
    assert spent == pytest.approx(found.generator_seconds[kind])
  for before, after in itertools.pairwise(found.intervals[0]):
    assert before.end <= after.start


def test_members_of_a_group_have_lengths_of_their_own(pod):
  lengths = Distribution(kind="lognormal", mean=16, sigma=0.5, least=1)
  found = outcome(
    pod(schedule="sync", group_size=4, simulated={"lengths": lengths})
  )
  # One slot: a batch takes as many seconds as it has tokens.
  assert any(batch.tokens % 4 for batch in found.batches)
  assert [b.taken - b.asked for b in found.batches] == pytest.approx(
    [b.tokens for b in found.batches]
  )


def test_a_step_costs_its_sequences_and_all_tokens_in_their_caches(pod):
  service = dataclasses.replace(
    SERVICE, decode_per_sequence=0.1, decode_per_cached_token=0.01
  )
  simulated = {"service": service, "prompt_tokens": 3}
  found = outcome(
    pod(schedule="sync", slots=2, group_size=2, simulated=simulated)
  )
  # Two sequences of 3, 4, ... 7 cached tokens each.
  generation = sum(1 + 2 * 0.1 + 2 * n * 0.01 for n in (3, 4, 5, 6, 7))
  assert found.batches[0].taken == pytest.approx(generation)


def test_what_finds_no_slot_waits_for_one(pod):
  found = outcome(pod(schedule="sync", group_size=3, slots=2))
  assert found.batches[0].taken == pytest.approx(10)
  assert found.figures()["slots_used_share"] == pytest.approx(0.75)


@pytest.mark.parametrize(
  ("interruption", "second"),
  [("recompute", 26 + 0.5 * 7), ("keep", 26), ("drain", 24)],
)
def test_new_weights_interrupt_as_the_driver_would(pod, interruption, second):
  # One answer of 12 tokens; the batch is trained 12..18, and the swap of 2
  # comes at 18, where the next sequence has a prompt of 1 and 6 tokens.
  service = dataclasses.replace(
    SERVICE, update_per_batch=6.0, prefill_per_token=0.5, swap=2.0
  )
  # A prefill of 1 token shifts all by half a second a sequence.
  config = pod(
    interruption=interruption,
    simulated={"service": service, "lengths": Distribution(mean=12)},
  )
  found = outcome(config)
  assert found.batches[0].taken == pytest.approx(12.5)
  assert found.batches[1].taken == pytest.approx(second + 1)
  mixed = {0: 6, 1: 6} if interruption != "drain" else {1: 12}
  assert found.batches[1].staleness == mixed


def test_an_answer_in_flight_has_the_versions_of_its_tokens(pod):
  found = outcome(
    pod(
      max_staleness=4,
      simulated={
        "lengths": Distribution(mean=24),
        "service": dataclasses.replace(SERVICE, update_per_batch=1.0),
      },
    )
  )
  # Generation alone takes time: training a batch ends one step into the next.
  assert found.batches[2].staleness == {0: 23, 1: 1}


def test_a_slot_is_free_when_the_dispatch_of_its_last_token_ends(pod):
  found = outcome(pod(schedule="sync", group_size=2, steps=4))
  assert found.batches[0].taken == pytest.approx(2 * 8)
  assert found.batches[0].tokens == 2 * 5


def test_new_weights_wait_for_the_end_of_a_dispatch(pod):
  service = dataclasses.replace(SERVICE, update_per_batch=6.0, swap=2.0)
  simulated = {"service": service, "lengths": Distribution(mean=12)}
  found = outcome(pod(interruption="keep", steps=4, simulated=simulated))
  # They come at 18, amid the second dispatch of an answer that began at 12.
  assert found.batches[1].taken == pytest.approx(12 + 12 + 2)
  assert found.batches[1].staleness == {1: 8, 0: 4}


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_nothing_starts_that_would_be_too_stale_while_weights_travel(
  pod, schedule
):
  service = dataclasses.replace(SERVICE, travel=3.0)
  config = pod(
    schedule=schedule, max_staleness=0, simulated={"service": service}
  )
  taken = [batch.taken for batch in outcome(config).batches]
  assert taken[:3] == pytest.approx([5, 5 + 18, 5 + 2 * 18])


def test_both_sides_go_on_while_weights_travel(pod):
  service = dataclasses.replace(SERVICE, travel=3.0)
  found = outcome(pod(max_staleness=2, simulated={"service": service}))
  # The learner is the limit; it has a batch in stock.
  assert [b.asked for b in found.batches[:4]] == pytest.approx([0, 15, 25, 35])


def test_turns_and_a_slow_environment_add_up(pod):
  simulated = {"latency": Distribution(mean=0.5), "observation_tokens": 4}
  found = outcome(pod(schedule="sync", max_turns=3, simulated=simulated))
  assert found.batches[0].taken == pytest.approx(3 * (5 + 0.5))
  assert found.batches[0].tokens == 15


def test_grain_changes_neither_times_nor_tokens_of_multiples_of_it(pod):
  simulated = {"lengths": Distribution(mean=24), "prompt_tokens": 8}
  fine = outcome(pod(simulated=simulated))
  coarse = outcome(pod(simulated=simulated | {"grain": 8}))
  assert [b.asked for b in coarse.batches] == pytest.approx(
    [b.asked for b in fine.batches]
  )
  assert coarse.batches[0].staleness == fine.batches[0].staleness


# Laws.


@pytest.mark.parametrize("on_stale", ["refuse", "mask_tokens", "allow"])
def test_every_prompt_is_consumed_once_and_within_the_limit(pod, on_stale):
  found = outcome(
    pod(
      slots=4,
      groups_per_batch=3,
      group_size=2,
      max_staleness=1,
      on_stale=on_stale,
      simulated=LONG_TAIL | {"rejected_share": 0.3},
    )
  )
  prompts = [index for batch in found.batches for index in batch.prompts]
  assert len(prompts) == len(set(prompts)) == 30 * 3
  stale = max(s for batch in found.batches for s in batch.staleness)
  assert stale <= 1 or on_stale == "allow"


def test_equal_seeds_are_equal_runs_and_others_are_not(pod):
  one, again, other = (
    outcome(pod(slots=4, group_size=2, seed=seed, simulated=LONG_TAIL))
    for seed in (1, 1, 2)
  )
  assert one == again
  assert one.seconds != other.seconds


def test_no_staleness_is_synchronous_training_without_its_resharding(pod):
  changes = {"slots": 4, "groups_per_batch": 2, "group_size": 2}
  zero = rate(pod(max_staleness=0, simulated=LONG_TAIL, **changes))
  sync = rate(pod(schedule="sync", simulated=LONG_TAIL, **changes))
  # `swap` is paid in both; only the order of requests may differ.
  assert zero == pytest.approx(sync, rel=0.01)


def test_generators_help_until_the_trainer_is_the_limit(pod):
  rates = []
  service = dataclasses.replace(LONG_TAIL["service"], update_per_batch=20.0)
  for generators in (1, 2, 4, 8):
    simulated = LONG_TAIL | {"generators": generators, "service": service}
    rates.append(
      rate(
        pod(
          slots=2,
          groups_per_batch=8,
          group_size=2,
          max_staleness=3,
          simulated=simulated,
        )
      )
    )
  assert rates[1] > 1.7 * rates[0]  # of generation alone
  for fewer, more in itertools.pairwise(rates):
    assert more > 0.99 * fewer
  assert rates[-1] == pytest.approx(rates[-2], rel=0.02)  # trainer-bound


def test_lockstep_trains_at_its_lag(pod):
  found = outcome(pod(schedule="lockstep(2)", simulated=LONG_TAIL))
  assert {s for b in found.batches[3:] for s in b.staleness} == {2}


def test_recomputing_costs_the_generators_and_shows_in_their_shares(pod):
  shares = {}
  for interruption in ("recompute", "keep"):
    figures = outcome(
      pod(slots=4, interruption=interruption, simulated=LONG_TAIL)
    ).figures()
    shares[interruption] = figures["recompute_share"]
  assert shares["keep"] == 0 < shares["recompute"]


# The paper.


def pods_rate(name, schedule, limit, *, gpus, longest=8192, **simulated):
  """Tokens/s of one of the paper's pods, little of it simulated."""
  config = simulated_pod.pod(
    name, schedule, gpus=gpus, longest=longest, limit=limit
  )
  settings = dataclasses.replace(config.simulate, **simulated)
  return rate(dataclasses.replace(config, simulate=settings))


@pytest.mark.slow
def test_the_papers_pod_has_the_step_and_the_plateau_of_figure_5c():
  rates = [
    pods_rate("1.5b", "async", limit, gpus=16, batches=10, warm_up=4)
    for limit in (0, 1, 2, 4)
  ]
  gains = [one / rates[0] for one in rates]
  # AReaL: 1, 2.09, 2.77, 2.77.
  assert 1.6 < gains[1] < 2.5
  assert 2.0 < gains[2] < 3.2
  assert gains[1] - gains[0] > 1.3 * (gains[2] - gains[1])
  assert gains[3] == pytest.approx(gains[2], rel=0.05)


@pytest.mark.slow
def test_the_papers_pods_gain_from_async_and_large_models_less():
  def gain(name):
    model = simulated_pod.MODELS[name]
    overlapped, sync = (
      pods_rate(
        *(name, schedule, model.staleness),
        gpus=model.gpus,
        longest=27_648,
        batches=7,
        warm_up=3,
      )
      for schedule in ("async", "sync")
    )
    return overlapped / sync

  # AReaL: 2.77 and 1.64.
  assert 1.2 < gain("32b") < 2.0 < gain("1.5b") < 2.8


def test_a_small_part_of_the_papers_pod_says_what_the_whole_does():
  config = simulated_pod.pod(
    "1.5b", "async", gpus=16, longest=8192, limit=0, groups=8
  )
  settings = dataclasses.replace(
    config.simulate, batches=3, warm_up=1, grain=1024
  )
  config = dataclasses.replace(config, simulate=settings)
  none, one, four = (
    rate(dataclasses.replace(config, max_staleness=limit))
    for limit in (0, 1, 4)
  )
  assert 1.3 * none < one < 1.1 * four


# The command.


def test_service_times_come_from_the_compile_report_where_none_is_given():
  path = ROOT / "experiments/pods"
  spec = importlib.util.spec_from_file_location(
    "pod", path / "qwen3_8b_v5p64.py"
  )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = configs.build(parts.Config, module.get_config())
  report = path / "qwen3_8b_v5p64.txt"
  figures = json.loads(report.read_text().splitlines()[-1])
  settings = Config(
    report=str(report), service=Service(prefill_per_token=0.125)
  )
  service = simulate.service_times(
    dataclasses.replace(config, simulate=settings)
  )
  assert service.prefill_per_token == 0.125
  decode = figures["programs"]["decode"]
  assert service.decode_step * 16 == pytest.approx(
    decode["compute_seconds_estimated"] + decode["collective_seconds"]
  )
  # 512 * 16 trajectories of 32768 tokens, in 4 minibatches.
  update = figures["programs"]["update"]
  proximal = figures["programs"]["proximal"]
  assert service.update_per_token * 512 * 16 * 32768 == pytest.approx(
    4 * (update["compute_seconds_estimated"] + update["collective_seconds"])
    + proximal["compute_seconds_estimated"]
    + proximal["collective_seconds"]
  )


def test_a_time_that_nobody_states_is_an_error_that_names_it(pod):
  config = pod(simulated={"service": Service(decode_step=1.0)})
  with pytest.raises(
    configs.ConfigError, match="service.prefill_per_token is None"
  ):
    simulate.service_times(config)


def test_a_report_that_is_none_is_refused(pod, tmp_path):
  path = tmp_path / "report.txt"
  path.write_text("not a report\n")
  with pytest.raises(configs.ConfigError, match="report is"):
    simulate.service_times(pod(simulated={"report": str(path)}))


def test_no_limit_at_all_is_refused(pod):
  with pytest.raises(configs.ConfigError, match="max_running_groups is None"):
    outcome(pod(max_staleness=None))


def test_a_prompt_that_fills_the_context_is_refused(pod):
  with pytest.raises(configs.ConfigError, match="prompt_tokens is 64"):
    outcome(pod(simulated={"prompt_tokens": 64}))


@pytest.mark.parametrize(
  ("cls", "values", "message"),
  [
    (Config, {"generators": 0}, "generators is 0"),
    (Config, {"rejected_share": 1.0}, "rejected_share is 1.0"),
    (Config, {"batches": 4, "warm_up": 4}, "warm_up is 4"),
    (Config, {"sweep_generators": (1, 0)}, "sweep_generators has 0"),
    (Service, {"decode_step": 0.0}, "decode_step is 0"),
    (Service, {"swap": -1.0}, "swap is -1.0"),
    (Distribution, {"sigma": -1.0}, "sigma is -1.0"),
    (Distribution, {"least": 2.0, "largest": 1.0}, "largest is 1.0"),
    (Distribution, {"kind": "empirical"}, "directory is None"),
  ],
)
def test_a_wrong_setting_is_named_with_its_value(cls, values, message):
  with pytest.raises(ValueError, match=message):
    cls(**values)


def test_empirical_lengths_are_those_of_a_runs_log(pod, tmp_path):
  lines = [{"batch": 1, "lengths": [3, 7]}, {"batch": 2, "lengths": [7]}]
  log = "".join(json.dumps(line) + "\n" for line in lines)
  (tmp_path / "batches.jsonl").write_text(log)
  lengths = Distribution(kind="empirical", directory=str(tmp_path))
  found = outcome(pod(simulated={"lengths": lengths, "batches": 40}))
  tokens = [batch.tokens for batch in found.batches]
  assert set(tokens) == {3, 7}
  assert 16 <= tokens.count(7) < 36


@pytest.mark.slow
@pytest.mark.parametrize(
  ("page", "question", "axis"),
  [
    ("pods", "How many generators, how much staleness?", "generators"),
    ("staleness", "For a pod, ask the simulator", "staleness"),
  ],
)
def test_the_pages_commands_answer_their_questions(page, question, axis):
  text = (ROOT / f"docs/{page}.md").read_text().partition(question)[2]
  block = text.partition("\n\n")[2].partition("\n\n")[0]
  command = shlex.split(block.replace("\\\n", ""))
  assert command[:4] == [".venv/bin/python", "-m", "rl_tpu", "simulate"]
  # Less of it, for the time that it takes.
  less = {"batches": 6, "warm_up": 2, "grain": 256}
  done = subprocess.run(
    [
      *(sys.executable, *command[1:]),
      *(f"--config.simulate.{name}={value}" for name, value in less.items()),
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  figures = json.loads(done.stdout.splitlines()[-1])
  assert figures[f"enough_{axis}"] > 1
  idle = [row["learner_idle_share"] for row in figures["sweep"]]
  assert idle[0] > 0.3 > idle[-1]


def test_the_command_ends_with_its_figures_and_says_how_many_are_enough():
  path = ROOT / "experiments/quickstart.py"
  settings = {
    "prompt_tokens": 5,
    "lengths.mean": 4,
    "batches": 8,
    "warm_up": 4,
    "sweep_generators": "(1,2)",
    "sweep_staleness": "(0,1)",
    "service.decode_step": 0.01,
    "service.prefill_per_token": 0.0,
    "service.update_per_token": 1e-3,
  }
  flags = [f"--config.simulate.{n}={v}" for n, v in settings.items()]
  flags += ["--config.groups_per_batch=4", "--config.group_size=4"]
  done = subprocess.run(
    [sys.executable, "-m", "rl_tpu", "simulate", f"--config={path}", *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  lines = done.stdout.splitlines()
  figures = json.loads(lines[-1])
  assert len(lines) == 1 + 1 + 4 + 1
  assert {"tokens_per_second", "learner_idle_share", "staleness_max"} <= set(
    figures
  )
  assert [row.get("max_staleness") for row in figures["sweep"][2:]] == [0, 1]
  assert figures["enough_generators"] == 1
  assert figures["enough_staleness"] == 1
