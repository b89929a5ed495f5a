"""Proposes the nearest job that fits, where the requested one does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...specs.job import JobSpec, LoraSpec, ShardingSpec
from ...specs.memory import MemoryEstimate
from ...specs.methods import METHODS
from ..model.fsdp import keeps_whole_gradients
from .estimate import estimate
from .trace import Batch, attention_modules

MARGIN = 1.1
"""A job fits where its estimate, times this, is no more than what the device has."""


_SHORTEST = 64
"""Tokens: sequences are not proposed to be cut to fewer."""


@dataclass(frozen=True)
class Capacity:
    """What the machines of a job have for it."""

    device: int
    """Bytes that each rank may take of its device."""
    machine: int | None = None
    """Bytes of CPU memory of each machine; None: unknown, and not compared."""
    max_ranks: int | None = None
    """The most ranks that the job may request; None: no more than it has."""
    baseline: int = 0
    """On a CPU: bytes of the process before it does anything, which every estimate includes."""

    def holds(self, memory: MemoryEstimate) -> bool:
        """Whether each device has enough memory, and each machine enough CPU memory."""
        return self.device_holds(memory) and self.machine_holds(memory)

    def device_holds(self, memory: MemoryEstimate) -> bool:
        return memory.total * MARGIN <= self.device

    def machine_holds(self, memory: MemoryEstimate) -> bool:
        return self.machine is None or memory.machine * MARGIN <= self.machine


@dataclass(frozen=True)
class Proposal:
    """A job that fits, and the changes that lead to it, by field of the request."""

    spec: JobSpec
    changes: dict[str, Any]
    memory: MemoryEstimate


def nearest(spec: JobSpec, batch: Batch, device: str, capacity: Capacity) -> Proposal | None:
    """The first job that fits, with changes in the order of their cost; None where no change is sufficient.

    First changes without effect on the result (gradients in parts, recomputing activations, smaller micro batches with
    the same global batch, more ranks, parts in CPU memory), then adapters instead of all weights, then shorter
    sequences.
    """
    shards = spec.lora is None or spec.lora.method != "vera"  # whose shared matrices cannot be sharded
    most_ranks = capacity.max_ranks - spec.devices_of_vllm if capacity.max_ranks and shards else spec.ranks

    def proposed(candidate: _Changes) -> Proposal:
        changed = spec.changed(**{name: value for change in candidate for name, value in change.fields})
        tokens = min(batch.tokens, changed.data.max_seq_length)
        sequences = max(batch.sequences * changed.data.batch_size // spec.data.batch_size, spec.sequences_per_row)
        changes = {name: value for change in candidate for name, value in change.request}
        reduced = batch.reduced(sequences, tokens)
        return Proposal(changed, changes, estimate(changed, reduced, device, capacity.baseline))

    families = (_families(spec, most_ranks, may_offload) for may_offload in (True, False))
    for candidates, without_offloading in zip(*families, strict=True):
        if candidates and not capacity.machine_holds(proposed(candidates[-1]).memory):
            candidates = without_offloading
        # The last one saves the most: where it does not fit, none of its family fits.
        if candidates and capacity.holds((last := proposed(candidates[-1])).memory):
            others = (proposed(candidate) for candidate in candidates[:-1])
            return next((one for one in others if capacity.holds(one.memory)), last)
    return None


@dataclass(frozen=True)
class _Change:
    """One change, of the JobSpec and of the request that leads to it."""

    fields: tuple[tuple[str, Any], ...]
    request: tuple[tuple[str, Any], ...]


_Changes = tuple[_Change, ...]


def _families(spec: JobSpec, max_ranks: int, may_offload: bool) -> Iterator[list[_Changes]]:
    """Lists of combined changes; within each list, every entry saves more than the previous one.

    As many lists whether or not `may_offload`; some are empty.
    """
    same = list(_same_result(spec, max_ranks, may_offload))
    yield same
    adapters: _Changes = ()
    if spec.lora is None and spec.train.qat is None:  # QAT trains every weight
        adapters = (_with_lora(spec),)
        yield [adapters, *((*adapters, *more) for more in same)]
    # A model that answers prompts, or gives rewards, trains with no base in 4 bits.
    may_quantize = spec.train.qat is None and spec.method.answer_tokens is None and not spec.trains_reward
    may_quantize = may_quantize and spec.context_parallel_size == 1
    if may_quantize and not (spec.lora and (spec.lora.quantize_base or spec.lora.method != "lora")):
        adapters = (_quantized(spec),)
        yield [adapters, *((*adapters, *more) for more in same)]
    most = (*adapters, *(same[-1] if same else ()))
    length, shorter = spec.data.max_seq_length, []
    while length // 2 >= _SHORTEST and length // 2 > (
        spec.method.answer_tokens or 0
    ):  # which leaves a token for a prompt
        length //= 2
        cut = _Change((("max_seq_length", length),), (("provider_options.max_seq_length", length),))
        shorter.append((*most, cut))
    yield shorter


def _same_result(spec: JobSpec, max_ranks: int, may_offload: bool) -> Iterator[_Changes]:
    made: _Changes = ()
    if keeps_whole_gradients(spec):
        field = "provider_options.gradient_sync"
        made = (_Change((("gradient_sync", "micro_step"),), ((field, "micro_step"),)),)
        yield made
    if spec.compute.gradient_checkpointing and spec.compute.keep_attention == "always":
        made = (*made, _Change((("keep_attention", "never"),), (("provider_options.keep_attention", "never"),)))
        yield made
    if not spec.compute.gradient_checkpointing or spec.compute.checkpoint_every > 1:
        field = "training_config.efficiency_config.enable_activation_checkpointing"
        made = (*made, _Change((("gradient_checkpointing", True), ("checkpoint_every", 1)), ((field, True),)))
        yield made
    if spec.method.has_batch_means:
        return
    size = spec.data.batch_size
    smaller = made
    for micro in (size // parts for parts in range(2, size + 1) if size % parts == 0):
        smaller = (*made, _micro(spec.with_batches_of(micro)))
        yield smaller
    made, micro = smaller, 1 if size > 1 else size
    accumulation = spec.train.gradient_accumulation_steps * (size // micro)
    many = 2 * spec.ranks
    while many <= max_ranks:
        more = many // spec.ranks
        steps = accumulation // more if accumulation % more == 0 else accumulation
        sharding = spec.sharding or ShardingSpec()
        if sharding.strategy == "NO_SHARD" or spec.compute.activation_offloading:  # which excludes sharding
            break
        fields = (("ranks", many), ("sharding", sharding), ("gradient_accumulation_steps", steps))
        request: tuple[tuple[str, Any], ...] = (("provider_options.nproc_per_node", many),)
        if steps != accumulation:
            request = (*request, ("training_config.gradient_accumulation_steps", steps))
        yield (*made, ranked := _Change(fields, request))
        last = ranked
        many *= 2
    if many > 2 * spec.ranks:
        made = (*made, last)
    shared = next((value for change in made for name, value in change.fields if name == "sharding"), spec.sharding)
    if may_offload and shared and shared.strategy != "NO_SHARD" and not shared.cpu_offload and many > 2:
        offloaded = shared.model_copy(update={"cpu_offload": True})
        field = "training_config.efficiency_config.fsdp_cpu_offload"
        yield (*made, _Change((("sharding", offloaded),), ((field, True),)))


def _micro(smaller: JobSpec) -> _Change:
    """A smaller micro batch and proportionally more of them, with the same global batch."""
    fields = ("batch_size", "gradient_accumulation_steps")
    return _Change(tuple((name, smaller.value(name)) for name in fields), tuple(batch_fields(smaller).items()))


def batch_fields(spec: JobSpec) -> dict[str, Any]:
    """The fields of a request that set a job's batches."""
    return {
        "training_config.data_config.batch_size": spec.data.batch_size,
        "training_config.gradient_accumulation_steps": spec.train.gradient_accumulation_steps,
    }


def _with_lora(spec: JobSpec, **more: Any) -> _Change:
    modules = attention_modules(spec)
    wanted = [name for name in ("q_proj", "v_proj") if name in modules] or modules
    lora = LoraSpec(target_modules=tuple(wanted), mlp=True, rank=8, alpha=16, **more)
    request = {"type": "LoRA", "lora_attn_modules": wanted, "apply_lora_to_mlp": True, "rank": 8, "alpha": 16, **more}
    field = METHODS[spec.algorithm].lora_field
    # Products in 8 bits are those of trained weights.
    off = {"float8": "never"} if spec.compute.float8 == "always" else {}
    options = tuple((f"provider_options.{name}", value) for name, value in off.items())
    return _Change((("lora", lora), *off.items()), ((field, request), *options))


def _quantized(spec: JobSpec) -> _Change:
    if spec.lora is None:
        return _with_lora(spec, quantize_base=True)
    lora = spec.lora.model_copy(update={"quantize_base": True})
    field = METHODS[spec.algorithm].lora_field
    return _Change((("lora", lora),), ((f"{field}.quantize_base", True),))
