#!/usr/bin/env bash
# Run a command beside a SLURM cluster of this machine alone: the real daemons in a temporary folder, without systemd,
# cgroups and accounting. They end with the command.
# Usage, as root: tests/launch/start_slurm.sh [COMMAND ...]    (a shell by default)
#   NODES=2 (default 1): as many nodes, each with all cores. Only the first one's name can be resolved.
#   Debian: apt-get install slurmctld slurmd slurm-client munge
set -euo pipefail
NODES=${NODES:-1}
folder=$(mktemp -d)
chmod 755 "$folder"
mkdir "$folder/state"
host=$(hostname -s)
# All are open at once, so that the ports differ.
mapfile -t ports < <(python3 -c '
import socket, sys
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]) + 1)]
print(*(free.getsockname()[1] for free in sockets), sep="\n")' "$NODES")
cat > "$folder/slurm.conf" <<END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdTimeout=10
ReturnToService=2
MinJobAge=3600
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE OverSubscribe=FORCE:8
END
names=("$host")
for ((number = 2; number <= NODES; number++)); do names+=("$host-$number"); done
for ((index = 0; index < NODES; index++)); do
    echo "NodeName=${names[index]} NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[index + 1]} CPUs=$(nproc) RealMemory=500"
done >> "$folder/slurm.conf"
export SLURM_CONF=$folder/slurm.conf

wait_for() {  # COMMAND ...: until it succeeds, for a minute
    for _ in $(seq 600); do
        "$@" >/dev/null 2>&1 && return
        sleep 0.1
    done
    echo "error: '$*' has failed for a minute; the logs are in $folder" >&2
    return 1
}
are_idle() { [ "$(sinfo --noheader --Node --states=idle | wc -l)" = "$NODES" ]; }
has_no_jobs() { [ -z "$(squeue --noheader)" ]; }
end() {
    trap "" INT TERM
    scancel --user=root --full --signal=KILL || true
    scancel --user=root || true
    wait_for has_no_jobs && rm=yes || rm=no
    for file in "$folder"/slurmd-*.pid "$folder"/slurmctld.pid "$folder"/munged.pid; do
        kill "$(cat "$file")" 2>/dev/null || true  # also a slurmd that a test has started again
    done
    wait
    [ "$rm" = no ] || rm -rf "$folder"
}
trap end EXIT
trap 'exit 1' INT TERM

(umask 077 && head -c 1024 /dev/urandom > "$folder/munge.key")
munged --foreground --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munged.pid" --seed-file="$folder/munge.seed" 2> "$folder/munged.log" &
wait_for test -S "$folder/munge.socket"
slurmctld -D > /dev/null 2>&1 &
for name in "${names[@]}"; do slurmd -D -N "$name" > /dev/null 2>&1 & done
wait_for are_idle
code=0
"${@:-bash}" || code=$?
exit "$code"
