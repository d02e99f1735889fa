#!/usr/bin/env bash
# Runs that are preempted, or whose ranks die or hang, must end with the weights of an uninterrupted
# run: under torchrun, and on a SLURM cluster of two nodes that this script simulates on one machine.
#
#   scripts/chaos/slurm_scenario.sh [torchrun] [slurm]     # default: both; takes ten minutes
#
# The SLURM part needs root on Debian or Ubuntu: apt-get install slurmctld slurmd slurm-client munge.
# It uses its own munge, ports and folder, adds `127.0.0.1 n1 n2` to /etc/hosts while it runs, and
# stops everything that it started. Results: benchmarks/cpu-slurm.json
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d /tmp/slurm-scenario.XXXXXX)
scenes=("$@")
[ $# -gt 0 ] || scenes=(torchrun slurm)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
export SLURM_CONF=$work/slurm.conf SCENARIO=$work

options=(
    "data.root=$work/volumes, small" "data.cache=$work/preprocessed" data.layout.num_cases=8
    "data.layout.size=[16,16,16]" "data.patch_size=[16,16,16]" data.batch_size=1
    data.patches_per_case=2 data.num_workers=1
    trainer.max_steps=60 trainer.accelerator=cpu trainer.enable_progress_bar=false
    trainer.timeout_seconds=10 memory.estimate=false save_every_seconds=0
)

down() {
    local daemon
    set +e
    if [ -e "$work/ctld.pid" ]; then
        scancel --user root 2>/dev/null
        sleep 3
    fi
    for daemon in slurmd.n1 slurmd.n2 ctld munged; do
        [ -e "$work/$daemon.pid" ] && kill "$(cat "$work/$daemon.pid")"
    done
    if grep -q '^127.0.0.1 n1 n2$' /etc/hosts; then
        grep -v '^127.0.0.1 n1 n2$' /etc/hosts >"$work/hosts" && cat "$work/hosts" >/etc/hosts
    fi
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
    grep -q '^127.0.0.1 n1 n2$' /etc/hosts || echo "127.0.0.1 n1 n2" >>/etc/hosts
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

find_rank() { # VARIABLE=VALUE...: print our first process with these variables
    local pid pair
    for pid in $(find /proc -maxdepth 1 -name '[0-9]*' -printf '%f\n' | sort -n); do
        for pair in "SCENARIO=$work" "$@"; do
            tr '\0' '\n' 2>/dev/null <"/proc/$pid/environ" | grep -qxF -- "$pair" || continue 2
        done
        [ "$(cat "/proc/$pid/comm")" = bash ] && continue # the shell that started the rank
        echo "$pid" && return
    done
    echo "no process with $*" >&2 && return 1
}

begin() { # SCENE: start to count its seconds
    echo "--- $*"
    start=$SECONDS
}

end() { # RUN LAUNCHER SCENE MESSAGE: compare with the first run, and record the result
    local weights
    [ -n "${reference:-}" ] || reference=$1
    weights=$(python -m scripts.compare_checkpoints {"$reference","$1"}/checkpoints/last.ckpt)
    printf '%s\t%s\t%s\t%s\t%s\n' "$2" "$3" $((SECONDS - start)) "$weights" "$4" | tee -a rows.tsv
}

first_match() { grep -ahoE "$2" "$1" | head -1; } # FILE PATTERN
is_training() { [ -e "outputs/$1/checkpoints/best.ckpt" ]; } # in its second epoch of ten

torchrun_scenes() {
    local run
    for run in uninterrupted killed; do
        begin "torchrun, $run"
        torchrun --standalone --nproc-per-node 2 --max-restarts 1 train.py \
            trainer=torchrun "hydra.run.dir=outputs/$run" resume=auto "${options[@]}" \
            &>"torchrun-$run.out" &
        if [ $run = killed ]; then
            wait_for 120 is_training $run
            kill -KILL "$(find_rank RANK=1 TORCHELASTIC_RESTART_COUNT=0)"
        fi
        wait $!
        if [ $run = uninterrupted ]; then
            end outputs/uninterrupted torchrun uninterrupted ""
        else
            end outputs/killed torchrun "rank 1 killed" \
                "$(first_match torchrun-killed.out 'rank 1 stopped responding.*')"
        fi
    done
}

submit() { sbatch --parsable --nodes=2 "$root/scripts/slurm.sh" "${options[@]}"; }
state() { scontrol show job "$1" | grep -oP 'JobState=\K\w+'; }
has_state() { [[ $(state "$1") =~ $2 ]]; }
is_over() { has_state "$1" 'COMPLETED|FAILED|CANCELLED|TIMEOUT'; }
start_soon() { # JOB: start a requeued job, which SLURM would let wait for two minutes
    wait_for 60 has_state "$1" PENDING
    # not at once: SLURM would mistake it for the ended run ("Job credential revoked")
    wait_for 60 scontrol update "job=$1" StartTime=now+5seconds
}

finish() { # JOB SCENE MESSAGE
    wait_for 300 is_over "$1"
    has_state "$1" COMPLETED || { tail -20 "slurm-$1.out" && return 1; }
    end "outputs/$1" slurm "$2" "$3"
}

slurm_scenes() {
    local job signal at
    up

    begin "SLURM, two nodes"
    job=$(submit)
    finish "$job" uninterrupted ""

    begin "SLURM, preempted: the job requeues itself"
    job=$(submit)
    wait_for 120 is_training "$job"
    scancel --signal=USR1 "$job"
    start_soon "$job"
    finish "$job" "preempted (USR1)" \
        "$(first_match "slurm-$job.out" 'interrupted by SIGUSR1 after [0-9]+ steps')"

    for signal in KILL STOP; do
        begin "SLURM, rank 1 receives SIG$signal"
        job=$(submit)
        wait_for 120 is_training "$job"
        kill -$signal "$(find_rank "SLURM_JOB_ID=$job" SLURM_PROCID=1 SLURM_STEP_ID=0)"
        at=$SECONDS
        wait_for 60 grep -q "rank 1 stopped responding" "slurm-$job.out"
        at="after $((SECONDS - at)) s"
        wait_for 60 has_state "$job" FAILED
        scontrol requeue "$job"
        start_soon "$job"
        finish "$job" "rank 1 receives SIG$signal" \
            "$at: $(first_match "slurm-$job.out" 'rank 1 stopped responding.*')"
    done
}

ln -s "$root/train.py" "$work"
cd "$work"
trap down EXIT
for scene in "${scenes[@]}"; do "${scene}_scenes"; done

python - "$root" <<'END'
import importlib.metadata
import json
import sys
from pathlib import Path

names = ("launcher", "scene", "seconds", "weights", "said")
rows = [line.split("\t") for line in Path("rows.tsv").read_text().splitlines()]
print(*(f"| {a:9}| {b:20}| {c:>7} | {d:10}| {e}" for a, b, c, d, e in [names, *rows]), sep="\n")
path = Path(sys.argv[1], "benchmarks/cpu-slurm.json")
previous = json.loads(path.read_text())["scenes"] if path.exists() else []
scenes = [scene for scene in previous if scene["launcher"] not in {row[0] for row in rows}]
scenes += [dict(zip(names, row)) | {"seconds": int(row[2])} for row in rows]
result = {
    "command": "scripts/chaos/slurm_scenario.sh",
    "versions": {name: importlib.metadata.version(name) for name in ("torch", "lightning")},
    "scenes": scenes,
}
path.write_text(json.dumps(result, indent=2) + "\n")
sys.exit(any(row[3] != "identical" for row in rows))
END
