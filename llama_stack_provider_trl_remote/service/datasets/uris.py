"""Checks uris of datasets. Nothing is looked up: readers resolve what a uri names (`hub`, `buckets`)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from llama_stack_provider_trl.errors import InvalidRequest

HUB = ("huggingface", "hf")
"""Schemes of datasets on the hub: Llama Stack's and that of huggingface_hub."""
BUCKET = "s3"
HUB_FORM = "huggingface://datasets/ORG/NAME?split=train&revision=COMMIT"
BUCKET_FORM = "s3://BUCKET/PATH/FILE, or s3://BUCKET/PATH/ for all files below it"
_HUB_OPTIONS = ("split", "name", "revision")
_PART = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[\w.+-]+(/[\w.+-]+)*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_MOST = 255
"""Characters of a revision, a split or a configuration."""


@dataclass(frozen=True)
class Readable:
    """A checked uri. A context manager: its file is closed at the end."""

    name: str
    """Its real path, whose suffix names the format; or a uri of the hub, a bucket or a Ray cluster."""
    stamp: str | None
    """Changes with the content; None: only its reader can find that out."""
    file: int | None = None
    """Descriptor of the file; None: it is not on this machine."""

    def __enter__(self) -> Readable:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            os.close(self.file)


class HubDataset(NamedTuple):
    name: str
    """ORG/NAME, or NAME."""
    revision: str | None = None
    """Branch, tag or commit; None: the default branch."""
    split: str = "train"
    config: str | None = None
    """One of its configurations; None: the default one."""

    @property
    def commit(self) -> str | None:
        """The revision, where it is a commit, whose content never changes."""
        return self.revision if self.revision and _COMMIT.fullmatch(self.revision) else None


class BucketFiles(NamedTuple):
    """A file in a bucket, or all files below a path that ends in a slash."""

    bucket: str
    path: str

    @property
    def is_directory(self) -> bool:
        return not self.path or self.path.endswith("/")


def split_uri(uri: str) -> SplitResult:
    """The parts of a uri. Raises InvalidRequest."""
    try:
        return urlsplit(uri)
    except ValueError as error:  # brackets that are no IPv6 address
        raise InvalidRequest("source.uri", uri, f"it is no uri ({error}): correct it") from error


def hub_dataset(uri: str) -> HubDataset:
    """What a uri of the hub names: `huggingface://datasets/ORG/NAME[@REVISION][?split=&name=&revision=]`. Raises
    InvalidRequest: it has another form, an option twice or without a value, or two revisions."""
    parts = split_uri(uri)
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(pairs)
    path, at, suffix = parts.path.strip("/").partition("@")
    form = f"expected {HUB_FORM}, with any of ?{'=&'.join(_HUB_OPTIONS)}="
    if parts.netloc != "datasets" or parts.fragment or set(options) - {*_HUB_OPTIONS}:
        raise InvalidRequest("source.uri", uri, form)
    if len(options) < len(pairs) or not all(options.values()):
        raise InvalidRequest("source.uri", uri, f"{form}, each once and with a value")
    names = path.split("/")
    # The library would read files of this machine for a name that begins like a path.
    if len(names) > 2 or not all(_PART.fullmatch(name) and ".." not in name for name in names):
        raise InvalidRequest("source.uri", uri, "expected the name of a dataset on the hub, ORG/NAME")
    revisions = [*([unquote(suffix)] if at else []), *([options["revision"]] if "revision" in options else [])]
    if len(set(revisions)) > 1:
        hint = f"it names the revisions {revisions[0]!r} and {revisions[1]!r}: name one of them"
        raise InvalidRequest("source.uri", uri, hint)
    revision = revisions[0] if revisions else None
    if revision is not None and not _is_revision(revision):
        raise InvalidRequest("source.uri", uri, "expected a branch, a tag or a commit of the dataset as its revision")
    if too_long := next((name for name, value in options.items() if len(value) > _MOST), None):
        raise InvalidRequest("source.uri", uri, f"{too_long} has more than {_MOST} characters")
    split = options.get("split", "train").replace(" ", "+")  # as a query has `train+test`
    return HubDataset(path, revision, split, options.get("name"))


def _is_revision(text: str) -> bool:
    return len(text) <= _MOST and bool(_REVISION.fullmatch(text)) and ".." not in text


def bucket_files(uri: str) -> BucketFiles:
    """What a uri of a bucket names. Raises InvalidRequest: it has another form."""
    parts = split_uri(uri)
    path = unquote(parts.path).removeprefix("/")
    names = path.removesuffix("/").split("/") if path else []
    is_plain = not any(name in ("", ".", "..") for name in names) and path.isprintable()
    if parts.query or parts.fragment or not _BUCKET.fullmatch(parts.netloc) or not is_plain:
        raise InvalidRequest("source.uri", uri, f"expected {BUCKET_FORM}, without ? and #")
    return BucketFiles(parts.netloc, path)


def is_within(found: BucketFiles, allowed: BucketFiles) -> bool:
    """Whether files lie below an allowed path of a bucket. A path without a slash at its end allows no longer name."""
    root = allowed.path if allowed.is_directory else f"{allowed.path}/"
    return found.bucket == allowed.bucket and found.path.startswith(root)
