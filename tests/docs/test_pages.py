"""Pages say what is so: links, messages, rules, figures."""

import ast
import csv
import math
import pathlib
import re

import pages
import pytest

from rl_tpu import health

ROOT = pages.ROOT


@pytest.mark.parametrize("page", pages.documents())
def test_links_lead_somewhere(page):
  text = re.sub(r"```.*?```", "", pages.read(page), flags=re.DOTALL)
  for target in re.findall(r"\]\(([^)\s]+)\)", text):
    if not target.startswith(("http", "#")):
      path = ROOT / pathlib.Path(page).parent / target.split("#")[0]
      assert path.exists(), target


def test_every_page_is_in_the_index():
  index = pages.read("docs/README.md")
  for path in (ROOT / "docs").glob("*.md"):
    assert path.name == "README.md" or f"]({path.name})" in index, path.name


def strings():
  """All texts in the source but docstrings; what they format is a NUL."""
  found = []
  for path in (ROOT / "rl_tpu").rglob("*.py"):
    tree = ast.parse(path.read_text())
    described = [n.value for n in ast.walk(tree) if isinstance(n, ast.Expr)]
    for node in ast.walk(tree):
      if node in described:
        continue
      if isinstance(node, ast.JoinedStr):
        parts = [getattr(part, "value", None) for part in node.values]
        found.append("".join(p if isinstance(p, str) else "\0" for p in parts))
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found.append(node.value)
  return found + [path.read_text() for path in (ROOT / "launch").glob("*.sh")]


def quoted():
  """The messages of the troubleshooting page: the first column's code."""
  rows = re.findall(
    r"^\| (`.*?) \|", pages.read("docs/troubleshooting.md"), re.MULTILINE
  )
  return [message for row in rows for message in re.findall("`(.*?)`", row)]


def test_messages_are_those_of_the_source():
  known = strings()
  assert len(quoted()) > 35
  for message in quoted():
    parts = [re.escape(part) for part in message.split("...")]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    # A word alone must be all of a text, or it would be found anywhere.
    matches = pattern.search if " " in message else pattern.fullmatch
    assert any(matches(text) for text in known), message


def test_every_rule_of_health_is_explained():
  page = pages.read("docs/collapse.md")
  named = set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))
  source = pathlib.Path(health.__file__).read_text()
  others = set(re.findall(r'rule="(\w+)"', source))
  others |= set(re.findall(r'_Rule\(\s*"(\w+)"', source))
  assert named == others


def test_limits_of_health_are_those_of_the_page():
  page = pages.read("docs/collapse.md")
  for rule in health._RULES:
    for limit in (rule.low, rule.high):
      if math.isfinite(limit) and limit:
        row = rf"^\| `{rule.metric}` \|.*\b{re.escape(str(limit))}\b"
        assert re.search(row, page, re.MULTILINE), (rule.metric, limit)


def test_accuracy_by_staleness_is_that_of_the_runs():
  path = ROOT / "experiments/areal/results/learning_curves.csv"
  with open(path) as file:
    rows = [row for row in csv.DictReader(file) if row["heldout_accuracy"]]
  etas = ("0", "1", "2", "4", "8", "16", "inf")
  table = {}
  for loss in ("naive", "decoupled"):
    means = []
    for eta in etas:
      own = [r for r in rows if (r["loss"], r["eta"]) == (loss, eta)]
      values = [float(r["heldout_accuracy"]) for r in own]
      means.append(f"{sum(values) / len(values):.2f}")
    table[loss] = " | ".join(means)
  page = pages.read("docs/staleness.md")
  assert f"| PPO, clipped around behavior | {table['naive']} |" in page
  assert f"| decoupled PPO | {table['decoupled']} |" in page


PAGE = """
Text.

    python -m x --a=1 \\
      --b=2    # why
    bash y

1. Item.

   more of the item

       head z

    sed w

<!-- file: a/b.py -->
```python
x = 1
```

```mermaid
    bash no
```
"""


def test_a_page_is_read_as_files_and_commands():
  assert pages.steps(PAGE) == [
    pages.Command("python -m x --a=1 --b=2"),
    pages.Command("bash y"),
    pages.Command("head z"),
    pages.Command("sed w"),
    pages.File("a/b.py", "x = 1\n"),
  ]


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("a\n\n    docker run it\n", "'docker run it' begins with none of"),
    ("```python\nx\n```\n", "not preceded by its file"),
    ("```bash\nkubectl\n```\n", "'kubectl' begins with none of"),
  ],
)
def test_what_cannot_be_followed_is_refused(text, message):
  with pytest.raises(ValueError, match=message):
    pages.steps(text)
