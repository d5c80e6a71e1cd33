"""Functions that workers run in the tests; some of them misbehave."""

import os
import sys
import time


def double(x):
  return 2 * x


def loads_jax():
  return "jax" in sys.modules


def misbehave(how):
  if how == "hang":
    while True:
      time.sleep(3600)
  if how == "die":
    os._exit(3)
  if how == "raise":
    raise ZeroDivisionError("nought")
  if how == "fill memory":
    return len(bytearray(1 << 34))
  if how == "print":
    print("not an answer")
  return how
