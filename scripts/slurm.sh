#!/usr/bin/env bash
# Train as a SLURM job that goes on by itself when it was preempted or its time was up:
#
#   sbatch scripts/slurm.sh data=decathlon data.root=/scans/Task04_Hippocampus model=unet_small
#   sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --time=4:00:00 scripts/slurm.sh ...
#
# One task for each GPU. The run lies in outputs/JOB; after a fault `scontrol requeue JOB` goes on
# with it, and so does, once SLURM has forgotten that job, a new one with hydra.run.dir=outputs/JOB.
#
#SBATCH --job-name=unet3d
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
##SBATCH --gpus-per-node=1
##SBATCH --cpus-per-task=8
##SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120
set -eu

read -ra program <<<"${UNET3D:-unet3d}" # UNET3D="apptainer run --nv unet3d.sif": an image
train=("${program[@]}" train)
command -v "${program[0]}" >/dev/null || train=(python train.py) # a checkout
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun 22.05 and later look for it here only
fi

# --kill-on-bad-exit: a rank that has gone, or hangs, ends the others by SIGTERM, so that it is not
# the exit code that tells who was asked to stop, but SIGUSR1.
asked=slurm-$SLURM_JOB_ID.asked
rm -f "$asked"
code=0
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c 'trap "touch $0" USR1; trap : TERM; "$@"; exit' "$asked" \
    "${train[@]}" trainer=slurm "hydra.run.dir=outputs/$SLURM_JOB_ID" resume=auto "$@" || code=$?

if [ "$code" != 0 ] && [ -e "$asked" ]; then
    rm "$asked"
    echo "job $SLURM_JOB_ID was asked to stop: it waits in the queue to go on"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
