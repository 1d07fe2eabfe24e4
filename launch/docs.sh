#!/usr/bin/env bash
# Builds the site in build/docs. Open build/docs/index.html; it needs no internet access. Settings are in docs/conf.py.
# Usage: launch/docs.sh [options of sphinx-build]
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" docs
cd "$project"
python -m sphinx -W --keep-going -q -b html -c launch/docs "$@" . build/docs
echo "written   $project/build/docs/index.html"
