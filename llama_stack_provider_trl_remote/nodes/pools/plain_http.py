"""What calls of other systems' HTTP APIs have in common."""

from __future__ import annotations

import urllib.request
from email.message import Message
from typing import IO


class RefusedRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would take the token to another host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


def why_unreachable(error: Exception) -> str:
    """The shortest reason that an error of urllib has, such as `Connection refused`."""
    reason = getattr(error, "reason", None) or error
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
