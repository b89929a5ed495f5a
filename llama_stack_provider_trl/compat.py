"""The only importer of Llama Stack. Written against 0.3.5; nothing else in the project knows a Llama Stack version."""

from typing import Any

from llama_stack.apis.common.errors import ConflictError, ResourceNotFoundError
from llama_stack.core.request_headers import NeedsRequestProviderData
from llama_stack.providers.datatypes import Api, InlineProviderSpec, ProviderSpec, RemoteProviderSpec

from . import errors

__all__ = ["Api", "NeedsRequestProviderData", "ProviderSpec", "inline_spec", "read_rows", "remote_spec", "to_http"]


class _JobNotFound(ResourceNotFoundError):
    """Llama Stack answers 404."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)  # the base classes' own constructors differ between releases


class _JobConflict(ConflictError):
    """Llama Stack answers 409."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)


def to_http(error: errors.TrlError) -> Exception:
    """The exception that Llama Stack turns into the right status code with our sentence in it.

    `InvalidRequest` is a ValueError and becomes 400 as it is; a class that Llama Stack does not know would become a
    500 without its text.
    """
    if isinstance(error, errors.JobNotFound):
        return _JobNotFound(str(error))
    if isinstance(error, errors.JobConflict):
        return _JobConflict(str(error))
    if isinstance(error, errors.ServiceRefusal):
        # Others carry a status_code, which Llama Stack takes as it is; these get what the inline provider would get.
        kinds: dict[int, type[Exception]] = {400: ValueError, 404: _JobNotFound, 409: _JobConflict}
        return kinds[error.status](str(error)) if error.status in kinds else error
    return error


async def read_rows(datasets: Any, datasetio: Any, dataset_id: str) -> list[dict[str, Any]]:
    """All rows of a registered dataset.

    Rows that were registered as such are taken as they are: localfs would make a data frame of them, which costs the
    first call 0.4 s for pandas and turns whole numbers with gaps into fractions. Others are read in one call, since
    localfs rebuilds the whole data frame for each.

    Raises:
        InvalidRequest: Llama Stack knows no such dataset, or cannot read it.
    """
    field = "training_config.data_config.dataset_id"
    try:
        source = (await datasets.get_dataset(dataset_id)).source
    except ValueError as error:
        raise errors.InvalidRequest(field, dataset_id, str(error)) from error
    if source.type == "rows":
        registered: list[dict[str, Any]] = source.rows
        return registered
    try:
        page = await datasetio.iterrows(dataset_id=dataset_id, start_index=0, limit=-1)
    except Exception as error:  # pandas', requests', zipfile's ...: whatever a reader of some format raises
        hint = f"Llama Stack cannot read it from {source.uri}: {type(error).__name__}: {error}"
        raise errors.InvalidRequest(field, dataset_id, hint) from error
    rows: list[dict[str, Any]] = page.data
    return rows


def inline_spec(module: str, config_class: str, pip_packages: list[str], validator: str) -> ProviderSpec:
    """The inline provider's registration."""
    return InlineProviderSpec(
        api=Api.post_training,
        provider_type="inline::trl",
        module=module,
        config_class=config_class,
        pip_packages=pip_packages,
        api_dependencies=[Api.datasetio, Api.datasets],
        provider_data_validator=validator,
        description="Supervised fine-tuning and DPO with TRL, on one device beside Llama Stack",
    )


def remote_spec(module: str, config_class: str, pip_packages: list[str], validator: str) -> ProviderSpec:
    """The remote provider's registration."""
    return RemoteProviderSpec(
        api=Api.post_training,
        provider_type="remote::trl_remote",
        adapter_type="trl_remote",
        module=module,
        config_class=config_class,
        pip_packages=pip_packages,
        api_dependencies=[Api.datasetio, Api.datasets],
        provider_data_validator=validator,
        description="Supervised fine-tuning and DPO with TRL, by a training service of its own",
    )
