"""Sends an export that is proven to a hub, or to a bucket, and reads back what is there.

The request names a place that the operator allows; the address of the hub or the store and the account are those of the
service's environment. Messages have no text of the libraries, which may name headers and signed addresses.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ... import faults
from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.exports import HUB, HUB_TOKEN, Destination
from ...system.files import MANIFEST
from ...system.hub_cache import hub_endpoint
from .card import LINEAGE
from .unfinished_parts import remove_unfinished

log = logging.getLogger(__name__)
CLAIM = "uploading.json"
"""Written first: whose export a directory of a bucket is to be. Removed at the end."""
LISTING = "manifest.json"
"""Written last: what a whole export in a bucket consists of."""
_CHUNK = 1 << 20
_PART = 8 << 20
"""Bytes of a request of S3."""
_MOST_LISTING = 16 << 20
_CODE = re.compile(r"AWS Error ([A-Z_]+)")
_REFUSED_CODES = (
    *("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "INVALID_CLIENT_TOKEN_ID", "EXPIRED_TOKEN"),
    *("MISSING_AUTHENTICATION_TOKEN", "UNRECOGNIZED_CLIENT"),
)
_BRANCH = "upload-"
"""Begins the name of the branch of a hub on which an export is read back, before it is on the main branch."""
_ATTRIBUTES = ".gitattributes"
"""The one file that a hub writes into a new repository."""
_REFUSED = (401, 403)


class _File(NamedTuple):
    size: int
    sha256: str
    git: str
    """Its id as a blob of git."""


def uploaded(directory: Path, destination: Destination, job_uuid: str) -> dict[str, Any]:
    """Send the files of a directory, and return where they are. Raises JobFailure: invalid_request, the place has other
    files, or refuses the account; export_failed, it does not answer, or has other bytes than were sent.

    Args:
        job_uuid: of the export, for the message of a commit and the list in a bucket.
    """
    files = {path.name: _described(path) for path in _files(directory)}
    if destination.scheme == HUB:
        return _to_hub(directory, files, destination, job_uuid)
    return _to_bucket(directory, files, destination, job_uuid)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.iterdir()) if path.is_file() and path.name != MANIFEST)


def _described(path: Path) -> _File:
    size = path.stat().st_size
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            sha256.update(chunk)
            git.update(chunk)
    return _File(size, sha256.hexdigest(), git.hexdigest())


def _to_hub(directory: Path, files: dict[str, _File], destination: Destination, job_uuid: str) -> dict[str, Any]:
    """One commit on the main branch, which is there as a whole or not at all, in a repository that is private where it
    is new. The same files are on a branch of their own before, and are read back there: weights that are damaged
    on the way do not reach the main branch. No hub moves its main branch to a commit of another one, so small files are
    sent again: where those are damaged, a further commit restores what the main branch had."""
    from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi, constants

    # Stores of chunks are a service of one hub. Without it files go to the hub that is named, by the protocol of LFS.
    constants.HF_HUB_DISABLE_XET = True
    endpoint = hub_endpoint(os.environ)
    token = os.environ.get(HUB_TOKEN) or os.environ.get("HF_TOKEN")
    if not token:
        raise _refused(
            destination,
            f"no account is set for it: set {HUB_TOKEN} (or HF_TOKEN) of one that may write there in the service's "
            "environment",
        )
    api, name = HfApi(endpoint=endpoint, token=token), destination.path

    def asked[Answer](ask: Callable[[], Answer]) -> Answer:
        try:
            return ask()
        except Exception as error:  # of the library, of its HTTP client (whose name changes), or of an answer's JSON
            raise _hub_failure(destination, endpoint, error) from None

    def listed(revision: str) -> dict[str, Any]:
        found = asked(lambda: api.repo_info(name, revision=revision, files_metadata=True))
        return {one.rfilename: one for one in found.siblings or ()}

    asked(lambda: api.create_repo(name, private=True, exist_ok=True))
    head = asked(lambda: api.repo_info(name, revision="main")).sha
    on_main = listed(head)
    before = on_main.keys() - {_ATTRIBUTES}
    if others := sorted(before - files.keys()):
        raise _refused(destination, f"it has other files, such as {others[0]!r}: name a new one")
    if before:  # of an earlier attempt of this job, or somebody's model
        owner = None
        if LINEAGE in before:
            with TemporaryDirectory() as cache:
                path = asked(lambda: api.hf_hub_download(name, LINEAGE, revision=head, cache_dir=cache))
                owner = _owner(Path(path).read_bytes()[:_MOST_LISTING], "export_job")
        if owner != job_uuid:
            raise _refused(destination, "it has a model of another job or another origin: name a new one")
    faults.reach("uploading")

    def committed(revision: str) -> tuple[str, str]:
        """Commit the files to a branch, and read back what the hub has. The second time it has the large ones. Returns
        the commit, and the first file that has other bytes in it; empty: none has."""
        operations = [CommitOperationAdd(path_in_repo=one, path_or_fileobj=directory / one) for one in files]
        message = f"Upload {job_uuid}"
        commit = asked(
            lambda: api.create_commit(name, operations, commit_message=message, revision=revision, parent_commit=head)
        ).oid
        there = listed(commit)
        for path, file in files.items():
            size, digest = _content_of(there.get(path))
            if size != file.size or digest not in (file.sha256, file.git):
                return str(commit), path
        return str(commit), ""

    def restored(damaged: str) -> bool:
        """Whether the main branch has what it had before, after one more commit."""
        message = f"Restore what was here before the damaged upload {job_uuid}"
        try:
            # No hub deletes a path that is not there.
            surplus = listed(damaged).keys() - before - {_ATTRIBUTES}
            back: list[Any] = [CommitOperationDelete(path) for path in sorted(surplus)]
            back += [CommitOperationCopy(path, path, src_revision=head) for path in sorted(before)]
            commit = api.create_commit(name, back, commit_message=message, revision="main", parent_commit=damaged).oid
            there = listed(commit)
        except Exception:  # of any of the library's layers, or a JobFailure: it is reported with the damage
            return False
        kept = {path: _content_of(one) for path, one in there.items() if path != _ATTRIBUTES}
        return kept == {path: _content_of(on_main[path]) for path in before}

    branch = f"{_BRANCH}{hashlib.sha256(job_uuid.encode()).hexdigest()[:16]}"
    with suppress(Exception):  # there is one where an earlier attempt was killed
        api.delete_branch(name, branch=branch)
    asked(lambda: api.create_branch(name, branch=branch, revision=head))
    try:
        commit, damaged = committed(branch)
        if damaged:
            raise _lost(destination, f"its commit {commit} on {branch} has other bytes of {damaged!r} than were sent")
        faults.reach("uploading-branch")
        commit, damaged = committed("main")
        if damaged:
            now = (
                "and main was restored" if restored(commit) else "and main could not be restored: delete what is there"
            )
            raise _lost(
                destination, f"its commit {commit} on main has other bytes of {damaged!r} than were sent, {now}"
            )
    finally:
        with suppress(Exception):  # it holds nothing that the main branch lacks, or what is not to be used
            api.delete_branch(name, branch=branch)
    return {**_summary(destination, files), "commit": commit}


def _content_of(file: Any) -> tuple[int | None, str | None]:
    """Bytes and digest of a file as a hub lists it: the sha256 of a large one, else its id as a blob of git."""
    lfs = getattr(file, "lfs", None)
    return getattr(file, "size", None), getattr(file, "blob_id", None) if lfs is None else lfs.sha256


def _to_bucket(directory: Path, files: dict[str, _File], destination: Destination, job_uuid: str) -> dict[str, Any]:
    """Files, and after all of them their list, `manifest.json`: without it they are no export. Before them the name of
    the job, which is removed at the end: of two jobs with one place the second one is refused."""
    store, listing, claim = _store(), f"{destination.path}/{LISTING}", f"{destination.path}/{CLAIM}"
    claimed = json.dumps({"job": job_uuid}).encode()
    sizes = {name: {"size": file.size, "sha256": file.sha256} for name, file in files.items()}
    wanted = json.dumps({"job": job_uuid, "files": sizes}, indent=1).encode()
    try:
        there = _listed(store, destination)
        marks = there & {LISTING, CLAIM}
        if others := sorted(there - (files.keys() if marks else set()) - marks):
            raise _refused(destination, f"it has other files, such as {others[0]!r}: name a new directory")
        for mark in marks:
            _check_owner(destination, store, mark, job_uuid)
        with store.open_output_stream(claim) as sink:
            sink.write(claimed)
        _check_owner(destination, store, CLAIM, job_uuid)
        _remove_unfinished(destination, (*files, LISTING, CLAIM))
        if LISTING in marks:
            store.delete_file(listing)  # before its files change
        for name in files:
            with open(directory / name, "rb") as source, store.open_output_stream(f"{destination.path}/{name}") as sink:
                while chunk := source.read(_PART):
                    sink.write(chunk)
        faults.reach("uploading")
        for name, file in files.items():
            if _digest(store, f"{destination.path}/{name}") != (file.size, file.sha256):
                raise _lost(destination, f"it has other bytes of {name!r} than were sent")
        with store.open_output_stream(listing) as sink:
            sink.write(wanted)
        if _digest(store, listing) != (len(wanted), hashlib.sha256(wanted).hexdigest()):
            raise _lost(destination, f"it has other bytes of {LISTING!r} than were sent")
        store.delete_file(claim)
    except OSError as error:
        raise _bucket_failure(destination, error) from None
    return {**_summary(destination, files), "manifest": LISTING}


def _remove_unfinished(destination: Destination, names: Collection[str]) -> None:
    """Remove parts that an attempt which was killed has left. An export does not need that: a store that refuses it is
    reported in the log."""
    bucket, _, directory = destination.path.partition("/")
    try:
        count = remove_unfinished(bucket, f"{directory}/", names, os.environ)
    except OSError as error:
        log.warning("unfinished uploads of an earlier attempt to %s are not looked for: %s", destination, error)
        return
    if count:
        log.info("removed %d unfinished uploads of an earlier attempt from %s", count, destination)


def _store() -> Any:
    from pyarrow import fs

    environ = os.environ
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    return fs.S3FileSystem(
        region=environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION"),
        endpoint_override=endpoint or None,
        connect_timeout=10,
        request_timeout=60,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=3),
        tls_ca_file_path=environ.get("AWS_CA_BUNDLE"),
    )


def _listed(store: Any, destination: Destination) -> set[str]:
    """Paths of the files in a directory of a bucket. Raises OSError."""
    from pyarrow import fs

    found = store.get_file_info(fs.FileSelector(destination.path, allow_not_found=True, recursive=True))
    return {one.path.removeprefix(f"{destination.path}/") for one in found if one.type == fs.FileType.File}


def _check_owner(destination: Destination, store: Any, name: str, job_uuid: str) -> None:
    """Return if a file in a bucket says that its directory is of this job. Raises JobFailure, OSError."""
    with store.open_input_stream(f"{destination.path}/{name}") as file:
        owner = _owner(file.read(_MOST_LISTING), "job")
    if owner != job_uuid:
        raise _refused(destination, f"it has another export ({name}): name a new directory")


def _owner(text: bytes, key: str) -> Any:
    """The job that a file names; None: it names none."""
    try:
        return json.loads(text)[key]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


def _digest(store: Any, path: str) -> tuple[int, str]:
    """Bytes and sha256 of a file of a bucket. Raises OSError."""
    size, sha256 = 0, hashlib.sha256()
    with store.open_input_stream(path) as file:
        while chunk := file.read(_PART):
            size += len(chunk)
            sha256.update(chunk)
    return size, sha256.hexdigest()


def _summary(destination: Destination, files: dict[str, _File]) -> dict[str, Any]:
    return {"to": str(destination), "files": len(files), "bytes": sum(one.size for one in files.values())}


def _bucket_failure(destination: Destination, error: OSError) -> JobFailure:
    code = found[1] if (found := _CODE.search(str(error))) else type(error).__name__
    if isinstance(error, FileNotFoundError) or code == "NO_SUCH_BUCKET":
        return _refused(destination, "there is no such bucket: correct it")
    if code in _REFUSED_CODES:
        return _refused(
            destination,
            f"the store refuses the service's account ({code}): expected s3:ListBucket, s3:GetObject, s3:PutObject and "
            "s3:DeleteObject; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the service's environment",
        )
    return _lost(
        destination,
        f"the store does not answer as S3 does ({code}): check AWS_ENDPOINT_URL_S3 and AWS_REGION in the service's "
        "environment and the network",
    )


def _hub_failure(destination: Destination, endpoint: str, error: Exception) -> JobFailure:
    parts = urlsplit(endpoint)
    where = f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}"  # without an account
    cause: BaseException | None = error  # of an upload, what a thread has raised
    while cause is not None and (status := getattr(getattr(cause, "response", None), "status_code", None)) is None:
        cause = cause.__cause__
    if status in _REFUSED:
        return _refused(
            destination,
            f"{where} refuses the service's account ({status}): set {HUB_TOKEN} (or HF_TOKEN) of one that may write "
            "there in the service's environment",
        )
    if status is not None:
        return _lost(destination, f"{where} answers with {status}, expected the API of a hub: check HF_ENDPOINT")
    return _lost(
        destination,
        f"{where} does not answer ({type(error).__name__}): check HF_ENDPOINT, HF_HUB_OFFLINE and the network",
    )


def _refused(destination: Destination, found: str) -> JobFailure:
    return JobFailure(
        Reason.invalid_request,
        f"the export is proven and was not uploaded to {destination}: {found}. It was removed here.",
    )


def _lost(destination: Destination, found: str) -> JobFailure:
    return JobFailure(
        Reason.export_failed,
        f"the export is proven and could not be uploaded to {destination}: {found}. It was removed here.",
    )
