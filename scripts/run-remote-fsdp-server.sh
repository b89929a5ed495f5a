#!/usr/bin/env bash
# Runs the training service, in the foreground. Arguments go to `trl-remote serve`.
#
#   ./scripts/run-remote-fsdp-server.sh
#
#   TRL_SERVICE_CONFIG    its configuration (default: run_fsdp.yaml beside this directory)
#   TRL_SERVICE_HOST      where it listens (default 127.0.0.1)
#   TRL_SERVICE_PORT      and on which port (default 8322)
#   TRL_SERVICE_DATA_DIR  where jobs and checkpoints go (default ~/.llama/trl-service)
#   TRL_NPROC_PER_NODE    ranks of a job that does not say (default 2; on GPUs each needs one; auto: all of them)
#   TRL_SERVICE_TOKEN     what clients must send; needed beyond the loopback address
set -euo pipefail
here="$PWD"
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

case "${NODE_RANK:-0}" in
    0) ;;
    *)
        echo "run-remote-fsdp-server: NODE_RANK=$NODE_RANK asks for a worker node, and worker nodes are not available yet:" \
            "start the service on one machine, without NODE_RANK." >&2
        exit 2
        ;;
esac

# Not on every start: a changed pyproject.toml must not keep a machine without network from serving.
[ -f .venv/prepare-env.stamp ] && [ -x .venv/bin/python ] || ./scripts/prepare-env.sh

export TRL_SERVICE_CONFIG="${TRL_SERVICE_CONFIG:-$PWD/run_fsdp.yaml}"
case "$TRL_SERVICE_CONFIG" in /* | '~'*) ;; *) TRL_SERVICE_CONFIG="$here/$TRL_SERVICE_CONFIG" ;; esac

exec .venv/bin/python -m llama_stack_provider_trl_remote serve "$@"
