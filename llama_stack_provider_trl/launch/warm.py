"""The warm process: has imported torch, trl and our recipes, and forks a runner for each task.

    python -m llama_stack_provider_trl.launch.warm --channel=DESCRIPTOR

The runner forks the training processes, so both start without an import. Both outlive this process, which ends when its
launcher does. It opens no CUDA context and keeps no thread: a fork would lack it.
"""

from __future__ import annotations

import array
import fcntl
import gc
import importlib
import json
import os
import select
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from ..system import fork
from ..system.process import resident_memory
from .installed import OWN, digest, searched

LIBRARIES = (
    *("numpy", "torch", "datasets", "transformers", "peft", "accelerate", "trl"),
    *("llama_stack_provider_trl.recipes.session", "llama_stack_provider_trl.recipes.preflight"),
    *("torch.distributed.run", "torch.distributed.elastic.rendezvous.static_tcp_rendezvous"),
    *("transformers.trainer", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "accelerate.utils.fsdp_utils"),
    *("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama"),
    *("transformers.models.qwen2.modeling_qwen2", "transformers.models.auto.tokenization_auto"),
)
"""Imported by name: modules of `launch` import no torch."""
TRAINER = "llama_stack_provider_trl.recipes.train"
CHANNEL = "--channel="
REQUEST_BYTES = 1 << 18
_PARENT_INTERVAL = 5.0
"""Seconds between two checks that the launcher's process lives. The end of its socket is noticed at once, unless a
fork of the launcher holds it too."""


def main(arguments: list[str]) -> None:
    launcher = os.getppid()
    channel = socket.socket(fileno=int(arguments[0].removeprefix(CHANNEL)))
    _end_with_launcher(channel, True)
    paths = searched(sys.path)
    found, before = digest(paths), dict(os.environ)
    for name in ARROW:
        before.pop(name, None)
    import_libraries()
    for name in (*ARROW, fork.ROOM):
        os.environ.pop(name, None)
    fork.prepare(before, resident_memory())
    _end_threads()
    _end_with_launcher(channel, False)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that it marks
    ready = {"executable": sys.executable, "paths": paths, "own": str(OWN), "digest": found}
    channel.send(json.dumps(ready).encode())
    _serve(channel, launcher)


ARROW: Mapping[str, str] = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Keeps pyarrow's jemalloc, which is not its default allocator, from starting a thread at the import."""


def _end_with_launcher(channel: socket.socket, at_once: bool) -> None:
    """Have the kernel end this process when the launcher's end of the channel closes, while the imports keep it from
    reading: SIGIO is sent then, which nothing handles."""
    fcntl.fcntl(channel, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(channel, fcntl.F_GETFL)
    fcntl.fcntl(channel, fcntl.F_SETFL, flags | os.O_ASYNC if at_once else flags & ~os.O_ASYNC)
    if select.select([channel], [], [], 0)[0]:  # it was closed before
        sys.exit(1)


def import_libraries() -> None:
    """Import what a training imports, as it does for a job without quantization."""
    train = importlib.import_module(TRAINER)
    with train.unused_libraries_hidden(train.QUANTIZATION_LIBRARIES), train.quick_imports():
        for name in LIBRARIES:
            importlib.import_module(name)
    fill_caches()


def fill_caches() -> None:
    """Have transformers compile its table of renamed weights, at which each fork would spend a tenth of its start.

    The table is the same for all models. A transformers without it is left alone."""
    with suppress(ImportError, AttributeError):
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")


def _end_threads() -> None:
    """numpy's OpenBLAS starts threads at the import and ends them before a fork. Those of a fork start when used."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _serve(channel: socket.socket, launcher: int) -> None:
    """Fork a runner for each request, until the launcher is gone."""
    while True:
        readable = select.select([channel], [], [], _PARENT_INTERVAL)[0]
        if os.getppid() != launcher or (readable and not channel.recv(1, socket.MSG_PEEK)):
            return
        if not readable:
            continue
        pid = os.fork()
        if pid == 0:
            _start_runner(channel)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        channel.send(json.dumps({"exit_code": status}).encode())
        if status < 0:
            return  # its request may still be unread


def _start_runner(channel: socket.socket) -> NoReturn:
    """Read the request and continue as the runner. Only the fork reads it: no part of a task is in this process's
    memory, and so in none of a later task."""
    try:
        request, files = _receive(channel)
        os.setsid()
        fork.redirect(files[0])
        fork.close_files()
        os.umask(request["umask"])
        os.chdir(request["cwd"])
        fork.become(request["argv"], request["environ"])
    finally:
        os._exit(1)


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    files = array.array("i")
    data, ancillary, *_ = channel.recvmsg(REQUEST_BYTES, socket.CMSG_SPACE(files.itemsize))
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(content[: len(content) - len(content) % files.itemsize])
    return json.loads(data), list(files)


if __name__ == "__main__":
    main(sys.argv[1:])
