"""The only importer of Llama Stack, with all differences between its releases: 0.2.14 to 0.7, and OGX. Differences that
only an external API has are in `external`.

Differences are detected (where a name is imported from, what a signature takes), not derived from version numbers:

    imports             llama_stack up to 0.3, llama_stack_api from 0.4 on
    remote specs        nested in an AdapterSpec up to 0.2.22
    calls of providers  by keywords up to 0.4, with one request object from 0.5 on (`answers_requests`)
    answers             0.5 and later check them against their own models (`answers_requests`)
    errors              what the server makes of an exception (`to_http`)
"""

import functools
import inspect
import sys
from collections.abc import Callable, Coroutine, Mapping
from importlib import metadata
from typing import Any, get_type_hints

from pydantic import BaseModel
from starlette.responses import JSONResponse

from .. import errors

try:
    from llama_stack.providers.datatypes import Api, InlineProviderSpec, ProviderSpec, RemoteProviderSpec
except ImportError:
    try:
        from llama_stack_api import Api, InlineProviderSpec, ProviderSpec, RemoteProviderSpec
    except ImportError:
        from ogx_api import Api, InlineProviderSpec, ProviderSpec, RemoteProviderSpec

try:
    from llama_stack.core.request_headers import NeedsRequestProviderData
except ImportError:
    try:
        from llama_stack.distribution.request_headers import NeedsRequestProviderData  # up to 0.2.16
    except ImportError:
        from ogx.core.request_headers import NeedsRequestProviderData

try:
    from llama_stack.providers.datatypes import AdapterSpec  # up to 0.2.22
except ImportError:
    AdapterSpec = None

try:
    from llama_stack.apis.common.errors import ConflictError, ResourceNotFoundError
except ImportError:
    try:
        from llama_stack_api.common.errors import ConflictError, ResourceNotFoundError
    except ImportError:
        try:
            from ogx_api.common.errors import ConflictError, ResourceNotFoundError
        except ImportError:
            # Up to 0.2.17 neither exists: this is the nearest error that is shown with its text, as a 400.
            ConflictError = ResourceNotFoundError = ValueError

__all__ = [
    "Api",
    "NeedsRequestProviderData",
    "ProviderSpec",
    "answers_requests",
    "inline_spec",
    "read_rows",
    "remote_spec",
    "request_user",
    "to_http",
]


_headers = sys.modules[NeedsRequestProviderData.__module__]
_DATASETS = tuple(getattr(Api, name) for name in ("datasetio", "datasets") if hasattr(Api, name))
"""The source of rows; OGX has neither."""


def _takes_status_codes() -> bool:
    """Whether Llama Stack answers with an exception's own `status_code`; 0.2 answers 500 without its text."""
    try:
        return not metadata.version("llama_stack").startswith("0.2.")
    except metadata.PackageNotFoundError:
        return True


class _JobNotFound(ResourceNotFoundError):
    """Llama Stack answers 404; up to 0.2.17, 400."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)  # the base classes' own constructors differ between releases


class _JobConflict(ConflictError):
    """Llama Stack answers 409; up to 0.2.17, 400."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)


class _Unavailable(ConnectionError, TimeoutError):
    """Llama Stack answers 502; up to 0.2.17, which does not know a ConnectionError, 504. Both show the text."""


def to_http(error: errors.TrlError) -> Exception:
    """The exception that Llama Stack turns into the right status code with our message.

    `InvalidRequest` is a ValueError and becomes 400 unchanged; a class that Llama Stack does not know would become a
    500 without its text. Only 0.3 and later use a `status_code` of the exception's own.
    """
    if isinstance(error, errors.JobNotFound):
        return _JobNotFound(str(error))
    if isinstance(error, errors.JobConflict):
        return _JobConflict(str(error))
    if isinstance(error, errors.ServiceUnreachable):
        return _Unavailable(str(error))
    if isinstance(error, errors.ServiceRefusal):
        # Others carry a status_code, which Llama Stack uses unchanged; these get that of the inline provider.
        kinds: dict[int, type[Exception]] = {400: ValueError, 404: _JobNotFound, 409: _JobConflict}
        if error.status in kinds:
            return kinds[error.status](str(error))
    if isinstance(error, errors.LimitReached | errors.StoreError | errors.ServiceRefusal) and not _takes_status_codes():
        return _Unavailable(str(error))
    return error


def answers_requests[Answer](
    method: Callable[..., Coroutine[Any, Any, Answer]],
) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Let a provider's method, written with keywords, be called with one request object too, as in 0.5 and later.

    Only the fields that the caller set are passed on, as plain values for our own models. The answer is returned
    unchanged: Llama Stack would validate it against its own model, which demands a validation loss where we have none.
    """
    known = inspect.signature(method).parameters

    @functools.wraps(method)
    async def call(self: Any, *args: Any, **fields: Any) -> Any:
        if not (len(args) == 1 and isinstance(args[0], BaseModel)):
            return await method(self, *args, **fields)
        given = args[0].model_dump(mode="json", exclude_unset=True)
        for name in given.keys() - known.keys():
            raise to_http(errors.InvalidRequest(name, given[name], "leave it out; this provider does not know it"))
        answer = await method(self, **given)
        return JSONResponse(answer.model_dump(mode="json")) if isinstance(answer, BaseModel) else answer

    return call


def request_user() -> str:
    """The user whom Llama Stack has authenticated for the current request; empty: none. Where it authenticates none,
    a client could put one into its header: as JSON, which has no such attribute."""
    find = getattr(_headers, "get_authenticated_user", lambda: None)
    try:
        principal = getattr(find(), "principal", "")
    except Exception:  # of Llama Stack, where the header is JSON and no object
        return ""
    return principal if isinstance(principal, str) else ""


async def read_rows(deps: Mapping[Any, Any], dataset_id: str) -> list[dict[str, Any]]:
    """All rows of a dataset that is registered with Llama Stack; `deps` is the provider's dependencies.

    Rows that were registered as rows are used unchanged: localfs would build a data frame of them, which costs the
    first call 0.4 s for pandas and turns whole numbers with gaps into fractions. Others are read in one call, since
    localfs rebuilds the whole data frame for each. Raises InvalidRequest: Llama Stack knows no such dataset, or cannot
    read it.
    """
    field = "training_config.data_config.dataset_id"
    if not _DATASETS:
        hint = "no dataset of this name is registered: POST /v1/datasets registers one"
        raise errors.InvalidRequest(field, dataset_id, hint)
    datasetio, datasets = (deps[api] for api in _DATASETS)
    try:
        source = (await _ask(datasets.get_dataset, dataset_id=dataset_id)).source
    except (ValueError, ResourceNotFoundError) as error:
        raise errors.InvalidRequest(field, dataset_id, str(error)) from error
    if source.type == "rows":
        registered: list[dict[str, Any]] = source.rows
        return registered
    try:
        page = await _ask(datasetio.iterrows, dataset_id=dataset_id, start_index=0, limit=-1)
    except Exception as error:  # each reader has errors of its own: pandas, requests, zipfile
        hint = f"Llama Stack cannot read it from {source.uri}: {type(error).__name__}: {error}"
        raise errors.InvalidRequest(field, dataset_id, hint) from error
    rows: list[dict[str, Any]] = page.data
    return rows


async def _ask(method: Callable[..., Coroutine[Any, Any, Any]], **fields: Any) -> Any:
    """Call Llama Stack: with keywords, or with one request object where its signature takes one (datasets from 0.4 on,
    datasetio from 0.5 on)."""
    if [*inspect.signature(method).parameters] != ["request"]:
        return await method(**fields)
    return await method(get_type_hints(method)["request"](**fields))


def inline_spec(
    module: str, config_class: str, pip_packages: list[str], validator: str, api: str = "post_training"
) -> ProviderSpec:
    """The inline provider's registration; `api` is another name where it serves an external API."""
    return InlineProviderSpec(
        api=Api(api),
        provider_type="inline::trl",
        module=module,
        config_class=config_class,
        pip_packages=pip_packages,
        api_dependencies=[*_DATASETS],
        provider_data_validator=validator,
        description="Supervised fine-tuning and DPO with TRL, on one device beside Llama Stack",
    )


def remote_spec(
    module: str, config_class: str, pip_packages: list[str], validator: str, api: str = "post_training"
) -> ProviderSpec:
    """The remote provider's registration; `api` is another name where it serves an external API."""
    adapter = {
        "adapter_type": "trl_remote",
        "module": module,
        "config_class": config_class,
        "pip_packages": pip_packages,
        "provider_data_validator": validator,
        "description": "Supervised fine-tuning and DPO with TRL, by a training service of its own",
    }
    # Flat since 0.2.23; before, the flat keys are ignored except for `config_class`.
    nested = {} if AdapterSpec is None else {"adapter": AdapterSpec(**adapter)}
    return RemoteProviderSpec(
        api=Api(api),
        provider_type="remote::trl_remote",
        api_dependencies=[*_DATASETS],
        **adapter,
        **nested,
    )
