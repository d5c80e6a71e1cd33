# Sourced by the scripts beside it: a virtual environment in .venv with the
# pinned packages. Installing again is skipped while requirements.txt is the same.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3.11}
if ! command -v "$PYTHON" > /dev/null; then
  echo "rl_tpu needs Python 3.11; set PYTHON to its path" >&2
  exit 1
fi
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
if ! cmp -s requirements.txt .venv/installed.txt; then
  echo "installing the packages of requirements.txt into .venv (4.5 GB, minutes)"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    -r requirements.txt
  cp requirements.txt .venv/installed.txt
fi
