#!/usr/bin/env bash
# Lint, format, types and tests. Usage: launch/test.sh [fast] [pytest arguments]
# With "fast", only the tests that start no process and train nothing; without it, all but those marked "campaign".
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test
tier=()
if [ "${1:-}" = fast ]; then
    tier=(-m "not slow and not multi_process and not gpu and not campaign") && shift
fi
ruff check priors tabicl_train tests  # only these folders: runs/ and others may hold code of users
ruff format --check --quiet priors tabicl_train tests
mypy --no-error-summary
export OMP_NUM_THREADS=1  # two test processes share the cores
# Compiled loops take 17 CPU seconds, which each test process would spend if it found none on disk.
[ -n "$(find priors -name '*.nbi' -print -quit)" ] || python -c "import priors; priors.prior_names()"
[ -n "$(find tabicl_train -name '*.nbi' -print -quit)" ] ||
    python -c "from tabicl_train.model.kernels import row_cpu, run_cpu"
python -m pytest -n 2 --dist loadfile "${tier[@]}" "$@"  # tests of a file share their runs
