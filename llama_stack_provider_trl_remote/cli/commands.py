"""Commands of `trl-remote`: each calls the service with a client and prints the result."""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.specs.state_words import state_of
from llama_stack_provider_trl.system.console import complain, lines_of, show_json, show_lines
from llama_stack_provider_trl.system.texts import counted

from ..answer_lines import answer_lines
from ..client import ServiceClient, job_path
from ..nodes.joining import how_to_add_a_node
from ..plots.curves import LOSS, curves_of
from ..plots.files import check_output, write_plot
from ..plots.points import fetch_points, newest_points, stored_points
from ..pull import pull
from ..request_files import read_request
from ..row_files import register_rows, register_uri, stored_rows
from ..submitting import submit_request
from ..trl_client import all_samples, list_jobs, preflight_request, sorted_jobs
from . import advise, machine_commands, nodes_ssh, whole_jobs
from .chat import chat
from .preview import preview
from .register import register
from .terminal import (
    JOB_COLUMNS,
    audit_line,
    devices_of,
    emit,
    job_line,
    job_row,
    node_lines,
    preflight_lines,
    progress_line,
    status_lines,
    table,
    token_row,
)
from .waiting import waiting
from .watch import exit_status, follow_log, watch, watch_changes

Command = Callable[[ServiceClient, Namespace], Coroutine[Any, Any, int]]
TOKENS, AUDIT = "/v1/tokens", "/v1/audit"
_NOT_READ = "not read yet"
"""Number of the rows of a uri that no job has needed."""
_RECENT = 100
"""Lines of the audit log that are shown without --after."""


async def submit(client: ServiceClient, options: Namespace) -> int:
    answer = await submit_request(client, read_request(options.file), options.algorithm)
    emit(options, answer, answer["job_uuid"])
    return 0


async def preflight(client: ServiceClient, options: Namespace) -> int:
    body = read_request(options.file)
    with waiting("preflight"):
        found = await preflight_request(client, body, options.algorithm)
    emit(options, found, *preflight_lines(found))
    return 0 if found["fits"] else 1


async def show_jobs(client: ServiceClient, options: Namespace) -> int:
    status = options.status and state_of(options.status)
    if options.sort is not None or options.reverse:
        sort = f"{'-' if options.reverse else ''}{options.sort or 'created'}"
        jobs = await sorted_jobs(client, sort, status)
        emit(options, jobs, *table(JOB_COLUMNS, map(job_row, jobs)))
        return 0
    if options.json:
        show_json([job async for job in list_jobs(client, status)], indent=2)
        return 0
    async for job in list_jobs(client, status):
        show_lines(job_line(job))
    return 0


async def show(client: ServiceClient, options: Namespace) -> int:
    if options.json:
        show_json(await client.status(options.job_uuid, options.config), indent=2)
        return 0
    status = await client.status(options.job_uuid)
    step = ((status.get("resources_allocated") or {}).get("progress") or {}).get("step")
    points = (await client.get(job_path(options.job_uuid, "/metrics"), after=step - 1))["data"] if step else ()
    # An attempt that has resumed is behind the steps of the one before.
    newest = {point["kind"]: point for point in points}
    show_lines(*status_lines(status, tuple(newest.values()), config=options.config))
    return 0


async def watch_jobs(client: ServiceClient, options: Namespace) -> int:
    if options.json:
        return exit_status(await watch_changes(client, options.job_uuids, options.interval, options.after))
    if options.after is not None:
        raise InvalidRequest("--after", options.after, "it continues a watch with --json: add that, or leave it out.")
    return exit_status(await watch(client, options.job_uuids, options.interval))


async def logs(client: ServiceClient, options: Namespace) -> int:
    if options.follow:

        def show_line(line: str) -> None:
            if options.json:
                show_json({"line": line}, flush=True)
            else:
                show_lines(line, flush=True)

        await follow_log(client, options.job_uuid, options.rank, options.tail, show_line)
        return 0
    path = job_path(options.job_uuid, "/logs")
    text = (await client.get_text(path, rank=options.rank, tail=options.tail)).rstrip("\n")
    emit(options, {"rank": options.rank, "lines": text.splitlines()}, *lines_of(text))
    return 0


async def answers(client: ServiceClient, options: Namespace) -> int:
    """Print each answer as a line of JSON, or write them to a file, which appears when it is complete."""
    if options.output is None:
        async with aclosing(answer_lines(client, options.job_uuid)) as lines:
            async for line in lines:
                show_lines(line.decode(errors="backslashreplace"))
        return 0
    target = Path(options.output)
    part, count = target.with_name(f".{target.name}.part"), 0
    try:
        with open(part, "wb") as file:
            async with aclosing(answer_lines(client, options.job_uuid)) as lines:
                async for line in lines:
                    file.write(line + b"\n")
                    count += 1
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    emit(options, {"file": str(target), "answers": count}, f"{target}: {count} answers")
    return 0


async def samples(client: ServiceClient, options: Namespace) -> int:
    """Print each prompt of a job, and the answers to it: before, at checkpoints and after the training."""
    found = await all_samples(client, options.job_uuid)
    none = "" if found["prompts"] else f"job {options.job_uuid} has no prompts: its option `samples` sets them"
    emit(options, found, *([none] if none else _sample_lines(found)))
    return 0


def _sample_lines(found: dict[str, Any]) -> Iterator[str]:
    """Texts as Python writes them: an answer may have control characters of a terminal."""
    for number, turns in enumerate(found["prompts"]):
        yield "prompt " + "; ".join(f"{turn['role']}: {turn['content']!r}" for turn in turns)
        for one in found["data"]:
            answer = one["answers"][number]
            kind = f"{one['kind']}, " if one["kind"] != "checkpoint" else ""
            end = "" if answer["complete"] else " (cut at the limit)"
            yield f"  {kind}step {one['step']}: {answer['text']!r}{end}"
    if not found["data"]:
        yield "  no answers yet"


async def cancel(client: ServiceClient, options: Namespace) -> int:
    await client.cancel(options.job_uuid)
    status = await client.status(options.job_uuid, config=False)
    emit(options, status, progress_line(status))
    return 0


async def pause_or_resume(client: ServiceClient, options: Namespace) -> int:
    status = await client.post(job_path(options.job_uuid, f"/{options.command}"))
    emit(options, status, progress_line(status))
    return 0


async def delete_job(client: ServiceClient, options: Namespace) -> int:
    await client.delete(job_path(options.job_uuid, "?checkpoints=true" if options.checkpoints else ""))
    answer = {"job_uuid": options.job_uuid, "deleted": True, "checkpoints": options.checkpoints}
    what = "its checkpoints are, too" if options.checkpoints else "its checkpoints stay"
    emit(options, answer, f"{options.job_uuid} is deleted; {what}")
    return 0


async def pull_checkpoint(client: ServiceClient, options: Namespace) -> int:
    target = Path(options.directory)
    line = (lambda text: None) if options.json else (lambda text: show_lines(text, flush=True))
    identifier = await pull(client, options.job_uuid, options.checkpoint, target, line)
    emit(options, {"identifier": identifier, "directory": str(target)}, f"{identifier} is in {target}")
    return 0


async def plot(client: ServiceClient, options: Namespace) -> int:
    target, metrics = check_output(options.output), options.metric or [LOSS]
    if options.data_dir is not None:
        points = await asyncio.to_thread(stored_points, options.data_dir.expanduser(), options.job_uuids, metrics)
    elif options.job_uuids:
        points = {job_uuid: await fetch_points(client, job_uuid) for job_uuid in options.job_uuids}
    else:
        points = await newest_points(client, metrics)
    panels = curves_of(points, metrics, options.x, options.smoothing)
    write_plot(panels, target, options.x)
    answer = {"path": str(target), "jobs": list(points), "metrics": [panel.metric for panel in panels]}
    emit(options, answer, f"{target}: {', '.join(answer['metrics'])} of {', '.join(points)}")
    return 0


async def add_dataset(client: ServiceClient, options: Namespace) -> int:
    if "://" in options.file:
        await register_uri(client, options.file, options.dataset_id)
        answer = {"dataset_id": options.dataset_id, "uri": options.file}
        emit(options, answer, f"{options.dataset_id}: {options.file}, read once a job needs it")
        return 0
    # In a thread: reading and writing 10,000 rows takes a third of a second.
    with ExitStack() as files:
        blob = await asyncio.to_thread(files.enter_context, stored_rows(Path(options.file)))
        rows = await register_rows(client, blob, options.dataset_id)
    emit(options, rows._asdict(), f"{rows.dataset_id}: {counted(rows.num_rows, 'row')}, {rows.sha256}")
    return 0


async def list_datasets(client: ServiceClient, options: Namespace) -> int:
    found = (await client.get_all("/v1/datasets"))["data"]
    rows = [(d["identifier"], d.get("metadata", {}).get("num_rows", _NOT_READ), _source(d["source"])) for d in found]
    emit(options, found, *table(("dataset", "rows", "source"), rows))
    return 0


async def delete_dataset(client: ServiceClient, options: Namespace) -> int:
    await client.delete(f"/v1/datasets/{quote(options.dataset_id, safe='')}")
    answer = {"dataset_id": options.dataset_id, "deleted": True}
    emit(options, answer, f"{options.dataset_id} is deleted; jobs that were queued with it keep their rows")
    return 0


async def list_nodes(client: ServiceClient, options: Namespace) -> int:
    found = (await client.get_all("/v1/nodes"))["data"]
    rows = [
        (node["node"], device, job, load or "-", node.get("state", "open"))
        for node in found
        for device, job, load in devices_of(node)
    ]
    lines = table(("node", "device", "job", "load", "state"), rows, cut=("load",))
    for node in found:
        if names := node.get("ollama_models"):
            lines.append(f"Ollama on {node['node']}, not for training: {', '.join(names)}")
    emit(options, found, *lines, "", how_to_add_a_node(client.url))
    return 0


async def list_pools(client: ServiceClient, options: Namespace) -> int:
    found = (await client.get("/v1/pools"))["data"]
    limits = [
        (
            pool["pool"],
            f"{pool['nodes']} of {pool['max_nodes']} x {pool['what']}",
            f"{pool['node_hours_used']:.1f} of {pool['node_hours'] or 'any number'}",
            pool["state"],
        )
        for pool in found
    ]
    requests = [
        (one["request_id"], pool["pool"], len(one["nodes"]), one["state"], one["requested_for"], one["message"])
        for pool in found
        for one in pool["allocations"]
    ]
    lines = table(("pool", "nodes", "node-hours in 30 days", "state"), limits, cut=("state",))
    if requests:
        head = ("request", "pool", "nodes", "state", "for job", "message")
        lines += ["", *table(head, requests, cut=("message",))]
    emit(options, found, *(lines if found else ["the service has no pools: `pools` in its configuration adds them"]))
    return 0


async def show_node(client: ServiceClient, options: Namespace) -> int:
    node = await client.get(_node(options))
    emit(options, node, *node_lines(node))
    return 0


async def change_node(client: ServiceClient, options: Namespace) -> int:
    await client.post(f"{_node(options)}/{options.command}")
    return await list_nodes(client, options)


async def remove_node(client: ServiceClient, options: Namespace) -> int:
    await client.delete(_node(options))
    return await list_nodes(client, options)


async def create_token(client: ServiceClient, options: Namespace) -> int:
    body = {
        "name": options.name,
        "role": options.role,
        "expires_in": options.expires,
        "max_queued_jobs": options.max_queued_jobs,
        "requests_per_second": options.requests_per_second,
        "priorities": options.priorities,
    }
    answer = await client.post(TOKENS, {name: value for name, value in body.items() if value is not None})
    emit(options, answer, answer["token"])
    # Standard output has the token alone, for $(trl-remote tokens create ...).
    complain("the token is shown this once; the service keeps only its sha256")
    if not answer["required"]:
        complain(
            "this service requires no token yet, and every user of its machine is an admin: created tokens "
            "count once it has a configured one (TRL_SERVICE_TOKEN) and was started again"
        )
    return 0


async def list_tokens(client: ServiceClient, options: Namespace) -> int:
    answer = await client.get_all(TOKENS)
    head = ("token", "role", "source", "expires", "last used", "limits")
    emit(options, answer, *table(head, map(token_row, answer["data"]), cut=("limits",)))
    return 0


async def revoke_token(client: ServiceClient, options: Namespace) -> int:
    await client.delete(f"{TOKENS}/{quote(options.name, safe='')}")
    emit(options, {"name": options.name, "revoked": True}, f"{options.name} is revoked")
    return 0


async def show_audit(client: ServiceClient, options: Namespace) -> int:
    after = options.after
    if after is None:
        after = max(0, (await client.get(AUDIT, limit=1))["last"] - _RECENT)
    while True:
        page = await client.get(AUDIT, after=after, limit=1000, caller=options.caller, route=options.route)
        for line in page["data"]:
            if options.json:
                show_json(line, flush=options.follow)
            else:
                show_lines(audit_line(line), flush=options.follow)
        if page["next"] == after:
            if not options.follow:
                return 0
            await asyncio.sleep(1.0)
        after = page["next"]


async def show_service_logs(client: ServiceClient, options: Namespace) -> int:
    text = (await client.get_text("/v1/logs", node=options.node, tail=options.tail)).rstrip("\n")
    emit(options, {"node": options.node, "lines": text.splitlines()}, *lines_of(text))
    return 0


COMMANDS: dict[tuple[str, str], Command] = {
    ("jobs", "submit"): submit,
    ("jobs", "preflight"): preflight,
    ("jobs", "list"): show_jobs,
    ("jobs", "show"): show,
    ("jobs", "watch"): watch_jobs,
    ("jobs", "logs"): logs,
    ("jobs", "samples"): samples,
    ("jobs", "answers"): answers,
    ("jobs", "cancel"): cancel,
    ("jobs", "pause"): pause_or_resume,
    ("jobs", "resume"): pause_or_resume,
    ("jobs", "pull"): pull_checkpoint,
    ("jobs", "delete"): delete_job,
    ("datasets", "add"): add_dataset,
    ("datasets", "list"): list_datasets,
    ("datasets", "preview"): preview,
    ("datasets", "delete"): delete_dataset,
    ("nodes", "list"): list_nodes,
    ("nodes", "commands"): machine_commands.print_commands,
    ("nodes", "advise"): advise.print_advice,
    ("nodes", "discover"): machine_commands.discover,
    ("nodes", "show"): show_node,
    ("nodes", "pools"): list_pools,
    ("nodes", "cordon"): change_node,
    ("nodes", "uncordon"): change_node,
    ("nodes", "drain"): change_node,
    ("nodes", "remove"): remove_node,
    ("nodes", "up"): nodes_ssh.up,
    ("nodes", "down"): nodes_ssh.down,
    ("nodes", "status"): nodes_ssh.status,
    ("tokens", "create"): create_token,
    ("tokens", "list"): list_tokens,
    ("tokens", "revoke"): revoke_token,
    ("audit", "show"): show_audit,
    ("logs", "show"): show_service_logs,
    ("train", ""): whole_jobs.train,
    ("generate", ""): whole_jobs.generate,
    ("export", ""): whole_jobs.export,
    ("chat", ""): chat,
    ("register", ""): register,
    ("run", ""): whole_jobs.run,
    ("resume", ""): whole_jobs.resume,
    ("plot", ""): plot,
}


def _node(options: Namespace) -> str:
    return f"/v1/nodes/{quote(options.node, safe='')}"


def _source(source: dict[str, Any]) -> str:
    return str(source.get("uri") or source.get("sha256") or source["type"])
