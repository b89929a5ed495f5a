"""Starts, observes and stops nodes over SSH. Each call may be repeated, and ends within its time.

Host keys are verified: an unknown one, or another one than expected, is refused. What happens on the machine is
`on_host`'s part, which is sent there; secrets go over the connection's standard input only.
"""

from __future__ import annotations

import asyncio
import base64
import getpass
import hashlib
import json
import os
import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_stack_provider_trl.errors import MissingExtra
from llama_stack_provider_trl.system import owned_paths

from ...wire import VERSIONS
from ..identity import NodeError
from . import on_host
from .inventory import InventoryHost
from .wheel import Wheel

if TYPE_CHECKING:
    import asyncssh

CONNECT = 10.0
"""Seconds for a connection with its login."""
PROBE = 30.0
"""Seconds to find a Python."""
STOP = 120.0
OLDEST_PYTHON = (3, 12)
PYTHONS = ("python3.12", "python3.13", "python3.14", "python3")
_KEEPALIVE = 5.0
"""Seconds between keepalive messages; three without an answer end the connection."""
_BOOTSTRAP = (
    "import sys; i = sys.stdin.buffer; "
    "exec(compile(i.read(int(i.readline())), 'on_host', 'exec'), {'__name__': '__main__'})"
)
_MARK = "trl-python"
Progress = Callable[[str], None]


class HostError(NodeError):
    """Raised when a machine of the inventory cannot do what was requested. Its text begins with the machine."""

    def __init__(self, host: InventoryHost, problem: str) -> None:
        self.problem = problem
        super().__init__(f"{host.where}: {problem}")


@dataclass(frozen=True)
class NodePlan:
    """What is installed on machines and started there."""

    url: str
    """The service's address as the machines reach it."""
    token: str = field(repr=False)
    """Join token (role node)."""
    wheel: Wheel = field(repr=False)
    certificate: str | None = None
    """The service's certificate as PEM, where the machines' systems do not trust it."""
    constraints: str | None = None
    """Text of a constraints file of pip."""
    offline: bool = False
    """No package index is called: everything but the wheel is there."""
    site_packages: bool = False
    """The environment shows the packages of the Python that it is made with."""
    install_timeout: float = 1800.0
    join_timeout: float = 90.0


def equal_versions(found: Mapping[str, str]) -> str | None:
    """Constraints of pip out of the versions of the service's machine, which those of a node must equal; None: none is
    known."""
    return "".join(f"{name}=={found[name]}\n" for name in VERSIONS[1:] if found.get(name)) or None


async def start_node(host: InventoryHost, plan: NodePlan, progress: Progress = lambda text: None) -> dict[str, Any]:
    """Have an agent run on this machine which has joined the service. One that runs with the same wheel and settings is
    left alone; another one is replaced, and its trainings continue. Returns `state` (started, replaced or unchanged),
    `pid`, and the version of its `python`. Raises HostError: it failed; the machine has no agent that has not
    joined."""
    request = {
        "action": "up",
        "url": plan.url,
        "token": plan.token,
        "name": host.name,
        "device": host.device,
        "labels": host.labels,
        "environment": host.environment,
        "certificate": plan.certificate,
        "constraints": plan.constraints,
        "offline": plan.offline,
        "site_packages": plan.site_packages,
        "wheel": plan.wheel.name,
        "size": len(plan.wheel.content),
        "digest": plan.wheel.digest,
        "install_timeout": plan.install_timeout,
        "join_timeout": plan.join_timeout,
    }
    limit = 2 * plan.install_timeout + plan.join_timeout + STOP + 600
    return await _request(host, request, limit, progress, plan.wheel.content)


async def observe_node(host: InventoryHost) -> dict[str, Any]:
    """Observe a machine. Raises HostError. Returns `state` (running, not running, or absent: it has never been a node),
    `pid`, number of `processes`, and of an agent that runs the `digest` of its wheel, its `url` and `name`."""
    return await _request(host, {"action": "status"}, PROBE)


async def stop_node(
    host: InventoryHost, progress: Progress = lambda text: None, *, only: str | None = None
) -> dict[str, Any]:
    """End the agent of a machine and everything that it started, and remove its token. Raises HostError: also where a
    process remains. Returns `state` (ended, not running, absent, or another node), and the number of processes that
    were `ended`.

    Args:
        only: name of the node; an agent that runs there under another name is left alone.
    """
    return await _request(host, {"action": "down", "only": only}, STOP, progress)


async def _request(
    host: InventoryHost,
    request: Mapping[str, Any],
    limit: float,
    progress: Progress = lambda text: None,
    wheel: bytes = b"",
) -> dict[str, Any]:
    """Send a request to `on_host`. Raises HostError."""
    ssh = require_asyncssh()
    progress("connecting")
    try:
        async with _connected(ssh, host) as connection:
            python = await _find_python(connection, host)
            async with asyncio.timeout(limit):
                return await _converse(connection, host, python, request, progress, wheel)
    except TimeoutError as error:
        raise HostError(host, f"it has not answered within {limit:g} s: repeat the command, or examine it") from error
    except (ssh.Error, OSError) as error:
        raise HostError(host, f"the SSH connection was lost ({_reason(error)}): repeat the command") from error


async def _converse(
    connection: asyncssh.SSHClientConnection,
    host: InventoryHost,
    python: str,
    request: Mapping[str, Any],
    progress: Progress,
    wheel: bytes,
) -> dict[str, Any]:
    ssh = require_asyncssh()
    source = program()
    sent = json.dumps({**request, "data_dir": host.data_dir}).encode()
    other = ""  # what a shell's start or a traceback writes
    async with connection.create_process(_command(python), encoding=None, stderr=ssh.STDOUT) as process:
        process.stdin.write(f"{len(source)}\n".encode() + source + sent + b"\n")
        async for line in process.stdout:
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            match found:
                case {"progress": str(text)}:
                    progress(text)
                case {"need": "wheel"}:
                    process.stdin.write(wheel)
                case {"error": str(problem)}:
                    raise HostError(host, problem)
                case {"result": dict(result)}:
                    return result
                case _:
                    other = line.decode(errors="replace").strip() or other
    raise HostError(host, f"its Python {python} ended without an answer: {other or 'it has written nothing'}")


def program() -> bytes:
    """`on_host`, with the module that it imports in the place of the import: the machine has no project."""
    source, imported = Path(on_host.__file__).read_text(), Path(owned_paths.__file__).read_text()
    line = "from llama_stack_provider_trl.system.owned_paths import own_directory\n"
    assert source.count(line) == 1
    return source.replace(line, imported.replace("from __future__ import annotations\n", "")).encode()


def _command(python: str) -> str:
    """The one command that other users of the machine see."""
    return f"{shlex.quote(python)} -I -c {shlex.quote(_BOOTSTRAP)}"


# --- the Python there


async def _find_python(connection: asyncssh.SSHClientConnection, host: InventoryHost) -> str:
    ssh = require_asyncssh()
    try:
        done = await connection.run("sh -s", input=python_probe(host.python), timeout=PROBE)
    except ssh.TimeoutError as error:
        raise HostError(host, f"its shell has not answered within {PROBE:g} s: log in there and examine it") from error
    python, found = chosen_python(str(done.stdout or ""))
    if python is None:
        wanted = f"`python` {host.python!r}" if host.python else "a Python >= 3.12"
        there = f"found {', '.join(found)}" if found else "found none" if not host.python else "it does not run there"
        raise HostError(
            host,
            f"{wanted} is needed there, {there}: install python3.12 and python3.12-venv, or set `python` of the "
            "inventory to one",
        )
    return python


def python_probe(chosen: str | None) -> str:
    """A shell script that prints version and path of each Python of interest."""
    words = " ".join(_quoted(one) for one in ([chosen] if chosen else PYTHONS))
    return (
        "PATH=$PATH:/usr/local/bin:$HOME/.local/bin\n"
        f"for name in {words}; do\n"
        '  path=$(command -v "$name" 2>/dev/null) || continue\n'
        '  version=$("$path" -I -c \'import sys; print("%d.%d.%d" % sys.version_info[:3])\' 2>/dev/null </dev/null) '
        "|| continue\n"
        f'  echo "{_MARK} $version $path"\n'
        "done\n"
    )


def chosen_python(output: str) -> tuple[str | None, list[str]]:
    """The first Python that is new enough, and all that were found, from the output of `python_probe`."""
    found = [line.split(" ", 2)[1:] for line in output.splitlines() if line.startswith(f"{_MARK} ")]
    fit = [path for version, path in found if tuple(map(int, version.split(".")[:2])) >= OLDEST_PYTHON]
    return (fit[0] if fit else None), [f"{path} {version}" for version, path in found]


def _quoted(path: str) -> str:
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


# --- the connection


@asynccontextmanager
async def _connected(ssh: Any, host: InventoryHost) -> AsyncIterator[asyncssh.SSHClientConnection]:
    """A connection to a machine whose host key was verified. Raises HostError."""
    seen: list[str] = []

    class Verifier(ssh.SSHClient):
        def validate_host_public_key(self, name: str, address: str, port: int, key: Any) -> bool:
            """Called for a key that is not trusted, which stays refused."""
            seen.append(f"{key.get_algorithm()} {fingerprint(key.public_data)}")
            return False

    try:
        options = _options(ssh, host)
        async with asyncio.timeout(CONNECT):
            connection, _ = await ssh.create_connection(Verifier, host.host, host.port, **options)
    except (ssh.Error, OSError, ValueError) as error:
        raise HostError(host, connection_problem(ssh, host, error, seen)) from error
    try:
        yield connection
    finally:
        connection.abort()
        await connection.wait_closed()


def _options(ssh: Any, host: InventoryHost) -> dict[str, Any]:
    """Options of asyncssh: public keys only, nothing from ~/.ssh/config, which could switch the verification off."""
    options: dict[str, Any] = {
        "config": None,
        "username": host.user or getpass.getuser(),
        "known_hosts": str(host.known_hosts),
        "preferred_auth": "publickey",
        "login_timeout": CONNECT,
        "keepalive_interval": _KEEPALIVE,
        "keepalive_count_max": 3,
    }
    if host.host_key:
        options["known_hosts"] = ([ssh.import_public_key(host.host_key)], [], [])
    else:
        with open(host.known_hosts):
            pass
    if host.key_file:
        options |= {"client_keys": [ssh.read_private_key(str(host.key_file))], "agent_path": None}
    return options


def connection_problem(ssh: Any, host: InventoryHost, error: Exception, seen: list[str]) -> str:
    """The sentence of a connection that was not made.

    Args:
        seen: host keys that were presented and are not trusted.
    """
    source = "`host_key` of the inventory" if host.host_key else str(host.known_hosts)
    user = host.user or getpass.getuser()
    match error:
        case ssh.HostKeyNotVerifiable():
            found = seen[-1] if seen else "of the machine"
            return (
                f"its host key {found} is not the one in {source}, and nothing was sent: compare it with `ssh-keygen "
                "-lf /etc/ssh/ssh_host_ed25519_key.pub` on the machine itself, and correct the entry if they are equal"
            )
        case ssh.KeyExchangeFailed():
            return f"it has no host key of the kind in {source} ({error.reason}): add the entry of another one there"
        case ssh.PermissionDenied():
            key = f"the key {host.key_file}" if host.key_file else "every key of the SSH agent and of ~/.ssh"
            return (
                f"it refuses {key} for user {user}: add the public key to that user's ~/.ssh/authorized_keys there, or "
                "set `user` or `key_file`"
            )
        case ssh.KeyImportError() | ssh.KeyEncryptionError() if "passphrase" in str(error).lower():
            return f"the key {host.key_file} has a passphrase: add it to an SSH agent, and leave out `key_file`"
        case FileNotFoundError() | PermissionError() if error.filename is not None:
            which = "key_file" if host.key_file and str(error.filename) == str(host.key_file) else "known_hosts"
            return f"its `{which}` {error.filename} cannot be read ({error.strerror}): correct it in the inventory"
        case ValueError():
            which = f"key {host.key_file}" if isinstance(error, ssh.KeyImportError) and not host.host_key else source
            return f"{which} cannot be used ({error}): correct it"
        case TimeoutError():
            reason = f"no answer within {CONNECT:g} s"
        case ssh.Error():
            reason = f"no SSH server there, or one that ends the connection: {error.reason}"
        case _:
            reason = _reason(error)
    return (
        f"port {host.port} of {host.host} cannot be reached ({reason}): check host and port, and that sshd runs there"
    )


def fingerprint(public_data: bytes) -> str:
    """As `ssh-keygen -l` shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(public_data).digest()).decode().rstrip("=")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno and error.errno > 0:  # asyncio's own text is "Connect call failed"
        return os.strerror(error.errno)
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error or type(error).__name__)


def require_asyncssh() -> Any:
    """The library. Raises MissingExtra."""
    try:
        import asyncssh
    except ImportError as error:
        raise MissingExtra("trl-remote nodes up, down and status", "asyncssh", "ssh") from error
    return asyncssh
