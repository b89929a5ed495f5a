"""Registration: `module: llama_stack_provider_trl` in run.yaml makes Llama Stack import this and ask for the spec."""

from .stack.compat import ProviderSpec, inline_spec


def get_provider_spec() -> ProviderSpec:
    """The spec of `inline::trl`."""
    package = "llama_stack_provider_trl"
    return inline_spec(
        module=package,
        config_class=f"{package}.config.TrlConfig",
        # Not `train`: 0.2 admits no library that trains, and where it is missing the provider says so when it starts.
        pip_packages=[f"{package}[stack]"],
        validator=f"{package}.options.ProviderData",
    )
