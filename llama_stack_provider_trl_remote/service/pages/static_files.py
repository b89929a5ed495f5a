"""The route of the files that pages load."""

from __future__ import annotations

from fastapi import Request, Response

from ..http.declared_routes import Routes
from ..http.errors import NotFound
from ..security.access import ANYONE
from ..security.streams import CountedFile
from .assets import TYPES, assets
from .route import PageRoute

router = Routes(PageRoute, include_in_schema=False)


@router.get("/static/{name}", dependencies=[ANYONE])
async def static_file(request: Request, name: str) -> Response:
    """A file that pages load. It holds nothing of any job."""
    asset = assets().get(name)
    if asset is None:
        raise NotFound(f"there is no file {name[:100]!r} among those of the dashboard")
    etag = f'"{asset.version}"'
    # Modules import each other without a version, so a browser asks for them again: 304 where nothing has changed.
    headers = {"ETag": etag, "Cache-Control": "no-cache", "Cross-Origin-Resource-Policy": "same-origin"}
    if request.query_params.get("v") == asset.version:
        headers["Cache-Control"] = "max-age=31536000, immutable"
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return CountedFile(asset.path, headers=headers, media_type=TYPES[asset.path.suffix])
