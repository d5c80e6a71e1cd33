"""What a page of the documentation asks its reader to do.

A fenced block of `python` after `<!-- file: PATH -->` is a file to write. A
block indented by four or more, or a fenced one of `bash`, holds commands. What
else is indented must be named in `PROSE`, so that no command passes for text.
"""

import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADS = ("bash", "curl", "head", "python", "sed", ".venv/bin/python")
"""First words of commands."""
PROSE = (
  "accepted + running <",
  "5>    4 <stop>",
)
"""How indented blocks begin that are no commands."""
ELSEWHERE = {"launch/README.md": "tests/launch"}
"""Pages whose commands another test rehearses, and which."""
FOLDERS = ("docs", "experiments", "launch", "notebooks", "rl_tpu", "tests")
_FILE = re.compile(r"<!-- file: (\S+) -->")
_FENCE = re.compile(r"```(\w*)$")


@dataclasses.dataclass(frozen=True)
class File:
  """To be written before what follows."""

  path: str
  text: str


@dataclasses.dataclass(frozen=True)
class Command:
  """To be run, on one line, without a comment."""

  text: str


def documents() -> list[str]:
  """The paths of all pages but those of ELSEWHERE."""
  found = [path for name in FOLDERS for path in (ROOT / name).rglob("*.md")]
  names = sorted(str(path.relative_to(ROOT)) for path in found)
  return ["README.md", *(name for name in names if name not in ELSEWHERE)]


def read(path: str) -> str:
  return (ROOT / path).read_text()


def steps(text: str) -> list[File | Command]:
  """Files and commands, in the page's order.

  Raises:
    ValueError: an indented block is neither commands nor in PROSE.
  """
  found: list[File | Command] = []
  lines, at, named = text.splitlines(), 0, None
  while at < len(lines):
    if fence := _FENCE.match(lines[at].strip()):
      end = next(
        i for i in range(at + 1, len(lines)) if lines[i].strip() == "```"
      )
      block = [line for line in lines[at + 1 : end]]
      if named:
        found.append(File(named, "\n".join(block) + "\n"))
      elif fence[1] in ("bash", "sh"):
        found += commands(block)
      elif fence[1] not in ("", "mermaid"):
        raise ValueError(f"a block of {fence[1]} is not preceded by its file")
      at, named = end + 1, None
      continue
    if file := _FILE.match(lines[at]):
      named = file[1]
    begins = at == 0 or not lines[at - 1].strip()
    if begins and re.match(r" {4}", lines[at]):
      end = at
      while end < len(lines) and lines[end].strip():
        end += 1
      block = [line.strip() for line in lines[at:end]]
      if not block[0].startswith(PROSE):
        found += commands(block)
      at = end
      continue
    at += 1
  return found


def commands(block: list[str]) -> list[Command]:
  """The commands of a block's lines; a backslash joins two lines.

  Raises:
    ValueError: a line begins with none of HEADS.
  """
  whole = re.sub(r"\\\n\s*", "", "\n".join(block)).splitlines()
  found = [Command(re.sub(r"\s+# .*$", "", line)) for line in whole]
  for command in found:
    if command.text.split()[0] not in HEADS:
      raise ValueError(
        f"{command.text!r} begins with none of {HEADS}, nor as text in PROSE"
      )
  return found
