"""The interface of an external API: Llama Stack from 0.2.23 on, and its successor OGX. Adds to `compat` the differences
that only an external API has.

    routes         up to 0.6 from `webmethod` marks on the protocol class, since 0.7 from a FastAPI router
    datasets       up to 0.7 Llama Stack's own, in OGX none
    provider data  X-LlamaStack-Provider-Data, in OGX X-OGX-Provider-Data
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..errors import InvalidRequest
from .compat import Api

__all__ = ["DATASET_LEVELS", "NAME", "OWN_DATASETS", "STACK_DATASETS", "request_context", "webmethod"]

NAME = "trl_post_training"
"""Name of the API. `post_training` would be ignored in favour of Llama Stack's own one in 0.5 and 0.6."""

try:
    from llama_stack import schema_utils as _marks  # up to 0.3
except ImportError:
    try:
        import llama_stack_api as _marks  # 0.4 to 0.7
    except ImportError:
        import ogx_api as _marks

webmethod: Any = getattr(_marks, "webmethod", None)
"""Marks a method of the protocol class with a route; None: routes come from `create_router`."""
OWN_DATASETS = webmethod is None
"""Whether our API includes datasets: 0.7 refuses to register any for post-training, and OGX has no datasets at all."""
STACK_DATASETS = hasattr(Api, "datasets")
"""Whether the server has datasets."""
DATASET_LEVELS = ("v1",) if STACK_DATASETS else ("v1", "v1beta")
"""Path of our datasets: 0.7 has its own under /v1beta."""

try:
    from ogx.core import request_headers as _ogx
except ImportError:
    _ogx = None


def request_context(headers: Mapping[str, str], scope: Any) -> AbstractContextManager[None]:
    """Make OGX accept Llama Stack's header too, where its own is not sent: a script works with both servers. Raises
    InvalidRequest: the header is not a JSON object; the server would continue without it."""
    known = ("X-LlamaStack-Provider-Data",) if _ogx is None else ("X-OGX-Provider-Data", "X-LlamaStack-Provider-Data")
    name = next((name for name in known if headers.get(name)), None)
    if name is None:
        return nullcontext()
    if not _is_object(headers[name]):
        raise InvalidRequest(name, headers[name], 'expected a JSON object, such as {"trl": {"seed": 7}}')
    if _ogx is None or name == known[0]:
        return nullcontext()
    return _ogx.request_provider_data_context({known[0]: headers[name]}, _ogx.user_from_scope(scope))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
