"""What each route takes of its callers: the rows of the attack table's further columns.

test_attack_columns.py attacks each route by what its row states. A route without a row fails there, and so does a row
that states less than what the route takes. Roles are in docs/reference/service.md; slow bodies are sent to each route
without a row's help (test_slow_peers.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

type Leaf = tuple[str | int, ...]
"""Path of a text in a JSON body. `KEY`: the name of a field; `*`: a field of any name; 0: any item of a list."""

KEY, ANY = "KEY", "*"


@dataclass(frozen=True)
class Takes:
    streams: bool = False
    """Answers with events for as long as its caller wants."""
    work: bool = False
    """Orders work that counts in the CPU budget of the caller's token (`system.offload`)."""
    texts: frozenset[str] = frozenset()
    """Fields of its body, or of its form, with text that names nothing: it may have any characters."""
    any_keys: bool = False
    """Whether names of fields in its body are data, as those of rows are."""


def _texts(*names: str, **more: Any) -> Takes:
    return Takes(texts=frozenset(names), **more)


_PROMPTS = ("prompts", "system_prompt", "chat_template", "metadata")
_READS = (
    *(
        "/health",
        "/metrics",
        "/openapi.json",
        "/docs",
        "/login",
        "/static/{name}",
        "/",
        "/nodes",
        "/new",
        "/data",
        "/data/tokens",
    ),
    *(
        "/playground",
        "/playground/votes",
        "/compare",
        "/jobs/{job_uuid}",
        "/jobs/{job_uuid}/logs",
        "/jobs/{job_uuid}/samples",
        "/jobs/{job_uuid}/trials",
    ),
    *("/jobs/{job_uuid}/checkpoints/{identifier}", "/tokens", "/audit", "/logs", "/pools", "/datasets"),
    *("/datasets/{dataset_id}", "/blobs/{sha256}", "/nodes/{name}", "/nodes/{name}/load"),
    *("/nodes/{name}/tasks/{task_id}/answers/{file}", "/nodes/{name}/tasks/{task_id}/models/{sha256}/files/{path}"),
    *("/post-training/jobs", "/post-training/queue", "/post-training/job/status", "/post-training/job/artifacts"),
    *(f"/post-training/jobs/{{job_uuid}}/{name}" for name in ("status", "artifacts", "series", "samples", "logs")),
    *(f"/post-training/jobs/{{job_uuid}}/{name}" for name in ("metrics", "answers", "checkpoints")),
    "/post-training/jobs/{job_uuid}/checkpoints/{identifier}",
    "/post-training/jobs/{job_uuid}/checkpoints/{identifier}/files/{path}",
)
TAKES: dict[tuple[str, str], Takes] = {
    **{("GET", path): Takes() for path in _READS},
    ("GET", "/post-training/events"): Takes(streams=True),
    ("GET", "/post-training/jobs/{job_uuid}/events"): Takes(streams=True),
    ("HEAD", "/blobs/{sha256}"): Takes(),
    # Jobs
    **{
        ("POST", f"/post-training/{name}"): _texts(*_PROMPTS, work=True)
        for name in (
            "supervised-fine-tune",
            "preference-optimize",
            "generate",
            "merge",
            "export",
            "preflight",
            "preview",
        )
    },
    ("POST", "/post-training/evaluate"): _texts(
        *_PROMPTS, "pattern", "json_schema", "template", "system_instruction", work=True
    ),
    ("POST", "/post-training/pipelines"): Takes(work=True),
    ("POST", "/post-training/job/cancel"): Takes(),
    **{("POST", f"/post-training/jobs/{{job_uuid}}/{name}"): Takes() for name in ("cancel", "pause", "resume")},
    ("DELETE", "/post-training/jobs/{job_uuid}"): Takes(),
    # Chats
    **{("GET", f"/openai/v1/{name}"): Takes() for name in ("models", "models/{model}")},
    ("DELETE", "/openai/v1/models/{model}"): Takes(),
    ("POST", "/openai/v1/chat/completions"): _texts("messages", "tools", "stop"),
    ("POST", "/openai/v1/completions"): _texts("prompt", "stop"),
    # OpenAI's fine-tuning
    ("POST", "/openai/v1/files"): Takes(work=True),
    **{("GET", f"/openai/v1/files{name}"): Takes() for name in ("", "/{file_id}", "/{file_id}/content")},
    ("DELETE", "/openai/v1/files/{file_id}"): Takes(),
    **{
        ("POST", f"/openai/v1/uploads{name}"): Takes()
        for name in ("", "/{upload_id}/parts", "/{upload_id}/complete", "/{upload_id}/cancel")
    },
    **{
        (method, f"/openai/v1/fine_tuning/checkpoints/{{model}}/permissions{name}"): Takes()
        for method, name in (("GET", ""), ("POST", ""), ("DELETE", "/{permission_id}"))
    },
    ("POST", "/openai/v1/fine_tuning/jobs"): _texts("metadata", work=True),
    **{
        ("GET", f"/openai/v1/fine_tuning/jobs{name}"): Takes()
        for name in ("", "/{job_id}", "/{job_id}/events", "/{job_id}/checkpoints")
    },
    **{("POST", f"/openai/v1/fine_tuning/jobs/{{job_id}}/{name}"): Takes() for name in ("cancel", "pause", "resume")},
    ("POST", "/openai/v1/fine_tuning/alpha/graders/run"): _texts(
        *("input", "reference", "source", "content", "text", "calculate_output", "model_sample", "item"), work=True
    ),
    ("POST", "/openai/v1/fine_tuning/alpha/graders/validate"): _texts(
        *("input", "reference", "source", "content", "text", "calculate_output"), work=True
    ),
    # Rows
    ("POST", "/datasets"): _texts("rows", work=True, any_keys=True),
    ("DELETE", "/datasets/{dataset_id}"): Takes(),
    ("PUT", "/blobs/{sha256}"): Takes(),
    ("PUT", "/readings/{reading}/{sha256}"): Takes(),
    # Nodes. What they report is text of other programs; who prints it escapes it (`system.console`).
    ("POST", "/nodes"): Takes(),
    ("POST", "/nodes/{name}/poll"): _texts("detail", "error", "observation", "failed", "lines", any_keys=True),
    ("POST", "/nodes/{name}/tasks/{task_id}/events"): Takes(),
    ("PUT", "/nodes/{name}/tasks/{task_id}/logs/{file}"): Takes(),
    ("POST", "/nodes/{name}/tasks/{task_id}/answers"): Takes(),
    ("PUT", "/nodes/{name}/tasks/{task_id}/answers/{file}"): Takes(),
    ("POST", "/nodes/{name}/tasks/{task_id}/checkpoints/{checkpoint}"): Takes(),
    ("PUT", "/nodes/{name}/tasks/{task_id}/checkpoints/{checkpoint}/files/{path}"): Takes(),
    **{("POST", f"/nodes/{{name}}/{action}"): Takes() for action in ("cordon", "uncordon", "drain")},
    ("DELETE", "/nodes/{name}"): Takes(),
    # Tokens
    ("POST", "/tokens"): Takes(),
    ("DELETE", "/tokens/{name}"): Takes(),
    # Forms of pages
    ("POST", "/login"): Takes(),
    ("POST", "/logout"): Takes(),
    **{("POST", f"/jobs/{{job_uuid}}/{name}"): Takes() for name in ("cancel", "pause", "resume", "delete")},
    ("POST", "/nodes/{name}/{action}"): Takes(),
    ("POST", "/data/tokens"): _texts("rows", "system_prompt", work=True),
    ("POST", "/data/delete"): Takes(),
    ("POST", "/data/upload"): Takes(),
    **{("GET", path): Takes(work=True) for path in ("/data/rows", "/answers")},
    ("POST", "/new"): _texts("system_prompt", "draft", work=True),
    ("GET", "/playground/prompt"): Takes(work=True),
    ("POST", "/playground/answers"): _texts("messages", "tools", "stop"),
    ("POST", "/playground/votes"): _texts("messages", "tools", "chosen", "rejected", work=True),
    ("POST", "/new/check"): _texts("system_prompt", "draft", work=True),
}
"""(method, path without its version) -> what it takes."""

PATHS = frozenset({"checkpoint_dir", "model", "base", "finetuned_model", "reference_model", "resume_from", "uri"})
"""Fields that name files or directories of the service's machine."""


def leaves(document: Mapping[str, Any], schema: Mapping[str, Any], path: Leaf = (), seen: Leaf = ()) -> Iterator[Leaf]:
    """Each text that a body of this schema has, with names of fields that are free."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in seen:
            yield from leaves(document, document["components"]["schemas"][name], path, (*seen, name))
        return
    for union in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(union, ()):
            yield from leaves(document, one, path, seen)
    if "enum" in schema or "const" in schema:
        return
    if schema.get("type") == "string":
        yield path
    for name, one in schema.get("properties", {}).items():
        yield from leaves(document, one, (*path, name), seen)
    if schema.get("type") == "array":
        yield from leaves(document, schema.get("items", {}), (*path, 0), seen)
    more = schema.get("additionalProperties", not schema.get("properties"))
    if schema.get("type") == "object" and more is not False:
        yield (*path, KEY)
        if isinstance(more, dict):
            yield from leaves(document, more, (*path, ANY), seen)


def body_schema(operation: Mapping[str, Any]) -> Mapping[str, Any] | None:
    content: Mapping[str, Any] = operation.get("requestBody", {}).get("content", {})
    schema: Mapping[str, Any] | None = content.get("application/json", {}).get("schema")
    return schema


def with_text(body: Any, leaf: Leaf, text: str) -> Any:
    """The body with a text at a place, which is made where it is missing."""
    if not leaf:
        return text
    step, *rest = leaf
    if step == 0:
        items = body if isinstance(body, list) and body else [None]
        return [with_text(items[0], tuple(rest), text), *items[1:]]
    known = body if isinstance(body, dict) else {}
    if step == KEY:
        return {**known, text: "x"}
    name = "x" if step == ANY else step
    return {**known, name: with_text(known.get(name), tuple(rest), text)}
