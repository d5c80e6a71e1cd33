"""The calculator: exact, and cheap whatever it is given."""

import ast
import operator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_tpu.tools.calculator import CalculatorError, Limits, evaluate


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("37*48", 1776),
    (" 1 + 2*3 ", 7),
    ("10-4-3", 3),
    ("100/10/5", 2),
    ("7/2", Fraction(7, 2)),
    ("-2^2", -4),
    ("(-2)^2", 4),
    ("2^3^2", 512),
    ("2**-1", Fraction(1, 2)),
    ("--3", 3),
    ("2*-3", -6),
    ("007", 7),
  ],
)
def test_an_expression_has_its_exact_value(text, value):
  assert evaluate(text).value == value


OPERATORS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
}


def oracle(node):
  if isinstance(node, ast.BinOp):
    return OPERATORS[type(node.op)](oracle(node.left), oracle(node.right))
  if isinstance(node, ast.UnaryOp):
    return -oracle(node.operand)
  return Fraction(node.value)


@settings(max_examples=200, deadline=None)
@given(
  st.recursive(
    st.integers(0, 99).map(str),
    lambda part: st.one_of(
      st.tuples(part, st.sampled_from("+-*/"), part).map("".join),
      part.map("({})".format),
      part.map("-{}".format),
    ),
    max_leaves=8,
  )
)
def test_it_agrees_with_pythons_grammar(text):
  try:
    expected = oracle(ast.parse(text, mode="eval").body)
  except ZeroDivisionError:
    with pytest.raises(CalculatorError, match="division by zero"):
      evaluate(text)
    return
  assert evaluate(text).value == expected


def test_it_says_what_the_expression_was_made_of():
  found = evaluate("(3-10)*12/-3")
  assert found.numbers == (3, 10, 12, 3)
  assert found.operators == 3


@pytest.mark.parametrize(
  ("text", "why"),
  [
    ("", "ends too early"),
    ("1+", "ends too early"),
    ("(1", "not closed"),
    ("1 2", "'2' was not expected"),
    ("1)", r"'\)' was not expected"),
    ("*1", r"'\*' was not expected"),
    ("1/0", "division by zero"),
    ("0^-1", "division by zero"),
    ("1/(2-2)", "division by zero"),
    ("__import__('os')", "'_' is not arithmetic"),
    ("1.5", "'.' is not arithmetic"),
    ("1e9", "'e' is not arithmetic"),
    ("٣+١", "is not arithmetic"),
    ("1;2", "';' is not arithmetic"),
    ("\ud800", "is not arithmetic"),
    ("9^9^9", "exponent"),
    ("2^(1/2)", "exponent"),
    ("9^64^1*9^64*9^64*9^64*9^64*9^64", "too large"),
    ("(2^64)^64", "too large"),
    ("9" * 256, "too large|characters"),
    ("1+" * 200 + "1", "401 characters"),
    ("(" * 60 + "1" + ")" * 60, "deeper than 32"),
    ("-" * 200 + "1", "deeper than 32"),
    ("2" + "^1" * 100, "deeper than 32"),
  ],
)
def test_what_has_no_value_or_costs_too_much_is_refused_with_a_reason(
  text, why
):
  with pytest.raises(CalculatorError, match=why):
    evaluate(text, Limits(bits=512))


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("0123456789+-*/^() "), max_size=80))
def test_no_text_does_more_than_be_refused(text):
  try:
    value = evaluate(text, Limits(bits=128)).value
  except CalculatorError:
    return
  assert value.numerator.bit_length() <= 128


@pytest.mark.parametrize("field", ["length", "depth", "exponent", "bits"])
def test_limits_out_of_range_are_refused(field):
  with pytest.raises(ValueError, match=f"Limits.{field} is 0"):
    Limits(**{field: 0})
  with pytest.raises(ValueError, match="depth is 1000"):
    Limits(depth=1000)
