"""Actor, admission and buffer when everything takes any time whatever.

Durations of answers, of training and what a filter rejects are hypothesis's
choice; on a virtual clock they are an order of events. A deadlock is an error
there (`virtual/clock.py`), not a test that hangs.
"""

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_tpu.actor import Actor, Config
from rl_tpu.buffer import Buffer
from rl_tpu.envs import Step
from rl_tpu.staleness import Admission, staleness_bound
from rl_tpu.types import Completion, Prompt, Sampling
from rl_tpu.virtual import clock


class Watched(Admission):
  """Admission that looks at its law whenever a group starts."""

  def dispatch(self, version):
    super().dispatch(version)
    bound = staleness_bound(self.max_staleness) + version + 1
    assert self.accepted + self.running <= bound * self.groups_per_batch
    assert self.running <= (self.max_running or self.running)

  def capacity(self, version):
    room = super().capacity(version)
    assert room >= 0
    return room


class Slow:
  """Answers after the seconds that its script has next; fails where < 0."""

  def __init__(self, seconds):
    self.version = 0
    self._seconds = itertools.cycle(seconds)

  async def generate(self, request, progress):
    born, seconds = self.version, next(self._seconds)
    await asyncio.sleep(abs(seconds))
    if seconds < 0:
      raise OSError("boom")
    return Completion(
      tokens=np.array([5, 2], np.int32),
      logp=np.zeros(2, np.float32),
      version=np.array([born, self.version], np.int32),
      stop_reason="stop",
    )


class OneTurn:
  """Ends after one action."""

  def __init__(self, prompt):
    self.prompt = prompt

  async def reset(self):
    return self.prompt.tokens

  async def step(self, action, stop_reason):
    return Step(observation=np.zeros(0, np.int32), reward=0.0, end=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Orders:
  """What decides the order of events."""

  answers: tuple[float, ...]
  training: tuple[float, ...]
  rejected: frozenset[int] = frozenset()
  groups_per_batch: int = 2
  group_size: int = 2
  max_staleness: int | None = 0
  max_running: int | None = None
  on_stale: str = "refuse"
  batches: int = 5


def play(orders, drains=False):
  """Trains all batches; returns what each had: prompts and token versions.

  Args:
    orders: of events.
    drains: whether the actor ends its work before a batch is taken, as under
      schedule `sync`; otherwise a batch is taken as soon as it is full.
  """
  generator, size = Slow(orders.answers), orders.groups_per_batch
  buffer = Buffer(
    groups_per_batch=size,
    max_staleness=orders.max_staleness,
    on_stale=orders.on_stale,
  )
  admission = Watched(
    groups_per_batch=size,
    max_staleness=orders.max_staleness,
    max_running=orders.max_running,
  )
  actor = Actor(
    Config(
      sampling=Sampling(max_tokens=2),
      group_size=orders.group_size,
      total_groups=orders.batches * size,
      max_trajectory_tokens=8,
      max_failures_in_a_row=10**6,
    ),
    generator=generator,
    make_group=lambda prompt, size: [OneTurn(prompt) for _ in range(size)],
    prompts=lambda index: Prompt(index=index, tokens=np.ones(1, np.int32)),
    admission=admission,
    buffer=buffer,
    keep=lambda group: group.prompt.index not in orders.rejected,
  )

  async def take(version):
    if drains:
      await actor.drain()
    while True:
      try:
        return buffer.take(version, timeout=0)
      except TimeoutError:
        await asyncio.sleep(0.25)
        assert asyncio.get_running_loop().time() < 1e4, "no batch will come"

  async def main():
    run = asyncio.create_task(actor.run())
    trained = []
    training = itertools.cycle(orders.training)
    for version in range(orders.batches):
      groups = await take(version)
      if orders.on_stale != "allow" and orders.max_staleness is not None:
        stale = max(group.staleness(version) for group in groups)
        assert stale <= orders.max_staleness
      trained.append(
        [
          (g.prompt.index, *(tuple(t.token_version) for t in g.trajectories))
          for g in groups
        ]
      )
      await asyncio.sleep(next(training))
      generator.version = version + 1
      actor.set_version(version + 1)
    await run
    assert admission.accepted == orders.batches * size
    assert admission.running == 0
    return trained, actor.snapshot()

  return clock.run(main())


SECONDS = st.sampled_from([0.0, 0.5, 1.0, 3.0, 20.0])
ORDERS = st.builds(
  Orders,
  answers=st.lists(SECONDS, min_size=1, max_size=12).map(tuple),
  training=st.lists(SECONDS, min_size=1, max_size=4).map(tuple),
  rejected=st.frozensets(st.integers(0, 12), max_size=12),
  groups_per_batch=st.integers(1, 3),
  group_size=st.integers(1, 3),
  max_staleness=st.integers(0, 3),
  max_running=st.none() | st.integers(1, 4),
  on_stale=st.sampled_from(["refuse", "mask_tokens", "allow"]),
)


@settings(deadline=None, max_examples=60)
@given(orders=ORDERS)
def test_any_order_keeps_equation_3_and_trains_every_prompt_once(orders):
  trained, state = play(orders)
  prompts = [group[0] for batch in trained for group in batch]
  dropped = [index for index, _ in state["dropped"]]
  assert len(prompts) == len(set(prompts))
  assert set(dropped) <= orders.rejected
  assert state["groups"] == state["unfinished"] == []
  assert sorted(prompts + dropped) == list(range(state["next_index"]))


@settings(deadline=None, max_examples=40)
@given(
  orders=ORDERS,
  failures=st.lists(st.booleans(), min_size=1, max_size=11),
)
def test_failures_in_any_order_give_their_places_back(orders, failures):
  # The last answer of the cycle always succeeds, and groups have one member.
  answers = [
    -seconds if fails else seconds
    for seconds, fails in zip(
      itertools.cycle(orders.answers), failures, strict=False
    )
  ]
  orders = dataclasses.replace(orders, answers=(*answers, 1.0), group_size=1)
  trained, state = play(orders)
  prompts = [group[0] for batch in trained for group in batch]
  dropped = [index for index, _ in state["dropped"]]
  assert sorted(prompts + dropped) == list(range(state["next_index"]))


@settings(deadline=None, max_examples=40)
@given(orders=ORDERS, first=st.integers(0, 4), rejected=st.integers(10, 60))
def test_a_filter_that_rejects_everything_for_a_while_starves_nobody(
  orders, first, rejected
):
  orders = dataclasses.replace(
    orders, rejected=frozenset(range(first, first + rejected))
  )
  trained, state = play(orders)
  assert sum(map(len, trained)) == 5 * orders.groups_per_batch
  assert state["admission"]["given_back"].get("rejected", 0) >= rejected


@settings(deadline=None, max_examples=60)
@given(orders=ORDERS)
def test_no_staleness_trains_the_same_batches_as_synchronous_training(orders):
  orders = dataclasses.replace(orders, max_staleness=0)
  trained, _ = play(orders)
  assert trained == play(orders, drains=True)[0]
  for version, batch in enumerate(trained):
    for _, *members in batch:
      assert {v for member in members for v in member} == {-1, version}


def test_without_a_limit_only_max_running_holds_groups_back():
  orders = Orders(
    answers=(1.0, 20.0),
    training=(3.0,),
    max_staleness=None,
    max_running=3,
    on_stale="allow",
  )
  trained, _ = play(orders)
  assert len(trained) == 5


def test_a_full_stop_is_noticed():
  # The clock's own word: nothing would ever wake these up again.
  async def main():
    await asyncio.gather(asyncio.Event().wait(), asyncio.Event().wait())

  with pytest.raises(RuntimeError, match="deadlock"):
    clock.run(main())
