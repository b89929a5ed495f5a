"""Runs the pods of a namespace of tests/kubernetes_api.py on the machines of a bed, as a kubelet would.

It is no Kubernetes: a pod is process 1 of its container, started with the manifest's command, arguments and variables.
Its directories are the machine's. SIGTERM comes first where it is evicted or deleted; with process 1 all others end.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

from tests.cluster.bed import NODE_TOKEN, Bed, Machine
from tests.kubernetes_api import Namespace, server


class Kubelet:
    """A namespace with its API, and machines for its pods: one pod on each."""

    def __init__(self, bed: Bed, root: Path, machines: list[Machine]) -> None:
        self.bed, self.machines, self.namespace = bed, machines, Namespace()
        self.placed: dict[str, Machine] = {}
        """Pod -> machine."""
        self.kubeconfig = root / "kubeconfig"
        self._http = server(self.namespace, f"{bed.network}.254")
        address = f"http://{bed.network}.254:{self._http.server_port}"
        config = {
            **{"apiVersion": "v1", "kind": "Config", "current-context": "c"},
            "clusters": [{"name": "c", "cluster": {"server": address}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }
        self.kubeconfig.write_text(json.dumps(config))
        for machine in machines:
            _prepare(machine)
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=one, daemon=True) for one in (self._http.serve_forever, self._work)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._http.shutdown()
        for thread in self._threads:
            thread.join(20)
        self._http.server_close()

    def evict(self, pod: str) -> None:
        """As `kubectl drain` does it."""
        self._signal(pod)

    def _work(self) -> None:
        while not self._stopping.wait(0.2):
            with self.namespace.lock:
                self._pass()

    def _pass(self) -> None:
        namespace = self.namespace
        for name, job in list(namespace.jobs.items()):
            own = [pod for pod in namespace.pods if pod.startswith(f"{name}-")]
            leaving = "deletionTimestamp" in job["metadata"]
            if not own and not leaving and not job["status"]:
                self._place(name, job)
            for pod in own:
                self._follow(pod)
                if leaving:
                    self._signal(pod)
            phases = [namespace.pods[pod]["status"]["phase"] for pod in own]
            if own and not {"Running"} & set(phases):
                kind = "Complete" if set(phases) == {"Succeeded"} else "Failed"
                job["status"]["conditions"] = [{"type": kind, "status": "True", "message": f"Job is {kind}"}]
                if leaving:
                    for pod in own:
                        del namespace.pods[pod]
                    del namespace.jobs[name]

    def _place(self, name: str, job: dict[str, Any]) -> None:
        free = [machine for machine in self.machines if not machine.pids()]
        count = job["spec"]["completions"]
        if len(free) < count:
            return
        for number, machine in zip(range(count), free, strict=False):
            spec, pod = job["spec"]["template"]["spec"], f"{name}-{number}-{uuid.uuid4().hex[:5]}"
            self._start(machine, spec["containers"][0], number)
            metadata = {**job["spec"]["template"]["metadata"], "name": pod}
            status = {"phase": "Running", "podIP": machine.address}
            self.namespace.pods[pod] = {
                **{"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status},
                "spec": {**spec, "nodeName": machine.name},
            }
            self.placed[pod] = machine

    def _start(self, machine: Machine, container: dict[str, Any], number: int) -> None:
        values = {
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(number),
            **{"status.podIP": machine.address, "metadata.uid": uuid.uuid4().hex, "spec.nodeName": machine.name},
        }
        variables: dict[str, str] = {}
        for one in container["env"]:
            if "valueFrom" in one:
                variables[one["name"]] = values[one["valueFrom"]["fieldRef"]["fieldPath"]]
            else:
                variables[one["name"]] = _there(machine, _expanded(one["value"], variables))
        words = [_there(machine, _expanded(word, variables)) for word in container["args"]]
        assert words[0] == "trl-remote"
        program = [*container["command"], str(machine.root / "trl-remote"), *words[1:]]
        machine.run(*program, **variables, TRL_NODE_WARM_START="off")

    def _follow(self, pod: str) -> None:
        """Record the end of a pod, and end what it has left."""
        machine, status = self.placed[pod], self.namespace.pods[pod]["status"]
        if status["phase"] == "Running" and machine.process is not None and machine.process.poll() is not None:
            code = machine.process.returncode
            status["phase"] = "Succeeded" if code == 0 else "Failed"
            ended = {"reason": "Completed" if code == 0 else "Error", "exitCode": code, "message": machine.log_tail()}
            status["containerStatuses"] = [{"state": {"terminated": ended}}]
            machine.signal_all(signal.SIGKILL)
            machine.reap()

    def _signal(self, pod: str) -> None:
        machine = self.placed[pod]
        if self.namespace.pods[pod]["status"]["phase"] == "Running" and machine.process is not None:
            machine.process.send_signal(signal.SIGTERM)


def _prepare(machine: Machine) -> None:
    secrets = machine.root / "secrets"
    secrets.mkdir()
    (machine.root / "work").mkdir()
    (secrets / "node-token").write_text(NODE_TOKEN)
    (secrets / "node-token").chmod(0o440)
    program = machine.root / "trl-remote"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m llama_stack_provider_trl_remote "$@" --device cpu\n')
    program.chmod(0o755)


def _expanded(text: str, variables: dict[str, str]) -> str:
    """As Kubernetes expands arguments and variables."""
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    return text.replace("$$(", "$(")


def _there(machine: Machine, text: str) -> str:
    """A directory of the container on the machine."""
    for inside, outside in (("/run/secrets/trl", "secrets"), ("/work", "work")):
        if text.startswith(inside):
            return f"{machine.root}/{outside}{text.removeprefix(inside)}"
    return text
