"""Post-training for Llama Stack: the training engine and the inline provider `inline::trl`."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


async def get_provider_impl(config: Any, deps: dict[Any, Any]) -> Any:
    """Llama Stack's factory for an inline provider (`config` is our `TrlConfig`, `deps` maps Api to implementation)."""
    from .post_training import TrlPostTraining

    provider = TrlPostTraining(config, deps)
    await provider.initialize()
    return provider
