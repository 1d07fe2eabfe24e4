#!/usr/bin/env bash
# Train on several machines: start the same command on each of them, in any order.
# Usage: launch/multinode.sh HOST:PORT NODES DEVICES key=value ...
#   HOST:PORT  where they meet: one of the machines, which must stay, and a free port there
#   NODES      number of machines, or MIN:MAX
#   DEVICES    devices, and processes, of each machine
# RESTARTS (default 10) is the number of failures on a machine after which it gives up. Exit codes as of tabicl-train.
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" ""
[[ $# -ge 3 && $2 =~ ^[0-9]+(:[0-9]+)?$ && $3 =~ ^[0-9]+$ ]] ||
    { sed -n 's/^# Usage: /usage: /p' launch/multinode.sh >&2; exit 2; }
endpoint=$1 nodes=$2 devices=$3 && shift 3
case " $*" in *" trainer.nodes="* | *" trainer.devices="*)
    echo "error: leave out trainer.nodes and trainer.devices; they are the second and third argument" >&2 && exit 2 ;;
esac
# Shared, torchrun's store stays where the first rank was at the start, for all machines that were there: they would
# wait for a lost machine.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Machines with other settings stay apart, and so do runs of one machine each, which all call it localhost: a run takes
# over the folder from one of its own name. torchrun uses the name in those of folders.
host=""
case $endpoint in localhost* | 127.*) host=$(uname -n) ;; esac
id=tabicl-$(cksum <<<"$host $endpoint $*" | cut -d " " -f 1)
echo "waiting for $nodes machines at $endpoint, each with this same command" >&2
sizes=(trainer.nodes="${nodes#*:}" trainer.devices="$devices")
. launch/torchrun.sh --nnodes "$nodes" --nproc-per-node "$devices" --max-restarts "${RESTARTS:-10}" \
    --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "$id" --rdzv-conf join_timeout=3600 -- "$@"
