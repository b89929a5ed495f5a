"""Rows of files in buckets of S3, and of stores with the same API, read in ranges: no file is here as a whole.

The operator's environment (`AWS_ACCESS_KEY_ID`, `AWS_PROFILE`, `AWS_REGION`, `AWS_ENDPOINT_URL_S3` and so on) names the
account and the store. Arrow's own client is used: pyarrow is there where Parquet files are read.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple

from llama_stack_provider_trl.errors import InvalidRows
from llama_stack_provider_trl.specs import row_files
from llama_stack_provider_trl.specs.compressed import Borrowed
from llama_stack_provider_trl.specs.row_files import Row

from .uris import BUCKET, BucketFiles

EXTRA = "s3"
_BLOCK = 8 << 20
"""Bytes of a request."""
_CONNECT_S, _READ_S = 10, 60
"""Seconds without a connection, and without a byte, after which a request is sent again."""
_TRIES = 3
_AT_ONCE = 16
"""Requests for what describes a file."""
_MOST_FILES = 10_000
_PARQUET = ".parquet"
_CODE = re.compile(r"AWS Error ([A-Z_]+)")
_REFUSED = (
    *("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH", "INVALID_CLIENT_TOKEN_ID", "EXPIRED_TOKEN"),
    *("MISSING_AUTHENTICATION_TOKEN", "UNRECOGNIZED_CLIENT"),
)


class BucketRows(NamedTuple):
    """The rows of files, as they were listed."""

    stamp: str
    """Digest of the files' names, sizes and ETags."""
    rows: Iterator[Row]


def credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment by which a bucket is read. No training gets it."""
    return {name: value for name, value in environ.items() if name.startswith("AWS_")}


def read_bucket(files: BucketFiles, known: str | None) -> BucketRows | None:
    """List files of a bucket, whose rows are read later. Raises InvalidRows: there are no such files, they may not be
    read, or the store does not answer. Returns None where the files have the stamp `known`.

    Args:
        known: the stamp of the rows that the caller has.
    """
    store = _store()
    try:
        tags = _tags(store, files, _listed(store, files))
    except OSError as error:
        raise _refusal(files, error) from error
    stamp = hashlib.sha256(json.dumps(tags).encode()).hexdigest()
    return None if stamp == known else BucketRows(stamp, _rows(store, files, tags))


def _store() -> Any:
    try:
        from pyarrow import fs
    except ImportError as error:
        raise InvalidRows(
            f"the interpreter that reads datasets lacks pyarrow: install the extra {EXTRA} there "
            f"(pip install 'llama_stack_provider_trl[{EXTRA}]'), or send the rows themselves"
        ) from error
    # Arrow has these from the C++ SDK of AWS, which reads fewer variables than other SDKs.
    environ = os.environ
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    return fs.S3FileSystem(
        region=environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION"),
        endpoint_override=endpoint or None,
        connect_timeout=_CONNECT_S,
        request_timeout=_READ_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_TRIES),
        tls_ca_file_path=environ.get("AWS_CA_BUNDLE"),
    )


def _listed(store: Any, files: BucketFiles) -> list[str]:
    """Paths in the bucket of the files of rows, hidden ones left out, in the order of their names. Raises InvalidRows:
    there are none, or too many; OSError: the store refuses it, or does not answer."""
    from pyarrow import fs

    where = f"{BUCKET}://{files.bucket}/{files.path}"
    if not files.is_directory:
        if store.get_file_info(f"{files.bucket}/{files.path}").type != fs.FileType.File:
            raise InvalidRows(f"{where} does not exist: correct the uri")
        return [files.path]
    directory = f"{files.bucket}/{files.path}".rstrip("/")
    found = store.get_file_info(fs.FileSelector(directory, allow_not_found=True, recursive=True))
    if len(found) > _MOST_FILES:
        raise InvalidRows(f"{where} has {len(found)} files, expected {_MOST_FILES} at most: name a smaller directory")
    paths = [info.path.removeprefix(f"{files.bucket}/") for info in found if info.type == fs.FileType.File]
    paths = [path for path in paths if not any(part[0] in "._" for part in path.removeprefix(files.path).split("/"))]
    paths = [path for path in paths if row_files.ending_of(path) in row_files.ROW_READERS]
    if not paths:
        raise InvalidRows(f"{where} has no file that ends in {row_files.ENDINGS}: correct the uri")
    return sorted(paths)


def _tag(file: Any) -> str:
    """What changes when a file of the store is replaced."""
    described = file.metadata() or {}
    return str(described.get(b"ETag") or described.get("ETag") or described)


def _tags(store: Any, files: BucketFiles, paths: list[str]) -> dict[str, tuple[int, str]]:
    """Path -> size and ETag of each file."""

    def described(path: str) -> tuple[int, str]:
        with store.open_input_file(f"{files.bucket}/{path}") as file:
            return file.size(), _tag(file)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(paths, pool.map(described, paths), strict=True))


def _rows(store: Any, files: BucketFiles, tags: dict[str, tuple[int, str]]) -> Iterator[Row]:
    for path, listed in tags.items():
        name, ending = f"{files.bucket}/{path}", row_files.ending_of(path)
        try:
            with store.open_input_file(name) as remote:
                found = (remote.size(), _tag(remote))
                yield from row_files.ROW_READERS[ending](remote if ending == _PARQUET else _buffered(remote))
            with store.open_input_file(name) as remote:
                if not listed == found == (remote.size(), _tag(remote)):
                    raise InvalidRows("the file changed while it was read: send the request again")
        except InvalidRows as error:
            raise InvalidRows(f"{path}: {error}") from error
        except OSError as error:
            if isinstance(error, MemoryError) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise _refusal(files, error) from error


def _buffered(file: Any) -> BinaryIO:
    """The file with a `readline` that has a limit, and few requests."""
    return io.BufferedReader(_Ranges(file), _BLOCK)


class _Ranges(Borrowed):
    """A file of the store, of which each read is a request."""

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._file.seek(offset, whence)
        return self.tell()

    def tell(self) -> int:
        return self._file.tell()


def _refusal(files: BucketFiles, error: OSError) -> InvalidRows:
    """The sentence for an error of the store. It has no text of the error but its code: it may name keys."""
    where = f"{BUCKET}://{files.bucket}/{files.path}"
    code = found[1] if (found := _CODE.search(str(error))) else type(error).__name__
    if isinstance(error, FileNotFoundError) or code in ("NO_SUCH_BUCKET", "NO_SUCH_KEY", "RESOURCE_NOT_FOUND"):
        return InvalidRows(f"{where} does not exist: correct the uri")
    if code in _REFUSED:
        return InvalidRows(
            f"the store refuses {where} to the service's account ({code}): expected s3:ListBucket and s3:GetObject; "
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, in the service's environment"
        )
    return InvalidRows(
        f"the store of {where} does not answer as S3 does ({code}): check AWS_ENDPOINT_URL_S3 and AWS_REGION in the "
        "service's environment and the network, then send the request again"
    )
