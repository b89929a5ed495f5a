"""Makes a model that the service answers with known to a running Llama Stack or OGX, and sees it answer there.

Llama Stack reaches the service by an inference provider of its own, `remote::vllm`, at `/openai/v1` of the service.
Releases 0.2 to 0.6 take a registration (`POST /v1/models`). Since 0.7, and in OGX, a model is known when the provider
lists it at its next refresh; all of them route a chat with `PROVIDER/MODEL` to that provider before.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from aiohttp import ClientError, ClientSession, ClientTimeout

from llama_stack_provider_trl.errors import TrlError

from .client import ServiceClient, json_of

DEFAULT_URL = "http://127.0.0.1:8321"
_SERVED = "/openai/v1"
_MOST_ANSWER = 16 << 20
"""Bytes of an answer."""
_SECONDS, _CHAT_SECONDS = 60.0, 900.0
"""For a call, and for the chat, before which the model is loaded."""
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class StackRefusal(TrlError, RuntimeError):
    """Raised when Llama Stack cannot be reached, or answers with an error."""

    def __init__(self, url: str, found: str, status: int = 0) -> None:
        self.status = status
        super().__init__(f"Llama Stack at {url} {found}")


class Registered(NamedTuple):
    """A model that answers in Llama Stack."""

    model: str
    """Its name there."""
    is_listed: bool
    """Whether its list of models has it. Otherwise it is there after the next refresh of the provider."""


class LlamaStack:
    """Calls a running Llama Stack or OGX.

    Args:
        token: sent as a bearer token.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def register(self, model: str, service: ServiceClient, provider: str | None = None) -> Registered:
        """Register a model of the service, unless it is known already, and let it answer with one token. Raises
        StackRefusal: there is no such provider, or the model does not answer; ServiceRefusal, ServiceUnreachable: the
        service does not have the model.

        Args:
            model: as the service lists it, such as `ft:JOB`.
            provider: the inference provider that calls the service; None: it is found by its address.
        """
        listed = await service.get("/openai/v1/models")
        if model not in (row["id"] for row in listed["data"]):
            known = ", ".join(row["id"] for row in listed["data"][:10]) or "none"
            raise StackRefusal(self.url, f"is not told of {model}, which the service does not list (it has {known})")
        provider = provider or await self.provider_of(service.url)
        if (name := await self._listed(provider, model)) is not None:
            await self._chat(name)
            return Registered(name, is_listed=True)
        name = await self._registered(provider, model)
        try:
            await self._chat(name or f"{provider}/{model}")
        except TrlError:
            if name is not None:  # nothing is left of what does not answer
                await self._call("DELETE", f"/v1/models/{quote(name)}")
            raise
        return Registered(name or f"{provider}/{model}", is_listed=name is not None)

    async def provider_of(self, service_url: str) -> str:
        """The inference provider that calls the service. Raises StackRefusal: there is none."""
        providers = [row for row in (await self._call("GET", "/v1/providers"))["data"] if row["api"] == "inference"]
        for row in providers:
            config = row.get("config") or {}
            if any(_is_served_by(str(config.get(key) or ""), service_url) for key in ("base_url", "url")):
                return str(row["provider_id"])
        have = ", ".join(f"{row['provider_id']} ({row['provider_type']})" for row in providers) or "none"
        raise StackRefusal(
            self.url,
            f"has no inference provider that calls {service_url}{_SERVED} (it has {have}): add `remote::vllm` with "
            "this `base_url` to its run file and start it again, or name the provider with --provider",
        )

    async def _listed(self, provider: str, model: str) -> str | None:
        """The model's name in the list of models."""
        for row in (await self._call("GET", "/v1/models"))["data"]:
            name = str(row.get("identifier") or row.get("id"))
            if name == f"{provider}/{model}" or (
                row.get("provider_id") == provider and row.get("provider_resource_id") == model
            ):
                return name
        return None

    async def _registered(self, provider: str, model: str) -> str | None:
        """The name under which a model was registered; None: this release takes no registration."""
        body = {"model_id": model, "provider_id": provider, "provider_model_id": model, "model_type": "llm"}
        try:
            return str((await self._call("POST", "/v1/models", body))["identifier"])
        except StackRefusal as error:
            if error.status in (404, 405):
                return None
            # Its refresh of the provider's models may have listed it since.
            if (name := await self._listed(provider, model)) is not None:
                return name
            raise

    async def _chat(self, name: str) -> None:
        body = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        try:
            await self._call("POST", "/v1/chat/completions", body, _CHAT_SECONDS)
        except StackRefusal as error:
            found = f"knows {name}, which does not answer a chat: {error}"
            raise StackRefusal(self.url, found, error.status) from error

    async def _call(self, method: str, path: str, body: Any = None, seconds: float = _SECONDS) -> Any:
        timeout = ClientTimeout(total=seconds, connect=5.0)
        try:
            async with (
                ClientSession(headers=self._headers, timeout=timeout, trust_env=True) as session,
                session.request(method, self.url + path, json=body, allow_redirects=False) as response,
            ):
                text = bytearray()
                async for part in response.content.iter_chunked(1 << 16):
                    text += part
                    if len(text) > _MOST_ANSWER:
                        raise StackRefusal(self.url, f"answers {path} with more than {_MOST_ANSWER >> 20} MiB")
                if response.status < 300:
                    return json_of(bytes(text), _MOST_ANSWER) if text else None
                raise StackRefusal(self.url, f"answered {response.status}: {_sentence(bytes(text))}", response.status)
        except OverflowError as error:
            raise StackRefusal(self.url, f"answers {path} with {error}") from error
        except ValueError as error:
            raise StackRefusal(self.url, f"answers {path} with no JSON: is it Llama Stack's address?") from error
        except TimeoutError as error:
            raise StackRefusal(self.url, f"did not answer {path} within {seconds:.0f} s") from error
        except (ClientError, OSError) as error:
            raise StackRefusal(self.url, f"cannot be reached ({error}): start it, or name its address") from error


def _is_served_by(url: str, service_url: str) -> bool:
    """Whether an address of a provider is that of the service's models."""
    try:
        given, service = urlsplit(url.rstrip("/")), urlsplit(service_url + _SERVED)
        ports = [parts.port or {"https": 443}.get(parts.scheme, 80) for parts in (given, service)]
    except ValueError:
        return False
    hosts = {given.hostname, service.hostname}
    return ports[0] == ports[1] and given.path == service.path and (len(hosts) == 1 or hosts <= _LOOPBACK)


def _sentence(body: bytes) -> str:
    """What an answer says is wrong."""
    text = body.decode(errors="replace")
    try:
        found = json_of(body, _MOST_ANSWER)
        detail = found.get("detail") or found["error"]
        return str(detail.get("message", detail) if isinstance(detail, dict) else detail)[:2000]
    except (ValueError, OverflowError, LookupError, AttributeError):
        return text[:200] or "no reason given"
