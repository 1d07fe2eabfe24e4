# Sourced by the scripts beside it: changes to the project's root and activates .venv there, made and filled if need be.
# Usage: . setup.sh [extra]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=${1:-}
if [ ! -x .venv/bin/python ]; then
    for python in python3 python3.13 python3.12 python3.11 none; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
    done
    [ "$python" != none ] || { echo "Python 3.11 or newer is needed and was not found" >&2; exit 1; }
    "$python" -m venv .venv
fi
# A stamp holds what was installed, and from which folder; the test extra includes everything of the plain install.
wanted=$(cat pyproject.toml launch/constraints.txt <(pwd) | sha256sum)
if [ "$(cat ".venv/installed-$extra" 2>/dev/null || cat .venv/installed-test 2>/dev/null)" != "$wanted" ]; then
    echo "installing into $PWD/.venv ..." >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c launch/constraints.txt -e ".${extra:+[$extra]}"
    echo "$wanted" > ".venv/installed-$extra"
fi
. .venv/bin/activate
