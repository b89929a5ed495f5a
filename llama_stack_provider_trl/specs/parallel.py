"""Whether training on several nodes helps: an estimate from what they exchange, and from the link between them. Pure.

The exchange of a step, in bytes that each node sends and receives: R ranks on N nodes reduce S bytes of gradients in a
ring, 2 (R-1)/R S over each link between nodes. Ranks that shard the model also gather its weights, (R-1)/R S at a time.
Gloo reduces a shard as it reduces the whole (measured with a model of 100M parameters: benchmarks/RESULTS.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .job import ShardingStrategy

LEAST_SPEEDUP = 1.1
"""Less than this does not pay for a second machine, and is within the error of the estimate."""
_OVERLAP = 1 / 3
"""Share of a micro step in which DDP reduces gradients while others are computed: half of its backward pass, since they
come in buckets of 25 MB, of which the last one is complete at the end."""


@dataclass(frozen=True)
class Exchange:
    """What the nodes of a job exchange in an optimizer step."""

    nodes: int
    trainable: int
    """Parameters that get a gradient."""
    total: int
    """Parameters of the model, frozen ones too."""
    reference: int = 0
    """Parameters of a sharded reference, which are gathered for its forward pass."""
    ranks_per_node: int = 1
    strategy: ShardingStrategy = "NO_SHARD"
    micro_steps: int = 1
    """Of an optimizer step."""
    keeps_whole_gradients: bool = False
    """Ranks that shard the model reduce gradients in the last micro step only (`gradient_sync`)."""
    gradient_bytes: int = 4
    """Of one element as it is sent."""
    weight_bytes: int = 4
    interval: int = 1
    """Optimizer steps between two exchanges across nodes (periodic averaging, of weights in fp32)."""
    on_cpu: bool = True
    """The ranks exchange with gloo, and those of one machine share its cores."""
    machines: int | None = None
    """Physical machines that the nodes are on; None: one each."""

    @property
    def bytes_per_node(self) -> float:
        """What each node sends in an optimizer step, and receives at the same time."""
        if self.interval > 1:
            copies = self.nodes * (self.ranks_per_node if self.strategy == "NO_SHARD" else 1)
            return 2 * (copies - 1) / copies * self.trainable * 4 / self.interval
        gradients, weights = self.trainable * self.gradient_bytes, self.total * self.weight_bytes
        ranks = self.nodes * self.ranks_per_node
        if self.strategy == "NO_SHARD":
            return 2 * (ranks - 1) / ranks * gradients
        if self.strategy == "HYBRID_SHARD":  # parts stay within a node, copies of them are reduced across nodes
            return 2 * (self.nodes - 1) / self.nodes * gradients * self._reductions
        gathers = self.micro_steps * (1 if self.strategy == "SHARD_GRAD_OP" else 2)
        reduced = (2 if self.on_cpu else 1) * gradients * self._reductions
        beside = self.micro_steps * self.reference * self.weight_bytes
        return (ranks - 1) / ranks * (gathers * weights + beside + reduced)

    @property
    def _reductions(self) -> int:
        return 1 if self.keeps_whole_gradients else self.micro_steps

    @property
    def slowdown(self) -> float:
        """How much longer a node computes, since others are on its machine."""
        return self.nodes / self.machines if self.on_cpu and self.machines else 1.0

    @property
    def _overlap(self) -> float:
        """Share of the computation during which bytes are exchanged. FSDP2 on gloo waits for each exchange."""
        return _OVERLAP / self.micro_steps if self.strategy == "NO_SHARD" and self.interval == 1 else 0.0

    def seconds(self, mbit_per_s: float) -> float:
        """Of the exchange alone."""
        return self.bytes_per_node * 8 / (mbit_per_s * 1e6)

    def step_seconds(self, alone: float, mbit_per_s: float) -> float:
        """Of a step on all nodes.

        Args:
            alone: seconds of a step on one node, with as many rows as each node has.
        """
        computing = alone * self.slowdown
        return computing + max(0.0, self.seconds(mbit_per_s) - self._overlap * computing)

    def alone(self, step_seconds: float, mbit_per_s: float) -> float:
        """The opposite: seconds of a step on one node, by those of a step on all. 0: the exchange takes all of it."""
        exchange = self.seconds(mbit_per_s)
        computing = step_seconds
        if exchange > self._overlap * step_seconds:
            computing = max(0.0, step_seconds - exchange) / (1 - self._overlap)
        return computing / self.slowdown

    def speedup(self, alone: float, step_seconds: float) -> float:
        """Rows per second of all nodes over those of one."""
        return self.nodes * alone / step_seconds if step_seconds else 0.0


class Advice(NamedTuple):
    """Whether training on several nodes helps."""

    helps: bool
    speedup: float
    step_seconds: float
    reason: str
    """As a sentence."""


def advise(exchange: Exchange, alone: float, mbit_per_s: float) -> Advice:
    """Predict a step on all nodes.

    Args:
        alone: seconds of a step on one node, with as many rows as each node has.
        mbit_per_s: between two nodes, each way.
    """
    step = exchange.step_seconds(alone, mbit_per_s)
    speedup = exchange.speedup(alone, step)
    helps = speedup >= LEAST_SPEEDUP
    verdict = f"parallel will {'help' if helps else 'not help'}"
    shown = f"{exchange.nodes} nodes train {speedup:.2f} times as many rows per second as one"
    return Advice(helps, speedup, step, f"{verdict}: {shown}; {_cause(exchange, alone, mbit_per_s)}")


def verdict_after(exchange: Exchange, step_seconds: float, mbit_per_s: float) -> Advice:
    """The same of a job that trains on all nodes, by its measured step."""
    if exchange.interval > 1:  # the measured steps exchange nothing
        found = advise(exchange, step_seconds / exchange.slowdown, mbit_per_s)
        return found._replace(reason=found.reason.replace("will help", "helps").replace("will not", "does not"))
    alone = exchange.alone(step_seconds, mbit_per_s)
    speedup = exchange.speedup(alone, step_seconds)
    helps = speedup >= LEAST_SPEEDUP
    verdict = f"parallel {'helps' if helps else 'does not help'}"
    shown = f"{exchange.nodes} nodes train about {speedup:.2f} times as many rows per second as one"
    took = f"a step takes {step_seconds:.2f} s"
    return Advice(helps, speedup, step_seconds, f"{verdict}: {shown}; {took}; {_exchange(exchange, mbit_per_s)}")


def _cause(exchange: Exchange, alone: float, mbit_per_s: float) -> str:
    if exchange.slowdown > 1 and exchange.machines:
        what = "one machine" if exchange.machines == 1 else f"{exchange.machines} machines"
        return f"they are on {what}, and share the same cores"
    return f"a step takes {alone:.2f} s on one; {_exchange(exchange, mbit_per_s)}"


def _exchange(exchange: Exchange, mbit_per_s: float) -> str:
    return (
        f"each node exchanges {exchange.bytes_per_node / 1e6:.0f} MB in it, which takes "
        f"{exchange.seconds(mbit_per_s):.2f} s at {mbit_per_s:.0f} Mbit/s"
    )
