"""The training service: the engine behind HTTP on port 8322. Imports neither torch nor Llama Stack."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .settings import ServiceSettings


def serve(settings: ServiceSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status. Trainings continue after it."""
    from .server import serve as run  # FastAPI only where it is needed

    return run(settings)
