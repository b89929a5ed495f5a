"""Downloads a checkpoint: resumed where it stopped, verified, and made visible in one step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from llama_stack_provider_trl.errors import InvalidRequest, ServiceRefusal, ServiceUnreachable
from llama_stack_provider_trl.system.files import put_in_place, resolve_under, sha256_of
from llama_stack_provider_trl.system.texts import json_digest

from .client import ServiceClient, job_path

_TRIES = 5
_MOST_OF_UNKNOWN_SIZE = 64 << 30
"""Bytes of a file whose size the service does not list: rows by their digest."""


class OtherBytes(ServiceUnreachable):
    """Raised when the service sends other bytes than it announced, the second time too."""


async def pull(client: ServiceClient, job_uuid: str, name: str, target: Path, note: Callable[[str], None]) -> str:
    """Download a checkpoint into `target`, which appears when it is complete.

    Until then the files are in a directory beside it; a further call continues with them. Returns the checkpoint's
    identifier.

    Args:
        name: the identifier, or its end: `final`, `merged`, `checkpoint-100`.
        note: receives a line for each file.

    Raises:
        InvalidRequest: there is no such checkpoint, or `target` exists.
        ServiceUnreachable: the service cannot be reached; call again when it is back.
    """
    if target.exists():
        raise InvalidRequest("DIR", str(target), "it exists already: name a new directory.")
    identifier = _chosen(await client.get(job_path(job_uuid, "/checkpoints")), name)
    root = job_path(job_uuid, f"/checkpoints/{quote(identifier, safe='')}")
    files = (await client.get(root))["files"]
    # Named after its content, so that the rest of another checkpoint is not mistaken for this one's.
    digest = json_digest(files)[:12]
    staging = target.with_name(f".{target.name}.{digest}.pulling")
    try:
        staging.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # with the path that the user has named
        raise OSError(error.errno, error.strerror, str(target)) from error
    for file in files:
        path = resolve_under(staging, file["path"], "checkpoint file")
        path.parent.mkdir(parents=True, exist_ok=True)
        note(f"{file['path']}  {file['size']:,} bytes")
        await fetch(client, f"{root}/files/{quote(file['path'])}", path, file)
    put_in_place(staging, target)
    return identifier


def _chosen(answer: Any, name: str) -> str:
    found = [str(checkpoint["identifier"]) for checkpoint in answer["data"]]
    for identifier in found:
        if identifier == name or identifier.endswith(f"-{name}"):
            return identifier
    there = f"the job has {', '.join(found)}" if found else "the job has none"
    is_early = name in ("final", "merged") and not any(identifier.endswith("-final") for identifier in found)
    ended = "a training with merge_adapter" if name == "merged" else "a training"
    there += f"; `{name}` is there once {ended} has completed." if is_early else "."
    raise InvalidRequest("--checkpoint", name, there)


async def fetch(
    client: ServiceClient, url: str, path: Path, file: dict[str, Any], note: Callable[[int], None] = lambda size: None
) -> None:
    """Download the missing part of one file; where the present part was damaged, all of it. Raises ServiceUnreachable:
    the service cannot be reached; OtherBytes.

    Args:
        file: its `path` (for a sentence), `size` (None: not known) and `sha256`, as the service lists them.
        note: receives the number of bytes that are here, after each part.
    """
    for last_chance in (False, True):
        resumed = await _complete(client, url, path, file["size"], note)
        # In a thread: the digest of gigabytes takes longer than a node's deadline.
        if await asyncio.to_thread(sha256_of, path) == file["sha256"]:
            return
        path.unlink()
        if last_chance or not resumed:
            break
    found = f"sent {file['path']} with another sha256 than the {file['sha256']} that it announced"
    raise OtherBytes(client.url, found, "fetch it again; if it stays so, the file is damaged on its disk")


async def _complete(client: ServiceClient, url: str, path: Path, size: int | None, note: Callable[[int], None]) -> bool:
    """Append the missing part. Returns whether there was a part before."""
    resumed = path.exists()
    most = _MOST_OF_UNKNOWN_SIZE if size is None else size
    for further in reversed(range(_TRIES)):
        have = path.stat().st_size if path.exists() else 0
        if size is not None and have >= size and path.exists():
            break
        try:
            async with client.download(url, have) as (start, chunks, _):
                with open(path, "ab" if start else "wb") as out:
                    async for chunk in chunks:
                        if out.tell() + len(chunk) > most:
                            found = f"sends more than the {most} bytes of {path.name}"
                            raise OtherBytes(client.url, found, "check that it is the training service")
                        out.write(chunk)
                        note(out.tell())
            if size is None:
                break
        except ServiceRefusal as error:
            if size is not None or error.status != 416:  # otherwise the file is complete
                raise
            break
        except OtherBytes:
            raise
        except ServiceUnreachable:
            got = path.stat().st_size if path.exists() else 0
            if not further or got == have:
                raise
    return resumed
