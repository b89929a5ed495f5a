#!/usr/bin/env bash
# Runs the training service, in the foreground. Arguments go to `trl-remote serve`.
#
#   ./scripts/run-remote-fsdp-server.sh
#
#   TRL_SERVICE_CONFIG    its configuration (default: run_fsdp.yaml beside this directory)
#   TRL_SERVICE_HOST      where it listens (default 127.0.0.1)
#   TRL_SERVICE_PORT      and on which port (default 8322)
#   TRL_SERVICE_DATA_DIR  where jobs and checkpoints go (default ~/.llama/trl-service)
#   TRL_NPROC_PER_NODE    ranks of a job that does not set it (default auto: one per GPU, 2 without GPUs)
#   TRL_SERVICE_TOKEN     what clients must send; needed beyond the loopback address
#   TRL_SERVICE_MODEL_ROOTS  directories below which a job's model may be a path, with colons between them; beyond the
#                         loopback address only they and checkpoints of jobs are taken (model ids always are)
#
# On another machine it makes that a worker node of the service; arguments go to `trl-remote agent`. docs/tutorials/two-machines.md
#
#   NODE_RANK=1 MASTER_ADDR=10.0.0.100 ./scripts/run-remote-fsdp-server.sh
#
#   MASTER_ADDR             address of the machine that runs the service
#   TRL_SERVICE_PORT        its port (default 8322); TRL_SERVICE_URL in place of both, for https
#   SSL_CERT_FILE           the service's certificate, where no authority has signed it
#   TRL_SERVICE_NODE_TOKEN  a token of the service with the role node (or TRL_SERVICE_TOKEN)
#   TRL_SERVICE_NODE_TOKEN_FILE  in its place: a file of mode 600 that holds the token
#   TRL_NODE_NAME           this machine's name among the nodes (default: its host name)
#   TRL_NODE_ADDRESS        its address for the others (default: the one from which it reaches the service)
#   TRL_NODE_DATA_DIR       where its jobs go (default ~/.llama/trl-node)
set -euo pipefail
here="$PWD"
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

# Given from where the user stands, and read from here.
case "${SSL_CERT_FILE:-/}" in /*) ;; *) export SSL_CERT_FILE="$here/$SSL_CERT_FILE" ;; esac

case "${TRL_SERVICE_NODE_TOKEN_FILE:-/}" in
    /* | '~'*) ;;
    *) export TRL_SERVICE_NODE_TOKEN_FILE="$here/$TRL_SERVICE_NODE_TOKEN_FILE" ;;
esac

case "${NODE_RANK:-0}" in
    *[!0-9]*)
        echo "run-remote-fsdp-server: NODE_RANK='$NODE_RANK' is not a number: 0 (or nothing) is the machine that runs the" \
            "service, 1 and more are worker nodes." >&2
        exit 2
        ;;
esac

# Not on every start: a changed pyproject.toml must not keep a machine without network from serving.
[ -f .venv/prepare-env.stamp ] && [ -x .venv/bin/python ] || ./scripts/prepare-env.sh

case "${NODE_RANK:-0}" in
    0)
        if [ -n "${NODE_RANK:-}" ] && [ -n "${MASTER_ADDR:-}" ]; then
            echo "run-remote-fsdp-server: NODE_RANK=0 runs the service here, and MASTER_ADDR='$MASTER_ADDR' has no effect on" \
                "it: the service listens on TRL_SERVICE_HOST, and ranks use torch_run_config.master_addr." >&2
        fi
        ;;
    *)
        if [ -z "${TRL_SERVICE_URL:-}" ]; then
            if [ -z "${MASTER_ADDR:-}" ]; then
                echo "run-remote-fsdp-server: NODE_RANK=$NODE_RANK makes this machine a worker node: set MASTER_ADDR to the" \
                    "address of the machine that runs the service (or TRL_SERVICE_URL)." >&2
                exit 2
            fi
            case "$MASTER_ADDR" in *:*) MASTER_ADDR="[$MASTER_ADDR]" ;; esac
            export TRL_SERVICE_URL="http://$MASTER_ADDR:${TRL_SERVICE_PORT:-8322}"
        fi
        exec .venv/bin/python -m llama_stack_provider_trl_remote agent "$@"
        ;;
esac

export TRL_SERVICE_CONFIG="${TRL_SERVICE_CONFIG:-$PWD/run_fsdp.yaml}"
case "$TRL_SERVICE_CONFIG" in /* | '~'*) ;; *) TRL_SERVICE_CONFIG="$here/$TRL_SERVICE_CONFIG" ;; esac

exec .venv/bin/python -m llama_stack_provider_trl_remote serve "$@"
