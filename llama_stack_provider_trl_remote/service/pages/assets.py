"""The files that pages load: our own modules and style, and plotly.js as the installed plotly package ships it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import mmap
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

PLOTLY = "plotly.min.js"
_DIRECTORY = Path(__file__).parent / "static"
TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


_STYLE_IDS = re.compile(rb'getElementById\("(\w{20,})"\)\)\{var (\w+)=document\.createElement\("style"\)')
"""Where plotly.js inserts a style sheet of a library, unless there is an element with its id. The id is a digest."""


class Asset(NamedTuple):
    path: Path
    version: str
    """Changes with the content."""


@cache
def assets() -> dict[str, Asset]:
    """Name -> file. plotly.min.js is missing where plotly is not installed."""
    found = {
        path.name: Asset(path, hashlib.sha256(path.read_bytes()).hexdigest()[:16])
        for path in _DIRECTORY.iterdir()
        if path.suffix in TYPES
    }
    spec = importlib.util.find_spec("plotly")  # does not import it: that takes 30 MiB
    shipped = Path(spec.origin).parent / "package_data" / PLOTLY if spec is not None and spec.origin else None
    if shipped is not None and shipped.is_file():
        found[PLOTLY] = Asset(shipped, importlib.metadata.version("plotly"))
    return found


@cache
def style_ids() -> tuple[str, ...]:
    """Ids of elements that keep plotly.js from inserting style sheets, which the policy of the pages forbids."""
    if PLOTLY not in assets():
        return ()
    # 4.7 MB, of which nothing is kept: read into memory, they would be a hole in the heap.
    with open(assets()[PLOTLY].path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return tuple(found[1].decode() for found in _STYLE_IDS.finditer(text))


def asset_url(name: str) -> str:
    """The address of a file, which changes with its content."""
    return f"/static/{name}?v={assets()[name].version}"
