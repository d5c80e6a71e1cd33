import dataclasses
import logging

import jax
import numpy as np
import pytest
from bigram import CONFIG, ask, make_engine, one_device_mesh, script, uniform
from tiny import INIT, POLICY, full_forward_logp

from rl_tpu import sharding
from rl_tpu.generation import decoding, engine, prefill
from rl_tpu.generation.decoding import Admission
from rl_tpu.types import VersionedParams

REQUESTS = [
  ask(3, 1, 4, index=0, max_tokens=6),
  ask(1, 5, 9, 2, 6, index=1, max_tokens=7, temperature=0.5),
  ask(5, index=2, max_tokens=4, temperature=1.3, member=3),
]


def policy_engine(mesh=None, **changes):
  config = dataclasses.replace(CONFIG, **changes)
  return engine.PolicyEngine(POLICY, mesh or one_device_mesh(), config)


def admission(slot, request, tokens=None, budget=None):
  return Admission(
    slot=slot,
    tokens=request.tokens if tokens is None else tokens,
    budget=budget or request.sampling.max_tokens,
    request=request,
  )


def play(served, weights, admissions, state=None):
  """Runs sequences to their end: {slot: (tokens, logp, standing)}."""
  state = served.init_decode_state() if state is None else state
  state = served.admit(weights, state, admissions)
  tokens = {a.slot: [] for a in admissions}
  logp = {a.slot: [] for a in admissions}
  standing = {}
  for _ in range(40):
    state, result = served.generate(weights, state)
    result = result.convert_to_numpy()
    for slot, count in enumerate(result.counts):
      if count:
        tokens[slot] += result.tokens[slot, :count].tolist()
        logp[slot] += result.logp[slot, :count].tolist()
        if result.standing[slot]:
          standing[slot] = int(result.standing[slot])
  assert len(standing) == len(admissions), "a sequence does not end"
  return {slot: (tokens[slot], logp[slot], standing[slot]) for slot in tokens}


@pytest.fixture(scope="module")
def served():
  return policy_engine()


@pytest.fixture(scope="module")
def initial():
  return INIT(jax.random.key(0))


@pytest.fixture(scope="module")
def weights(served, initial):
  return served.load_params(initial, version=3)


@pytest.fixture(scope="module")
def played(served, weights):
  admissions = [admission(i, r) for i, r in enumerate(REQUESTS)]
  return play(served, weights, admissions)


def test_cached_decode_is_the_full_forward_at_every_temperature(
  played, weights
):
  for slot, request in enumerate(REQUESTS):
    tokens, logp, _ = played[slot]
    assert len(tokens) == request.sampling.max_tokens
    expected = full_forward_logp(weights.params, request, tokens)
    np.testing.assert_allclose(logp, expected, atol=1e-4)


def test_a_sample_does_not_depend_on_slot_company_or_sizes(played, weights):
  other = policy_engine(slots=2, steps_per_dispatch=3, prefill_buckets=(16,))
  for slot, request in enumerate(REQUESTS):
    alone = play(other, weights, [admission(1, request)])[1]
    assert alone[0] == played[slot][0]
    np.testing.assert_allclose(alone[1], played[slot][1], atol=1e-5)


def test_a_2x2_mesh_samples_what_one_device_samples(played, initial):
  mesh = sharding.make_mesh(sharding.MeshShape(fsdp=2, tensor=2), jax.devices())
  spread = policy_engine(mesh, prefill_batches=(1,))
  moved = spread.load_params(initial, version=3)
  spread.check_params(moved.params)
  assert len(moved.params["embedding"].sharding.device_set) == 4
  order = [3, 0, 2]
  admissions = [admission(s, r) for s, r in zip(order, REQUESTS, strict=True)]
  result = play(spread, moved, admissions)
  for slot, there in zip(order, range(3), strict=True):
    assert result[slot][0] == played[there][0]
    np.testing.assert_allclose(result[slot][1], played[there][1], atol=1e-5)


def test_one_sequence_prefills_on_a_mesh_that_splits_slots(initial):
  mesh = sharding.make_mesh(sharding.MeshShape(fsdp=2, tensor=2), jax.devices())
  spread = policy_engine(mesh, prefill_batches=(1,))
  prefix = spread.prefill(
    params=spread.load_params(initial),
    padded_tokens=np.arange(4),
    true_length=3,
  )
  wanted = spread.get_prefix_destination_sharding().cache
  for array in jax.tree.leaves(prefix.cache):
    assert array.sharding.is_equivalent_to(wanted, array.ndim)


def test_a_resumed_sequence_goes_on_as_if_it_had_never_stopped(
  served, played, weights
):
  request = REQUESTS[1]
  tokens, logp, _ = played[1]
  partial = np.asarray([*request.tokens, *tokens[:3]], np.int32)
  rest = play(served, weights, [admission(2, request, partial, 4)])[2]
  assert rest[0] == tokens[3:]
  np.testing.assert_allclose(rest[1], logp[3:], atol=1e-5)


def test_a_slot_used_before_gives_what_a_fresh_one_gives(
  served, played, weights
):
  state = served.init_decode_state()
  long = ask(*range(9), index=9, max_tokens=7)
  state = served.admit(weights, state, [admission(0, long)])
  for _ in range(2):
    state, _ = served.generate(weights, state)
  again = play(served, weights, [admission(0, REQUESTS[0])], state)
  assert again[0][0] == played[0][0]


def test_jetstreams_own_calls_agree_with_admit(served, played, weights):
  request = REQUESTS[0]
  padded = np.zeros(8, np.int32)
  padded[: len(request.tokens)] = request.tokens
  prefix = served.prefill(
    params=weights,
    padded_tokens=padded,
    true_length=len(request.tokens),
    request=request,
  )
  state = served.insert(prefix, served.init_decode_state(), slot=2)
  _, result = served.generate(weights, state)
  result = result.convert_to_numpy()
  assert result.tokens[2].tolist() == played[0][0][:2]
  assert result.version == 3
  data = result.get_result_at_slot(2)
  assert data.tokens.tolist() == [played[0][0][:2]]
  assert data.valid.tolist() == [[1, 1]]
  assert data.lengths.tolist() == [len(request.tokens) + 2]


def test_released_slots_emit_nothing_and_the_others_go_on(
  served, played, weights
):
  state = served.init_decode_state()
  admissions = [admission(i, r) for i, r in enumerate(REQUESTS)]
  state = served.admit(weights, state, admissions)
  state = served.release(state, [0, 2])
  _, result = served.generate(weights, state)
  result = result.convert_to_numpy()
  assert result.counts.tolist() == [0, 2, 0, 0]
  assert result.tokens[1].tolist() == played[1][0][:2]


def test_more_sequences_than_the_largest_batch_are_all_inserted(weights):
  small = policy_engine(prefill_batches=(1, 2))
  admissions = [
    admission(i, ask(1 + i, index=i, max_tokens=2)) for i in range(4)
  ]
  assert len(play(small, weights, admissions)) == 4


@pytest.mark.parametrize(
  ("sequences", "batches"),
  [(1, (1,)), (8, (8,)), (10, (8, 1, 1)), (29, (32,)), (40, (32, 8))],
)
def test_sequences_are_split_into_batches_with_few_unused_rows(
  sequences, batches
):
  split = prefill.cheapest_splits(64, (1, 8, 32))[sequences]
  assert sorted(split, reverse=True) == list(batches)


def test_H03_a_stop_id_that_is_also_the_pad_id_is_kept():
  served = make_engine()
  weights = served.load_params(script(4, 5, 6, 2))
  request = ask(4, max_tokens=8, stop_ids=(2,))
  tokens, logp, standing = play(served, weights, [admission(0, request)])[0]
  assert tokens == [5, 6, 2]
  assert len(logp) == 3
  assert standing == decoding.STOPPED


def test_H03_without_stop_ids_an_eos_inside_does_not_end_the_answer():
  served = make_engine()
  table = script(3, 5, 2, 6)
  table["table"][6, 2] = 1e4
  request = ask(3, max_tokens=4)
  tokens, logp, standing = play(
    served, served.load_params(table), [admission(1, request)]
  )[1]
  assert tokens == [5, 2, 6, 2]
  assert len(logp) == 4
  assert standing == decoding.EXHAUSTED


def test_H06_any_of_several_stop_ids_ends_the_answer_and_is_kept():
  served = make_engine()
  weights = served.load_params(script(4, 5, 6, 7, 8))
  request = ask(4, max_tokens=8, stop_ids=(2, 7))
  tokens, logp, standing = play(served, weights, [admission(0, request)])[0]
  assert tokens == [5, 6, 7]
  assert len(logp) == 3
  assert standing == decoding.STOPPED


def test_a_stop_id_as_the_last_token_of_the_budget_counts_as_stop():
  served = make_engine()
  weights = served.load_params(script(4, 5, 6))
  request = ask(4, max_tokens=2, stop_ids=(6,))
  assert play(served, weights, [admission(0, request)])[0][2] == (
    decoding.STOPPED
  )


def test_X18_8_members_give_8_answers_the_same_on_another_slot_count():
  answers = []
  for slots in (8, 3):
    config = engine.Config(
      slots=slots,
      context_length=32,
      prefill_buckets=(4,),
      prefill_batches=(slots,),
      steps_per_dispatch=4,
    )
    served = make_engine(config, vocab_size=1000)
    weights = served.load_params(uniform(1000))
    members = [ask(1, member=m, max_tokens=20) for m in range(8)]
    answer = {}
    for first in range(0, 8, slots):
      batch = members[first : first + slots]
      result = play(
        served, weights, [admission(i, r) for i, r in enumerate(batch)]
      )
      answer |= {first + i: tuple(result[i][0]) for i in result}
    answers.append(answer)
  assert answers[0] == answers[1]
  assert len(set(answers[0].values())) == 8
  assert {len(a) for a in answers[0].values()} == {20}


@pytest.mark.parametrize(("length", "bucket"), [(4, 4), (5, 8), (16, 16)])
def test_H13_a_prompt_goes_to_the_smallest_bucket_that_holds_it(length, bucket):
  assert CONFIG.bucket(length) == bucket


def test_H13_17_tokens_are_refused_by_a_largest_bucket_of_16():
  served = make_engine(dataclasses.replace(CONFIG, context_length=32))
  served.check_request(ask(*[1] * 16))
  with pytest.raises(ValueError, match=r"17 tokens.*16"):
    served.check_request(ask(*[1] * 17))


def test_H13_the_limit_is_on_the_true_length_not_on_the_bucket():
  config = dataclasses.replace(CONFIG, context_length=7, prefill_buckets=(4, 8))
  served = make_engine(config)
  served.check_request(ask(*[1] * 6))
  with pytest.raises(ValueError, match=r"7 tokens.*6"):
    served.check_request(ask(*[1] * 7))


@pytest.mark.parametrize(
  ("request_", "message"),
  [
    (ask(), r"P >= 1"),
    (ask(1, 16), r"16.*\[0, 16\)"),
    (ask(-1), r"-1"),
    (ask(1, stop_ids=(1, 2, 3, 4, 5)), r"5 stop ids.*4"),
    (ask(1, index=-1), r"prompt_index is -1"),
    (ask(1, seed=2**32), r"seed is"),
  ],
)
def test_requests_that_cannot_be_served_are_refused(request_, message):
  with pytest.raises(ValueError, match=message):
    make_engine().check_request(request_)


def test_X09_weights_that_stayed_on_other_devices_are_refused(served):
  elsewhere = sharding.make_mesh(sharding.MeshShape(), jax.devices()[1:])
  moved = policy_engine(elsewhere).load_params(INIT(jax.random.key(0)))
  with pytest.raises(ValueError, match="it must be at .* load_params"):
    served.check_params(moved.params)


def test_weights_as_the_learner_holds_them_are_not_served(served, initial):
  with pytest.raises(ValueError, match="lay them out with load_params"):
    served.check_params(initial)


def test_H15_weights_of_another_model_are_refused(served, weights):
  renamed = dict(weights.params)
  renamed["head"] = renamed.pop("embedding")
  with pytest.raises(ValueError, match="named"):
    served.check_params(renamed)
  cut = weights.params | {"embedding": weights.params["embedding"][:8]}
  with pytest.raises(ValueError, match=r"embedding.*\(8, 16\).*\(64, 16\)"):
    served.check_params(cut)


def test_loaded_weights_survive_the_death_of_their_source(served):
  source = INIT(jax.random.key(5))
  loaded = served.load_params(source)
  jax.tree.map(lambda leaf: leaf.delete(), source)
  assert np.isfinite(np.asarray(loaded.params["embedding"])).all()


def compiled(caplog, work):
  """What the engine's programs compiled during `work`."""
  caplog.clear()
  with jax.log_compiles(), caplog.at_level(logging.WARNING):
    work()
  names = ("jit(admit)", "jit(decode)", "jit(release)")
  return [
    record.getMessage()
    for record in caplog.records
    if "Compiling" in record.getMessage()
    and any(name in record.getMessage() for name in names)
  ]


def test_warm_up_leaves_nothing_to_compile(caplog):
  # No other test has an engine of this size, whose programs it would share.
  served = policy_engine(slots=3, prefill_batches=(1, 2, 3))
  weights = served.load_params(INIT(jax.random.key(0)))
  state = served.init_decode_state()

  def warm():
    nonlocal state
    state = served.warm_up(weights, state)

  def serve():
    started = served.admit(weights, state, [admission(1, REQUESTS[0])])
    going, _ = served.generate(weights, started)
    freed = served.release(going, [1])
    served.generate(VersionedParams(version=1, params=weights.params), freed)

  assert len(compiled(caplog, warm)) >= 9 + 2
  assert compiled(caplog, serve) == []


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("slots", 0),
    ("context_length", 1),
    ("steps_per_dispatch", 0),
    ("behavior_top_k", -1),
    ("prefill_buckets", (8, 4)),
    ("prefill_batches", ()),
  ],
)
def test_a_bad_size_is_refused_by_name(field, value):
  with pytest.raises(ValueError, match=field):
    dataclasses.replace(CONFIG, **{field: value})


def test_slots_that_do_not_divide_over_the_mesh_are_refused():
  mesh = sharding.make_mesh(sharding.MeshShape(data=2), jax.devices())
  with pytest.raises(ValueError, match=r"slots is 3.*multiple of 2"):
    policy_engine(mesh, slots=3)


def test_a_head_larger_than_the_vocabulary_is_refused():
  policy_engine(behavior_top_k=64)
  with pytest.raises(ValueError, match=r"behavior_top_k is 65.*at most.*64"):
    policy_engine(behavior_top_k=65)


def test_a_head_changes_no_sample_and_costs_nothing_where_none_is_kept(
  played, weights
):
  keeping = policy_engine(behavior_top_k=3)
  admissions = [admission(i, r) for i, r in enumerate(REQUESTS)]
  assert play(keeping, weights, admissions) == played
  for served, width in ((keeping, 3), (policy_engine(), 0)):
    state = served.admit(weights, served.init_decode_state(), admissions)
    _, result = served.generate(weights, state)
    result = result.convert_to_numpy()
    assert result.data.dtype == np.int32
    assert result.data.shape == (4, 3 * 2 + 2 * 2 * width + 2)
    assert result.topk_ids.shape == result.topk_logp.shape == (4, 2, width)


def test_a_2x2_mesh_keeps_the_head_that_one_device_keeps(initial):
  mesh = sharding.make_mesh(sharding.MeshShape(fsdp=2, tensor=2), jax.devices())
  results = []
  for where in (None, mesh):
    served = policy_engine(where, behavior_top_k=5, prefill_batches=(4,))
    moved = served.load_params(initial)
    admissions = [admission(i, r) for i, r in enumerate(REQUESTS)]
    state = served.admit(moved, served.init_decode_state(), admissions)
    results.append(served.generate(moved, state)[1].convert_to_numpy())
  one, spread = results
  np.testing.assert_array_equal(one.topk_ids[:3], spread.topk_ids[:3])
  np.testing.assert_allclose(one.topk_logp[:3], spread.topk_logp[:3], atol=1e-5)


def test_entries_are_appended_alike_with_and_without_a_tpu(monkeypatch):
  """TPUs choose, other devices scatter; what was there before stays."""
  rng = np.random.default_rng(0)
  starts, counts = np.array([0, 3, 6, 2]), np.array([3, 2, 3, 0])
  for axis, entry in ((4, (5, 8)), (3, (8, 5))):
    cache = rng.normal(size=(2, 4, 3, *entry)).astype(np.float32)
    step = (5, 3) if axis == 4 else (3, 5)
    new = rng.normal(size=(2, 4, 3, *step)).astype(np.float32)
    appended = []
    for on_tpu in (False, True):
      monkeypatch.setattr(sharding, "on_tpu", lambda answer=on_tpu: answer)
      appended.append(decoding._append(cache, new, starts, counts, axis))
    np.testing.assert_array_equal(*appended)
    for slot in range(4):
      for n in range(counts[slot]):
        if starts[slot] + n < 8:
          np.testing.assert_array_equal(
            appended[0][:, slot].take(starts[slot] + n, axis - 1),
            new[:, slot].take(n, axis - 1),
          )
    np.testing.assert_array_equal(appended[0][:, 3], cache[:, 3])
