"""What the service asks of every pool of machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from llama_stack_provider_trl.errors import TrlError


class PoolUnavailable(TrlError):
    """Raised when a pool does not answer. The request is sent again later."""


class PoolRefusal(TrlError):
    """Raised when a pool does not give what was requested. The allocation ends; another one is requested later."""


@dataclass(frozen=True)
class AgentStart:
    """How an agent is started on a node of a pool."""

    service_url: str
    """Address at which the nodes reach the service."""
    token_file: str
    """File on the nodes with a token of the role node; only its owner may read it."""
    command: str = "trl-remote"
    """`trl-remote` of an installation on the nodes."""
    data_dir: str = "~/.llama/trl-pool"
    """Directory on the nodes, on a path that no other user of theirs can write to. Each agent has one of its own in it,
    which is removed with the order."""
    labels: Mapping[str, str] = field(default_factory=dict)


class PoolOrder(NamedTuple):
    """Machines that a pool is to give, or to take back."""

    request_id: str
    names: Sequence[str]
    """Names under which their agents join the service; as many as machines."""
    handle: str
    """The answer of `Pool.choose`."""


class Given(StrEnum):
    """What a pool has of an order."""

    nothing = "nothing"
    """It has never had it, or nothing of it is left."""
    pending = "pending"
    """It has accepted it, and has not given a machine yet, or no longer has one that runs an agent."""
    some = "some"
    """An agent was started on some of its machines, which wait for the others."""
    all = "all"
    """An agent was started on every machine."""


class Seen(NamedTuple):
    """An observation of an order."""

    given: Given
    message: str = ""
    """The reason for which machines are missing, or for which nothing is left."""


class Pool(Protocol):
    """Machines that another system owns. Every method may take seconds; `request`, `release` and `observe` are repeated
    after a crash, with the same order. Raises PoolUnavailable, PoolRefusal."""

    def choose(self, request_id: str, nodes: int, taken: Sequence[str]) -> str:
        """What the pool will find an order by, before anything is requested. It is stored first.

        Args:
            taken: answers for the orders that have not ended.
        """

    def request(self, order: PoolOrder) -> None:
        """Ask for machines, and have an agent started on each. An order that the pool has is not given twice."""

    def observe(self, order: PoolOrder) -> Seen:
        """What the pool has of an order."""

    def release(self, order: PoolOrder) -> None:
        """End the agents, and give the machines back. Nothing happens where nothing is left."""
