"""About the service itself."""

from __future__ import annotations

from fastapi import APIRouter, Response

from llama_stack_provider_trl import __version__

from .bodies import Health
from .context import Context
from .errors import declared
from .routes_jobs import as_json

router = APIRouter(tags=["service"])


@router.get("/health", response_model=Health, responses=declared())
async def health(service: Context) -> Response:
    """Whether the service answers. Needs no token."""
    return as_json(Health(status="OK", version=__version__, supervising=service.supervisor.supervising))
