# Sourced by the scripts in this folder. It activates .venv in the project's folder, $project, and makes and fills it if
# needed. The current folder stays that of the user.
# Usage: . setup.sh [extra]
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extra=${1:-}
if [ ! -x "$project/.venv/bin/python" ]; then
    for python in python3 python3.13 python3.12 python3.11 none; do
        "$python" -Pc 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
    done
    [ "$python" != none ] || { echo "Python 3.11 or newer is needed and was not found" >&2; exit 1; }
    "$python" -P -m venv "$project/.venv"
fi
# A stamp records what was installed and from which folder. The test extra includes the plain install.
stamp=$project/.venv/installed-
wanted=$(cd "$project" && cat pyproject.toml launch/constraints.txt <(pwd) | sha256sum)
installed=$(cat "$stamp$extra" 2>/dev/null || true)
[ -n "$extra$installed" ] || installed=$(cat "${stamp}test" 2>/dev/null || true)
if [ "$installed" != "$wanted" ]; then
    echo "installing tabicl-train${extra:+[$extra]}, torch and other dependencies into $project/.venv; 2 to 8 GB, a few minutes" >&2
    "$project/.venv/bin/python" -P -m pip install --quiet --disable-pip-version-check \
        -c "$project/launch/constraints.txt" -e "$project${extra:+[$extra]}"
    echo "$wanted" > "$stamp$extra"
fi
. "$project/.venv/bin/activate"
# Compile the loops of the priors, which takes 30 to 40 CPU seconds, so that no process of a run or of tests has to.
[ -n "$(find "$project/priors" -name '*.nbi' -print -quit)" ] ||
    python -P -c "import priors.boosting, priors.graph.nodes, priors.predictability"
