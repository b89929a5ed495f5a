"""`trl-remote register`: a result answers in a running Llama Stack or OGX."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.system.console import show_json, show_lines

from ..address import checked_token, checked_url
from ..client import ServiceClient
from ..llama_stack import DEFAULT_URL, LlamaStack
from .chat import model_name
from .promotion import check_promotion

URL, TOKEN = "LLAMA_STACK_CLIENT_BASE_URL", "LLAMA_STACK_CLIENT_API_KEY"
"""Variables of Llama Stack's own client."""


def stack_at(given: str | None) -> LlamaStack:
    """The Llama Stack of an option or, where it is empty, of the environment. Raises InvalidRequest: it is no address,
    or the token cannot be sent."""
    try:
        url = checked_url(given or os.environ.get(URL) or DEFAULT_URL, "Llama Stack", DEFAULT_URL, TOKEN)
        return LlamaStack(url, checked_token(os.environ.get(TOKEN)))
    except ValueError as error:
        raise InvalidRequest("--stack", "...", str(error)) from error


async def register(client: ServiceClient, options: Namespace) -> int:
    stack, model = stack_at(options.stack), model_name(options.model)
    if options.promote_if:
        await check_promotion(client, model, options.promote_if)
    await show_registered(client, stack, model, options.provider, show_json if options.json else None)
    return 0


async def show_registered(
    client: ServiceClient,
    stack: LlamaStack,
    model: str,
    provider: str | None,
    show: Callable[[dict[str, Any]], None] | None,
) -> None:
    """Register a model of the service, and print its name in Llama Stack. `show` prints it as an object; None: a
    sentence is printed."""
    found = await stack.register(model, client, provider)
    if show is not None:
        show({"model": found.model, "url": stack.url, "listed": found.is_listed})
        return
    later = "" if found.is_listed else "; its list of models shows it after the next refresh of the provider"
    show_lines(f"{found.model} answers at {stack.url}{later}")
