#!/usr/bin/env bash
# Train as a SLURM job that requeues itself when it is preempted or its time limit is near. Start it in the
# folder that outputs/ should be in, with the settings of `unet3d train`:
#
#   sbatch --gpus-per-node=1 scripts/slurm.sh data=decathlon data.root=/scans/Task04_Hippocampus
#   sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --time=4:00:00 scripts/slurm.sh ...
#
# Edit first, or give sbatch as options: the lines that begin with ##SBATCH (remove one #), and the partition and
# the account if your cluster needs them. Activate the environment of unet3d before, or set UNET3D (see below).
# Request one task per GPU. The run is in outputs/JOB. After an error, `scontrol requeue JOB` resumes it;
# when SLURM no longer knows the job, submit a new one with output=outputs/JOB.
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

read -ra program <<<"${UNET3D:-unet3d}" # for an image: UNET3D="apptainer run --nv unet3d.sif"
train=("${program[@]}" train)
command -v "${program[0]}" >/dev/null || train=(python train.py) # a checkout that is not installed
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun 22.05 and later read only this one
fi

# With --kill-on-bad-exit, a rank that fails or hangs makes SLURM end the others with SIGTERM. So the
# exit code cannot tell whether the job was asked to stop; a file that the SIGUSR1 trap writes does.
stop_file=slurm-$SLURM_JOB_ID.stop
rm -f "$stop_file"
code=0
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c 'trap "touch $0" USR1; trap : TERM; "$@"; exit' "$stop_file" \
    "${train[@]}" trainer=slurm "output=outputs/$SLURM_JOB_ID" resume=auto "$@" || code=$?

if [ "$code" != 0 ] && [ -e "$stop_file" ]; then
    rm "$stop_file"
    echo "job $SLURM_JOB_ID was asked to stop; it is requeued and will resume"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
