"""What the servers want of an external API: Llama Stack from 0.2.23 on, and its successor OGX. Beside `compat`, for the
differences that only an external API sees.

    routes         up to 0.6 from `webmethod` marks on the protocol class, since 0.7 from a FastAPI router
    datasets       up to 0.7 Llama Stack's own, in OGX none
    provider data  X-LlamaStack-Provider-Data, in OGX X-OGX-Provider-Data
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .compat import Api

__all__ = ["DATASET_LEVELS", "NAME", "OWN_DATASETS", "STACK_DATASETS", "request_context", "webmethod"]

NAME = "trl_post_training"
"""Of the API. `post_training` would be ignored in favour of Llama Stack's own one in 0.5 and 0.6."""

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
"""Whether we serve datasets: 0.7 refuses to register any for post-training, and OGX has no datasets at all."""
STACK_DATASETS = hasattr(Api, "datasets")
"""Whether the server has some."""
DATASET_LEVELS = ("v1",) if STACK_DATASETS else ("v1", "v1beta")
"""Where ours are served: 0.7 has its own under /v1beta."""

try:
    from ogx.core import request_headers as _ogx
except ImportError:
    _ogx = None


def request_context(headers: Mapping[str, str], scope: Any) -> AbstractContextManager[None]:
    """Has OGX take Llama Stack's header too: a script that sends it need not know what it talks to."""
    theirs, ours = "X-OGX-Provider-Data", headers.get("X-LlamaStack-Provider-Data")
    if _ogx is None or ours is None or theirs in headers:
        return nullcontext()
    return _ogx.request_provider_data_context({theirs: ours}, _ogx.user_from_scope(scope))
