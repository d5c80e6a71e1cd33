"""Exact arithmetic on text that a policy wrote: parsed, never evaluated.

    expression = term (("+" | "-") term)*
    term       = unary (("*" | "/") unary)*
    unary      = "-" unary | power
    power      = atom ("^" unary)?               also written **
    atom       = integer | "(" expression ")"

A recursive parser over rationals that looks at each character once. Every cost
has a limit: the text's length, how deep it nests, the bits of any number on the
way; an exponent is refused before the power is computed, so 9^9^9 costs
nothing.
"""

import dataclasses
import re
from fractions import Fraction

_TOKEN = re.compile(r"\s*(\*\*|[0-9]+|[-+*/^()])")


class CalculatorError(ValueError):
  """A text that has no value here; the message is fit for an observation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What an expression may cost."""

  length: int = 256
  """Most characters, >= 1."""
  depth: int = 32
  """Most parentheses, signs and powers inside one another, in [1, 100]."""
  exponent: int = 64
  """Largest exponent, on either side of 0, >= 1."""
  bits: int = 1024
  """Largest numerator and denominator on the way, in bits, >= 1."""

  def __post_init__(self):
    for name in ("length", "depth", "exponent", "bits"):
      if getattr(self, name) < 1:
        raise ValueError(
          f"calculator.Limits.{name} is {getattr(self, name)!r}; it must be "
          ">= 1"
        )
    if self.depth > 100:
      raise ValueError(
        f"calculator.Limits.depth is {self.depth}; it must be <= 100, as "
        "Python's stack bears no more"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expression:
  """What a text was found to be."""

  value: Fraction
  """What it is worth."""
  numbers: tuple[int, ...]
  """The integers in it, in order; a sign is none of their business."""
  operators: int
  """Binary operators in it."""


def evaluate(text: str, limits: Limits | None = None) -> Expression:
  """Returns the value of an arithmetic expression, exactly.

  Raises:
    CalculatorError: it is none, divides by zero, or goes beyond the limits.
  """
  limits = limits or Limits()
  if len(text) > limits.length:
    raise CalculatorError(
      f"the expression has {len(text)} characters; at most {limits.length} "
      "are allowed"
    )
  parser = _Parser(_tokens(text), limits)
  value = parser.expression(0)
  if parser.next is not None:
    raise CalculatorError(f"{parser.next!r} was not expected there")
  return Expression(
    value=value, numbers=tuple(parser.numbers), operators=parser.operators
  )


def _tokens(text: str) -> list[str]:
  tokens, place, end = [], 0, len(text.rstrip())
  while place < end:
    match = _TOKEN.match(text, place)
    if match is None:
      raise CalculatorError(
        f"{text[place:end].strip()[:1]!r} is not arithmetic"
      )
    tokens.append(match[1])
    place = match.end()
  return tokens


class _Parser:
  """One pass over the tokens; a method for each rule of the grammar."""

  def __init__(self, tokens: list[str], limits: Limits):
    self._tokens, self._limits = tokens, limits
    self._place = 0
    self.numbers: list[int] = []
    self.operators = 0

  @property
  def next(self) -> str | None:
    """The token to come, or None at the end."""
    if self._place == len(self._tokens):
      return None
    return self._tokens[self._place]

  def expression(self, depth: int) -> Fraction:
    value = self._term(depth)
    while self.next in ("+", "-"):
      operator = self._take_operator()
      other = self._term(depth)
      value = self._bounded(value + other if operator == "+" else value - other)
    return value

  def _term(self, depth: int) -> Fraction:
    value = self._unary(depth)
    while self.next in ("*", "/"):
      operator = self._take_operator()
      other = self._unary(depth)
      if operator == "/" and not other:
        raise CalculatorError("division by zero")
      value = self._bounded(value * other if operator == "*" else value / other)
    return value

  def _unary(self, depth: int) -> Fraction:
    self._check_depth(depth)
    if self.next == "-":
      self._place += 1
      return -self._unary(depth + 1)
    return self._power(depth)

  def _power(self, depth: int) -> Fraction:
    base = self._atom(depth)
    if self.next not in ("^", "**"):
      return base
    self._take_operator()
    exponent = self._unary(depth + 1)
    if exponent.denominator != 1 or abs(exponent) > self._limits.exponent:
      raise CalculatorError(
        "an exponent must be an integer of at most "
        f"{self._limits.exponent} on either side of 0"
      )
    if not base and exponent < 0:
      raise CalculatorError("division by zero")
    # At most `bits` times `exponent` bits, before the check.
    return self._bounded(Fraction(base ** int(exponent)))

  def _atom(self, depth: int) -> Fraction:
    token = self.next
    if token is None:
      raise CalculatorError("the expression ends too early")
    self._place += 1
    if token == "(":
      value = self.expression(depth + 1)
      if self.next != ")":
        raise CalculatorError("a parenthesis is not closed")
      self._place += 1
      return value
    if not token.isdigit():
      raise CalculatorError(f"{token!r} was not expected there")
    # A digit has more than 3 bits; int() refuses very long texts by itself.
    if 3 * (len(token) - 1) > self._limits.bits:
      raise CalculatorError("a number is too large")
    self.numbers.append(int(token))
    return self._bounded(Fraction(int(token)))

  def _take_operator(self) -> str:
    self._place += 1
    self.operators += 1
    return self._tokens[self._place - 1]

  def _check_depth(self, depth: int) -> None:
    if depth > self._limits.depth:
      raise CalculatorError(
        f"the expression nests deeper than {self._limits.depth}"
      )

  def _bounded(self, value: Fraction) -> Fraction:
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    if bits > self._limits.bits:
      raise CalculatorError("a number is too large")
    return value
