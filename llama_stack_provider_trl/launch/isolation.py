"""Builds the view of a training on its machine for `namespaces`, from the task's specification and the directories that
the service hides.

Hidden are the service's data directory, its files with secrets, and the sockets that control other programs of the user
or the machine. Below a hidden directory a training sees its own run directory and checkpoints, and the paths of its
specification, its environment and its interpreter. All other paths are read-only, with the rights of its user.
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import InvalidRequest
from ..specs.bases import parts_of
from ..specs.harness import HarnessSpec
from ..specs.job import AttemptSpec, DatasetRef, ReferenceSpec, ResumeFrom
from ..specs.model_source import ModelName
from ..specs.serving import ServeSpec
from ..system.data_dir import DataDir
from ..system.files import RunDir
from ..system.process import child_environment
from .base import TaskSpec
from .namespaces import KEEP, View
from .runner import lock_places

log = logging.getLogger(__name__)

Mode = Literal["auto", "off", "required"]
NAMESPACES = "llama_stack_provider_trl.launch.namespaces"
LOCK_DIRECTORY = "TRL_LOCK_DIR"
_MODEL_FILES = ("config.json", "adapter_config.json")
_SCRATCH = ("/tmp", "/var/tmp")
_CACHES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_XET_CACHE", "HF_ASSETS_CACHE", "HF_DATASETS_CACHE", "HF_MODULES_CACHE"),
    *("HUGGINGFACE_HUB_CACHE", "HUGGINGFACE_ASSETS_CACHE", "TRANSFORMERS_CACHE", "XDG_CACHE_HOME", "TORCH_HOME"),
    *("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"),
    *("TMPDIR", "TEMP", "TMP", "TRL_FAULTS"),
)
"""Environment variables that name a directory which a training may write."""
_HOME_CACHES = (".cache", ".triton", ".nv")
"""Directories, below the home directory, for files that libraries compile and download."""
_LINKED_CACHES = ("huggingface", "huggingface/hub", "huggingface/datasets", "huggingface/xet", "torch", "triton")
_CONTROL_SOCKETS = (
    *("/run/user", "/run/dbus", "/run/systemd/private", "/run/docker.sock", "/run/containerd", "/run/crio"),
    *("/run/podman", "/run/snapd.socket", "/run/libvirt", "/run/incus", "/run/lxd", "/run/tmux", "/run/screen"),
    *("/run/k3s", "/run/docker", "/run/buildkit", "/run/cri-dockerd.sock", "/var/snap/lxd/common/lxd"),
)
_PROBE_TIMEOUT = 20.0
_DEPTH = 40
"""Symbolic links on one path; the kernel's limit."""


@dataclass(frozen=True)
class Isolation:
    """Isolates the trainings of one service, agent or provider. `isolate` creates it."""

    how: str = ""
    """`root` or `user namespace`; empty: trainings are not isolated."""
    why_not: str = ""
    directories: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()

    def view(self, task: TaskSpec, environ: Mapping[str, str]) -> View | None:
        """The view of a task whose specification is written; None: it is not isolated. Creates the directories that it
        may write. `environ` is that of its processes. Raises OSError: its specification cannot be read, or a directory
        cannot be created."""
        if not self.how:
            return None
        spec = RunDir(task.run_dir).spec
        named = SpecPaths()
        if spec.exists():
            named = (
                served_paths(_read_as(ServeSpec, spec), self.directories)
                if task.serves
                else spec_paths(_read_as(AttemptSpec, spec), self.directories)
            )
        write = [task.run_dir, *named.write]
        for path in named.write:
            path.mkdir(parents=True, exist_ok=True)
        gpus = any(device.startswith("cuda") for device in task.devices)
        return self._view(task.run_dir, task.python or sys.executable, environ, named.read, write, gpus=gpus)

    def command(
        self,
        argv: Sequence[str],
        cwd: Path,
        environ: Mapping[str, str],
        *,
        read: Iterable[Path] = (),
        write: Iterable[Path] = (),
        keep: Iterable[int] = (),
    ) -> list[str]:
        """A command line that runs another one isolated; the same one where nothing is isolated.

        Args:
            read: files and directories below a hidden one that it reads, beside those of a training.
            write: directories that it writes.
            keep: open files that it inherits from its caller.
        """
        if not self.how:
            return list(argv)
        view = self._view(cwd, argv[0], environ, read, write)
        kept = f"{KEEP}{','.join(map(str, keep))}"
        return [sys.executable, "-m", NAMESPACES, kept, json.dumps(view.to_json()), *argv]

    def _view(
        self,
        cwd: Path,
        python: str,
        environ: Mapping[str, str],
        read: Iterable[Path],
        write: Iterable[Path],
        *,
        gpus: bool = False,
    ) -> View:
        locks = lock_places(environ.get(LOCK_DIRECTORY))
        # From this process: the allow-list of a training's environment omits the variable.
        sockets = [Path(path) for path in (*_CONTROL_SOCKETS, os.environ.get("XDG_RUNTIME_DIR") or "/run/user")]
        hidden = [*self.directories, *locks, *(path for path in sockets if path.is_dir())]
        found = _Resolver(_outermost(_with_linked(hidden)))
        for path in (*read, *_interpreter(python), *_named(environ)):
            found.add(path, found.read)
        for path in (*write, *map(Path, _SCRATCH), *_caches(environ, gpus)):
            found.add(path, found.write)
        files = [*self.files, *(path for path in sockets if not path.is_dir())]
        return View(
            covers=tuple(sorted(map(str, found.covers))),
            blanks=tuple(sorted(str(path.resolve()) for path in files if path.exists())),
            # A mount point cannot be renamed: a damaged checkpoint in a writable directory has to be set aside.
            read=tuple(sorted(path for path in found.read if not found.is_writable(path))),
            write=tuple(sorted(found.write)),
            links=tuple(sorted(found.links.items())),
            cwd=str(cwd.resolve()),
        )


NO_ISOLATION = Isolation(why_not="isolation is off")


def isolate(mode: Mode, directories: Iterable[Path], files: Iterable[Path | None] = ()) -> Isolation:
    """Apply the setting `isolation` on this machine; takes 0.1 s. Raises InvalidRequest: the mode is `required`, and
    trainings cannot be isolated here; gives the reason.

    Args:
        files: files with secrets; None entries are skipped.
    """
    if mode == "off":
        return NO_ISOLATION
    kept = tuple(dict.fromkeys(path.absolute() for path in directories))
    found = probe()
    if found.how:
        return Isolation(found.how, "", kept, tuple(path.absolute() for path in files if path is not None))
    if mode == "required":
        raise InvalidRequest(
            "isolation",
            mode,
            f"trainings cannot be isolated here ({found.why_not}); {ADVICE}, or set isolation to auto",
        )
    log.warning(
        "trainings are not isolated: %s. They run as the user of this process and can read its files and environment; "
        "%s, or set isolation to off to accept it",
        *(found.why_not, ADVICE),
    )
    return Isolation(why_not=found.why_not)


ADVICE = (
    "run it as root, or allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns; in a container, --security-opt seccomp=unconfined)"
)


def probe() -> Isolation:
    """Find out how a program can be isolated on this machine, by isolating an empty one."""
    if sys.platform != "linux":
        return Isolation(why_not=f"{sys.platform} has no namespaces, only Linux has them")
    view = View(write=_SCRATCH)
    try:
        done = subprocess.run(
            [sys.executable, "-m", NAMESPACES, KEEP, json.dumps(view.to_json())],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT,
            cwd="/",
            env=child_environment(os.environ, {}),
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Isolation(why_not=str(error))
    if done.returncode == 0:
        return Isolation(done.stdout.strip())
    lines = done.stderr.strip().splitlines()
    return Isolation(why_not=lines[-1].removeprefix("not isolated: ") if lines else f"it ended with {done.returncode}")


@dataclass
class SpecPaths:
    """Paths that an attempt's specification names."""

    read: list[Path] = field(default_factory=list)
    write: list[Path] = field(default_factory=list)


def spec_paths(attempt: AttemptSpec, directories: Sequence[Path]) -> SpecPaths:
    """Paths that an attempt reads and writes. Models and adapters are texts of a client: they count only where they
    are directories with such files, outside of those in `directories` that hold our own."""
    job, found = attempt.job, SpecPaths()
    caches = [model.cache for _, model in parts_of(job, ReferenceSpec)]
    # A preflight writes nothing else than tokens.
    written = [job.data.token_cache, *([] if attempt.preflight else [job.checkpoint_dir, *caches, attempt.compiled])]
    found.write += [path for path in written if path is not None]
    rows = [rows.path for _, rows in parts_of(job, DatasetRef)]
    borrowed = [other.path for _, other in parts_of(job, ResumeFrom)]
    read = [*attempt.resume_candidates, attempt.turn, *borrowed, *rows]
    # Which the operator has named.
    read += [root for _, tasks in parts_of(job, HarnessSpec) for root in tasks.roots]
    found.read += [path for path in read if path is not None]
    answering, vllm = job.does.answering, job.method.answered_by_vllm
    for python in (answering and answering.vllm_python, vllm and vllm.python):
        found.read += _program(str(python)) if python else ()
    chosen = {str(source.path) for source in job.models if source.path is not None}  # by the agent of a node
    found.read += _model_paths([model.location for _, model in parts_of(job, ModelName)], chosen, directories)
    return found


def served_paths(serving: ServeSpec, directories: Sequence[Path]) -> SpecPaths:
    """Paths that a task which serves reads: its base model, and the copies of adapters that the service makes."""
    return SpecPaths(read=[serving.adapters, *_model_paths([serving.source.location], (), directories)])


def _model_paths(locations: Iterable[str], chosen: Collection[str], directories: Sequence[Path]) -> Iterator[Path]:
    for location in dict.fromkeys(locations):
        model = Path(location)
        if location in chosen or (model.is_absolute() and _is_model(model, directories)):
            yield from (model, *_links_of(model, directories))


def _read_as[Spec: (AttemptSpec, ServeSpec)](kind: type[Spec], spec: Path) -> Spec:
    try:
        return kind.model_validate_json(spec.read_bytes())
    except ValueError as error:
        raise OSError(f"{spec} is no {kind.__name__}: {error}") from error


def _links_of(model: Path, directories: Sequence[Path]) -> Iterator[Path]:
    """Targets of symbolic links in a model's directory, as in a hub's cache. A link in a data directory, or to one, is
    not followed: a training may have written it."""
    homes = [home.resolve() for home in directories]
    if any(model.resolve().is_relative_to(home) for home in homes):
        return
    with suppress(OSError):
        for path in model.iterdir():
            if path.is_symlink() and not any(path.resolve().is_relative_to(home) for home in homes):
                yield path


def _paths(*texts: Any) -> list[Path]:
    return [Path(text) for text in texts if isinstance(text, str) and text.startswith("/")]


def _is_model(path: Path, directories: Sequence[Path]) -> bool:
    try:
        real = path.resolve()
        if not any((real / name).is_file() for name in _MODEL_FILES):
            return False
    except (OSError, RuntimeError):
        return False
    return all(DataDir(home).is_free(real) for home in directories)


def _interpreter(python: str) -> Iterator[Path]:
    """Paths of an interpreter and of our own packages."""
    packages = Path(__file__).absolute().parents[1]
    yield from (packages, packages.with_name(f"{packages.name}_remote"))
    yield from (Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable))
    yield from _program(python)


def _program(python: str) -> Iterator[Path]:
    """Paths of another interpreter: of its virtual environment and of what that was made with, or of the prefix that
    conda, or an installation from source, has its modules in."""
    program = Path(python)
    if not program.is_absolute():
        return
    yield program
    home = program.parent.parent
    try:
        lines = (home / "pyvenv.cfg").read_text().splitlines()
    except OSError:
        prefixes = {home, program.resolve().parent.parent}
        yield from (prefix for prefix in prefixes if any(prefix.glob("lib/python3*/os.py")))
        return
    yield home
    base = [line.partition("=")[2].strip() for line in lines if line.partition("=")[0].strip() == "home"]
    yield from (Path(text).parent for text in base)


def _named(environ: Mapping[str, str]) -> Iterator[Path]:
    """Paths in the environment that are not caches: of modules, libraries, certificates."""
    for name, value in environ.items():
        if name not in (*_CACHES, LOCK_DIRECTORY, "HOME"):
            yield from _paths(*value.split(os.pathsep))


def _caches(environ: Mapping[str, str], gpus: bool) -> Iterator[Path]:
    yield from _paths(*(environ.get(name) for name in _CACHES))
    for home in _paths(environ.get("HOME") or _home()):
        for name in _HOME_CACHES[: None if gpus else 1]:
            try:
                (home / name).mkdir(mode=0o700, exist_ok=True)
            except OSError:
                continue
        yield from (home / name for name in _HOME_CACHES)
        # Each may be a symbolic link to another disk. Others are not followed: a training may have created them.
        yield from _elsewhere(home / ".cache", *_LINKED_CACHES)
    for cache in _paths(environ.get("HF_HOME")):
        yield from _elsewhere(cache, "hub")


def _elsewhere(cache: Path, *names: str) -> Iterator[Path]:
    """Paths with these names in a cache that lie outside of it."""
    with suppress(OSError, RuntimeError):
        real = cache.resolve()
        yield from (path for name in names if not (path := (cache / name).resolve()).is_relative_to(real))


def _home() -> str | None:
    """The home directory, as `expanduser` finds it without HOME."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None


def _with_linked(directories: Iterable[Path]) -> Iterator[Path]:
    """The real directories, and our directories in them that an operator has moved to another disk, behind a symbolic
    link."""
    for directory in directories:
        yield from DataDir(directory).places()  # even where it is created later: the lock directory may be
        if (checkpoints := DataDir(directory).checkpoints).is_symlink() and checkpoints.is_dir():
            yield checkpoints.resolve()


def _outermost(directories: Iterable[Path]) -> list[Path]:
    """The paths without those below another one, and never the root."""
    found: list[Path] = []
    for path in sorted(set(directories) - {Path("/")}):
        if not found or not path.is_relative_to(found[-1]):
            found.append(path)
    return found


class _Resolver:
    """Collects paths below and beside the covers, and the symbolic links that lead to them."""

    def __init__(self, covers: Sequence[Path]) -> None:
        self.covers = covers
        self.read: set[str] = set()
        self.write: set[str] = set()
        self.links: dict[str, str] = {}

    def add(self, path: Path, to: set[str]) -> None:
        """Add a path, unless it does not exist, contains a whole cover, or is a cover itself."""
        links: dict[str, str] = {}
        real = self._resolve(path, links)
        if real is None or any(cover == real for cover in self.covers):
            return
        if self._is_hidden(real) or to is self.write:
            to.add(str(real))
        self.links.update(links)

    def is_writable(self, path: str) -> bool:
        """Whether a directory that may be written holds this path, and no cover hides it there."""
        above = {str(path), *map(str, Path(path).parents)}
        written = [place for place in self.write if place in above]
        covered = [str(place) for place in self.covers if str(place) in above]
        return max(map(len, written), default=0) > max(map(len, covered), default=0)

    def _is_hidden(self, path: Path) -> bool:
        return any(path.is_relative_to(cover) for cover in self.covers)

    def _resolve(self, path: Path, links: dict[str, str]) -> Path | None:
        """The path without symbolic links; those below a cover are noted in `links`. None: the path does not exist."""
        done, parts = Path("/"), [part for part in reversed(path.parts) if part != "/"]
        for _ in range(_DEPTH * len(parts) + _DEPTH):
            if not parts:
                return done
            part = parts.pop()
            done = done.parent if part == ".." else done / part
            try:
                if done.is_symlink():
                    target = os.readlink(done)
                    if self._is_hidden(done):
                        links[str(done)] = target
                    parts += [each for each in reversed(Path(target).parts) if each != "/"]
                    done = Path("/") if target.startswith("/") else done.parent
                elif not done.exists():
                    return None
            except OSError:
                return None
        return None
