"""The way back, tried by a generator before a run needs it.

A trainer says where its weights would come from, an address or a path, and a
word that stands there meanwhile. Finding another word is as wrong as finding
nothing: it is somebody else's port, or a directory of the same name elsewhere.
"""

import asyncio
import pathlib

_LONGEST_WORD = 256


async def reach(address: str, word: str, timeout_seconds: float) -> str:
  """What is wrong with an address, host:port, that should say a word.

  Returns:
    "" if nothing is, or if no address is given.
  """
  if not address:
    return ""
  host, _, port = address.rpartition(":")
  try:
    async with asyncio.timeout(timeout_seconds):
      reader, writer = await asyncio.open_connection(host.strip("[]"), port)
      try:
        line = await reader.read(_LONGEST_WORD)
      finally:
        writer.close()
  except TimeoutError:
    return f"{address} does not answer within {timeout_seconds:g} s"
  except OSError as error:
    return f"{address} cannot be reached: {error}"
  return "" if line == word.encode() else f"{address} is another process"


def read(path: str, word: str) -> str:
  """What is wrong with a file that should hold a word.

  Returns:
    "" if nothing is, or if no path is given.
  """
  if not path:
    return ""
  try:
    with pathlib.Path(path).open("rb") as file:
      found = file.read(_LONGEST_WORD)
  except OSError as error:
    return f"{path} cannot be read: {error}"
  return "" if found == word.encode() else f"{path} is another file"
