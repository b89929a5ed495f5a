"""Post-training for Llama Stack: the training engine and the inline provider `inline::trl`."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


async def get_provider_impl(config: Any, deps: dict[Any, Any]) -> Any:
    """Build the inline provider: Llama Stack's factory.

    Args:
        config: our `TrlConfig`.
        deps: Api to implementation.
    """
    from .post_training import TrlPostTraining

    provider = TrlPostTraining(config, deps)
    await provider.initialize()
    return provider
