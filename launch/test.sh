#!/usr/bin/env bash
# Checks lint, format, docstrings and types, and runs the tests. Usage: launch/test.sh [all|gpu] [pytest arguments]
# By default it runs every test that a change needs. "all" adds whole demos, comparisons with the tabicl package and
# other long variants; "gpu" runs only the tests that need a GPU.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" test
tier=(-n 2 --dist loadfile)  # the tests of a file share their runs
case "${1:-}" in
    all) tier+=(-m "not gpu and not campaign") && shift ;;
    gpu) tier=(-m gpu) && shift ;;
esac
for argument in "$@"; do  # paths are relative to the current folder of the user
    [[ $argument == /* || ! -e ${argument%%::*} ]] || argument=$PWD/$argument
    tier+=("$argument")
done
cd "$project"
ruff check priors tabicl_train tests launch  # only these folders, since runs/ and others may hold code of users
ruff format --check --quiet priors tabicl_train tests launch
grep -rlZ --include='*.py' '^__all__' priors tabicl_train |  # modules that users import need numpydoc docstrings
    xargs -0 ruff check --select D --config 'lint.pydocstyle.convention="numpy"'
mypy --no-error-summary
export OMP_NUM_THREADS=1  # two test processes share the cores
python -m pytest "${tier[@]}"
