"""`trl-remote doctor`: checks whether this machine can run the service or an agent, and advises where it cannot."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from llama_stack_provider_trl.errors import TrlError
from llama_stack_provider_trl.jobs.supervision.lost_jobs import lost_jobs
from llama_stack_provider_trl.launch.interpreter import check_interpreter, check_vllm
from llama_stack_provider_trl.launch.isolation import ADVICE, probe
from llama_stack_provider_trl.specs.custom import custom_names
from llama_stack_provider_trl.system.compiler import ADVICE as ADVICE_COMPILER
from llama_stack_provider_trl.system.compiler import missing_compiler
from llama_stack_provider_trl.system.console import show_json, show_lines
from llama_stack_provider_trl.system.data_dir import DataDir
from llama_stack_provider_trl.system.files import free_bytes, is_read_only

from ..nodes.identity import NodeError, versions
from ..service.loading import load_settings
from ..service.settings import ServiceSettings, SettingsError

Level = Literal["ok", "warn", "fail"]
_OPEN_FILES = 4096
_SHARED_MEMORY = 1 << 30
_SHARED_MEMORY_AT = Path("/dev/shm")
_SHOWN = 20
"""Files of a kind that are listed."""
_SPARE_DISK = 10 << 30
"""Bytes of free disk; a checkpoint of a small model takes some of them."""
_PLUGINS_SECONDS = 300.0


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Level
    what: str
    found: str
    advice: str = ""
    """Advice; empty where none is needed."""


def report(options: argparse.Namespace) -> int:
    """Print the findings. Returns the exit status: 1 where a check failed."""
    findings = list(examine(options.config))
    if options.json:
        show_json([asdict(finding) for finding in findings], indent=1)
    else:
        for one in findings:
            advice = f"; {one.advice}" if one.advice else ""
            show_lines(f"{one.level:<4}  {one.what:<13} {one.found}{advice}")
    return int(any(finding.level == "fail" for finding in findings))


def examine(config: Path | None = None) -> Iterator[Finding]:
    """Run every check, in the order of the report. Where the settings cannot be loaded, the defaults are checked."""
    try:
        settings, path = load_settings(config)
        yield Finding("ok", "settings", str(path or "defaults and TRL_SERVICE_* variables"))
    except SettingsError as error:
        settings = ServiceSettings()
        yield Finding("fail", "settings", str(error), "docs/reference/service.md lists every setting")
    for check in _CHECKS:
        yield from check(settings)


def _python(settings: ServiceSettings) -> Iterator[Finding]:
    python = str(settings.train_python or sys.executable)
    try:
        check_interpreter(settings.train_python)
        found = versions(str(settings.train_python) if settings.train_python else None)
    except (TrlError, NodeError) as error:
        yield Finding("fail", "python", str(error))
        return
    yield Finding("ok", "python", f"{python}: {', '.join(f'{name} {version}' for name, version in found.items())}")
    try:
        if release := check_vllm(settings.vllm_python):
            yield Finding("ok", "vllm", f"{settings.vllm_python}: {release}")
    except TrlError as error:
        yield Finding("fail", "vllm", str(error))
    if settings.train_python is None and not _is_compiled("transformers"):
        yield Finding(
            *("warn", "bytecode", "the packages are not compiled, and isolated trainings cannot compile them"),
            f"run {python} -m compileall -q {sys.prefix}/lib: every training starts seconds faster",
        )


def _is_compiled(package: str) -> bool:
    found = importlib.util.find_spec(package)
    return found is None or found.origin is None or Path(importlib.util.cache_from_source(found.origin)).exists()


def _exposure(settings: ServiceSettings) -> Iterator[Finding]:
    try:
        settings.check_exposure()
    except SettingsError as error:
        yield Finding("fail", "exposure", str(error))
        return
    if settings.on_loopback and not settings.credentials:
        found = f"{settings.host}, no token: every user and training of this machine may use the service"
        yield Finding("warn", "exposure", found, "set TRL_SERVICE_TOKEN")
    else:
        yield Finding("ok", "exposure", f"{settings.host}, token required")


def _data_dir(settings: ServiceSettings) -> Iterator[Finding]:
    path = settings.data_dir
    if not path.exists():
        yield Finding("ok", "data_dir", f"{path} will be created")
        return
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid():
        yield Finding(
            "fail", "data_dir", f"{path} belongs to user {found.st_uid}", "choose another, or change its owner"
        )
    elif is_read_only(path):
        advice = "make it writable again: the kernel's log has the reason, and mount -o remount,rw may be enough"
        yield Finding("fail", "data_dir", f"{path} is on a disk that is read-only: the service accepts no jobs", advice)
    elif not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        yield Finding("fail", "data_dir", f"{path} cannot be written", f"chmod 0700 {path}")
    elif mode & 0o077:
        yield Finding("warn", "data_dir", f"{path} has mode {mode:04o}: others can read it", f"chmod 0700 {path}")
    else:
        yield Finding("ok", "data_dir", str(path))


def _own_files(settings: ServiceSettings) -> Iterator[Finding]:
    place = DataDir(settings.data_dir)
    if (why := place.why_not() or _lost_jobs(place)) is not None:
        yield Finding("fail", "own files", why)
    for found, paths, advice in (
        ("no file or directory as it should be", place.odd(), "the next start sets it aside"),
        ("it cannot be parsed", place.damaged(), "the service sets it aside when it reads it"),
        ("it was set aside", place.aside(), "put its content back while the service is stopped, or remove it"),
    ):
        for path in paths[:_SHOWN]:
            yield Finding("warn", "own files", f"{path}: {found}", advice)
        if len(paths) > _SHOWN:
            yield Finding("warn", "own files", f"{len(paths) - _SHOWN} more: {found}", advice)


def _lost_jobs(place: DataDir) -> str | None:
    """What is there of jobs that the database does not know; None: nothing, or it knows a job, or cannot be read."""
    if place.database.exists():
        try:
            with closing(sqlite3.connect(f"file:{quote(str(place.database))}?mode=ro", uri=True)) as database:
                if database.execute("SELECT 1 FROM jobs LIMIT 1").fetchone():
                    return None
        except sqlite3.Error as error:
            if is_read_only(place.root):
                return None  # a database of ours is not opened there, whole or not; `_data_dir` reports it
            if place.database.stat().st_size:
                return f"{place.database} cannot be read ({error}): put a backup of it in its place"
    return lost_jobs(place.root)


def _isolation(settings: ServiceSettings) -> Iterator[Finding]:
    found = probe()
    if found.how:
        off = settings.isolation == "off"
        status = f"possible ({found.how}), and switched off" if off else f"trainings are isolated ({found.how})"
        yield Finding("warn" if off else "ok", "isolation", status, "set isolation to auto" if off else "")
    else:
        level: Level = "fail" if settings.isolation == "required" else "warn"
        yield Finding(level, "isolation", f"trainings cannot be isolated: {found.why_not}", ADVICE)


def _devices(settings: ServiceSettings) -> Iterator[Finding]:
    try:
        devices = settings.devices()
    except SettingsError as error:
        yield Finding("fail", "devices", str(error))
        return
    yield Finding("ok", "devices", ", ".join(devices))
    try:
        settings.for_jobs(devices)
    except SettingsError as error:
        yield Finding("fail", "ranks", str(error))
        return
    ranks, origin = settings.default_ranks(devices)
    yield Finding("ok", "ranks", f"{ranks} per job unless it sets a number ({origin})")


def _triton(settings: ServiceSettings) -> Iterator[Finding]:
    """Whether trainings on GPUs can use Triton's kernels."""
    try:
        has_gpus = settings.devices()[0].startswith("cuda")
    except SettingsError:
        return  # a finding of `_devices`
    if not has_gpus:
        return
    if settings.train_python is None:
        missing = missing_compiler()
    else:
        command = [str(settings.train_python), "-m", "llama_stack_provider_trl.system.compiler"]
        try:
            missing = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        except (OSError, subprocess.SubprocessError) as error:
            missing = f"{settings.train_python} cannot be examined: {error}"
    advice = f"{ADVICE_COMPILER}: trainings use slower kernels until then" if missing else ""
    yield Finding("warn" if missing else "ok", "triton", missing or "its kernels can be compiled", advice)


def _shared_memory(settings: ServiceSettings) -> Iterator[Finding]:
    if not _SHARED_MEMORY_AT.is_dir():
        return  # no Linux
    size = shutil.disk_usage(_SHARED_MEMORY_AT).total
    found = f"{_SHARED_MEMORY_AT} has {size / 2**30:.1f} GiB"
    enough = size >= _SHARED_MEMORY
    yield Finding(
        *("ok" if enough else "warn", "shared memory", found),
        "" if enough else "ranks exchange gradients there; in a container, --shm-size=8g",
    )


def _open_files(settings: ServiceSettings) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    enough = soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES
    advice = f"ulimit -n {_OPEN_FILES}, or LimitNOFILE={_OPEN_FILES} in the unit"
    yield Finding("ok" if enough else "warn", "open files", limit, "" if enough else advice)


def _disk(settings: ServiceSettings) -> Iterator[Finding]:
    free, needed = free_bytes(settings.data_dir), settings.min_free_disk_mb << 20
    found = f"{free / 2**30:.1f} GiB are free for {settings.data_dir}"
    level: Level = "fail" if free < needed else "warn" if free < needed + _SPARE_DISK else "ok"
    advice = "" if level == "ok" else f"free some; min_free_disk_mb keeps {settings.min_free_disk_mb} MiB"
    yield Finding(level, "disk", found, advice)


def _plugins(settings: ServiceSettings) -> Iterator[Finding]:
    """Methods of installed packages. They are imported by another process: what they print is not for this terminal."""
    code = "import json, sys; from llama_stack_provider_trl.specs.custom import problems; "
    code += "open(sys.argv[1], 'w').write(json.dumps(problems()))"
    with tempfile.TemporaryDirectory(prefix="trl-doctor-") as directory:
        target = Path(directory, "problems.json")
        command = [sys.executable, "-c", code, str(target)]
        try:
            subprocess.run(command, timeout=_PLUGINS_SECONDS, check=True, capture_output=True)
            found = json.loads(target.read_text())
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            found = [f"the methods of installed packages cannot be examined: {type(error).__name__}"]
    advice = "uninstall the package, or have its author correct it; the service starts without it"
    for problem in found:
        yield Finding("warn", "plug-ins", problem, advice)
    names = custom_names()
    if names and not found:
        yield Finding("ok", "plug-ins", f"packages add the methods {', '.join(names)}")


_CHECKS: tuple[Callable[[ServiceSettings], Iterator[Finding]], ...] = (
    *(_python, _exposure, _data_dir, _own_files, _isolation, _devices, _triton, _shared_memory, _open_files, _disk),
    _plugins,
)
