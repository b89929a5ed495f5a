"""`trl-remote jobspec`: a job for another system, which trains one model on one dataset and ends.

Each has the same shell script. On its first machine it runs the service, queues the job with `trl-remote train`, and
pulls the result; on the others it runs agents. Tokens are made on the machine that submits or starts the job, or are in
a secret of that system: no output contains one.
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.system.console import show_lines

PORT = 8322
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""Names of objects of Kubernetes, with room for the numbers of pods."""
_SECRETS = "/run/secrets"
_HUB = "/work/huggingface"
"""HF_HOME in a container: on the disk of TRL_WORK, which its user may write to."""
_CPUS, _MEMORY_GIB = 4, 16
"""Of a pod whose size is not named."""
_CONTAINERS = ("kubernetes", "compose", "swarm")
_ONLY_FOR = {
    "gpus": ("slurm", *_CONTAINERS),
    "image": _CONTAINERS,
    "claim": ("kubernetes",),
    "cpus": ("kubernetes",),
    "memory_gib": ("kubernetes",),
}
"""Option -> the systems whose specification has it."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"

NODE = """set -eu
url="http://$TRL_HEAD:{port}"
if [ "$TRL_RANK" != 0 ]; then
    {agent}trl-remote agent --service "$url" --name "node-$TRL_RANK" \\
        --token-file "$TRL_TOKENS/node-token" --data-dir "$TRL_WORK"{end}
fi
TRL_SERVICE_TOKEN="$(cat "$TRL_TOKENS/token")"
TRL_SERVICE_NODE_TOKEN="$(cat "$TRL_TOKENS/node-token")"
export TRL_SERVICE_TOKEN TRL_SERVICE_NODE_TOKEN TRL_SERVICE_ALLOWED_HOSTS="$TRL_HEAD"
{roots}trl-remote serve --host "$TRL_ADDRESS" --port {port} --data-dir "$TRL_WORK" --insecure &
service=$!
trap 'kill "$service" 2>/dev/null || true; wait "$service" 2>/dev/null || true' EXIT
until trl-remote nodes list --url "$url" >/dev/null 2>&1; do
    kill -0 "$service"  # else it has ended, with the reason above
    sleep 1
done
{train} --url "$url"
"""
"""What each machine runs. TRL_RANK: its number, TRL_ADDRESS: its own address, TRL_HEAD: that of machine 0, TRL_TOKENS:
the directory of the tokens, TRL_WORK: a directory of its own."""

_END_WITH_SERVICE = """ &
    agent=$!
    trap 'kill "$agent" 2>/dev/null || true; wait "$agent" 2>/dev/null || true' EXIT
    trap 'exit 143' TERM
    reached() {{ python3 -c "import socket; socket.create_connection(('$TRL_HEAD', {port}), 5)" 2>/dev/null; }}
    until reached; do kill -0 "$agent"; sleep 2; done
    misses=0
    while [ "$misses" -lt 6 ]; do
        kill -0 "$agent"
        sleep 5
        if reached; then misses=0; else misses=$((misses + 1)); fi
    done
    exit 0"""
"""After the agent's command: it ends when the service has not been reached for 30 s. An agent alone waits for it."""


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("system", choices=sorted(_SYSTEMS), help="what runs the job")
    command.add_argument("--model", required=True, metavar="M", help="a directory on every machine, or a model id")
    command.add_argument(
        "--dataset",
        required=True,
        metavar="D",
        help="rows: a .jsonl, .json, .csv (also .gz, .zst) or .parquet file there",
    )
    command.add_argument("--output", default="result", metavar="DIR", help="new directory for the result (result)")
    command.add_argument("--nodes", type=int, default=1, metavar="N", help="machines that train together (1)")
    command.add_argument("--gpus", type=int, default=0, metavar="N", help="GPUs of each machine (0: its CPU)")
    command.add_argument("--cpus", type=int, metavar="N", help=f"CPUs of each pod ({_CPUS}; kubernetes)")
    command.add_argument("--memory-gib", type=int, metavar="N", help=f"of each pod ({_MEMORY_GIB}; kubernetes)")
    command.add_argument("--name", default="trl-job", help="of the job (trl-job)")
    command.add_argument("--image", help="container image with trl-remote (kubernetes, compose, swarm)")
    command.add_argument("--claim", metavar="PVC", help="volume that has model, rows and result (kubernetes)")
    command.add_argument(
        "--options", default="", metavar="TEXT", help="further options of `trl-remote train`, such as '--epochs 2'"
    )


def print_job(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Write the job to standard output. Raises InvalidRequest: an option is missing or cannot be right."""
    _check(options)
    words = ["train", options.dataset, "--model", options.model, "--pull", options.output]
    words += ["--job", options.name, *(["--nodes", str(options.nodes)] if options.nodes > 1 else [])]
    try:
        words += shlex.split(options.options)
    except ValueError as error:
        raise InvalidRequest(
            "--options", options.options, f"expected options as a shell reads them ({error})."
        ) from error
    parser.parse_args(words)  # ends with the reason where an option is unknown
    show_lines(*_SYSTEMS[options.system](options, _script(options, words)).removesuffix("\n").split("\n"))
    return 0


def _check(options: argparse.Namespace) -> None:
    if not 0 < options.nodes <= 10_000:
        raise InvalidRequest("--nodes", options.nodes, "name 1 to 10000 machines.")
    if not 0 <= options.gpus <= 64:
        raise InvalidRequest("--gpus", options.gpus, "name 0 to 64 GPUs of each machine.")
    for option, systems in _ONLY_FOR.items():
        value = getattr(options, option)
        if value not in (None, 0) and options.system not in systems:
            hint = f"a specification for {options.system} has none (only {', '.join(systems)}): leave it out."
            raise InvalidRequest(f"--{option.replace('_', '-')}", value, hint)
    if options.cpus is not None and not 0 < options.cpus <= 10_000:
        raise InvalidRequest("--cpus", options.cpus, "name 1 to 10000 CPUs of each pod.")
    if options.memory_gib is not None and not 2 <= options.memory_gib <= 100_000:
        raise InvalidRequest("--memory-gib", options.memory_gib, "name 2 to 100000 GiB of each pod.")
    if not _NAME.fullmatch(options.name):
        raise InvalidRequest("--name", options.name, "use up to 40 lower-case letters, digits and hyphens.")
    for option in ("model", "dataset", "output"):
        if "\n" in getattr(options, option):
            raise InvalidRequest(f"--{option}", getattr(options, option), "expected one line.")
    if options.system in _CONTAINERS and not options.image:
        raise InvalidRequest("--image", options.image, "name the image with trl-remote: deploy/Dockerfile makes one.")
    if options.system == "kubernetes" and not options.claim:
        raise InvalidRequest("--claim", options.claim, "name the PersistentVolumeClaim with the model and the rows.")
    if options.system == "systemd" and options.nodes > 1:
        raise InvalidRequest("--nodes", options.nodes, "a unit runs on one machine: the others are agents' units.")
    places = [("--dataset", options.dataset), ("--output", options.output)]
    for option, place in places if options.system != "slurm" else []:
        if not PurePosixPath(place).is_absolute():
            raise InvalidRequest(option, place, "expected a whole path, as the job has it.")
    if options.system in _CONTAINERS:
        _mounted(options)


_OF_THE_IMAGE = "bin boot dev etc home lib lib64 proc root run sbin src sys tmp usr var work"
_TAKEN = frozenset(PurePosixPath("/", name) for name in _OF_THE_IMAGE.split())
"""Directories that a container has files of its own in: none of them can be a mounted one."""


def _mounted(options: argparse.Namespace) -> dict[PurePosixPath, bool]:
    """Directories that a container needs from outside, each with whether it is only read.

    None of them is inside another one. A volume claim is mounted once, where all of them are. Raises InvalidRequest: a
    path is below a directory of the image, or in the root of the file system.
    """
    paths = {"--dataset": options.dataset, "--output": options.output}
    if PurePosixPath(options.model).is_absolute():
        paths["--model"] = options.model
    parents = {}
    for option, path in paths.items():
        if ".." in PurePosixPath(path).parts:
            raise InvalidRequest(option, path, "expected a path without `..`.")
        parents[option] = parent = PurePosixPath(posixpath.normpath(path)).parent
        if len(parent.parts) < 2 or PurePosixPath(*parent.parts[:2]) in _TAKEN:
            hint = "expected a path in a directory that the image does not have, such as /data/NAME."
            raise InvalidRequest(option, path, hint)
    if options.system == "kubernetes":
        common = PurePosixPath(posixpath.commonpath(parents.values()))
        if len(common.parts) < 2:
            shown = ", ".join(f"{option} {path}" for option, path in paths.items())
            hint = f"one volume has all of {shown}: name them below one directory, such as /data."
            raise InvalidRequest("--claim", options.claim, hint)
        return {common: False}
    written = parents["--output"]
    outermost = {one for one in parents.values() if not any(other in one.parents for other in parents.values())}
    return {one: one != written and one not in written.parents for one in sorted(outermost)}


def _script(options: argparse.Namespace, words: list[str]) -> str:
    model = PurePosixPath(options.model)
    roots = f"export TRL_SERVICE_MODEL_ROOTS={shlex.quote(str(model.parent))}\n" if model.is_absolute() else ""
    ends = options.system == "kubernetes"
    return NODE.format(
        port=PORT,
        roots=roots,
        train=shlex.join(["trl-remote", *words]),
        agent="" if ends else "exec ",
        end=_END_WITH_SERVICE.format(port=PORT) if ends else "",
    )


def _slurm(options: argparse.Namespace, script: str) -> str:
    gpus = f"#SBATCH --gpus-per-node={options.gpus}\n" if options.gpus else ""
    return f"""#!/bin/bash
#SBATCH --job-name={options.name}
#SBATCH --nodes={options.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
{gpus}#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={options.name}-%j.log
# Submit it with sbatch, in a directory that all nodes share, where `trl-remote` is on the PATH of every node.
set -euo pipefail
umask 077
TRL_TOKENS="$PWD/.trl-$SLURM_JOB_ID"
# A job that Slurm has requeued begins again, with new tokens: it was killed before it could remove the old ones.
rm -rf "$TRL_TOKENS"
mkdir "$TRL_TOKENS"
trap 'rm -rf "$TRL_TOKENS"' EXIT
for name in token node-token; do od -An -N24 -tx1 /dev/urandom | tr -d ' \\n' > "$TRL_TOKENS/$name"; done
head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
TRL_HEAD="$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')"
export TRL_TOKENS TRL_HEAD TRL_ADDRESS="$TRL_HEAD"
cat > "$TRL_TOKENS/node.sh" <<'EOF_NODE'
TRL_RANK="$SLURM_PROCID"
base="${{TMPDIR:-$HOME/.llama/trl-pool}}"
mkdir -p "$base"
if [ "${{1:-}}" = clean ]; then rm -rf "$base/trl-$SLURM_JOB_ID-"*; exit; fi
work="$base/trl-$SLURM_JOB_ID-$TRL_RANK"
if [ "${{SLURM_RESTART_COUNT:-0}}" != 0 ]; then rm -rf "$work"-* 2>/dev/null || true; fi
# Of a name that no other user can have created first.
TRL_WORK="$(mktemp -d "$work-XXXXXXXX")"
end() {{ kill "$job" 2>/dev/null || true; wait "$job" 2>/dev/null || true; rm -rf "$TRL_WORK"; }}
job=
trap end EXIT
trap 'exit 143' TERM
job() {{
{script}}}
# Without a process between: a signal to it reaches the agent.
job &
job=$!
if [ "$TRL_RANK" = 0 ]; then
    status=0
    wait "$job" || status=$?
    echo "$status" > "$TRL_TOKENS/status"
    exit "$status"
fi
# An agent does not end by itself.
until [ -e "$TRL_TOKENS/status" ]; do
    kill -0 "$job" 2>/dev/null || {{ wait "$job"; exit; }}
    sleep 1
done
EOF_NODE
# 90 s: a file of another node may be seen late. Tasks that are killed then leave their directories.
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=90 bash "$TRL_TOKENS/node.sh" || true
srun --ntasks-per-node=1 bash "$TRL_TOKENS/node.sh" clean || true
exit "$(cat "$TRL_TOKENS/status")"
"""


def _kubernetes(options: argparse.Namespace, script: str) -> str:
    name, labels = options.name, {"app.kubernetes.io/name": options.name}
    gpus = {"nvidia.com/gpu": options.gpus} if options.gpus else {}
    memory_gib = options.memory_gib or _MEMORY_GIB
    size = {"cpu": str(options.cpus or _CPUS), "memory": f"{memory_gib}Gi", **gpus}
    (mounted,) = _mounted(options)
    hub_token = {"name": f"{name}-tokens", "key": "hf-token", "optional": True}
    container = {
        "name": "trl",
        "image": options.image,
        "command": ["/bin/sh", "-c", script],
        "env": [
            {"name": "TRL_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            {"name": "TRL_HEAD", "value": f"{name}-0.{name}"},
            {"name": "TRL_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "TRL_TOKENS", "value": _SECRETS},
            {"name": "TRL_WORK", "value": "/work"},
            # A volume that everyone may write to, in a container without other users.
            {"name": "TRL_NODE_CHECK_PATH", "value": "off"},
            {"name": "TRL_NODE_HOST_ID", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "HF_HOME", "value": _HUB},
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": hub_token}},
        ],
        "resources": {"requests": size, "limits": size},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "tokens", "mountPath": _SECRETS, "readOnly": True},
            {"name": "data", "mountPath": str(mounted)},
            {"name": "work", "mountPath": "/work"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        # A Service named `trl` would set TRL_SERVICE_HOST and TRL_SERVICE_PORT.
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "tokens", "secret": {"secretName": f"{name}-tokens", "defaultMode": 0o440}},
            {"name": "data", "persistentVolumeClaim": {"claimName": options.claim}},
            {"name": "work", "emptyDir": {}},
            # Counted as memory of the pod.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{memory_gib // 2}Gi"}},
        ],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [{"name": "http", "port": PORT}],
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": options.nodes,
            "parallelism": options.nodes,
            "backoffLimit": 0,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    secret = (
        f"# kubectl create secret generic {name}-tokens \\\n"
        "#     --from-literal=token=$(openssl rand -hex 24) --from-literal=node-token=$(openssl rand -hex 24)\n"
        "#     # for models of the hub that need a token: --from-literal=hf-token=TOKEN\n"
        "# kubectl apply -f THIS_FILE\n"
    )
    return secret + _yaml(service) + "---\n" + _yaml(job)


def _containers(options: argparse.Namespace, script: str, *, swarm: bool) -> str:
    """A compose file; of the format that both `docker compose` and `docker stack deploy` read."""
    reserved: dict[str, Any] = {}
    if options.gpus and swarm:
        generic = {"discrete_resource_spec": {"kind": "NVIDIA-GPU", "value": options.gpus}}
        reserved = {"resources": {"reservations": {"generic_resources": [generic]}}}
    mounts: list[dict[str, Any]] = [
        {"type": "bind", "source": _expanded(path), "target": _expanded(path), "read_only": is_read}
        for path, is_read in _mounted(options).items()
    ]
    # A disk, since checkpoints do not fit into memory; it ends with its container.
    mounts.append({"type": "volume", "target": "/work"})
    # `docker stack deploy` ignores shm_size.
    mounts.append({"type": "tmpfs", "target": "/dev/shm", "tmpfs": {"size": 8 << 30}})

    # Containers of one service have the same environment, and each a host name of its own.
    start = 'TRL_ADDRESS="$(hostname -i | cut -d" " -f1)"\n' + script.replace("node-$TRL_RANK", "node-$(hostname)")

    def machine(rank: int, **deploy: Any) -> dict[str, Any]:
        if options.gpus and not swarm:  # all containers are on one machine: each has GPUs of its own
            first = rank * options.gpus
            ids = [str(number) for number in range(first, first + options.gpus)]
            devices = [{"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}]
            deploy["resources"] = {"reservations": {"devices": devices}}
        return {
            "image": options.image,
            "entrypoint": ["/bin/sh", "-c", _expanded(start)],
            "environment": {
                "TRL_RANK": str(rank),
                "TRL_HEAD": "head",
                "TRL_TOKENS": _SECRETS,
                "TRL_WORK": "/work",
                "HF_HOME": _HUB,
                "HF_TOKEN": None,  # of the shell that starts it
            },
            "secrets": [
                {"source": name, "target": name, "uid": "1000", "mode": 0o400} for name in ("token", "node-token")
            ],
            "volumes": mounts,
            **({} if swarm else {"restart": "no"}),
            **({"deploy": {**reserved, **deploy}} if reserved or deploy else {}),
        }

    never = {"restart_policy": {"condition": "none"}} if swarm else {}
    services = {"head": machine(0, **never)}
    if options.nodes > 1 and swarm:
        services["node"] = machine(1, replicas=options.nodes - 1, **never)
    elif options.nodes > 1:
        services |= {f"node-{rank}": machine(rank) for rank in range(1, options.nodes)}
    source: dict[str, Any] = {"external": True} if swarm else {}
    secrets = {name: source or {"file": f"./{options.name}-{name}"} for name in ("token", "node-token")}
    text: dict[str, Any] = {"services": services, "secrets": secrets}
    if swarm:
        text = {"version": "3.8", **text}
        how = (
            "# for name in token node-token; do openssl rand -hex 24 | docker secret create $name -; done\n"
            f"# docker stack deploy -c THIS_FILE {options.name}    # at its end: docker stack rm {options.name}\n"
        )
    else:
        how = (
            f"# for name in token node-token; do (umask 077; openssl rand -hex 24 > {options.name}-$name); done\n"
            "# docker compose -f THIS_FILE up --abort-on-container-exit --exit-code-from head\n"
            "# docker compose -f THIS_FILE down --volumes\n"
        )
        text = {"name": options.name, **text}
    return how + _yaml(text)


def _expanded(text: object) -> str:
    """Text of a compose file, which expands `$`."""
    return str(text).replace("$", "$$")


def _systemd(options: argparse.Namespace, script: str) -> str:
    tokens = (
        'umask 077; for name in token node-token; do od -An -N24 -tx1 /dev/urandom | tr -d " \\n" '
        '> "$RUNTIME_DIRECTORY/$name"; done\n'
    )
    start = 'TRL_TOKENS="$RUNTIME_DIRECTORY" TRL_WORK="$STATE_DIRECTORY"\n' + tokens + script
    return f"""# Install as /etc/systemd/system/{options.name}.service, then: systemctl start --no-block {options.name}
# Starting it again continues the same job. `trl-remote` is on the PATH of User=.
[Unit]
Description=Training {options.name} (llama-stack-provider-trl)
After=network-online.target
Wants=network-online.target

[Service]
Type=oneshot
User=trl
StateDirectory={options.name}
StateDirectoryMode=0700
RuntimeDirectory={options.name}
RuntimeDirectoryMode=0700
Environment=TRL_RANK=0 TRL_HEAD=127.0.0.1 TRL_ADDRESS=127.0.0.1
ExecStart=/bin/sh -c {_unit_quoted(start)}
KillMode=control-group
NoNewPrivileges=yes
PrivateTmp=yes

[Install]
WantedBy=multi-user.target
"""


def _unit_quoted(text: str) -> str:
    """One argument of a command line of systemd.service(5), which expands `$` and `%`."""
    return json.dumps(text).replace("$", "$$").replace("%", "%%")


def _yaml(value: dict[str, Any]) -> str:
    import yaml

    class Literal(yaml.SafeDumper):
        """Writes scripts as they are, and everything in full."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, found: str) -> yaml.ScalarNode:
        style = "|" if "\n" in found else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", found, style=style)

    Literal.add_representer(str, text)
    return yaml.dump(value, Dumper=Literal, sort_keys=False, width=1000)


_SYSTEMS: dict[str, Callable[[argparse.Namespace, str], str]] = {
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "compose": partial(_containers, swarm=False),
    "swarm": partial(_containers, swarm=True),
    "systemd": _systemd,
}
