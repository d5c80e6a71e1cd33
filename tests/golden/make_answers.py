"""Writes answers.jsonl: 200 answers, and what Math-Verify itself says of them.

  python tests/golden/make_answers.py

Each is a text with one box, a truth, and the verdict of the reference: its own
`parse` of the whole text, its own time limits, on a main thread. The texts are
made from a seed: right in another form, wrong by a little, malformed.
"""

import json
import pathlib
import random

import math_verify

COUNT = 200


def main() -> None:
  """Writes the file beside this one."""
  rng = random.Random(0)
  lines = []
  for number in range(COUNT):
    truth, answer = MAKERS[number % len(MAKERS)](rng)
    text = rng.choice(WRAPPERS).format(answer)
    gold = math_verify.parse(f"\\boxed{{{truth}}}")
    verdict = math_verify.verify(gold, math_verify.parse(text))
    lines.append({"text": text, "truth": truth, "right": bool(verdict)})
  path = pathlib.Path(__file__).with_name("answers.jsonl")
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))


WRAPPERS = (
  "\\boxed{{{}}}",
  "We add and simplify.\nSo the answer is \\boxed{{{}}}.",
  "Let $x$ be it. Then $\\boxed{{{}}}$",
  "Final answer: $$\\boxed{{{}}}$$ as was to be shown.",
)


def integers(rng):
  n = rng.randint(-999, 9999)
  forms = (f"{n}", f"{n}.0", f"{n:,}", f"+{n}", f"{n + 1}", f"{-n}", f"0{n}")
  return str(n), rng.choice(forms)


def fractions(rng):
  p, q, k = rng.randint(1, 9), rng.randint(2, 9), rng.randint(2, 4)
  forms = (
    f"\\frac{{{p}}}{{{q}}}",
    f"\\frac{{{p * k}}}{{{q * k}}}",
    f"{p}/{q}",
    f"\\dfrac{{{p}}}{{{q}}}",
    f"\\frac{{{q}}}{{{p}}}",
    f"{p / q:.6f}",
    f"-\\frac{{{p}}}{{{q}}}",
  )
  return f"\\frac{{{p}}}{{{q}}}", rng.choice(forms)


def decimals(rng):
  value = rng.randint(1, 999) / rng.choice((4, 8, 10))
  forms = (f"{value}", f"{value:.3f}", f"{value + 0.25}", f"{value * 8}/8")
  return str(value), rng.choice(forms)


def roots(rng):
  a, b = rng.randint(2, 9), rng.choice((2, 3, 5, 7))
  forms = (
    f"{a}\\sqrt{{{b}}}",
    f"\\sqrt{{{a * a * b}}}",
    f"\\sqrt{{{b}}}\\cdot {a}",
    f"{a}\\sqrt{{{b + 1}}}",
    f"\\frac{{{a * b}}}{{\\sqrt{{{b}}}}}",
    f"{a}\\sqrt{b}",
  )
  return f"{a}\\sqrt{{{b}}}", rng.choice(forms)


def polynomials(rng):
  a, b = rng.randint(1, 6), rng.randint(1, 6)
  forms = (
    f"(x+{a})(x+{b})",
    f"x^2+{a + b}x+{a * b}",
    f"x^2+{a * b}+{a + b}x",
    f"x^2+{a + b}x-{a * b}",
    f"(x+{b})(x+{a})",
  )
  return f"x^2+{a + b}x+{a * b}", rng.choice(forms)


def pairs(rng):
  a, b = rng.randint(-9, 9), rng.randint(-9, 9)
  forms = (
    f"({a},{b})",
    f"({a}, {b})",
    f"({b},{a})",
    f"({a},{b},0)",
    f"{a},{b}",
  )
  return f"({a},{b})", rng.choice(forms)


def sets(rng):
  numbers = rng.sample(range(1, 30), 3)
  shuffled = rng.sample(numbers, 3)
  forms = (
    "\\{" + ",".join(map(str, shuffled)) + "\\}",
    "\\{" + ",".join(map(str, numbers)) + "\\}",
    "\\{" + ",".join(map(str, numbers[:2])) + "\\}",
    ",".join(map(str, shuffled)),
  )
  return "\\{" + ",".join(map(str, numbers)) + "\\}", rng.choice(forms)


def intervals(rng):
  a = rng.randint(0, 9)
  b = a + rng.randint(1, 9)
  forms = (f"[{a},{b})", f"({a},{b})", f"[{a}, {b})", f"[{a},{b + 1})")
  return f"[{a},{b})", rng.choice(forms)


def others(rng):
  truth, forms = rng.choice(
    (
      ("50\\%", ("50\\%", "0.5", "\\frac{1}{2}", "50")),
      ("\\pi", ("\\pi", "3.14159", "pi", "2\\pi/2")),
      ("2^{10}", ("1024", "2^{10}", "4^5", "2^{11}")),
      ("\\text{(B)}", ("B", "(B)", "\\text{B}", "C")),
      ("90^\\circ", ("90", "90^\\circ", "90^{\\circ}", "80^\\circ")),
      ("x=3", ("3", "x=3", "x = 3", "y=3")),
      ("1+2i", ("1+2i", "2i+1", "1-2i")),
    )
  )
  return truth, rng.choice(forms)


def malformed(rng):
  n = rng.randint(2, 99)
  forms = (
    "",
    "?",
    f"\\frac{{{n}}}",
    f"{n}{n}",
    f"\\sqrt{{{n}",
    "\\text{no solution}",
    f"{n}++",
    "\\infty",
  )
  return str(n), rng.choice(forms)


MAKERS = (
  integers,
  fractions,
  decimals,
  roots,
  polynomials,
  pairs,
  sets,
  intervals,
  others,
  malformed,
)

if __name__ == "__main__":
  main()
