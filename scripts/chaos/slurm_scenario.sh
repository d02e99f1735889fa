#!/usr/bin/env bash
# A SLURM job that is preempted must end with the weights of an uninterrupted one: on a cluster of two
# nodes that this script simulates on one machine.
#
#   scripts/chaos/slurm_scenario.sh    # results: benchmarks/cpu-slurm.json
#
# Needs root on Debian or Ubuntu: apt-get install slurmctld slurmd slurm-client munge. It uses its own
# munge, ports and folder, adds `127.0.0.1 n1 n2` to /etc/hosts while it runs, and stops everything
# that it started.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d /tmp/slurm-scenario.XXXXXX)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
export SLURM_CONF=$work/slurm.conf

options=(
    "data.root=$work/volumes" "data.cache=$work/preprocessed" data.layout.num_cases=8
    "data.layout.size=[16,16,16]" "data.patch_size=[16,16,16]" data.batch_size=1
    data.patches_per_case=2 data.num_workers=1
    trainer.max_steps=60 trainer.accelerator=cpu trainer.enable_progress_bar=false
    memory.estimate=false save_every_seconds=0
)

down() {
    local daemon
    set +e
    for daemon in slurmd.n1 slurmd.n2 ctld munged; do
        [ -e "$work/$daemon.pid" ] && kill "$(cat "$work/$daemon.pid")"
    done
    grep -v '^127.0.0.1 n1 n2$' /etc/hosts >"$work/hosts" && cat "$work/hosts" >/etc/hosts
    echo "the outputs are in $work"
}

up() {
    local host node
    host=$(hostname -s)
    chmod a+x "$work" # munged requires it
    mkdir "$work"/{state,spool.n1,spool.n2}
    head -c 128 /dev/urandom >"$work/munge.key"
    chmod 600 "$work/munge.key"
    munged --socket="$work/munge.socket" --key-file="$work/munge.key" --pid-file="$work/munged.pid" \
        --log-file="$work/munged.log" --seed-file="$work/munge.seed"
    cat >"$SLURM_CONF" <<END
ClusterName=scenario
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=26817
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool.%n
SlurmctldPidFile=$work/ctld.pid
SlurmdPidFile=$work/slurmd.%n.pid
SlurmctldLogFile=$work/ctld.log
SlurmdLogFile=$work/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=10
NodeName=n[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[26821-26822] CPUs=1 State=UNKNOWN
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=60 State=UP
END
    echo "127.0.0.1 n1 n2" >>/etc/hosts
    slurmctld
    for node in n1 n2; do slurmd -N $node; done
    until [ "$(sinfo -h -t idle -o %D)" = 2 ]; do sleep 1; done
}

wait_for() { # SECONDS COMMAND...: repeat a command until it succeeds
    local last=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $last ] || { echo "timed out waiting for: $*" >&2 && return 1; }
        sleep 0.2
    done
}

submit() { sbatch --parsable --nodes=2 "$root/scripts/slurm.sh" "${options[@]}"; }
has_state() { [[ $(scontrol show job "$1" | grep -oP 'JobState=\K\w+') =~ $2 ]]; }

ln -s "$root/train.py" "$work"
cd "$work"
trap down EXIT
up
first=$(submit)
wait_for 300 has_state "$first" COMPLETED
second=$(submit)
wait_for 120 test -e "outputs/$second/checkpoints/best.ckpt" # in its second epoch of ten
scancel --signal=USR1 "$second"
wait_for 60 has_state "$second" PENDING # it requeues itself; SLURM would let it wait for two minutes
# not at once: SLURM would mistake it for the ended run ("Job credential revoked")
wait_for 60 scontrol update "job=$second" StartTime=now+5seconds
wait_for 300 has_state "$second" COMPLETED
weights=$(python -m scripts.compare_checkpoints outputs/{"$first","$second"}/checkpoints/last.ckpt)
said=$(grep -ohE 'interrupted by SIGUSR1 after [0-9]+ steps' "slurm-$second.out" | head -1)
printf '{\n "command": "scripts/chaos/slurm_scenario.sh",\n "weights": "%s",\n "said": "%s"\n}\n' \
    "$weights" "$said" | tee "$root/benchmarks/cpu-slurm.json"
[ "$weights" = identical ]
