#!/usr/bin/env bash
# Lint and tests. Usage: launch/test.sh [pytest arguments]
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test
ruff check priors tabicl_train tests  # other folders are not ours to judge
export OMP_NUM_THREADS=1  # two test processes share the cores
python -m pytest -n 2 "$@"
