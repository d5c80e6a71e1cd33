#!/usr/bin/env bash
# Installs what is needed and runs every test.
# Arguments go to pytest, for example -m "not slow".
source "$(dirname "$0")/venv.sh"
exec .venv/bin/python -m pytest "$@"
