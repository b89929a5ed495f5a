#!/bin/bash
#SBATCH --job-name=trl-agents
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-requeue
#SBATCH --signal=B:USR1@300
# Agents of a service that runs elsewhere, for as long as Slurm gives the nodes. A pool (docs/clusters.md) submits such jobs by itself.
#
#   export TRL_SERVICE_URL=http://10.0.0.100:8322 TRL_SERVICE_NODE_TOKEN_FILE=~/.trl-node-token
#   sbatch --nodes=4 --gpus-per-node=8 --time=12:00:00 deploy/slurm/agents.sh
#
# The file of the token has mode 600, and is on every node, as is `trl-remote` (TRL_REMOTE=/path/to/trl-remote). 300 s before the time
# limit, and on `scancel --batch --signal=USR1 ID`, the agents' jobs save and continue on other nodes.
set -euo pipefail
: "${TRL_SERVICE_URL:?set the address of the service as the nodes reach it}"
: "${TRL_SERVICE_NODE_TOKEN_FILE:?set the file with a token of the role node}"
export TRL_REMOTE="${TRL_REMOTE:-trl-remote}"
export TRL_NODE_HOME="${TRL_NODE_HOME:-$HOME/.llama/trl-pool}/$SLURM_JOB_ID"

# Slurm sends a signal to every process of a step, trainings too. So another step signals the agents alone.
leave() {
    srun --overlap --ntasks-per-node=1 bash -c 'kill -USR1 "$(cat "$TRL_NODE_HOME-$SLURM_PROCID/pid")"' || true
}
trap leave USR1
srun --kill-on-bad-exit=0 --ntasks-per-node=1 bash -c '
    umask 077
    home="$TRL_NODE_HOME-$SLURM_PROCID"
    mkdir -p "$home"
    echo $$ > "$home/pid"
    exec "$TRL_REMOTE" agent --name "slurm-$SLURM_JOB_ID-$SLURM_PROCID" --data-dir "$home/agent"
' &
agents=$!
# A signal ends the wait, not the agents.
while kill -0 "$agents" 2>/dev/null; do wait "$agents" || true; done
srun --overlap --ntasks-per-node=1 bash -c 'rm -rf "$TRL_NODE_HOME-$SLURM_PROCID"'
