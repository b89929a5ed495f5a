"""Makes a machine a node, and ends that again. `ssh` sends this file there and has the Python found there run it.

So it is the standard library only (Python >= 3.12, Linux), whatever is installed there. It reads a request, one line of
JSON, from standard input, and writes lines of JSON: {"progress": text}, {"need": "wheel"}, and as the last one
{"result": ...} or {"error": sentence}. Secrets are in the request only, never in an argument or a variable.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from llama_stack_provider_trl.system.owned_paths import own_directory

AGENT = "llama_stack_provider_trl_remote.nodes.pools.host_agent"
SERVICE_TIMEOUT = 10.0
LOCK_TIMEOUT = 15.0
GRACE = 10.0
"""Seconds for an agent, and then for trainings, to end by themselves."""
KILLED = 20.0
"""Seconds after which a process that was sent SIGKILL is reported."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NOT_PASSED_ON = ("SSH_", "PYTHONPATH", "PYTHONHOME", "OLDPWD", "TRL_SERVICE_")
"""Beginnings of variables of the SSH session that the agent does not get."""


class HostProblem(Exception):
    """Raised when this machine cannot do what was requested; one sentence."""


class Place:
    """Where everything of a node is."""

    def __init__(self, data_dir: str) -> None:
        self.named = Path(data_dir).expanduser().absolute()
        """As it is named. `data_dir` has no links, so that processes are found by it."""
        self.data_dir = self.named
        with suppress(OSError):
            self.data_dir = self.data_dir.resolve()
        self.home = self.data_dir / "ssh"
        self.environments = self.home / "environments"
        self.settings = self.home / "agent.json"
        self.token = self.home / "token"
        self.certificate = self.home / "certificate.pem"
        self.constraints = self.home / "constraints.txt"
        self.output = self.home / "agent.out"
        self.credential = self.data_dir / "credential.json"
        """Written by the agent whenever it has joined."""

    def check(self) -> None:
        """Raises UnsafePath: another user could change what is there, or has created it."""
        for path in (self.named / "ssh", self.home):
            with suppress(FileNotFoundError):
                own_directory(path, create=False)

    def make(self) -> None:
        """Create what is missing. Raises UnsafePath: another user could change it."""
        own_directory(self.environments)
        write(self.home / "probe", b"\0" * 4096)
        (self.home / "probe").unlink()


@dataclass(frozen=True)
class Process:
    """A process, not just a number: a reused pid does not compare equal."""

    pid: int
    started: int
    """Clock ticks since the machine's boot."""
    parent: int
    argv: tuple[str, ...]


def main() -> int:
    os.umask(0o077)
    request = json.loads(sys.stdin.buffer.readline())
    place = Place(request["data_dir"])
    try:
        if sys.platform != "linux":
            raise HostProblem(f"found {sys.platform}, expected Linux: start `trl-remote agent` there by hand")
        place.check()
        result = {"up": up, "down": down, "status": status}[request["action"]](request, place)
    except HostProblem as problem:
        emit(error=str(problem))
    except OSError as error:
        emit(error=explained(error, place))
    else:
        emit(result=result)
    return 0


def up(request: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Have an agent of this version run here, which has joined the service."""
    place.make()
    with locked(place):
        check_service(request["url"], request["certificate"])
        settings = settings_of(request, place)
        before = agent_of(place)
        if before and settings == stored_settings(place):
            write(place.token, request["token"].encode())
            return {"state": "unchanged", "pid": before.pid, "python": settings["python"]}
        python = environment(request, place)
        if before:
            emit(progress="ending the agent of another version; trainings continue")
            end([before])
        write(place.token, request["token"].encode())
        if request["certificate"]:
            write(place.certificate, request["certificate"].encode())
        write(place.settings, json.dumps(settings, indent=1).encode())
        emit(progress="starting the agent")
        pid = start(python, request, place)
        remove_other_environments(place, python)
        return {"state": "replaced" if before else "started", "pid": pid, "python": settings["python"]}


def down(request: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """End the agent and everything that it started, and remove the token."""
    if not place.home.is_dir():
        return {"state": "absent", "ended": 0}
    with locked(place):
        agent, found = agent_of(place), owned(place)
        if agent and request["only"] not in (None, stored_settings(place).get("name")):
            return {"state": "another node", "ended": 0}
        if agent:
            end([agent])
        end_all(place)
        for path in (place.token, place.certificate):
            path.unlink(missing_ok=True)
        return {"state": "ended" if found else "not running", "ended": len(found)}


def status(request: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """What runs here."""
    agent, settings = agent_of(place), stored_settings(place)
    state = "running" if agent else "not running" if place.home.is_dir() else "absent"
    known = {key: settings.get(key) for key in ("digest", "url", "name")} if agent else {}
    return {"state": state, "pid": agent.pid if agent else None, "processes": len(owned(place)), **known}


def settings_of(request: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """What the agent is started with; an agent that runs with the same is left alone."""
    given = {key: request[key] for key in ("url", "name", "device", "labels", "digest", "environment", "site_packages")}
    certificate = request["certificate"]
    return {
        **given,
        "python": ".".join(map(str, sys.version_info[:3])),
        "certificate": hashlib.sha256(certificate.encode()).hexdigest() if certificate else None,
        "data_dir": str(place.data_dir),
        "token_file": str(place.token),
    }


def stored_settings(place: Place) -> dict[str, Any]:
    try:
        found = json.loads(place.settings.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# --- the service


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """A service does not redirect: what does may be another one, and would choose what this machine requests."""

    def redirect_request(self, *given: Any, **named: Any) -> None:
        return None


def check_service(url: str, certificate: str | None) -> None:
    """Check that the service answers here, before anything is installed."""
    context = ssl.create_default_context(cadata=certificate or None)
    if certificate:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), NoRedirects())
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(f"{url}/v1/health", timeout=SERVICE_TIMEOUT) as answer:
            found = json.loads(answer.read(1 << 16))
    except urllib.error.HTTPError as error:
        raise HostProblem(f"{url} answers GET /v1/health with {error.code}: it is no training service") from None
    except urllib.error.URLError as error:
        reason = error.reason
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise HostProblem(
                f"the service at {url} has a certificate that is not trusted there ({reason.verify_message}): set "
                "`certificate` of the inventory to its tls_cert"
            ) from None
        raise HostProblem(unreachable(url, getattr(reason, "strerror", None) or str(reason))) from None
    except (OSError, ValueError) as error:
        raise HostProblem(unreachable(url, str(error) or type(error).__name__)) from None
    if not isinstance(found, dict) or "version" not in found:
        raise HostProblem(f"{url} is no training service: set `service` of the inventory to its address")


def unreachable(url: str, reason: str) -> str:
    return (
        f"the service at {url} cannot be reached from there ({reason}): have it listen on an address of its network, "
        "open its port to this machine, or set `service` of the inventory"
    )


# --- the environment


def environment(request: Mapping[str, Any], place: Place) -> Path:
    """The Python of an environment with this wheel; made where it is missing."""
    kind = [request["digest"], sys.version, sys.prefix, request["site_packages"], request["constraints"]]
    directory = place.environments / hashlib.sha256(json.dumps(kind).encode()).hexdigest()[:16]
    python = directory / "bin" / "python"
    if (directory / "complete").exists():
        return python
    shutil.rmtree(directory, ignore_errors=True)  # an interrupted one
    wheel = place.home / request["wheel"]
    try:
        emit(need="wheel")
        write(wheel, received(sys.stdin.buffer, request["size"], request["digest"]))
        emit(progress=f"installing {request['wheel'].removesuffix('-py3-none-any.whl')}")
        make_environment(directory, request["site_packages"], place)
        install(python, wheel, request, place)
        (directory / "complete").touch()
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        wheel.unlink(missing_ok=True)
    return python


def received(source: IO[bytes], size: int, digest: str) -> bytes:
    content = source.read(size)
    if len(content) != size or hashlib.sha256(content).hexdigest() != digest:
        raise HostProblem(f"the wheel did not arrive whole ({len(content)} of {size} bytes): repeat the command")
    return content


def make_environment(directory: Path, site_packages: bool, place: Place) -> None:
    options = ["--system-site-packages"] if site_packages else []
    if site_packages and has_pip():
        options.append("--without-pip")
    done = run([sys.executable, "-I", "-m", "venv", *options, str(directory)], 300)
    if done.returncode:
        refuse_when_full(done.stdout, place)
        if "ensurepip" in done.stdout or "No module named venv" in done.stdout:
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            raise HostProblem(
                f"{sys.executable} cannot make environments (no venv or ensurepip): install python{version}-venv, "
                "or set `python` to another one"
            )
        raise HostProblem(f"the environment could not be made: {last_line(done.stdout)}")
    if site_packages and sys.prefix != sys.base_prefix:
        # --system-site-packages shows those of the Python that this environment was made with, not this one's own.
        paths = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        (packages,) = directory.glob("lib/python*/site-packages")
        lines = [f"import site; site.addsitedir({path!r})\n" for path in paths]
        write(packages / "host.pth", "".join(lines).encode())


def has_pip() -> bool:
    return run([sys.executable, "-I", "-c", "import pip"], 60).returncode == 0


def install(python: Path, wheel: Path, request: Mapping[str, Any], place: Place) -> None:
    """The wheel itself first, in any case: an equal version among the packages of the machine may have other code."""
    pip = [str(python), "-m", "pip", "--no-input", "--disable-pip-version-check", "install", "--progress-bar", "off"]
    index = ["--no-index"] if request["offline"] else []
    write(place.constraints, (request["constraints"] or "").encode())
    steps = (
        ["--no-index", "--no-deps", "--ignore-installed", str(wheel)],
        [*index, "--constraint", str(place.constraints), "llama_stack_provider_trl[train]"],
    )
    for step in steps:
        done = run([*pip, *step], request["install_timeout"], request["environment"])
        if done.returncode == 0:
            continue
        refuse_when_full(done.stdout, place)
        errors = [line.removeprefix("ERROR: ") for line in done.stdout.splitlines() if line.startswith("ERROR: ")]
        advice = (
            "install it there and use --site-packages, or leave out --offline"
            if request["offline"]
            else "check the package index of that machine (pip config list), or use --site-packages"
        )
        raise HostProblem(
            f"pip could not install it ({(errors or [last_line(done.stdout)])[-1].rstrip('.')}): {advice}"
        )


def remove_other_environments(place: Place, python: Path) -> None:
    """Those that no process uses any more: trainings of the agent before continue with theirs."""
    used = [process.argv[0] for process in processes() if process.argv]
    for directory in place.environments.iterdir():
        inside = f"{directory}/"
        if not str(python).startswith(inside) and not any(path.startswith(inside) for path in used):
            shutil.rmtree(directory, ignore_errors=True)


# --- the agent


def start(python: Path, request: Mapping[str, Any], place: Place) -> int:
    """Start the agent detached, in a session of its own, and wait until it has joined. Returns its pid."""
    before = written_at(place.credential)
    environ = agent_environment(os.environ, request, place)
    with open(place.output, "wb") as output:
        agent = subprocess.Popen(
            [str(python), "-m", AGENT, str(place.settings)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=place.data_dir,
            env=environ,
            start_new_session=True,
        )
    deadline = time.monotonic() + request["join_timeout"]
    while written_at(place.credential) == before:
        if agent.poll() is not None:
            place.token.unlink(missing_ok=True)
            raise HostProblem(f"the agent ended: {last_line(place.output.read_text(errors='replace'))}")
        if time.monotonic() > deadline:
            with suppress(HostProblem):
                end(found for found in processes() if found.pid == agent.pid)
            agent.wait(KILLED)
            place.token.unlink(missing_ok=True)
            found = last_line(place.output.read_text(errors="replace"))
            raise HostProblem(f"the agent has not joined the service within {request['join_timeout']:g} s: {found}")
        time.sleep(0.05)
    return agent.pid


def agent_environment(environ: Mapping[str, str], request: Mapping[str, Any], place: Place) -> dict[str, str]:
    passed = {name: value for name, value in environ.items() if not name.startswith(_NOT_PASSED_ON)}
    trusted = {"SSL_CERT_FILE": str(place.certificate)} if request["certificate"] else {}
    return {**passed, **trusted, **request["environment"]}


def written_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


# --- processes


def processes() -> list[Process]:
    """Every process of this machine that this user can see; zombies are left out."""
    found = (process_of(int(name)) for name in os.listdir("/proc") if name.isdecimal())
    return [process for process in found if process]


def process_of(pid: int) -> Process | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        argv = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    words = tuple(os.fsdecode(word) for word in argv.removesuffix(b"\0").split(b"\0"))
    return Process(pid, int(fields[19]), int(fields[1]), words)


def agent_of(place: Place) -> Process | None:
    """The agent of this node."""
    found = [one for one in processes() if one.argv[1:] == ("-m", AGENT, str(place.settings))]
    pids = {one.pid for one in found}
    return next((one for one in found if one.parent not in pids), None)  # a fork has the words of its parent


def owned(place: Place) -> list[Process]:
    """The agent, what its environments' Pythons run, every task of the node, and all their descendants."""
    everything = processes()
    ours = {one.pid for one in everything if is_of_node(one, place)}
    while more := {one.pid for one in everything if one.parent in ours} - ours:
        ours |= more
    return [one for one in everything if one.pid in ours]


def is_of_node(process: Process, place: Place) -> bool:
    if process.argv and process.argv[0].startswith(f"{place.environments}/"):
        return True
    try:
        variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:  # of another user, or gone
        return False
    return any(one.startswith(b"TRL_RUN_DIR=" + os.fsencode(f"{place.data_dir}/")) for one in variables)


def end_all(place: Place) -> None:
    """End what is left. A process that was forked meanwhile is found by the next search."""
    deadline = time.monotonic() + KILLED
    end(owned(place))
    while left := owned(place):
        if time.monotonic() > deadline:
            pids = ", ".join(str(one.pid) for one in left)
            raise HostProblem(f"the processes {pids} cannot be ended: they wait for a device or a disk, restart it")
        for process in left:
            send(process, signal.SIGKILL)
        time.sleep(0.05)


def end(found: Iterator[Process] | list[Process]) -> None:
    """SIGTERM, and SIGKILL after GRACE seconds; returns when they are gone."""
    left = list(found)
    for process in left:
        send(process, signal.SIGTERM)
    began = time.monotonic()
    while left := [one for one in left if is_alive(one)]:
        waited = time.monotonic() - began
        if waited > GRACE + KILLED:
            raise HostProblem(f"process {left[0].pid} cannot be ended: it waits for a device or a disk, restart it")
        if waited > GRACE:
            for process in left:
                send(process, signal.SIGKILL)
        time.sleep(0.05)


def is_alive(process: Process) -> bool:
    now = process_of(process.pid)
    return now is not None and now.started == process.started


def send(process: Process, number: int) -> None:
    """Signal this same process: what the descriptor refers to stays it, also where its pid is given to another one."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if is_alive(process):
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise HostProblem(
            f"process {process.pid} of this node belongs to another user: set `user` of the inventory to that one"
        ) from None
    finally:
        os.close(descriptor)


# --- files, programs, sentences


def write(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    partial = path.with_name(f".{path.name}.new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def locked(place: Place) -> Iterator[None]:
    """One command at a time works on a node."""
    with open(place.home / "lock", "ab") as file:
        deadline = time.monotonic() + LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise HostProblem(
                        f"another `trl-remote nodes` works on {place.data_dir}: wait for its end, and repeat this"
                    ) from None
                time.sleep(0.1)
        yield


def run(
    command: list[str], timeout: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            env={**kept, **(environment or {})},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise HostProblem(f"`{' '.join(command[:4])} ...` has not ended within {timeout:g} s") from None


def refuse_when_full(output: str, place: Place) -> None:
    if "No space left on device" in output or "Disk quota exceeded" in output:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def explained(error: OSError, place: Place) -> str:
    """The sentence of a file that could not be written."""
    if error.errno in _FULL:
        free = ""
        with suppress(OSError):
            usage = shutil.disk_usage(next(path for path in (place.home, *place.home.parents) if path.exists()))
            free = f" ({usage.free / 2**20:.1f} of {usage.total / 2**20:.1f} MiB are free)"
        return f"the disk of {place.data_dir} is full{free}: free space there, or set `data_dir` to a larger disk"
    if error.errno in _REFUSED or error.errno == errno.ENOTDIR:
        what = error.filename or place.data_dir
        return (
            f"{what} cannot be written by user {user_name()} ({error.strerror}): give that user the directory "
            f"{place.data_dir}, or set `data_dir` or `user`"
        )
    return f"{error.filename or place.data_dir}: {error.strerror or error}"


def user_name() -> str:
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("trl-remote: ") if lines else "it has written nothing"


def emit(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
