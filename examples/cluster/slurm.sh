#!/bin/bash
# Train on a Ray cluster of this job's nodes. The first argument is a recipe, the others are the command's:
#   sbatch --nodes=2 examples/cluster/slurm.sh recipe.toml run_dir=/shared/runs/one scale.learners=8 scale.engines=8
# Submit it again to continue: --resume starts a run if there is none.
#SBATCH --job-name=agentgym-rl
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --signal=B:TERM@120
set -euo pipefail

port=${RAY_PORT:-6379}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes%%$'\n'*} # not `| head -n 1`, which ends scontrol by a signal
size=(--num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="${SLURM_GPUS_ON_NODE:-0}")
export RAY_ADDRESS="$head:$port"
export RAY_worker_niceness=0
[ -f ~/.ray/auth_token ] && export RAY_AUTH_MODE=token
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not inherit --cpus-per-task since SLURM 22.05

srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
  env -u RAY_ADDRESS ray start --head --port="$port" "${size[@]}" --block &
if [ "$SLURM_NNODES" -gt 1 ]; then
  srun --nodes=$((SLURM_NNODES - 1)) --ntasks-per-node=1 --exclude="$head" --overlap \
    timeout 600 bash -c "until ray health-check --address $RAY_ADDRESS 2>/dev/null; do sleep 1; done" &&
    srun --nodes=$((SLURM_NNODES - 1)) --ntasks-per-node=1 --exclude="$head" --overlap \
      ray start --address="$RAY_ADDRESS" "${size[@]}" --block &
fi

# It waits until all nodes have joined; the line "waiting for the cluster" says what is missing.
agentgym-rl train "$@" --resume scale.address=auto scale.nodes="$SLURM_NNODES" &
train=$!
trap 'kill -TERM $train' TERM # 120 s before the time limit: a checkpoint, status `stopped`
wait $train || true # ended by the signal, perhaps before the run
status=0
wait $train || status=$?
exit $status
