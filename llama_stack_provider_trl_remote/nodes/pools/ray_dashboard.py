"""Sends calls of Ray's Jobs REST API to the dashboard of a cluster."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.system.texts import decoded

from .base import PoolUnavailable
from .plain_http import RefusedRedirects, why_unreachable
from .ray_jobs import RayAnswer, Send

_TIMEOUT = 30.0
_MOST_BYTES = 4 << 20


def sender(address: str, token_file: Path | None) -> Send:
    """Sends to the dashboard at an address; see `Send`.

    Args:
        token_file: with the token of the cluster (RAY_AUTH_MODE=token); read for each call.
    """
    opener = urllib.request.build_opener(RefusedRedirects())

    def send(method: str, path: str, body: Mapping[str, Any] | None) -> RayAnswer:
        headers = {"Content-Type": "application/json"}
        if token_file is not None:
            try:
                headers["Authorization"] = f"Bearer {decoded(token_file.read_bytes()).strip()}"
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or error
                raise PoolUnavailable(f"auth_token_file {token_file} cannot be read: {why}") from error
        data = None if body is None and method == "GET" else json.dumps(body or {}).encode()
        try:
            request = urllib.request.Request(f"{address}{path}", data, headers, method=method)
            with opener.open(request, timeout=_TIMEOUT) as answer:
                return RayAnswer(answer.status, answer.read(_MOST_BYTES).decode(errors="replace"))
        except urllib.error.HTTPError as error:
            with error:
                return RayAnswer(error.code, error.read(_MOST_BYTES).decode(errors="replace"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise PoolUnavailable(f"Ray at {address} cannot be reached ({why_unreachable(error)})") from error

    return send
