"""The memory that a job needs, as a preflight estimates and reports it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device at the peak; the parts add up to `total`."""

    weights: int
    """Base model and adapters; under sharding this rank's part and the gathered blocks."""
    gradients: int
    optimizer: int
    """With periodic averaging, the last common weights and the momentum of the averages, too."""
    activations: int
    """Tensors that forward saves for backward, and temporaries of both."""
    logits: int
    """The output head: tiles of logits and their gradients; TRL never computes all logits at once."""
    reference: int
    """The reference of DPO or GRPO, where it is a model of its own; under sharding as `weights`. GRPO's reward models,
    which each rank holds."""
    overhead: int
    """Context, workspaces and slack of the allocator. On a CPU: the libraries as imported, too."""
    checkpoint_copy: int = 0
    """CPU: the copy of trained weights and optimizer that step checkpoints are written from. It stays allocated after
    the first one, and every job that runs for half an hour, or is paused, saves one."""
    loading: int = 0
    """CPU: the memory of loading the model beyond the sum of all of the above; 0 where it is less."""
    vllm: int = 0
    """GRPO: vLLM beside training. On a CPU its process, weights and cache, and the memory in which it gets new weights;
    on a GPU what it keeps while it sleeps."""
    host: int = field(default=0, metadata={"beside": True})
    """CPU memory of a rank that trains on another device, in no total: the copy for checkpoints, offloaded activations,
    offloaded parts."""
    host_offloaded: int = field(default=0, metadata={"beside": True})
    """Of `host`: offloaded activations and parts."""
    host_loading: int = field(default=0, metadata={"beside": True})
    """CPU memory of such a rank while it loads the model: copies of weights that are not mapped."""
    page_cache: int = field(default=0, metadata={"beside": True})
    """The files of weights in a machine's page cache, in no total: its ranks read the same pages, which the kernel can
    free."""
    machine: int = field(default=0, metadata={"beside": True})
    """CPU memory of a machine: of all its ranks, while they load or while they train, whichever is more."""

    @property
    def parts(self) -> dict[str, int]:
        """Memory on the device, by name."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def shown(self) -> dict[str, int]:
        """As a preflight reports it: each field under its name and `_bytes`."""
        return {f"{name}_bytes": value for name, value in asdict(self).items()}


PARTS = tuple(part.name for part in fields(MemoryEstimate) if not part.metadata.get("beside"))
"""Fields of an estimate that are on the device and add up to its total."""
