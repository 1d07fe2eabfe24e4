#!/usr/bin/env bash
# Trains on several machines with torchrun. Start the same command on each of them, in any order.
# Usage: launch/multinode.sh HOST:PORT NODES RANKS KEY=VALUE ...
#   HOST:PORT  one of the machines, which must stay available, and a free port there
#   NODES      number of machines, or MIN:MAX; a single machine uses its loopback address instead of HOST:PORT
#   RANKS      number of ranks on each machine, one for each GPU
# The variable RESTARTS is the number of failures after which torchrun gives up. Default: 10
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" ""  # without an argument, it would get those of this script
[[ $# -ge 4 && $2 =~ ^[0-9]+(:[0-9]+)?$ && $3 =~ ^[0-9]+$ ]] ||
    { sed -n 's/^# Usage: /usage: /p' "$project/launch/multinode.sh" >&2; exit 2; }
export PYTHONSAFEPATH=1  # like tabicl-train, import nothing from the current folder
endpoint=$1 nodes=$2 ranks=$3 && shift 3
# Report all errors of the configuration once, since torchrun would repeat them at each restart.
errors=$(python -m tabicl_train "$@" --cfg job 2>&1 > /dev/null) || { echo "$errors" >&2; exit 2; }
# With a store that outlives a restart, ranks would find the addresses from before, and wait for the machine of rank 0.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240  # an option of torchrun only from torch 2.12 on
if [ "$nodes" = 1 ]; then  # no other machine has to reach it
    torchrun=(tabicl_train.training.distributed.loopback --rdzv-backend loopback)
else
    torchrun=(torch.distributed.run --rdzv-backend c10d)
fi
# The checksum of the settings keeps machines with different ones apart.
exec python -m "${torchrun[@]}" --rdzv-endpoint "$endpoint" --rdzv-id "tabicl-$(cksum <<< "$*" | cut -d " " -f 1)" \
    --nnodes "$nodes" --nproc-per-node "$ranks" --max-restarts "${RESTARTS:-10}" \
    --rdzv-conf join_timeout=3600 --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU \
    -m tabicl_train "$@"
