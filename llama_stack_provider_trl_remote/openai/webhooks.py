"""Tells the configured addresses how jobs of this API have ended, as Standard Webhooks has it.

https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md

What is due is in the job store, written with the end of each job. A try is recorded before it is made, so a killed
service repeats it later, and never loses one: each receiver gets an event at least once. Each has a thread of its own,
and waits for no other one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from llama_stack_provider_trl import __version__, faults
from llama_stack_provider_trl.errors import StoreError
from llama_stack_provider_trl.jobs.store.monitoring.webhooks import Delivery
from llama_stack_provider_trl.jobs.store.store import Store

from ..nodes.identity import NodeError, read_token
from ..service.openai_settings import WEBHOOK_EVENTS, OpenAIWebhook, webhook_key
from ..service.settings import SettingsError
from .names import JOB
from .outgoing import Undelivered, WebhookAddress, post

log = logging.getLogger(__name__)
FIRST_WAIT, LONGEST_WAIT = 1.0, 3600.0
"""Seconds between the first two tries, twice as many after each, and at most."""
MOST_TRIES = 84
"""Of an event, the waits between which take 72 hours."""
_CHECK = 1.0
"""Seconds between two looks into the store."""
LONGEST_PAUSE = 60.0
"""Seconds from a try that a receiver has refused to that of its next event, at most."""
_MOST_ASKED = LONGEST_WAIT
"""Seconds of a Retry-After that are honoured, at most: a receiver cannot keep its events waiting for ever."""
_ERROR_WAIT = 30.0
"""Seconds after an error that is not the receiver's, such as one of the store."""
_END = 1.0
"""Seconds that the end of a service waits for a try."""


class Receiver(NamedTuple):
    """Who is told."""

    url: str
    target: WebhookAddress
    key: bytes


class Try(Enum):
    """What became of the next try for a receiver."""

    none_due = "none is due"
    delivered = "the receiver has accepted it"
    undelivered = "the receiver has not accepted it"


class WebhookSender:
    """The receivers of a service, each with a thread.

    Args:
        send: sends a body with headers; raises Undelivered.
    """

    def __init__(
        self,
        store: Store,
        receivers: Sequence[Receiver],
        clock: Callable[[], float] = time.time,
        send: Callable[[WebhookAddress, Mapping[str, str], bytes], None] = post,
    ) -> None:
        self._store, self._receivers, self._clock, self._send = store, receivers, clock, send
        self._stopping = threading.Event()
        self._troubled: set[str] = set()
        """Receivers whose last try has failed."""
        self._threads = [
            threading.Thread(target=self._serve, args=(receiver,), name="trl-webhook", daemon=True)
            for receiver in receivers
        ]

    def start(self) -> None:
        """Deliver from now on, in threads that end with the process."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Begin no more tries; one that is under way is repeated by the next service, unless it ends at once."""
        self._stopping.set()
        until = time.monotonic() + _END
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def deliver(self, receiver: Receiver) -> Try:
        """Make the next try for a receiver, if it is due. Raises StoreError."""
        now = self._clock()
        found = self._store.webhooks.next(receiver.url)
        # Further away than any wait: the clock was set back.
        if found is None or now < found.not_before <= now + LONGEST_WAIT:
            return Try.none_due
        begun = self._store.webhooks.begin(found, now + wait_after(found.tries + 1))
        if begun is None:  # another process changed it
            return Try.none_due
        faults.reach("webhook-begun")
        body = event_of(begun)
        try:
            self._send(receiver.target, signed_headers(receiver.key, event_id(begun.job_uuid), int(now), body), body)
        except Undelivered as error:
            self._failed(receiver, begun, str(error), min(error.retry_after, _MOST_ASKED))
            return Try.undelivered
        faults.reach("webhook-sent")
        self._store.webhooks.end(begun, "delivered")
        if receiver.url in self._troubled:
            self._troubled.discard(receiver.url)
            log.info("webhooks to %s are delivered again", receiver.target.place)
        return Try.delivered

    def _failed(self, receiver: Receiver, delivery: Delivery, why: str, asked: float) -> None:
        """Note a try that was not accepted.

        Args:
            asked: seconds for which the receiver wants no further one, of any event.
        """
        place, name = receiver.target.place, delivery.job_uuid
        if asked > 0:
            self._store.webhooks.rest(receiver.url, self._clock() + asked)
        if delivery.tries >= MOST_TRIES:
            self._store.webhooks.end(delivery, "given_up")
            log.error("webhook to %s of job %s is given up after %d tries: %s", place, name, delivery.tries, why)
        elif receiver.url not in self._troubled:  # not for each of a thousand events
            log.warning("webhook to %s of job %s is not delivered: %s; it is tried again", place, name, why)
        self._troubled.add(receiver.url)

    def _serve(self, receiver: Receiver) -> None:
        pause, refused = 0.0, 0
        while not self._stopping.wait(pause):
            try:
                made = self.deliver(receiver)
            except StoreError as error:
                log.warning("webhooks to %s wait for the job database: %s", receiver.target.place, error)
                pause = _ERROR_WAIT
            except Exception:  # else its thread would end, and nothing would be delivered until the next start
                log.exception("webhooks to %s are tried again in %g s", receiver.target.place, _ERROR_WAIT)
                pause = _ERROR_WAIT
            else:
                if made is not Try.none_due:
                    refused = refused + 1 if made is Try.undelivered else 0
                pause = _pause_after(made, refused)


def receivers_of(webhooks: Sequence[OpenAIWebhook]) -> list[Receiver]:
    """The receivers of the settings. Raises SettingsError: the file of a secret cannot be used."""
    found = []
    for number, webhook in enumerate(webhooks):
        if webhook.secret is not None:
            secret = webhook.secret.get_secret_value()
        else:
            try:
                secret = read_token(str(webhook.secret_file))
            except NodeError as error:
                raise SettingsError(f"openai.webhooks.{number}.secret_file: {error}") from error
        try:
            key = webhook_key(secret)
        except ValueError as error:
            raise SettingsError(f"openai.webhooks.{number}.secret_file: {error}") from error
        found.append(Receiver(webhook.url, WebhookAddress.of(webhook.url, webhook.networks), key))
    return found


def _pause_after(made: Try, refused: int) -> float:
    """Seconds from a try to the next one for the same receiver, of whichever event: a receiver that is down, with a
    thousand events that are due, would be called without a pause.

    Args:
        refused: tries in a row, this one included, that the receiver has not accepted.
    """
    if made is Try.none_due:
        return _CHECK
    return min(wait_after(refused), LONGEST_PAUSE) if refused else 0.0


def wait_after(tries: int) -> float:
    """Seconds from a try to the next one."""
    return float(min(FIRST_WAIT * 2 ** min(tries - 1, 30), LONGEST_WAIT))


def event_id(job_uuid: str) -> str:
    """The event of a job, of which there is one: a job ends once."""
    return f"evt_{job_uuid.removeprefix(JOB)}"


def event_of(delivery: Delivery) -> bytes:
    """The event as OpenAI writes it."""
    event = {
        "id": event_id(delivery.job_uuid),
        "object": "event",
        "created_at": int(delivery.ended_at),
        "type": WEBHOOK_EVENTS[delivery.state],
        "data": {"id": delivery.job_uuid},
    }
    return json.dumps(event, separators=(",", ":")).encode()


def signed_headers(key: bytes, name: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The headers of a try.

    Args:
        name: of the event, the same for each try.
        timestamp: of the try, in seconds since the epoch.
    """
    digest = hmac.digest(key, f"{name}.{timestamp}.".encode() + body, hashlib.sha256)
    return {
        "Content-Type": "application/json",
        "User-Agent": f"llama-stack-provider-trl/{__version__}",
        "webhook-id": name,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }
