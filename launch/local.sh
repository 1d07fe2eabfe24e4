#!/usr/bin/env bash
# Train on this machine, with a process for each device. Usage: launch/local.sh [DEVICES] key=value ...
# Exit codes as of tabicl-train: 75 when the run has ended early and the same command continues it.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" ""  # without an argument it would see those of this script
devices=1
if [[ ${1:-} =~ ^[0-9]+$ ]]; then devices=$1 && shift; fi
[ "$devices" -gt 1 ] || exec python -m tabicl_train "$@"
sizes=(trainer.devices="$devices")
. launch/torchrun.sh --standalone --nproc-per-node "$devices" -- "$@"
