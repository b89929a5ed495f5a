"""Registration: Llama Stack reads the spec here, for `module: llama_stack_provider_trl_remote` in run_fsdp.yaml."""

from llama_stack_provider_trl.stack.compat import ProviderSpec, remote_spec


def get_provider_spec() -> ProviderSpec:
    """The spec of `remote::trl_remote`."""
    package = "llama_stack_provider_trl_remote"
    return remote_spec(
        module=package,
        config_class=f"{package}.config.TrlRemoteConfig",
        pip_packages=["llama_stack_provider_trl[stack]"],
        validator="llama_stack_provider_trl.options.ProviderData",
    )
