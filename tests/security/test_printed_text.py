"""What the command line prints: text from elsewhere does nothing to the terminal, and makes no line of its own."""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from llama_stack_provider_trl.errors import JobFailure
from llama_stack_provider_trl.system.console import shown
from llama_stack_provider_trl.system.logs import RedactingFormatter
from llama_stack_provider_trl_remote.cli import main as cli
from llama_stack_provider_trl_remote.cli import watch, whole_jobs
from llama_stack_provider_trl_remote.cli.commands import COMMANDS
from llama_stack_provider_trl_remote.nodes.discovery.machines import FoundMachine
from llama_stack_provider_trl_remote.nodes.discovery.search import Search
from llama_stack_provider_trl_remote.nodes.discovery.sightings import Sighting
from tests.fake_service import FakeService, Json, Run, command_line, progress, status
from tests.required import in_full
from tests.security.harmful_text import FALSE_LINE, HARMFUL

pytestmark = pytest.mark.contract

REPOSITORY = Path(__file__).resolve().parents[2]
HOSTILE = (
    "n\x1b]0;owned\x07\x1b[2J\x1b[31m\x00\x08\x7f\x9b2J\x85\u202e\u2066\u200b\u2060\u00ad\ufeff\u2028\u2029\ud800"
    f"\U000e0041\u3164\r\n{FALSE_LINE}\r{FALSE_LINE}"
)
JOB = "job-1"
PREFLIGHT = {
    "fits": True,
    "message": HOSTILE,
    "warnings": [HOSTILE],
    "data": {
        **dict.fromkeys(("num_rows", "examples", "trained", "truncated", "dropped", "median_tokens", "max_tokens"), 1),
        "histogram": [{"up_to": 64, "rows": 1}],
        "mixture": [{"dataset_id": HOSTILE, "rows": 1, "rows_per_epoch": 1}],
    },
    "steps": {"total_steps": 1, "epochs": 1, "steps_per_epoch": 1, "global_batch": 1},
    "memory": {"estimate_bytes": 1, "limit_bytes": 1, "devices": 1, "device": HOSTILE, "host_bytes": 0},
    "disk": {"needed_bytes": 1, "free_bytes": 1},
}
PREVIEW = {
    "data": {
        **dict.fromkeys(
            ("num_rows", "examples", "trained", "truncated", "dropped", "read", "trained_tokens", "total_tokens"), 1
        ),
        "longest_before_cut": 1,
        "histogram": [],
    },
    "max_seq_length": 8,
    "warnings": [HOSTILE],
    "rows": [
        {
            "row": 0,
            "dataset_id": HOSTILE,
            "example": 0,
            "examples": 2,
            "tokens": 1,
            "outcome": HOSTILE,
            "reason": HOSTILE,
            "kept": "1",
            "trained": "1",
            "parts": {HOSTILE: 1, "b": 0},
            "ids": [1],
            "texts": [HOSTILE],
            "turns": [{"turn": HOSTILE, "part": HOSTILE, "outcome": "different", "reason": HOSTILE}],
            "roles": [HOSTILE],
            **dict.fromkeys(("tools", "tool_calls", "thoughts", "thoughts_kept", "untrained_answers"), HOSTILE),
        }
    ],
    "inference": {
        **dict.fromkeys(("turns", "equal", "different", "cut", "unasked", "not_compared"), HOSTILE),
        "first_different": HOSTILE,
    },
}
NODE = {
    "node": HOSTILE,
    "devices": [HOSTILE, "cpu"],
    "jobs": {HOSTILE: HOSTILE, "cpu:0": HOSTILE},
    "state": HOSTILE,
    "cpus": 2,
    "ollama_models": [HOSTILE],
    "labels": {HOSTILE: HOSTILE},
    "agent": True,
    "machine": HOSTILE,
}
POOL = {
    "pool": HOSTILE,
    "nodes": 1,
    "max_nodes": 2,
    "what": HOSTILE,
    "node_hours_used": 1.0,
    "node_hours": HOSTILE,
    "state": HOSTILE,
    "allocations": [
        {"request_id": HOSTILE, "nodes": [HOSTILE], "state": HOSTILE, "requested_for": HOSTILE, "message": HOSTILE}
    ],
}
TOKEN = {
    **dict.fromkeys(("name", "role", "source", "created_by", "expires_at", "last_used_at", "token"), HOSTILE),
    "priorities": [HOSTILE],
    "required": False,
}
AUDIT = {
    "seq": 1,
    **dict.fromkeys(
        ("time", "event", "caller", "role", "address", "method", "route", "status", "state", "error", "version", "of"),
        HOSTILE,
    ),
    "params": {HOSTILE: HOSTILE},
    "count": HOSTILE,
}


def hostile_status() -> Json:
    """A job that has ended, with every text that a service may send."""
    best = {"job_uuid": HOSTILE, "values": {HOSTILE: HOSTILE}, "value": 1.0}
    found = status(
        JOB,
        "completed",
        detail=HOSTILE,
        progress=progress(1, loss=1.0, link_mbit_per_s=100.0),
        error={"reason": HOSTILE, "message": HOSTILE, "log_path": HOSTILE},
        search={"best": best, "objective": HOSTILE},
        result={HOSTILE: {HOSTILE: 1.5}},
    )
    found["resources_allocated"]["state"] = HOSTILE
    found["scheduled_at"] = HOSTILE
    found["checkpoints"] = [{"identifier": HOSTILE, "path": HOSTILE}]
    return found


class HostileService(FakeService):
    """Puts HOSTILE into every text of its answers that no later call depends on."""

    refuses = False
    """Every answer is an error with HOSTILE as its sentence."""

    def reset(self) -> None:
        self.jobs = {JOB: [hostile_status()]}
        self.logs = [HOSTILE]
        self.nodes = [NODE]
        self.datasets = [{"identifier": HOSTILE, "metadata": {"num_rows": HOSTILE}, "source": {"uri": HOSTILE}}]
        self.samples = [
            {
                "kind": HOSTILE,
                "step": HOSTILE,
                "answers": [{"text": HOSTILE, "complete": True}],
            }
        ]
        self.points = [
            {"kind": "train", "step": n, "epoch": 1.0, "time": 1.0, "metrics": {"loss": 1.0}} for n in (1, 2)
        ]
        self.files = {"config.json": b"{}"}

    async def _dispatch(self, request: web.Request, half: bool) -> web.StreamResponse:
        if self.refuses and request.method != "HEAD":
            return web.json_response({"detail": HOSTILE}, status=400)
        answer = self._hostile(request.method, request.path.removeprefix("/v1/"))
        if answer is not None:
            return answer
        return await super()._dispatch(request, half)

    def _hostile(self, method: str, path: str) -> web.Response | None:
        match method, path.split("/"):
            case "POST", ["post-training", "preflight"]:
                return web.json_response(PREFLIGHT)
            case "POST", ["post-training", "preview"]:
                return web.json_response(PREVIEW)
            case "POST", ["post-training", *_]:
                return web.json_response({**hostile_status(), "job_uuid": JOB})
            case "POST", ["tokens"]:
                return web.json_response(TOKEN)
            case "GET", ["tokens"]:
                return web.json_response({"data": [TOKEN]})
            case "GET", ["audit"]:
                return web.json_response({"data": [AUDIT], "next": 0, "last": 0})
            case "GET", ["logs"]:
                return web.Response(body=HOSTILE.encode("utf-8", "backslashreplace"))
            case "GET", ["pools"]:
                return web.json_response({"data": [POOL]})
            case "GET", ["nodes", _]:
                return web.json_response(NODE)
            case "GET", ["post-training", "jobs", _, "answers"]:
                return web.Response(body=json.dumps(HOSTILE, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            case "GET", ["post-training", "jobs", _, "samples"]:
                prompts = [[{"role": HOSTILE, "content": HOSTILE}]]
                return web.json_response({"prompts": prompts, "data": self.samples, "total": 1})
            case "GET", ["post-training", "jobs", _, "logs"]:
                return web.Response(body=HOSTILE.encode("utf-8", "backslashreplace"))
        return None


WORDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("jobs", "submit"): ("REQUEST",),
    ("jobs", "preflight"): ("REQUEST",),
    ("jobs", "list"): (),
    ("jobs", "show"): (JOB,),
    ("jobs", "watch"): (JOB,),
    ("jobs", "logs"): (JOB, "--follow"),
    ("jobs", "samples"): (JOB,),
    ("jobs", "answers"): (JOB,),
    ("jobs", "cancel"): (JOB,),
    ("jobs", "pause"): (JOB,),
    ("jobs", "resume"): (JOB,),
    ("jobs", "pull"): (JOB, "NEW"),
    ("datasets", "add"): ("ROWS", "--id", "d"),
    ("datasets", "list"): (),
    ("datasets", "preview"): ("d", "--model", "m"),
    ("datasets", "check"): ("ROWS", "--model", "m"),
    ("nodes", "list"): (),
    ("nodes", "commands"): ("--discover",),
    ("nodes", "advise"): ("--model", "1M", "--step-seconds", "1", "--job", JOB),
    ("nodes", "discover"): (),
    ("nodes", "show"): ("n",),
    ("nodes", "pools"): (),
    ("nodes", "cordon"): ("n",),
    ("nodes", "uncordon"): ("n",),
    ("nodes", "drain"): ("n",),
    ("nodes", "remove"): ("n",),
    ("tokens", "create"): ("t",),
    ("tokens", "list"): (),
    ("tokens", "revoke"): ("t",),
    ("jobs", "delete"): (JOB,),
    ("datasets", "delete"): ("d",),
    ("audit", ""): (),
    ("logs", ""): (),
    ("train", ""): ("ROWS", "--model", "m", "--job", JOB),
    ("generate", ""): ("ROWS", "--model", "m", "--output", "o", "--job", JOB),
    ("export", ""): ("m", "--to", "gguf", "--job", JOB),
    ("run", ""): ("REQUEST",),
    ("resume", ""): ("paused",),
    ("plot", ""): (JOB, "--output", "PLOT"),
    ("evaluate", ""): ("m", "ROWS"),
    ("merge", ""): ("m", "--output", "NEW"),
    ("adapter", "merge"): ("ADAPTER", "--output", "NEW"),
    ("doctor", ""): ("--config", "CONFIG"),
    ("serve", ""): ("--config", "CONFIG"),
    ("dashboard", ""): ("--data-dir", HOSTILE.replace("\0", "").replace("\ud800", "")),
    ("agent", ""): ("--token-file", HOSTILE.replace("\0", "").replace("\ud800", "")),
}
"""Command -> its arguments; those in capitals are files of the test."""
ELSEWHERE = {
    ("nodes", "up"): "needs SSH: tests/unit/test_nodes_over_ssh.py; the rule below keeps it from printing otherwise",
    ("nodes", "down"): "as up",
    ("nodes", "status"): "as up",
    ("jobspec", ""): "prints the caller's own words, as a script",
    ("openai", ""): "prints the caller's own address, quoted for a shell: tests/unit/test_remote_cli.py",
    ("completion", ""): "prints a script out of the parser",
    ("register", ""): "calls a Llama Stack: tests/contract/test_registration.py; the rule below keeps it from printing",
    ("chat", ""): "streams answers: tests/contract/test_chats.py; the rule below keeps it from printing otherwise",
}

SILENT = {
    ("jobs", "submit"),
    ("jobs", "resume"),
    ("jobs", "pull"),
    ("datasets", "add"),
    ("nodes", "advise"),
    ("evaluate", ""),
    ("tokens", "revoke"),
    ("jobs", "delete"),
    ("datasets", "delete"),
    ("plot", ""),
}
"""Commands whose output has no text of the service where it answers."""


@pytest.fixture
def service() -> Iterator[HostileService]:
    service = HostileService()
    service.reset()
    try:
        yield service
    finally:
        service.stop()


@pytest.fixture
def run(
    service: HostileService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Run:
    """`trl-remote` with a network, recipes and files that are hostile too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRL_SERVICE_NODE_TOKEN", raising=False)

    async def search(*given: object) -> Search:
        sighting = Sighting("service", ("10.0.0.9",), 8322, name=HOSTILE, version=HOSTILE)
        agent = Sighting("agent", ("10.0.0.8",), 0, name=HOSTILE, service=HOSTILE)
        ollama = Sighting("ollama", ("10.0.0.8",), 11434, version=HOSTILE, models=(HOSTILE,))
        found = (FoundMachine(("10.0.0.9",), (sighting,)), FoundMachine(("10.0.0.8",), (agent, agent, ollama)))
        return Search(found, (HOSTILE,))

    def recipe(*given: object) -> Json:
        raise JobFailure(HOSTILE, HOSTILE)

    monkeypatch.setattr("llama_stack_provider_trl_remote.nodes.discovery.search.search", search)
    for name in ("evaluate", "check"):  # imported before its recipe is replaced: the fixture undoes that
        command = importlib.import_module(f"llama_stack_provider_trl_remote.cli.{name}")
        monkeypatch.setattr(command, "run_recipe", recipe)
        monkeypatch.setattr(command, "check_interpreter", lambda python: None)
    monkeypatch.setattr("llama_stack_provider_trl_remote.cli.recipe_process.run_recipe", recipe)
    monkeypatch.setattr("llama_stack_provider_trl.launch.interpreter.check_interpreter", lambda python: None)
    return command_line(service, monkeypatch, capsys)


def arguments(group: str, command: str, tmp_path: Path) -> list[str]:
    """The words of a command, with files whose content is hostile where it is read."""
    job = {"job_uuid": JOB, "model": "m", "training_config": {"n_epochs": 1}}
    row = {"prompt": HOSTILE.replace("\ud800", ""), "completion": "b"}
    settings = {HOSTILE.replace("\ud800", ""): HOSTILE.replace("\ud800", "")}
    provider = {"provider_id": "trl", "provider_type": "remote::trl_remote", "config": settings}
    files = {
        "REQUEST": ("request.json", json.dumps(job)),
        "ROWS": ("rows.jsonl", json.dumps(row) + "\n"),
        "CONFIG": ("config.yaml", json.dumps({"providers": {"post_training": [provider]}})),
        "NEW": ("new", None),
        "PLOT": ("plot.svg", None),
        "ADAPTER": ("adapter", None),
    }
    if "ADAPTER" in WORDS[group, command]:
        (tmp_path / "adapter").mkdir()
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": HOSTILE}))
    words = [group, *([command] if command else [])]
    for word in WORDS[group, command]:
        if word in files:
            name, content = files[word]
            if content is not None:
                (tmp_path / name).write_text(content)
            words.append(str(tmp_path / name))
        else:
            words.append(word)
    return words


def assert_harmless(text: str, is_log: bool = False) -> None:
    """Nothing in it acts on a terminal, and but for a log, which has lines of its own, no line is a false one."""
    assert not (found := HARMFUL.findall(text)), [hex(ord(one)) for one in found]
    assert is_log or not [line for line in text.splitlines() if line.startswith(FALSE_LINE)]


def every_command() -> list[tuple[str, str]]:
    """Every command of the parser, and of the table that it calls."""
    groups = next(action for action in cli.parser()._actions if action.dest == "group").choices
    assert groups is not None
    found = []
    for group, parser in groups.items():  # type: ignore[attr-defined]
        below = [action.choices for action in parser._actions if action.dest == "command" and action.choices]
        found += [(group, command) for command in below[0]] if below else [(group, "")]
    return found


def test_every_command_is_tried_or_has_a_reason() -> None:
    commands = every_command()
    assert sorted(commands) == sorted([*WORDS, *ELSEWHERE])
    assert {(group, command if command != "show" or group == "jobs" else "") for group, command in COMMANDS} <= {
        *commands,
        ("nodes", ""),
    }


# `logs` and `audit` are tables of text in one form only; the others have JSON, too.
@pytest.mark.parametrize(
    ("refuses", "as_json"),
    [
        pytest.param(False, False, id="answered-text"),
        pytest.param(True, True, id="refused-json"),
        *in_full(pytest.param(True, False, id="refused-text")),
    ],
)
@pytest.mark.parametrize(("group", "command"), WORDS, ids=[" ".join(words).strip() for words in WORDS])
def test_nothing_from_elsewhere_acts_on_the_terminal(
    run: Run,
    service: HostileService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    command: str,
    refuses: bool,
    as_json: bool,
) -> None:
    service.refuses = refuses
    service.jobs["paused"] = [status("paused", "paused"), {**hostile_status(), "job_uuid": "paused"}]
    monkeypatch.setattr(whole_jobs, "_new_name", lambda stem: JOB)
    words = arguments(group, command, tmp_path)
    if as_json and group not in ("dashboard", "serve", "agent"):
        words.append("--json")
    _, output, errors = run(*words)
    assert_harmless(output, is_log="logs" in (group, command))
    assert_harmless(errors)
    assert "owned" in output + errors or (not refuses and (group, command) in SILENT), output + errors


def test_no_json_of_a_command_acts_on_the_terminal(
    run: Run, service: HostileService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the service has answered, by all commands in one test: a test for each would take as long as its text."""
    monkeypatch.setattr(whole_jobs, "_new_name", lambda stem: JOB)
    wrong: list[str] = []
    for number, (group, command) in enumerate(WORDS):
        if group in ("dashboard", "serve", "agent"):
            continue
        service.reset()
        service.jobs["paused"] = [status("paused", "paused"), {**hostile_status(), "job_uuid": "paused"}]
        (own := tmp_path / str(number)).mkdir()
        monkeypatch.chdir(own)
        _, output, errors = run(*arguments(group, command, own), "--json")
        try:
            assert_harmless(output, is_log="logs" in (group, command))
            assert_harmless(errors)
            assert "owned" in output + errors or (group, command) in SILENT
        except AssertionError as error:
            wrong.append(f"{group} {command}: {error}")
    assert wrong == []


class _Terminal:
    """A terminal that keeps what was written."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_lines_that_change_on_a_terminal_are_redrawn_by_our_own_sequences_only(service: HostileService) -> None:
    terminal: Any = _Terminal()
    client = watch.ServiceClient(service.url)
    for name in ("a", "b"):
        service.jobs[name] = [{**hostile_status(), "job_uuid": name, "status": "in_progress"}, hostile_status()]
        service.jobs[name][1]["job_uuid"] = name
    asyncio.run(watch.watch(client, ["a", "b"], 0.01, output=terminal))
    assert_harmless(re.sub(r"\x1b\[(1A|J)|\r", "", terminal.text))


def test_a_command_that_fails_in_an_unexpected_way_is_harmless_too(run: Run, service: HostileService) -> None:
    service.jobs[JOB] = [{HOSTILE: HOSTILE}]
    for words in (["jobs", "watch", JOB], ["jobs", "watch", JOB, "--verbose"]):
        code, output, errors = run(*words)
        assert code == 1
        assert_harmless(output + errors)
        assert "bug" in errors


def test_words_of_a_command_that_come_from_elsewhere_are_harmless(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("jobs", "list", HOSTILE)
    assert_harmless(capsys.readouterr().err)
    assert_harmless(run("jobs", "show", HOSTILE)[2])


def test_entries_of_a_log_are_harmless_and_none_makes_another() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "found %s", (HOSTILE,), sys.exc_info())
    text = RedactingFormatter().format(record)
    assert "Traceback" in text
    assert_harmless(text)
    assert all(line.startswith("    ") for line in text.split("\n")[1:])


def test_escapes_leave_json_and_other_languages_as_they_are() -> None:
    text = "Zwölf Boxkämpfer, 你好, ジャパン, שלום, हिन्दी, 🎉, a b"
    assert shown(text) == text
    value = {HOSTILE: [HOSTILE, text]}
    written = shown(json.dumps(value, ensure_ascii=False))
    assert json.loads(written) == value
    assert not HARMFUL.search(written)


PROGRAMS = {
    "llama_stack_provider_trl/launch/interface.py": "prints the name of an interface for a shell",
    "llama_stack_provider_trl/launch/namespaces.py": "the first process of a namespace: its reader is the runner",
    "llama_stack_provider_trl/proposer.py": "its reader parses JSON",
    "llama_stack_provider_trl/recipes/distributed/torchrun.py": "torchrun's own output, which is the log of a training",
    "llama_stack_provider_trl/recipes/model/vllm_child.py": "a child of a training, whose output is the log",
    "llama_stack_provider_trl/recipes/results.py": "a child, whose output is a log",
    "llama_stack_provider_trl/recipes/serve.py": "the process that answers chats, whose output is its log",
    "llama_stack_provider_trl/recipes/serving/grammar_check.py": "its reader is the process that answers chats",
    "llama_stack_provider_trl/recipes/train.py": "a training, whose output is its log",
    "llama_stack_provider_trl/system/compiler.py": "its reader is the doctor",
    "llama_stack_provider_trl/system/fork.py": "the exit status of a fork, for what would print it",
    "llama_stack_provider_trl_remote/nodes/pools/guard.py": "its reader is the pool",
    "llama_stack_provider_trl_remote/nodes/pools/on_host.py": "runs without this package: its reader is the pool",
    "llama_stack_provider_trl_remote/nodes/pools/ray_bundles.py": "runs in Ray: its reader is the pool",
    "llama_stack_provider_trl_remote/nodes/pools/ray_rows.py": "runs in Ray: its reader is the service",
    "llama_stack_provider_trl_remote/service/datasets/reader.py": "its reader is the service",
    "llama_stack_provider_trl_remote/service/datasets/registration.py": "its reader is the service",
}
"""Modules that write to standard output or error themselves: no person reads it, or with the reason given."""
STREAM = {"stdout", "stderr", "__stdout__", "__stderr__"}


def ways_around(tree: ast.AST) -> Iterator[str]:
    """What prints without the console: print, a method of a stream, a message for sys.exit, printing modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func
            prints = any(_is_text(given) for given in node.args)
            if isinstance(name, ast.Name) and (name.id == "print" or (name.id == "SystemExit" and prints)):
                yield f"{name.id} in line {node.lineno}"
            if isinstance(name, ast.Attribute):
                owner = name.value
                if isinstance(owner, ast.Attribute) and owner.attr in STREAM and name.attr in ("write", "writelines"):
                    yield f"{owner.attr}.{name.attr} in line {node.lineno}"
                if name.attr == "exit" and isinstance(owner, ast.Name) and owner.id == "sys" and prints:
                    yield f"sys.exit with a text in line {node.lineno}"
                if name.attr in ("print_exc", "print_exception", "print_stack", "pprint"):
                    yield f"{name.attr} in line {node.lineno}"
        if isinstance(node, ast.keyword) and node.arg == "file" and _is_stream(node.value):
            yield f"file=sys.{ast.unparse(node.value)} in line {node.value.lineno}"
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _is_stream(node.value):
            yield f"another name of a stream in line {node.lineno}"


def _is_stream(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in STREAM
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
    )


def _is_text(node: ast.AST) -> bool:
    """Whether sys.exit would print the value."""
    is_str = isinstance(node, ast.Constant) and isinstance(node.value, str)
    is_call_of_str = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str"
    return is_str or is_call_of_str or isinstance(node, ast.JoinedStr | ast.BinOp | ast.Name)


def test_everything_that_is_printed_goes_through_the_console() -> None:
    found = {}
    clients = [REPOSITORY / "examples" / name for name in ("quickstart.py", "score.py")]
    for package in ("llama_stack_provider_trl", "llama_stack_provider_trl_remote"):
        for path in [*(REPOSITORY / package).rglob("*.py"), *clients]:
            name = str(path.relative_to(REPOSITORY))
            if ways := list(ways_around(ast.parse(path.read_text()))):
                found[name] = ways
    assert {name: ways for name, ways in found.items() if name not in PROGRAMS} == {}
    assert PROGRAMS.keys() - found.keys() == set(), "these print nothing any more: leave them out"


@pytest.mark.parametrize(
    "source",
    [
        "print(1)",
        "import sys; sys.stdout.write('a')",
        "import sys; sys.exit(f'{name}')",
        "import traceback; traceback.print_exc()",
        "import sys; json.dump(1, file=sys.stderr)",
        "import sys; out = sys.stdout",
    ],
)
def test_the_rule_finds_each_way_around_the_console(source: str) -> None:
    assert list(ways_around(ast.parse(source)))
