"""Post-training by a service of its own: the service on port 8322, its clients, the adapter `remote::trl_remote`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .follow import JobEvent
    from .row_files import UploadedRows
    from .trl_client import AsyncTrlClient, TrlClient

__all__ = ["AsyncTrlClient", "JobEvent", "TrlClient", "UploadedRows", "get_adapter_impl"]
_MODULES = {
    "AsyncTrlClient": "trl_client",
    "JobEvent": "follow",
    "TrlClient": "trl_client",
    "UploadedRows": "row_files",
}
"""Public name -> its module, which is imported with its first use: the service and agents do not need it."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


async def get_adapter_impl(config: Any, deps: dict[Any, Any]) -> Any:
    """Build the adapter: Llama Stack's factory for a remote provider.

    Args:
        config: `TrlRemoteConfig`.
        deps: Api to implementation.
    """
    from .adapter import TrlRemotePostTraining

    return TrlRemotePostTraining(config, deps)
