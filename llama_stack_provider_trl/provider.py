"""Registration: Llama Stack imports this for `module: llama_stack_provider_trl` in run.yaml and reads the spec."""

from .stack.compat import ProviderSpec, inline_spec


def get_provider_spec() -> ProviderSpec:
    """The spec of `inline::trl`."""
    package = "llama_stack_provider_trl"
    return inline_spec(
        module=package,
        config_class=f"{package}.config.TrlConfig",
        # Not `train`: 0.2 admits no library that trains; where it is missing the provider reports it at its start.
        pip_packages=[f"{package}[stack]"],
        validator=f"{package}.options.ProviderData",
    )
