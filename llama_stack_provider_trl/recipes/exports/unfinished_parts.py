"""Removes the parts of killed uploads to a bucket: no list of files has them, and a store keeps them for good.

pyarrow's client of S3 has no call for that. Two calls of S3 are made here, signed with the account of the environment
(version 4 of its signatures).
"""

from __future__ import annotations

import hashlib
import hmac
import html
import ssl
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import NamedTuple
from urllib.parse import quote, urlsplit

_SECONDS = 30.0
"""For which an answer is waited."""
_MOST_ANSWER = 4 << 20
"""Bytes of a list of 1,000 uploads at most."""
_ROUNDS = 20
"""Lists of the uploads of a file that are read at most."""
_EMPTY = hashlib.sha256(b"").hexdigest()


class _Account(NamedTuple):
    key: str
    secret: str
    session: str
    """Token of a temporary account; empty: it is none."""
    region: str


def remove_unfinished(bucket: str, prefix: str, names: Collection[str], environ: Mapping[str, str]) -> int:
    """Abort the uploads of some files that have begun and not ended, and return how many these were. Raises OSError:
    there is no account, or the store does not answer, or refuses.

    Args:
        prefix: of the keys, such as `team/sft-1/`.
        names: what follows it in a key.
        environ: has the account (`AWS_ACCESS_KEY_ID` ...) and the address of the store.
    """
    return sum(_removed(environ, bucket, f"{prefix}{name}") for name in names)


def _removed(environ: Mapping[str, str], bucket: str, key: str) -> int:
    """Abort the uploads of one file. MinIO lists those whose key is the prefix only, others those of a longer key, too,
    after it: the first 1,000 of a directory need not have a file of this export."""
    count = 0
    for _ in range(_ROUNDS):
        listed = _call(environ, "GET", bucket, "", {"uploads": "", "prefix": key}).decode("utf-8", "replace")
        found = [upload for of, upload in _uploads(listed) if of == key]
        for upload in found:
            _call(environ, "DELETE", bucket, key, {"uploadId": upload})
        count += len(found)
        if not found:
            break
    return count


def _uploads(listed: str) -> Iterator[tuple[str, str]]:
    """Keys and numbers of the uploads in an answer. It is read once from its begin to its end: a search for each end of
    an element takes hours where a store sends begins only."""
    for one in listed.split("<Upload>")[1:]:
        upload = one.partition("</Upload>")[0]
        key, number = _content(upload, "Key"), _content(upload, "UploadId")
        if key and number:
            yield key, number


def _content(text: str, name: str) -> str:
    """The text of the first element of this name; empty: there is none, or none that is text."""
    content, end, _ = text.partition(f"<{name}>")[2].partition(f"</{name}>")
    try:
        return html.unescape(content) if end and "<" not in content else ""
    except ValueError:  # a character is given by a number of thousands of digits
        return ""


def _call(environ: Mapping[str, str], method: str, bucket: str, key: str, query: Mapping[str, str]) -> bytes:
    account = _account(environ)
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    parts = urlsplit(endpoint or f"https://s3.{account.region}.amazonaws.com")
    path = f"{parts.path.rstrip('/')}/{bucket}{f'/{key}' if key else ''}"
    headers = signed(account, method, parts.netloc, path, query, datetime.now(UTC))
    connection: HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=environ.get("AWS_CA_BUNDLE"))
        connection = HTTPSConnection(parts.netloc, timeout=_SECONDS, context=context)
    else:
        connection = HTTPConnection(parts.netloc, timeout=_SECONDS)
    try:
        connection.request(method, f"{_quoted(path)}?{_joined(query)}", headers=headers)
        answer = connection.getresponse()
        content = answer.read(_MOST_ANSWER)
    except (HTTPException, ValueError) as error:
        raise OSError(f"the answer is not one of HTTP ({type(error).__name__})") from error
    finally:
        connection.close()
    if answer.status not in (200, 204, 404):  # 404: another attempt has ended the upload
        raise OSError(f"it answers with {answer.status}")
    return content


def _account(environ: Mapping[str, str]) -> _Account:
    key, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
    if not key or not secret:
        raise OSError("AWS_ACCESS_KEY_ID or AWS_SECRET_ACCESS_KEY is not set")
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return _Account(key, secret, environ.get("AWS_SESSION_TOKEN") or "", region)


def signed(
    account: _Account, method: str, host: str, path: str, query: Mapping[str, str], now: datetime
) -> dict[str, str]:
    """The headers of a call without a body.

    Args:
        path: not quoted yet, as the values of `query`.
    """
    moment, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    headers = {"host": host, "x-amz-content-sha256": _EMPTY, "x-amz-date": moment}
    if account.session:
        headers["x-amz-security-token"] = account.session
    names = ";".join(headers)  # they are sorted
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    request = "\n".join((method, _quoted(path), _joined(query), lines, names, _EMPTY))
    scope = f"{day}/{account.region}/s3/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{account.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"Credential={account.key}/{scope}"
    return {
        **headers,
        "authorization": f"AWS4-HMAC-SHA256 {credential},SignedHeaders={names},Signature={signature}",
    }


def _quoted(text: str) -> str:
    return quote(text, safe="/-_.~")


def _joined(query: Mapping[str, str]) -> str:
    return "&".join(f"{name}={quote(query[name], safe='-_.~')}" for name in sorted(query))
