#!/usr/bin/env bash
# Train on this machine, with a process for each device. Usage: launch/local.sh [DEVICES] key=value ...
# Exit codes as of tabicl-train: 75 when the run has ended early and the same command continues it.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" ""  # without an argument it would see those of this script
devices=${DEVICES:-1}
case ${1:-} in [0-9]*) devices=$1 && shift ;; esac
[ "$devices" -gt 1 ] || exec python -m tabicl_train "$@"
# Its notes are of no interest here, unless there is no such configuration.
configuration=$(python -m tabicl_train "$@" --cfg job --resolve 2>/dev/null) || exec python -m tabicl_train "$@"
run_dir=$(sed -n "s/^run_dir: //p" <<<"$configuration")
started=$(mktemp)
trap 'rm -f "$started"' EXIT
python -m torch.distributed.run --standalone --nproc-per-node "$devices" -m tabicl_train "$@" &
# torchrun passes signals on, and then fails; a shell passes nothing on.
trap 'stopped=1; kill -TERM $!' TERM INT USR1
code=0
wait $! || code=$?
while kill -0 $! 2>/dev/null; do wait $! || code=$?; done
if [ "$run_dir/status.json" -nt "$started" ]; then
    if grep -q '"preempted"' "$run_dir/status.json"; then exit 75; fi
elif [ -n "${stopped:-}" ]; then
    exit 75  # before the run began
fi
exit "$code"
