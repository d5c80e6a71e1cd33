"""Workers: values in order, limits, and what is left when they end."""

import asyncio
import gc
import os
import threading

import pytest

from rl_tpu.rewards.workers import Workers
from rl_tpu.types import EpisodeError

SCORERS = "tests.rewards.scorers"


@pytest.fixture
def make():
  made = []

  def workers(name, **kwargs):
    made.append(Workers(f"{SCORERS}:{name}", **kwargs))
    return made[-1]

  yield workers
  for one in made:
    one.close()


def test_values_come_back_each_to_its_caller(make):
  double = make("double", count=2)

  async def main():
    return await asyncio.gather(*(double(i) for i in range(20)))

  assert asyncio.run(main()) == [2 * i for i in range(20)]


def test_one_pool_serves_several_event_loops(make):
  double = make("double", count=1)
  assert asyncio.run(double(1)) == 2
  found = []
  thread = threading.Thread(
    target=lambda: found.append(asyncio.run(double("ab")))
  )
  thread.start()
  thread.join()
  assert found == ["abab"]


def test_a_worker_starts_without_jax(make):
  assert asyncio.run(make("loads_jax")()) is False


@pytest.mark.parametrize(
  ("how", "kind"),
  [
    ("hang", "reward_timeout"),
    ("die", "reward_crashed"),
    ("raise", "reward_raised"),
    ("fill memory", "reward_raised"),
  ],
)
def test_what_goes_wrong_has_a_name_and_the_next_call_is_served(
  make, how, kind
):
  misbehave = make("misbehave", count=1, seconds=0.5)
  with pytest.raises(EpisodeError, match="misbehave") as caught:
    asyncio.run(misbehave(how))
  assert caught.value.kind == kind
  assert asyncio.run(misbehave("print")) == "print"


def test_the_loop_goes_on_while_a_function_hangs(make):
  misbehave = make("misbehave", count=1, seconds=0.5)

  async def main():
    hanging = asyncio.create_task(misbehave("hang"))
    turns = 0
    while not hanging.done():
      await asyncio.sleep(0.01)
      turns += 1
    with pytest.raises(EpisodeError, match="more than 0.5 s"):
      hanging.result()
    return turns

  assert asyncio.run(main()) > 2


def alive(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True


def test_no_process_is_left_when_nobody_needs_it():
  double = Workers(f"{SCORERS}:double", count=1)
  asyncio.run(double(1))
  (process,) = double._processes
  pid = process._popen.pid
  assert alive(pid)
  del double, process
  gc.collect()
  assert not alive(pid)


def test_a_function_that_is_not_there_is_no_episodes_fault(make):
  for find in (make("triple").check, lambda: asyncio.run(make("triple")(1))):
    with pytest.raises(ValueError, match="triple cannot be loaded: Attribute"):
      find()


def test_a_module_that_ends_its_process_is_no_episodes_fault(make, tmp_path):
  (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")
  ends = Workers(f"{tmp_path}/ends.py:score")
  with pytest.raises(RuntimeError, match="no process could be started"):
    ends.check()
  ends.close()


def test_limits_out_of_range_are_refused():
  with pytest.raises(ValueError, match="seconds is 0"):
    Workers("a:b", seconds=0)
