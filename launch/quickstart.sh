#!/usr/bin/env bash
# Installs what is needed and trains the quickstart: a small language model
# learns to spell words backward by asynchronous RL, on two CPU cores.
# Arguments go to the training command, for example --config.seed=1.
source "$(dirname "$0")/venv.sh"
exec .venv/bin/python -m rl_tpu train --config=experiments/quickstart.py "$@"
