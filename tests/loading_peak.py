"""Measures the memory that two or more ranks take while they load a model: from the imports to the first step. Linux.

`python -m tests.loading_peak` reads a line of JSON, [path of a spec, ...], forks the ranks of each job, and prints one
line of JSON per job: bytes above those after the imports, summed over the ranks. It is itself forked from what has
imported torch and trl.

- `private`: the peak of private memory (RssAnon, sampled each millisecond).
- `resident`: the peak of all resident memory (VmHWM), with pages of mapped files, which ranks share.
- `at_the_end`: private memory when the model is sharded.

`whole:` before a path: with weights that are not deferred, as every rank once loaded them.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from llama_stack_provider_trl.specs.job import JobSpec
from tests import forked
from tests.zygote import begin, environment

_M_MMAP_THRESHOLD = -3
_EVERY = 0.001
"""Seconds between two samples."""


def loading_peaks(specs: Sequence[str]) -> list[dict[str, int]]:
    """The measurements of jobs."""
    process = forked.start_talking(forked.RECIPES, "tests.loading_peak", environment())
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as given, process.stdout as found:
        given.write(json.dumps(specs) + "\n")
        given.flush()
        measured = [json.loads(line) for line in found if line.startswith("{")]
    assert process.wait() == 0
    return measured


def main() -> None:
    begin()
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20) == 1  # freed blocks of weights are given back
    arguments = [argument.rpartition(":") for argument in json.loads(sys.stdin.readline())]
    specs = [JobSpec.model_validate_json(Path(path).read_text()) for *_, path in arguments]
    for spec, (kind, _, _) in zip(specs, arguments, strict=True):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pipes = [_fork(spec, rank, port, kind == "whole") for rank in range(spec.ranks)]
        found = [json.loads(os.fdopen(pipe).read()) for pipe in pipes]
        print(json.dumps({name: sum(one[name] for one in found) for name in found[0]}), flush=True)


def _fork(spec: JobSpec, rank: int, port: int, whole: bool) -> int:
    """Fork a rank; returns a pipe with its measurements."""
    ours, theirs = os.pipe()
    if os.fork():
        os.close(theirs)
        return ours
    try:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": spec.ranks, "LOCAL_WORLD_SIZE": spec.ranks}
        os.environ.update({name: str(number) for name, number in numbers.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.write(theirs, json.dumps(_measured(spec, whole)).encode())
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)


def _measured(spec: JobSpec, whole: bool) -> dict[str, int]:
    import torch

    from llama_stack_provider_trl.recipes.build import build_trainer
    from llama_stack_provider_trl.recipes.distributed.peers import connected_peers
    from llama_stack_provider_trl.recipes.model.loading import WeightStorage
    from llama_stack_provider_trl.specs.events import NullEventWriter

    device, storage = torch.device("cpu"), WeightStorage.of(spec)
    if whole:
        storage = replace(storage, is_deferred=False)
    with (
        connected_peers(device, spec.checkpoint_dir, NullEventWriter()),
        patch.object(WeightStorage, "of", lambda spec: storage),
    ):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins here
        before = _memory()
        with _Sampled() as samples:
            trainer = build_trainer(spec, device).trainer
            trainer._prepare_for_training(1, None, None)
        after = _memory()
    return {
        "private": max(samples) - before["RssAnon"],
        "resident": after["VmHWM"] - before["VmRSS"],
        "at_the_end": after["RssAnon"] - before["RssAnon"],
    }


class _Sampled:
    """Samples this process's private memory while it is open."""

    def __enter__(self) -> list[int]:
        self._samples = [_memory()["RssAnon"]]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self._samples

    def _run(self) -> None:
        while not self._ended.wait(_EVERY):
            self._samples.append(_memory()["RssAnon"])

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()


def _memory() -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    return {name: int(size) << 10 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE)}


if __name__ == "__main__":
    main()
