"""Commands of `trl-remote`: each calls the service with a client and prints the result."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import quote

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.requests.bodies import algorithm_of
from llama_stack_provider_trl.system.files import Blob, put_rows

from ..client import JOBS, PREFERENCE_OPTIMIZE, PREFLIGHT, SUPERVISED_FINE_TUNE, ServiceClient, job_path
from ..pull import pull
from .row_files import read_row_file
from .terminal import audit_line, how_to_add_a_node, job_line, preflight_lines, progress_line, table, token_row
from .watch import follow_log, watch

Command = Callable[[ServiceClient, Namespace], Coroutine[Any, Any, int]]
TOKENS, AUDIT = "/v1/tokens", "/v1/audit"
_PAGE = 200
_RECENT = 100
"""Lines of the audit log that are shown without --after."""


async def submit(client: ServiceClient, options: Namespace) -> int:
    body = _read_request(options.file)
    paths = {"sft": SUPERVISED_FINE_TUNE, "dpo": PREFERENCE_OPTIMIZE}
    answer = await client.submit(paths[options.algorithm or algorithm_of(body)], body)
    print(answer["job_uuid"])
    return 0


async def preflight(client: ServiceClient, options: Namespace) -> int:
    body = _read_request(options.file)
    found = await client.submit(PREFLIGHT, {**body, "algorithm": options.algorithm or algorithm_of(body)})
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(preflight_lines(found)))
    return 0 if found["fits"] else 1


async def list_jobs(client: ServiceClient, options: Namespace) -> int:
    async for job in _pages(client, options.status):
        print(job_line(job))
    return 0


async def show(client: ServiceClient, options: Namespace) -> int:
    print(json.dumps(await client.status(options.job_uuid), indent=2))
    return 0


async def watch_job(client: ServiceClient, options: Namespace) -> int:
    return await watch(client, options.job_uuid, options.interval)


async def logs(client: ServiceClient, options: Namespace) -> int:
    if options.follow:
        await follow_log(client, options.job_uuid, options.rank, options.tail)
    else:
        path = job_path(options.job_uuid, "/logs")
        print((await client.get_text(path, rank=options.rank, tail=options.tail)).rstrip("\n"))
    return 0


async def cancel(client: ServiceClient, options: Namespace) -> int:
    await client.cancel(options.job_uuid)
    print(progress_line(await client.status(options.job_uuid)))
    return 0


async def pause(client: ServiceClient, options: Namespace) -> int:
    print(progress_line(await client.post(job_path(options.job_uuid, "/pause"))))
    return 0


async def resume(client: ServiceClient, options: Namespace) -> int:
    print(progress_line(await client.post(job_path(options.job_uuid, "/resume"))))
    return 0


async def pull_checkpoint(client: ServiceClient, options: Namespace) -> int:
    target = Path(options.directory)
    identifier = await pull(client, options.job_uuid, options.checkpoint, target, lambda text: print(text, flush=True))
    print(f"{identifier} is in {target}")
    return 0


async def add_dataset(client: ServiceClient, options: Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="trl-remote-") as directory:
        blob = await asyncio.to_thread(_rows_of, Path(options.file), Path(directory))
        if not await client.has_blob(blob.sha256):
            await client.put_blob(blob.sha256, blob.path)
    body = {
        "dataset_id": options.dataset_id,
        "purpose": "post-training/messages",
        "source": {"type": "blob", "sha256": blob.sha256},
    }
    await client.post("/v1/datasets", body)
    print(f"{options.dataset_id}: {blob.num_rows} rows, {blob.sha256}")
    return 0


async def list_datasets(client: ServiceClient, options: Namespace) -> int:
    answer = await client.get("/v1/datasets")
    rows = [(d["identifier"], d.get("metadata", {}).get("num_rows", "?"), _source(d["source"])) for d in answer["data"]]
    print(table(("dataset", "rows", "source"), rows))
    return 0


async def list_nodes(client: ServiceClient, options: Namespace) -> int:
    answer = await client.get("/v1/nodes")
    rows = [
        (node["node"], device, node.get("jobs", {}).get(device) or "free", node.get("state", "open"))
        for node in answer["data"]
        for device in node["devices"]
    ]
    print(table(("node", "device", "job", "state"), rows))
    print(f"\n{how_to_add_a_node(client.url)}")
    return 0


async def show_node(client: ServiceClient, options: Namespace) -> int:
    print(json.dumps(await client.get(_node(options)), indent=2))
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
    print(json.dumps(answer, indent=2) if options.json else answer["token"])
    # Standard output has the token alone, for $(trl-remote tokens create ...).
    print("trl-remote: the token is shown this once; the service keeps only its sha256", file=sys.stderr)
    if not answer["required"]:
        print(
            "trl-remote: this service requires no token yet, and every user of its machine is an admin: created tokens "
            "count once it has a configured one (TRL_SERVICE_TOKEN) and was started again",
            file=sys.stderr,
        )
    return 0


async def list_tokens(client: ServiceClient, options: Namespace) -> int:
    answer = await client.get(TOKENS)
    if options.json:
        print(json.dumps(answer, indent=2))
    else:
        print(table(("token", "role", "source", "expires", "last used", "limits"), map(token_row, answer["data"])))
    return 0


async def revoke_token(client: ServiceClient, options: Namespace) -> int:
    await client.delete(f"{TOKENS}/{quote(options.name, safe='')}")
    print(f"{options.name} is revoked")
    return 0


async def show_audit(client: ServiceClient, options: Namespace) -> int:
    after = options.after
    if after is None:
        after = max(0, (await client.get(AUDIT, limit=1))["last"] - _RECENT)
    while True:
        page = await client.get(AUDIT, after=after, limit=1000, caller=options.caller, route=options.route)
        for line in page["data"]:
            print(json.dumps(line) if options.json else audit_line(line), flush=options.follow)
        if page["next"] == after:
            if not options.follow:
                return 0
            await asyncio.sleep(1.0)
        after = page["next"]


COMMANDS: dict[tuple[str, str], Command] = {
    ("jobs", "submit"): submit,
    ("jobs", "preflight"): preflight,
    ("jobs", "list"): list_jobs,
    ("jobs", "show"): show,
    ("jobs", "watch"): watch_job,
    ("jobs", "logs"): logs,
    ("jobs", "cancel"): cancel,
    ("jobs", "pause"): pause,
    ("jobs", "resume"): resume,
    ("jobs", "pull"): pull_checkpoint,
    ("datasets", "add"): add_dataset,
    ("datasets", "list"): list_datasets,
    ("nodes", "list"): list_nodes,
    ("nodes", "show"): show_node,
    ("nodes", "cordon"): change_node,
    ("nodes", "uncordon"): change_node,
    ("nodes", "drain"): change_node,
    ("nodes", "remove"): remove_node,
    ("tokens", "create"): create_token,
    ("tokens", "list"): list_tokens,
    ("tokens", "revoke"): revoke_token,
    ("audit", "show"): show_audit,
}


def _node(options: Namespace) -> str:
    return f"/v1/nodes/{quote(options.node, safe='')}"


async def _pages(client: ServiceClient, status: str | None) -> AsyncIterator[dict[str, Any]]:
    after: str | None = None
    while True:
        page = await client.get(JOBS, full=True, limit=_PAGE, status=status, after=after)
        for job in page["data"]:
            yield job
        after = page.get("next")
        if after is None:
            return


def _read_request(name: str) -> dict[str, Any]:
    shown = "standard input" if name == "-" else name
    try:
        body = json.loads(sys.stdin.read() if name == "-" else Path(name).read_text())
    except OSError as error:
        hint = f"it cannot be read ({error.strerror}): name a file with the request as JSON, or - for standard input."
        raise InvalidRequest("FILE", shown, hint) from error
    except ValueError as error:
        raise InvalidRequest("FILE", shown, f"it is not JSON ({error}).") from error
    if not isinstance(body, dict):
        raise InvalidRequest("FILE", shown, f"found a {type(body).__name__}, expected an object.")
    return body


def _rows_of(file: Path, directory: Path) -> Blob:
    return put_rows(directory, read_row_file(file))


def _source(source: dict[str, Any]) -> str:
    return str(source.get("uri") or source.get("sha256") or source["type"])
