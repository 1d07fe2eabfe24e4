# Sourced by local.sh and multinode.sh, after setup.sh: starts torchrun, and ends as the run did. torchrun's own exit
# code does not tell an interrupted run from a failed one.
# Usage: sizes=(SETTINGS); . torchrun.sh OPTIONS OF TORCHRUN -- key=value ...
#   sizes: settings of trainer.devices and trainer.nodes, with which the configuration is checked first
options=()
while [ "$1" != -- ]; do options+=("$1") && shift; done
shift
[ $# -gt 0 ] || exec python -m tabicl_train  # which says what is missing
case " $* " in *" -m "* | *" --multirun "*)
    echo "error: a sweep starts the processes of its jobs itself: use tabicl-train -m" >&2 && exit 2 ;;
esac
# All errors at once, for the largest number of processes; each restart would repeat them.
configuration=$(python -m tabicl_train "$@" "${sizes[@]}" --cfg job --resolve 2>/dev/null) ||
    exec python -m tabicl_train "$@" "${sizes[@]}" --cfg job
run_dir=$(python -c 'import sys, yaml; print(yaml.safe_load(sys.stdin)["run_dir"])' <<<"$configuration")
started=$(mktemp)
trap 'rm -f "$started"' EXIT
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}  # seconds for the last step and its checkpoint
python -m torch.distributed.run "${options[@]}" -m tabicl_train "$@" &
# torchrun passes signals on, and then fails; a shell passes nothing on.
trap 'stopped=1; kill -TERM $!' TERM INT USR1
code=0
wait $! || code=$?
while kill -0 $! 2>/dev/null; do wait $! || code=$?; done
if [ "$run_dir/status.json" -nt "$started" ]; then
    if grep -q '"preempted"' "$run_dir/status.json"; then exit 75; fi
    if grep -q '"finished"' "$run_dir/status.json"; then exit 0; fi  # a signal in the last step makes torchrun fail
elif [ -n "${stopped:-}" ]; then
    exit 75  # before the run began
fi
exit "$code"
