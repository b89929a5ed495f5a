"""Post-training as an external API of Llama Stack and OGX: the same calls on every release, whether it has a
post-training API of its own or not.

`external_apis.d/trl_post_training.yaml` names this module. The server imports from it the two providers, the class
whose methods are the API (`PostTrainingApi`), and since 0.7 a router; then it constructs the provider that the run file
names.
"""

from typing import Any

from llama_stack_provider_trl.stack.compat import ProviderSpec, inline_spec, remote_spec
from llama_stack_provider_trl.stack.external import NAME

from .routes import PostTrainingApi, create_router

__all__ = ["PostTrainingApi", "available_providers", "create_router", "get_adapter_impl", "get_provider_impl"]


def available_providers() -> list[ProviderSpec]:
    """The specs of both providers."""
    common: dict[str, Any] = {"module": __name__, "validator": "llama_stack_provider_trl.options.ProviderData"}
    common |= {"pip_packages": ["llama_stack_provider_trl"], "api": NAME}
    return [
        inline_spec(config_class=f"{__name__}.inline.ExternalTrlConfig", **common),
        remote_spec(config_class="llama_stack_provider_trl_remote.config.TrlRemoteConfig", **common),
    ]


async def get_provider_impl(config: Any, deps: dict[Any, Any]) -> Any:
    """The server's factory for `inline::trl` (`config`: `ExternalTrlConfig`; `deps`: Api to implementation)."""
    from .inline import ExternalTrl

    provider = ExternalTrl(config, deps)
    await provider.initialize()
    return provider


async def get_adapter_impl(config: Any, deps: dict[Any, Any]) -> Any:
    """The server's factory for `remote::trl_remote` (`config`: `TrlRemoteConfig`; `deps`: Api to implementation)."""
    from .remote import ExternalTrlRemote

    return ExternalTrlRemote(config, deps)
