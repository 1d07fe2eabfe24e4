#!/usr/bin/env bash
# The site, in build/docs: open build/docs/index.html, which needs no internet access. Settings are in docs/conf.py.
# Usage: launch/docs.sh [options of sphinx-build]
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" docs
cd "$project"
python -m sphinx -W --keep-going -q -b html -c launch/docs "$@" . build/docs
echo "written   $project/build/docs/index.html"
