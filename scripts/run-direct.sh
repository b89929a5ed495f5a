#!/usr/bin/env bash
# Runs Llama Stack with the inline provider. Arguments go to `llama stack run`.
#
#   ./scripts/run-direct.sh
#
#   LLAMA_STACK_PORT  where it listens (default 8321)
#   TRL_OUTPUT_DIR    where jobs and checkpoints go (default ~/.llama/trl)
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# Not on every start: a changed pyproject.toml must not keep a machine without network from serving.
[ -f .venv/prepare-env.stamp ] && [ -x .venv/bin/llama ] || ./scripts/prepare-env.sh

export LLAMA_STACK_PORT="${LLAMA_STACK_PORT:-8321}"
export TRL_OUTPUT_DIR="${TRL_OUTPUT_DIR:-$HOME/.llama/trl}"
mkdir -p "$TRL_OUTPUT_DIR"

# Both addresses: macOS lets a loopback listener stand beside one on all interfaces, and clients then find either.
.venv/bin/python -S - "$LLAMA_STACK_PORT" <<'PY' || exit 1
import errno, socket, sys

port = sys.argv[1]
if not port.isdecimal() or not 0 < int(port) < 65536:
    sys.exit(f"run-direct: LLAMA_STACK_PORT must be a port number from 1 to 65535, not '{port}'.")
for host in ("127.0.0.1", "0.0.0.0"):
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
            sys.exit(f"run-direct: port {port} {reason}; stop what listens there or set LLAMA_STACK_PORT to another.")
PY

exec .venv/bin/llama stack run run.yaml --port "$LLAMA_STACK_PORT" "$@"
