"""Renders templates into pages, with the headers that every page has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from fastapi import Request, Response

from llama_stack_provider_trl import __version__
from llama_stack_provider_trl.errors import TrlError
from llama_stack_provider_trl.specs.state_words import state_word

from ..security.access import CALLER, Caller, calls_of
from .assets import PLOTLY, asset_url, assets, style_ids

if TYPE_CHECKING:
    from jinja2 import Environment

POLICY = "; ".join(
    [
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"),
        *("img-src 'self' data:", "form-action 'self'", "base-uri 'none'", "frame-ancestors 'none'"),
    ]
)
"""Content-Security-Policy: nothing inline and nothing of another site. Plotly draws with attributes and with the style
objects of elements, which style-src does not concern; its own style sheet is part of ours."""
UNCACHED = {"Cache-Control": "no-store"}
"""Of what the scripts of a page read: it has the policy of all answers, which loads nothing."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    **UNCACHED,
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_NAVIGATION = (
    *(("/", "Jobs", "j"), ("/new", "New job", "n"), ("/compare", "Compare", "c"), ("/data", "Datasets", "d")),
    *(("/playground", "Playground", "p"), ("/nodes", "Nodes", "m"), ("/docs", "API", "a")),
)
"""Pages to which each page has a link, where its reader may open them: address, text, the key that opens it after
`g`."""
_MISSING = (
    "the dashboard is not installed here: run `pip install 'llama_stack_provider_trl[dashboard]'` in the service's "
    "environment and start the service again; the API and trl-remote work without it"
)


class NoDashboard(TrlError, RuntimeError):
    """Raised when the extra `dashboard` is not installed. -> 501"""

    status_code = 501


def page(request: Request, template: str, code: int = 200, **values: Any) -> Response:
    """A page from a template.

    Args:
        code: HTTP status.

    Raises:
        NoDashboard.
    """
    caller: Caller = request.scope[CALLER]
    allowed = calls_of(request.app, caller)
    text = (
        _environment()
        .get_template(template)
        .render(
            caller=caller,
            form_token=request.app.state.sessions.form_token(caller.session) if caller.role else "",
            asset=asset_url,
            has_charts=PLOTLY in assets(),
            style_ids=style_ids,
            allowed=allowed,
            navigation=[one for one in _NAVIGATION if f"GET {one[0]}" in allowed],
            here=request.url.path,
            version=__version__,
            **values,
        )
    )
    return Response(text.encode("utf-8", "replace"), code, HEADERS, "text/html; charset=utf-8")


def error_page(request: Request, status: int, detail: str, headers: Mapping[str, str]) -> Response:
    """An error as a page: of 401 the form to log in."""
    try:
        if status == 401:
            url = request.url
            back = f"{url.path}?{url.query}" if url.query else url.path
            tried = request.method == "POST" and url.path == "/login"
            found = page(request, "login.html", status, back="/" if request.method != "GET" else back, wrong=tried)
        else:
            found = page(request, "error.html", status, status=status, detail=detail)
    except NoDashboard as error:
        missing = status if status in (401, 403, 429) else 501
        found = Response(f"{error}\n", missing, HEADERS, "text/plain; charset=utf-8")
    found.headers.update(headers)
    return found


def require_templates() -> None:
    """Raise NoDashboard where pages cannot be rendered."""
    _environment()


@cache
def _environment() -> Environment:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise NoDashboard(_MISSING) from error
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"moment": moment, "duration": duration, "size": size, "number": number, "step_time": step_time}
    made.filters["state_word"] = state_word
    return made


def address(path: str, query: Iterable[tuple[str, str]]) -> str:
    """A path with those fields of a query that are not empty."""
    pairs = [(name, text) for name, text in query if text]
    return f"{path}?{urlencode(pairs)}" if pairs else path


def moment(value: datetime | str | None) -> str:
    """A time as text, in UTC; empty: there is none."""
    if value is None:
        return ""
    found = datetime.fromisoformat(value) if isinstance(value, str) else value
    return f"{found.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def duration(seconds: float | None) -> str:
    """Seconds as hours, minutes and seconds, without leading zeros; empty: not known."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def step_time(seconds: float | None) -> str:
    """Seconds of an optimizer step, in ms where they are short; empty: not known."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s" if seconds < 60 else duration(seconds)


def size(value: float | None) -> str:
    """Bytes as KiB, MiB, GiB or TiB; empty: not known."""
    if value is None:
        return ""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def number(value: float | None) -> str:
    """A number with five digits; empty: not known."""
    return "" if value is None else f"{value:.5g}"
