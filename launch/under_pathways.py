"""rl_tpu's command line with the devices of a Pathways cluster.

  python -m launch.under_pathways train --config=FILE ...

Whoever starts it says where the cluster is: JAX_PLATFORMS=proxy and
JAX_BACKEND_TARGET, as XPK sets them. JAX knows the platform `proxy` only once
`pathwaysutils`, which the image has, registered it.
"""

import importlib
import sys

from rl_tpu import __main__ as command_line


def main(arguments: list[str]) -> int:
  """Runs one command; returns the exit code."""
  try:
    # Of the image alone: on other machines there is no use for it.
    importlib.import_module("pathwaysutils").initialize()
  except ImportError as error:
    print(f"launch: {error}; launch/Containerfile installs it", file=sys.stderr)
    return 1
  return command_line.main(arguments)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
