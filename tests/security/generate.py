"""Requests of the fuzzer: made from the OpenAPI document, then damaged.

The same seed and number make the same request.
"""

from __future__ import annotations

import base64
import copy
import json
import random
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from tests.security.guarded import BODIES, MULTIPART, ROWS_DIGEST, without_version

METHODS = ("get", "put", "post", "delete", "head")
PLACEHOLDER = re.compile(r"\{(\w+)\}")
LARGEST = 40 << 20
"""Bytes of the largest body: more than any route takes but an upload."""
STREAMS = "text/event-stream"
FORM_TOKEN = "{form_token}"
"""In the body of a form: the sender replaces it."""
_JOB_FIELDS = (
    *("job", "model", "dataset", "validation_dataset", "method", "epochs", "batch_size", "gradient_accumulation"),
    *("learning_rate", "max_seq_length", "lora_rank", "lora_alpha", "nproc_per_node", "priority", "truncation_side"),
    *("train_on_input", "data_format", "tuning", "options", "request", "kind", "output", "to"),
)
_PREVIEW_FIELDS = ("model", "dataset", "method", "first_row", "rows", "train_on_input", "max_seq_length")
PAGES: dict[tuple[str, str], tuple[str, ...]] = {
    **{("GET", path): () for path in ("/", "/login", "/nodes", "/static/{name}", "/jobs/{job_uuid}", "/docs")},
    **{("GET", f"/jobs/{{job_uuid}}/{name}"): () for name in ("logs", "samples", "trials", "checkpoints/{identifier}")},
    **{("GET", path): ("dataset", "job", "page", "search", "sort", "hide") for path in ("/data", "/compare")},
    ("GET", "/data/rows"): ("dataset", "search", "first"),
    ("GET", "/data/tokens"): ("dataset", "method"),
    ("GET", "/answers"): ("job", "first", "show"),
    **{("GET", path): () for path in ("/metrics", "/openapi.json")},
    ("GET", "/new"): ("dataset", "model", "method", "options", "from", "preset", "kind"),
    ("GET", "/playground"): ("job", "model_a", "model_b", "dataset", "votes"),
    ("GET", "/playground/prompt"): ("dataset", "row", "job"),
    ("GET", "/playground/votes"): ("dataset", "model"),
    ("POST", "/playground/answers"): ("request",),
    ("POST", "/playground/votes"): ("vote",),
    **{("POST", f"/jobs/{{job_uuid}}/{name}"): () for name in ("cancel", "pause", "resume")},
    ("POST", "/jobs/{job_uuid}/delete"): ("checkpoints",),
    ("POST", "/nodes/{name}/{action}"): (),
    ("POST", "/login"): ("token", "back"),
    ("POST", "/logout"): (),
    ("POST", "/data/tokens"): _PREVIEW_FIELDS,
    ("POST", "/data/delete"): ("dataset",),
    ("POST", "/data/upload"): (),
    **{("POST", path): _JOB_FIELDS for path in ("/new", "/new/check")},
}
"""Route that the document leaves out -> fields of its form, or parameters of its query."""
CALLERS = {"admin": 8, "submit": 4, "node": 2, "own-node": 4, "other-node": 2, "nobody": 1, "wrong": 1}
"""Caller -> how often, where the route takes it."""


@dataclass(frozen=True)
class Written:
    """A piece of a body that is written as it is, whether JSON has it or not."""

    text: str


@dataclass
class FuzzRequest:
    number: int
    caller: str
    method: str
    target: str
    """May hold `{task_id}`, which the sender fills in."""
    headers: list[tuple[str, bytes]] = field(default_factory=list)
    body: bytes = b""
    framing: str = "length"
    """length, chunked, tiny-chunks, trickled (with pauses), bad-chunks, short (the body breaks off), long (more
    follows), both, none."""
    browser: bool = False
    """Whether it is sent by a browser with a session, in place of a token."""
    notes: list[str] = field(default_factory=list)
    """What was damaged."""

    @property
    def must_be_answered(self) -> bool:
        """Whether the request is complete: others may find their connection closed."""
        return self.framing in ("length", "chunked", "tiny-chunks", "trickled", "none")

    def shown(self) -> dict[str, Any]:
        """For a line of a file; a large body is left out, since the seed and the number make it again."""
        small = len(self.body) <= 1 << 16
        return {
            **{"number": self.number, "caller": self.caller, "method": self.method, "target": self.target[:2000]},
            "headers": [[name, value[:500].decode("latin-1")] for name, value in self.headers],
            **{"framing": self.framing, "browser": self.browser},
            **{"damage": self.notes, "body_bytes": len(self.body)},
            "body_base64": base64.b64encode(self.body).decode() if small else None,
        }


class Generator:
    """Requests to every route of a document.

    Args:
        known: parameter or field -> values that the service knows.
    """

    def __init__(self, document: Mapping[str, Any], seed: int, known: Mapping[str, list[Any]]) -> None:
        self._schemas = document.get("components", {}).get("schemas", {})
        self._seed = seed
        self._known = known
        self.operations = [
            (method.upper(), path, operation)
            for path, operations in sorted(document["paths"].items())
            for method, operation in sorted(operations.items())
            if method in METHODS
        ]
        self.operations += [(method, path, _page_operation(method, path)) for method, path in sorted(PAGES)]

    def request(self, number: int) -> FuzzRequest:
        rng = random.Random(f"{self._seed}/{number}")
        # Each route once per pass, in an order of its own.
        order = list(range(len(self.operations)))
        random.Random(f"{self._seed}/pass {number // len(order)}").shuffle(order)
        method, path, operation = self.operations[order[number % len(order)]]
        return _Making(self, rng, number, method, path, operation).made()

    def value(self, rng: random.Random, schema: Mapping[str, Any], name: str = "", depth: int = 0) -> Any:
        """A value that a schema admits, or nearly."""
        if name in self._known and rng.random() < 0.8:
            return rng.choice(self._known[name])
        if "$ref" in schema:
            return self.value(rng, self._schemas[schema["$ref"].rpartition("/")[2]], name, depth)
        for union in ("anyOf", "oneOf", "allOf"):
            if union in schema:
                return self.value(rng, rng.choice(schema[union]), name, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        kind = schema.get("type")
        if kind == "object" or "properties" in schema:
            return self._object(rng, schema, depth)
        if kind == "array":
            least = schema.get("minItems", 0)
            count = 0 if depth > 6 else rng.randint(least, max(least, 3))
            return [self.value(rng, schema.get("items", {}), name, depth + 1) for _ in range(count)]
        if kind in ("integer", "number"):
            low = schema.get("minimum", schema.get("exclusiveMinimum", -1))
            high = schema.get("maximum", low + rng.choice((1, 10, 10**6)))
            return rng.randint(int(low), int(max(low, high))) if kind == "integer" else rng.uniform(low, high)
        if kind == "boolean":
            return rng.random() < 0.5
        if kind == "null":
            return None
        if kind == "string":
            return rng.choice(_NASTY_TEXTS)(rng) if rng.random() < 0.05 else _text(rng)
        return rng.choice((None, True, 1, 1.5, "text", [], {}))

    def known_of(self, name: str) -> list[Any]:
        return self._known.get(name, [])

    def _object(self, rng: random.Random, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        made = {}
        for name, inner in schema.get("properties", {}).items():
            if rng.random() < (0.98 if name in required else 0.3 / (1 + depth / 2)):
                made[name] = self.value(rng, inner, name, depth + 1)
        more = schema.get("additionalProperties")
        if more and depth < 6:
            for _ in range(rng.randint(0, 3)):
                made[_text(rng)[:50]] = self.value(rng, more if isinstance(more, dict) else {}, "", depth + 1)
        return made

    def schema_of_body(self, operation: Mapping[str, Any]) -> Mapping[str, Any] | None:
        content = operation.get("requestBody", {}).get("content", {})
        found: Mapping[str, Any] | None = content.get("application/json", {}).get("schema")
        return found


class _Making:
    """One request while it is made."""

    def __init__(
        self,
        generator: Generator,
        rng: random.Random,
        number: int,
        method: str,
        path: str,
        operation: Mapping[str, Any],
    ) -> None:
        self.generator, self.rng, self.operation = generator, rng, operation
        self.call = f"{method} {without_version(path)}"
        self.request = FuzzRequest(number, self._caller(), method, path)

    def made(self) -> FuzzRequest:
        request, rng = self.request, self.rng
        request.target = self._target(request.target)
        if "x-fields" in self.operation:
            self._fill_page()
        elif request.method in ("POST", "PUT") or rng.random() < 0.03:
            self._fill_body()
            request.body = request.body[:LARGEST]
        self._accept_streams()
        if rng.random() < 0.15:
            self._damage_headers()
        if rng.random() < 0.12:
            request.framing = rng.choice(
                ("chunked", "tiny-chunks", "trickled", "bad-chunks", "short", "long", "both", "none")
            )
            request.notes.append(f"framing {request.framing}")
        return request

    def _accept_streams(self) -> None:
        if STREAMS in self.operation.get("responses", {}).get("200", {}).get("content", {}) and self.rng.random() < 0.5:
            self.request.headers.append(("Accept", STREAMS.encode()))

    def _caller(self) -> str:
        roles = self.operation.get("x-roles", [])
        welcome = {
            "admin": "admin" in roles,
            "submit": "submit" in roles,
            **dict.fromkeys(("node", "own-node", "other-node"), "node" in roles),
        }
        chosen = [name for name in CALLERS if welcome.get(name)]
        if not chosen or self.rng.random() < 0.2:
            chosen = list(CALLERS)
        return self.rng.choices(chosen, [CALLERS[name] for name in chosen])[0]

    # Path, query, headers

    def _target(self, path: str) -> str:
        parameters = self.operation.get("parameters", ())
        inner = {one["name"]: one for one in parameters if one["in"] == "path"}
        path = PLACEHOLDER.sub(lambda match: self._in_path(match[1], inner.get(match[1], {})), path)
        queries = []
        for one in parameters:
            if one["in"] != "query" or not (one.get("required") or self.rng.random() < 0.4):
                continue
            for _ in range(2 if self.rng.random() < 0.03 else 1):
                value = self.generator.value(self.rng, one.get("schema", {}), one["name"])
                if self.rng.random() < 0.2:
                    value = self._nasty_text(one["name"])
                shown = {None: "", True: "true", False: "false"}.get(value) if value in (None, True, False) else None
                queries.append(f"{one['name']}={quote(_bytes(str(value) if shown is None else shown), safe='')}")
        if self.rng.random() < 0.03:
            queries.append(quote(_bytes(self._nasty_text("query")), safe="=&"))
        return path + ("?" + "&".join(queries) if queries else "")

    def _in_path(self, name: str, parameter: Mapping[str, Any]) -> str:
        if name == "task_id" and self.rng.random() < 0.8:
            return "{task_id}"
        if self.rng.random() < 0.15:
            return quote(_bytes(self._nasty_text(name)[:8000]), safe=self.rng.choice(("", "/", "/.")))
        value = self.generator.value(self.rng, parameter.get("schema", {}), name)
        return quote(_bytes(str(value)), safe="/")

    def _nasty_text(self, name: str) -> str:
        self.request.notes.append(f"nasty {name}")
        return str(self.rng.choice(_NASTY_TEXTS)(self.rng))

    def _damage_headers(self) -> None:
        rng, headers = self.rng, self.request.headers
        name = rng.choice(list(_HEADERS))
        value = rng.choice(_HEADERS[name])
        self.request.notes.append(f"header {name} of {len(value)}")
        if name == "Content-Type":
            headers[:] = [one for one in headers if one[0] != name]
        headers.append((name, value))
        if rng.random() < 0.05:
            headers += [(f"X-{number}", b"x") for number in range(rng.choice((100, 1000)))]

    # Pages and their forms

    def _fill_page(self) -> None:
        rng, request = self.rng, self.request
        request.browser = rng.random() < 0.8
        given = {name: self._field(name) for name in self.operation["x-fields"] if rng.random() < 0.7}
        if rng.random() < 0.1:
            given |= {
                self._nasty_text("field"): "x",
                **{f"more-{number}": "x" for number in range(rng.randint(0, 200))},
            }
        fields = "&".join(
            f"{quote(_bytes(name), safe='')}={quote(_bytes(text), safe='')}" for name, text in given.items()
        )
        if request.method == "GET":
            request.target += f"?{fields}" if fields else ""
            return
        request.headers.append(("Content-Type", b"application/x-www-form-urlencoded"))
        request.body = _bytes(f"form_token={FORM_TOKEN}&{fields}" if rng.random() < 0.9 else fields)
        if rng.random() < 0.1:
            request.body = self._damaged_text(request.body)

    def _field(self, name: str) -> str:
        known = self.generator.known_of({"dataset": "dataset_id", "job": "job_uuid"}.get(name, name))
        if known and self.rng.random() < 0.6:
            return str(self.rng.choice(known))
        if self.rng.random() < 0.4:
            return self._nasty_text(name)
        return self.rng.choice(("1", "0", "on", "sft", "dpo", "2e-5", "8", _text(self.rng)))

    # Bodies

    def _fill_body(self) -> None:
        rng, request = self.rng, self.request
        schema = self.generator.schema_of_body(self.operation)
        if self.call in MULTIPART:
            request.headers.append(("Content-Type", b"multipart/form-data; boundary=b"))
            request.body = self._form_body()
            return
        if schema is None:
            request.headers.append(("Content-Type", b"application/octet-stream"))
            request.body = self._bytes_body()
            return
        request.headers.append(("Content-Type", b"application/json"))
        good = BODIES.get(self.call)
        value = self._own_copy(good) if good is not None and rng.random() < 0.6 else None
        if value is None:
            value = self.generator.value(rng, schema)
        for _ in range(rng.choice((0, 1, 1, 1, 2, 5))):
            value = self._damaged(value)
        request.body = _bytes(_dumps(value))
        if rng.random() < 0.12:
            request.body = self._damaged_text(request.body)

    def _form_body(self) -> bytes:
        """Of an upload as a form: mostly whole, or with a part that is damaged."""
        rng = self.rng
        head = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n'
        name = rng.choice((b"rows.jsonl", b"\xff", b"../../a", b"x" * 5000, _text(rng).encode("utf-8", "replace")))
        purpose = rng.choice((b"fine-tune", b"evals", b"", b"\xff", b"x" * 5000))
        field = b"file" if self.call == "POST /openai/v1/files" else b"data"
        file = rng.choice((field, field, field, b"files", b""))
        parts = [
            head % (b"purpose", b"") + purpose + b"\r\n",
            head % (file, b'; filename="%s"' % name) + self._bytes_body() + b"\r\n",
        ]
        rng.shuffle(parts)
        body = b"".join(parts) + rng.choice((b"--b--\r\n", b"--b--\r\n", b"--b\r\n", b""))
        return self._damaged_text(body) if rng.random() < 0.2 else body

    def _own_copy(self, good: dict[str, Any]) -> dict[str, Any]:
        """Names of its own, so that jobs and datasets are made and not only repeated."""
        made: dict[str, Any] = json.loads(json.dumps(good))
        for name in ("job_uuid", "dataset_id"):
            if made.get(name) == "new":
                made[name] = f"new-{self.request.number}"
        return made

    def _bytes_body(self) -> bytes:
        """Of an upload: rows, event lines, or anything."""
        rng = self.rng
        kind = rng.choice(("rows", "events", "events", "events", "any"))
        if kind == "any":
            return self._sized(rng.randbytes(1 << 12))
        rows = [self._event() if kind == "events" else {"prompt": _text(rng), "completion": _text(rng)}]
        while rng.random() < 0.5:
            rows.append(self._damaged(copy.deepcopy(rows[-1])) if isinstance(rows[-1], dict) else self._event())
        text = b"".join(_bytes(_dumps(row)) + b"\n" for row in rows)
        return self._damaged_text(text) if rng.random() < 0.2 else text

    def _event(self) -> Any:
        rng = self.rng
        event = copy.deepcopy(rng.choice(_EVENTS)) | {"time": rng.choice((1.7e9, 0, -1, 1e18, 1e308, 253402300800))}
        return self._damaged(event) if rng.random() < 0.7 else event

    def _damaged(self, value: Any) -> Any:
        """The value with one place changed."""
        rng = self.rng
        places = list(_places(value))
        if not places or rng.random() < 0.05:
            self.request.notes.append("the whole body")
            return rng.choice(_NASTY)(rng)
        holder, key = rng.choice(places)
        what = rng.choice(("replace", "replace", "replace", "drop", "rename", "add", "swap"))
        self.request.notes.append(f"{what} {str(key)[:50]!r}")
        if what == "replace":
            holder[key] = rng.choice(_NASTY)(rng)
        elif what == "swap":
            holder[key] = copy.deepcopy(rng.choice(places)[0])  # a part that holds itself has no end
        elif what == "drop":
            del holder[key]
        elif isinstance(holder, dict):
            name = rng.choice(_NASTY_TEXTS)(rng)
            holder[name] = holder.pop(key) if what == "rename" else rng.choice(_NASTY)(rng)
        else:
            holder.append(rng.choice(_NASTY)(rng))
        return value

    def _damaged_text(self, body: bytes) -> bytes:
        rng = self.rng
        what = rng.choice(
            ("cut", "flip", "invalid UTF-8", "BOM", "UTF-16", "more", "empty", "spaces", "twice", "newline")
        )
        self.request.notes.append(f"text {what}")
        if what == "cut":
            return body[: rng.randint(0, len(body))]
        if what == "flip" and body:
            damaged = bytearray(body)
            for _ in range(rng.randint(1, 8)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            return bytes(damaged)
        if what == "invalid UTF-8":
            at = rng.randint(0, len(body))
            return body[:at] + rng.choice((b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf8")) + body[at:]
        if what == "BOM":
            return b"\xef\xbb\xbf" + body
        if what == "UTF-16":
            return body.decode("utf-8", "replace").encode("utf-16")
        if what == "more":
            return body + rng.choice((b"{}", b"]", b"\0", b" x"))
        if what == "spaces":
            return self._sized(b" " * 64) + body
        if what == "twice":
            return body + body
        return b"" if what == "empty" else body + b"\r\n"

    def _sized(self, piece: bytes) -> bytes:
        """Mostly small, seldom larger than anything that is taken."""
        size = LARGEST if self.rng.random() < 0.01 else int(2 ** self.rng.uniform(0, 21))
        return (piece * (size // len(piece) + 1))[:size]


def _page_operation(method: str, path: str) -> dict[str, Any]:
    """A route that the document leaves out, as the document would have it."""
    parameters = [{"in": "path", "name": name, "schema": {"type": "string"}} for name in PLACEHOLDER.findall(path)]
    return {"parameters": parameters, "x-roles": ["submit", "admin"], "x-fields": PAGES[method, path]}


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a document, to a bounded depth."""
    found, left = [], [value]
    while left and len(found) < 500:
        holder = left.pop()
        keys: Any = range(len(holder)) if isinstance(holder, list) else holder if isinstance(holder, dict) else ()
        for key in keys:
            found.append((holder, key))
            left.append(holder[key])
    return found


def _dumps(value: Any) -> str:
    """JSON, with pieces that JSON has not."""
    if isinstance(value, Written):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(key))}:{_dumps(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_dumps, value)) + "]"
    return json.dumps(value)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_letters + string.digits + "-_./ äß你😊", k=rng.randint(0, 20)))


def _long(rng: random.Random, most: int = 21) -> str:
    return rng.choice("ax.%é") * int(2 ** rng.uniform(4, most))


def _nested(rng: random.Random) -> Written:
    depth = int(2 ** rng.uniform(3, 17))
    begin, end = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"job_uuid":', "}]")))
    return Written(begin * depth + "1" + end * (depth if rng.random() < 0.9 else 0))


def _many_keys(rng: random.Random) -> Written:
    count = int(2 ** rng.uniform(4, 16))
    name = rng.choice(("k{}", "job_uuid", "{}" + "x" * 20))
    return Written("{" + ",".join(f'"{name.format(number)}":{number}' for number in range(count)) + "}")


_NASTY_TEXTS: tuple[Callable[[random.Random], str], ...] = (
    *(
        lambda _, text=text: text  # type: ignore[misc]
        for text in (
            *("", " ", ".", "..", "../../../../etc/passwd", "/etc/passwd", "/dev/zero", "file:///etc/passwd", "\0"),
            *("a\0b", "a\nb", "\x7f", "\x1b[2J", "\u202e", "\ud800", "\udfff\ud800", "e\u0301" * 20, "null", "NaN"),
            *("-1", "1e999", "0x10", "9" * 400, "٣", "-9223372036854775809", "true", "%00", "%n%s", "{}", "[]"),
            *("${jndi:ldap://x}", "' OR 1=1 --", "__proto__", "__class__", "{0.__class__}", "huggingface://datasets"),
            *("9999-1", "1:1:1", "waiting:99999999999999999999", "1" + "0" * 5000, "CON", "a/" * 200, "~root"),
        )
    ),
    lambda rng: _long(rng, 15),
)
_NASTY: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: rng.choice((None, True, False, 0, 1, -1, -0.0, 0.1, 1.5, [], {}, [[]], [None], {"": None})),
    lambda rng: rng.choice((2**31, 2**53, 2**63, 2**64, -(2**63) - 1, 10**18, 1e18, 1e308, -1e308, 5e-324, 10**30)),
    lambda rng: Written(
        rng.choice(("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5000, "0." + "1" * 5000, "01", "+1"))
    ),
    lambda rng: Written(rng.choice(('"\\ud800"', '"\\u0000"', '"\\x"', '"\t"', "'a'", '{"a":1,"a":2}', "//", "[1,]"))),
    lambda rng: rng.choice(_NASTY_TEXTS)(rng),
    lambda rng: rng.choice(_NASTY_TEXTS)(rng),
    _long,
    _nested,
    _many_keys,
    lambda rng: [0] * int(2 ** rng.uniform(2, 16)),
    lambda rng: [{}] * int(2 ** rng.uniform(2, 14)),
)
_HEADERS: dict[str, tuple[bytes, ...]] = {
    "Content-Type": (
        *(b"", b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b"\xff"),
        *(b"application/json; charset=utf-16", b"APPLICATION/JSON", b"application/json" * 1000),
    ),
    "Range": (
        *(b"bytes=0-", b"bytes=-1", b"bytes=5-1", b"bytes=0-0,5-9", b"bytes=99999999999999999999-", b"bytes=-"),
        *(b"bytes=-99999999999999999999", b"lines=1-2", b"bytes=a-b", b"bytes=\xff-", b"bytes=" + b"0-1," * 2000),
    ),
    "If-Range": (b'"x"', b"", f'"{ROWS_DIGEST}"'.encode(), b"\xff" * 100),
    "Accept": (b"text/event-stream", b"text/event-stream", b"*/*;q=nan", b"," * 5000),
    "Last-Event-ID": (
        *(b"1", b"1:1", b"-1", b"waiting:1:5", b"9" * 400, b"1:99999999999999999999", b"\xff", b"a:b:c"),
    ),
    "Authorization": (b"", b"Bearer", b"Bearer  ", b"Basic YTpi", b"Bearer \xff\xfe", b"Bearer " + b"x" * 50_000),
    "Host": (b"", b"evil.example", b"127.0.0.1:99999", b"[::1", b"\xff", b"a" * 5000),
    "Origin": (b"null", b"http://evil.example", b"http://[", b"//", b"http://127.0.0.1:x"),
    "Expect": (b"100-continue", b"200-ok"),
    "Connection": (b"close", b"upgrade", b"keep-alive, x"),
    "Upgrade": (b"websocket", b"h2c"),
    "Content-Encoding": (b"gzip", b"x" * 100),
    "X-Long": (b"x" * (1 << 10), b"x" * (1 << 14), b"x" * (1 << 17)),
}
_EVENTS: tuple[dict[str, Any], ...] = (
    {"type": "started", "pid": 1, "device": "cpu", "versions": {}},
    {"type": "tokenizing", "rows": 4, "total_rows": 8},
    {"type": "prepared", "total_steps": 4, "num_rows": 8, "trainable_parameters": 1, "total_parameters": 1},
    {"type": "progress", "step": 1, "epoch": 0.5, "metrics": {"loss": 2.5}, "peak_memory_bytes": 1},
    {"type": "checkpoint", "kind": "step", "step": 2, "epoch": 1, "path": "/tmp/x", "train_loss": 2.5},
    {"type": "warning", "message": "a warning"},
    {"type": "evaluated", "step": 1, "epoch": 0.5, "metrics": {"eval_loss": 2.5}},
    {
        "type": "samples",
        **{"kind": "checkpoint", "step": 2, "epoch": 0.5},
        "answers": [{"text": "It is 6.", "tokens": 4, "complete": True}],
    },
    {
        "type": "rollout",
        **{"step": 1, "epoch": 0.5, "row": 0},
        "prompt": [{"role": "user", "content": "What is 3 plus 3?"}],
        "answers": [
            {"text": "6", "tokens": 1, "complete": True, "reward": 1.0, "advantage": 0.5, "rewards": {"digits": 1.0}}
        ],
    },
    {"type": "checkpoint_damaged", "path": "/tmp/x", "message": "text"},
    {"type": "paused", "step": 1},
    {"type": "failed", "reason": "rank_failed", "message": "text"},
    {"type": "finished", "step": 4},
)
