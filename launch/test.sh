#!/usr/bin/env bash
# Installs what is needed and runs every test, two files at a time.
# Arguments go to pytest, for example -m "not slow", or -n 0 for one process.
source "$(dirname "$0")/venv.sh"
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
