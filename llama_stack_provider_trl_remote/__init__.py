"""Post-training by a service of its own: the service on port 8322, its client, and the adapter `remote::trl_remote`."""

from __future__ import annotations

from typing import Any


async def get_adapter_impl(config: Any, deps: dict[Any, Any]) -> Any:
    """Build the adapter: Llama Stack's factory for a remote provider.

    Args:
        config: `TrlRemoteConfig`.
        deps: Api to implementation.
    """
    from .adapter import TrlRemotePostTraining

    return TrlRemotePostTraining(config, deps)
