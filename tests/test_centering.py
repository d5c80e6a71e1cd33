"""Score centering: golden numbers, oracles over the vocabulary, identities."""

import json
import math
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_tpu import ops

GOLDEN = json.loads(
  (pathlib.Path(__file__).parent / "golden/score_centering.json").read_text()
)
CORRECTIONS = {
  "none": ("none", 0.0, math.inf),
  "is": ("is", 0.0, math.inf),
  "tis_C2": ("truncate", 0.0, 2.0),
  "tis_0.5_2": ("truncate", 0.5, 2.0),
  "icepop_mis_0.5_5": ("mask", 0.5, 5.0),
  "icepop_gate_0.4_2": ("mask_unit", 0.4, 2.0),
  "ppo_0.8_1.2": ("ppo", 0.8, 1.2),
}
SIGNS = {"alpha": 1.0, "alpha_negative_advantage": -1.0}
every_correction = pytest.mark.parametrize(
  "correction", CORRECTIONS.values(), ids=CORRECTIONS
)


@pytest.fixture(autouse=True)
def double_precision():
  with jax.enable_x64(True):
    yield


def one_token(logp):
  return jnp.asarray(logp, float)[None, None]


def center(target, behavior, correction, advantage=1.0, exact=False):
  """Centering of one token with a head of all the numbers given."""

  def weigh(target_logp, behavior_logp):
    signs = jnp.full((1, 1, 1), advantage)
    return ops.correction_weight(
      target_logp, behavior_logp, *correction, signs, 3.0
    )

  target, behavior = one_token(target), one_token(behavior)
  valid = jnp.ones(target.shape, bool)
  return ops.center(target, behavior, valid, weigh, exact=exact)


def coefficients(target, behavior, *args, **kwargs):
  """The c_v: the term's slopes by the target's logp."""
  term = lambda x: center(x, behavior, *args, **kwargs).term.sum()  # noqa: E731
  return jax.grad(term)(jnp.asarray(target, float))


def logit_slopes(logits, behavior, head, *args, **kwargs):
  """The term's gradient by the logits of the target."""

  def term(logits):
    target = jax.nn.log_softmax(logits)[jnp.asarray(head)]
    return center(target, behavior, *args, **kwargs).term.sum()

  return jax.grad(term)(jnp.asarray(logits, float))


def drift(logits, behavior, correction, advantage):
  """E_q[w s] by the logits, a sum over the vocabulary."""
  target = jax.nn.log_softmax(jnp.asarray(logits, float))
  behavior = jnp.asarray(behavior)
  weight = ops.correction_weight(target, behavior, *correction, advantage, 3.0)
  mass = jnp.exp(behavior) * weight
  return mass - mass.sum() * jnp.exp(target)


def random_logits(size, seed=0, scale=0.7):
  generator = np.random.default_rng(seed)
  target = generator.normal(size=size)
  return target, target + scale * generator.normal(size=size)


def test_the_head_and_its_tail_are_the_golden_ones():
  inputs, expected = GOLDEN["inputs"], GOLDEN["topk"]
  head = jnp.asarray(expected["head"])
  target, behavior = jnp.asarray(inputs["logp"]), jnp.asarray(inputs["logq"])
  made = center(target[head], behavior[head], CORRECTIONS["none"])
  for value, name in (
    (made.head_mass, "q_head_mass"),
    (made.target_head_mass, "p_head_mass"),
    (made.tail_ratio, "rho"),
  ):
    np.testing.assert_allclose(value, [[expected[name]]], rtol=1e-8)
  tail = made.tail_ratio[0, 0] * jnp.exp(target)
  q_hat = tail.at[head].set(jnp.exp(behavior[head]))
  np.testing.assert_allclose(q_hat, expected["qhat"], atol=1e-9)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_of_the_token_taken_are_the_golden_ones(name):
  target, behavior = (
    jnp.asarray(GOLDEN["inputs"][x]) for x in ("logp", "logq")
  )
  for advantage in (1.5, -1.5):
    weight = ops.correction_weight(
      target, behavior, *CORRECTIONS[name], advantage, 3.0
    )
    for token in (0, 1, 4):
      cell = f"A={advantage:+}|y={token}|{name}|uncentered"
      expected = GOLDEN["grads"][cell]["w_y"]
      np.testing.assert_allclose(weight[token], expected, atol=1e-8)


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_coefficients_and_alpha_are_the_golden_ones(name, sign):
  head = jnp.asarray(GOLDEN["topk"]["head"])
  target = jnp.asarray(GOLDEN["inputs"]["logp"])[head]
  behavior = jnp.asarray(GOLDEN["inputs"]["logq"])[head]
  found = coefficients(target, behavior, CORRECTIONS[name], SIGNS[sign])
  if sign == "alpha":
    expected = GOLDEN["topk"]["coeff_head"][name]
    np.testing.assert_allclose(found, expected, atol=1e-9)
  weight = ops.correction_weight(
    target, behavior, *CORRECTIONS[name], SIGNS[sign], 3.0
  )
  alpha = (jnp.exp(behavior) * weight - found) / jnp.exp(target)
  np.testing.assert_allclose(alpha, GOLDEN["topk"][sign][name], atol=1e-8)


@pytest.mark.parametrize(
  ("behavior_tail", "target_tail", "name"),
  [
    (0.0, 0.0, "both_tails_zero_rho"),
    (0.0, 0.1, "q_tail_zero_p_tail_0.1_rho_floored"),
    (0.1, 0.0, "q_tail_0.1_p_tail_zero_rho"),
  ],
)
def test_both_tails_have_a_floor(behavior_tail, target_tail, name):
  target = jnp.log(jnp.array([0.6, 0.4 - target_tail]))
  behavior = jnp.log(jnp.array([0.6, 0.4 - behavior_tail]))
  made = center(target, behavior, CORRECTIONS["none"])
  np.testing.assert_allclose(made.tail_ratio, [[GOLDEN["edge"][name]]])


@pytest.mark.parametrize(
  ("behavior", "target", "tail_ratio", "expected"),
  [
    ([0.6, 0.2], [0.5, 0.25], 0.8, [0.2, 0.0]),
    ([0.5, 0.3], [0.4, 0.4], 1.0, [0.1, -0.1]),
  ],
  ids=["fireworks", "torchtitan"],
)
def test_hand_cases_of_other_implementations(
  behavior, target, tail_ratio, expected
):
  target, behavior = jnp.log(jnp.array([target, behavior]))
  made = center(target, behavior, CORRECTIONS["none"])
  np.testing.assert_allclose(made.tail_ratio, [[tail_ratio]])
  found = coefficients(target, behavior, CORRECTIONS["none"])
  np.testing.assert_allclose(found, expected, atol=1e-12)
  np.testing.assert_allclose(made.coefficients, [[np.abs(expected).sum()]])


@every_correction
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_over_the_whole_vocabulary_it_is_the_scores_mean(correction, advantage):
  logits, sampled = random_logits(7)
  behavior = jax.nn.log_softmax(sampled)
  arguments = correction, advantage
  slopes = logit_slopes(logits, behavior, range(7), *arguments, exact=True)
  expected = drift(logits, behavior, *arguments)
  np.testing.assert_allclose(slopes, expected, atol=1e-12)


@every_correction
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_head_with_a_proportional_tail_is_exact(correction, advantage):
  """61 tokens, a head of 8: against the sum over the vocabulary."""
  logits, sampled = random_logits(61, scale=1.5)
  head = np.argsort(-logits)[:8]  # So that a cap of 2 binds.
  target = jax.nn.log_softmax(logits)
  behavior = jax.nn.log_softmax(sampled)
  mass = jnp.exp(behavior)[head].sum(), jnp.exp(target)[head].sum()
  tail = target + jnp.log((1 - mass[0]) / (1 - mass[1]))
  behavior = tail.at[head].set(behavior[head])
  arguments = correction, advantage
  slopes = logit_slopes(logits, behavior[head], head, *arguments)
  expected = drift(logits, behavior, *arguments)
  np.testing.assert_allclose(slopes, expected, atol=1e-12)
  assert np.abs(expected).max() > 1e-3 or correction[0] == "is"


@every_correction
def test_a_filtered_sampler_is_exact_on_its_support(correction):
  """Four of six tokens can be drawn, and both policies know which."""
  logits, sampled = random_logits(6)
  support = jnp.array([0, 2, 3, 5])
  behavior = jax.nn.log_softmax(jnp.asarray(sampled)[support])
  expected = drift(logits[support], behavior, correction, 1.0)
  for exact in (True, False):
    slopes = logit_slopes(
      logits[support], behavior, range(4), correction, exact=exact
    )
    np.testing.assert_allclose(slopes, expected, atol=1e-6)


def test_importance_sampling_has_nothing_to_center():
  logits, sampled = random_logits(9)
  target = jax.nn.log_softmax(logits)[:4]
  behavior = jax.nn.log_softmax(sampled)[:4]
  found = coefficients(target, behavior, CORRECTIONS["is"])
  np.testing.assert_allclose(found, 0.0, atol=1e-15)


@every_correction
def test_where_the_policies_agree_there_is_nothing_to_center(correction):
  target = jax.nn.log_softmax(random_logits(9)[0])[:4]
  made = center(target, target, correction)
  np.testing.assert_allclose(made.coefficients, 0.0, atol=1e-15)
  np.testing.assert_allclose(made.term, 0.0, atol=1e-15)
  np.testing.assert_allclose(made.tail_ratio, 1.0, rtol=1e-14)


@every_correction
def test_tails_below_the_floor_cost_no_more_than_the_floor(correction):
  target = jnp.array([0.6, 0.4 - 2e-7, 2e-7])
  behavior = jnp.array([0.5, 0.5 - 8e-7, 8e-7])
  logits = jnp.log(target)
  slopes = logit_slopes(logits, jnp.log(behavior)[:2], [0, 1], correction)
  expected = drift(logits, jnp.log(behavior), correction, 1.0)
  np.testing.assert_allclose(slopes, expected, atol=2e-6)


@every_correction
def test_single_precision_keeps_six_digits_of_a_small_head(correction):
  logits, sampled = random_logits(200)
  head = np.argsort(-sampled)[:16]
  behavior = jax.nn.log_softmax(sampled)[head]
  expected = logit_slopes(logits, behavior, head, correction)
  with jax.enable_x64(False):
    slopes = logit_slopes(logits, np.float32(behavior), head, correction)
  assert slopes.dtype == jnp.float32
  np.testing.assert_allclose(slopes, expected, atol=2e-6)


@pytest.mark.parametrize("poison", [np.nan, -np.inf, np.inf, 3.0])
def test_slots_that_are_not_valid_are_never_read(poison):
  target, behavior = np.log([[0.5, 0.2, 0.1], [0.3, 0.3, 0.2]])

  def everything(target, behavior, *valid):
    def term(target):
      made = ops.center(
        target,
        one_token(behavior),
        jnp.array([[valid]]),
        lambda target, behavior: jnp.exp(0.5 * (target - behavior)),
      )
      return made.term.sum(), made

    slopes, made = jax.grad(term, has_aux=True)(one_token(target))
    return jax.tree.map(np.asarray, made), np.asarray(slopes)

  two, two_slopes = everything(target[:2], behavior[:2], True, True)
  assert np.abs(two_slopes).max() > 0.01
  target[2] = behavior[2] = poison
  three, slopes = everything(target, behavior, True, True, False)
  np.testing.assert_array_equal(three, two)
  np.testing.assert_array_equal(slopes[0, 0], [*two_slopes[0, 0], 0.0])
  nothing, slopes = everything(target, behavior, False, False, False)
  assert nothing.term == 0.0 and not np.any(slopes)
  assert nothing.head_mass == 0.0 and nothing.tail_ratio == 1.0


def test_a_slot_counts_on_an_action_with_an_id_and_a_number():
  made = [(7, -0.5, True), (7, -0.5, False), (-1, -0.5, True)]
  made += [(7, -np.inf, True), (7, np.nan, True)]
  ids, logp, mask = (jnp.array([column]) for column in zip(*made, strict=True))
  batch = types.SimpleNamespace(
    behavior_topk_ids=ids[..., None],
    behavior_topk_logp=logp[..., None],
    action_mask=mask,
  )
  slots = ops.head_slots(batch)[0, :, 0]
  assert slots.tolist() == [True, False, False, False, False]


def test_a_target_that_is_no_number_is_not_hidden():
  target, behavior = np.log([[0.5, 0.2], [0.3, 0.3]])
  made = center([np.nan, target[1]], behavior, CORRECTIONS["none"])
  assert np.isnan(made.term)


@every_correction
def test_the_diagnosis_is_what_it_says(correction):
  logits, sampled = random_logits(9)
  target, behavior = jax.nn.log_softmax(logits), jax.nn.log_softmax(sampled)
  head = np.argsort(-sampled)[:4]
  made = center(target[head], behavior[head], correction, -1.0)
  slopes = logit_slopes(logits, behavior[head], head, correction, -1.0)
  np.testing.assert_allclose(made.gradient, [[np.abs(slopes).sum()]])
  p = np.append(np.exp(target[head]), 1 - np.exp(target[head]).sum())
  q = np.append(np.exp(behavior[head]), 1 - np.exp(behavior[head]).sum())
  np.testing.assert_allclose(made.head_kl, [[np.sum(q * np.log(q / p))]])


def test_the_term_by_name_is_the_term_of_its_weight():
  logits, sampled = random_logits(9)
  target = jax.nn.log_softmax(logits)[:4]
  behavior = jax.nn.log_softmax(sampled)[:4]
  for correction in CORRECTIONS.values():
    for advantage in (-2.0, 2.0):
      found = ops.centering_term(
        one_token(target),
        one_token(behavior),
        jnp.ones((1, 1, 4), bool),
        *correction,
        advantages=jnp.full((1, 1), advantage),
        dual_clip=3.0,
      )
      expected = center(target, behavior, correction, advantage).term
      np.testing.assert_array_equal(found, expected)


def test_weights_of_the_ppo_correction_by_hand():
  """Ties do not bind; an advantage of 0 counts as positive."""
  ratios = jnp.log(jnp.array([0.5, 0.75, 1.0, 1.25, 2.0, 4.0]))
  for advantage, dual_clip, expected in (
    (1.0, None, [0.5, 0.75, 1.0, 1.25, 0.0, 0.0]),
    (0.0, 2.0, [0.5, 0.75, 1.0, 1.25, 2.0, 4.0]),
    (-1.0, None, [0.0, 0.75, 1.0, 1.25, 2.0, 4.0]),
    (-1.0, 2.0, [0.0, 0.75, 1.0, 1.25, 2.0, 0.0]),
  ):
    weight = ops.correction_weight(
      ratios, jnp.zeros(6), "ppo", 0.75, 1.25, advantage, dual_clip
    )
    np.testing.assert_allclose(weight, expected, rtol=1e-12)


def test_what_would_broadcast_or_is_unknown_is_refused():
  one, two = jnp.zeros((1, 1, 1)), jnp.zeros((1, 1, 2))
  valid = jnp.ones((1, 1, 2), bool)
  with pytest.raises(ValueError, match=r"\(1, 1, 1\).*must be alike"):
    ops.centering_term(one, two, valid, "none")
  with pytest.raises(
    ValueError, match="advantages of a ppo correction is None"
  ):
    ops.centering_term(two, two, valid, "ppo", 0.8, 1.2)
  with pytest.raises(ValueError, match="'tv'"):
    ops.centering_term(two, two, valid, "tv")
