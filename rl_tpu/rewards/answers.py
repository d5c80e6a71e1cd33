r"""Final answers: where they stand in a text, and whether they are right.

One extractor serves training and evaluation. An answer in a box is what the
last closed `\boxed{...}` holds, braces counted, so that \boxed{\frac{1}{2}} is
\frac{1}{2}; a box that is not closed is none. Only what the policy wrote is
looked at, never the prompt.

Two answers are the same if their texts are, and otherwise if Math-Verify says
so (https://github.com/huggingface/Math-Verify, Hugging Face 2025). It may run
for ever on what a policy writes and sets alarms that only a main thread can
have, so its own limits are off: call `math_score` in a process that has some
(`workers.Workers`).
"""

import logging
import re
from typing import Literal

Form = Literal["boxed", "tags", "whole"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def extract(text: str, form: Form) -> str | None:
  r"""Returns the final answer in a text, or None where there is none.

  Args:
    text: what the policy wrote.
    form: `boxed` takes the last \boxed{}; `tags` the last <answer></answer>
      and, where that holds a box, what is in the box; `whole` all of it.
  """
  if form == "whole":
    return text.strip() or None
  if form == "boxed":
    return _last_box(text)
  found = _TAGS.findall(text)
  if not found:
    return None
  return _last_box(found[-1]) or found[-1].strip() or None


def math_score(text: str, truth: str, form: Form) -> float:
  """Returns 1.0 if the text's final answer equals `truth`, else 0.0."""
  answer = extract(text, form)
  if answer is None:
    return 0.0
  if _plain(answer) == _plain(truth):
    return 1.0
  # Its import takes a second, mostly for SymPy.
  import math_verify

  # It warns at every call that its limits are off.
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  right, given = (
    math_verify.parse(f"\\boxed{{{one}}}", parsing_timeout=0)
    for one in (truth, answer)
  )
  return float(math_verify.verify(right, given, timeout_seconds=0))


def voted(text: str, form: Form) -> str | None:
  """Returns the final answer as it is counted in a vote, or None.

  Answers that differ in more than spaces are different votes, also where both
  are right (0.5 and 1/2).
  """
  answer = extract(text, form)
  return None if answer is None else _plain(answer)


def _last_box(text: str) -> str | None:
  for match in reversed(list(_BOX.finditer(text))):
    depth = 1
    for place in range(match.end(), len(text)):
      depth += {"{": 1, "}": -1}.get(text[place], 0)
      if not depth:
        return text[match.end() : place].strip() or None
  return None


def _plain(answer: str) -> str:
  """The text without spaces, dollar signs and a final full stop."""
  return re.sub(r"[\s$]", "", answer).removesuffix(".")
