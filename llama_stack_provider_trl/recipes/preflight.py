"""Predicts lengths, steps, memory and disk of a job without training, and proposes the nearest job that fits.

The same check runs before a job loads its model (`before_training`) and, on request, as a task that takes no device
(`preflight_attempt`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset

from ..errors import JobFailure
from ..specs.events import EventWriter, Finished, Preflighted, Reason, Warned
from ..specs.job import AttemptSpec, JobSpec, ShardingSpec
from ..specs.preflight import PreflightSpec
from ..specs.schedules import problem_of_warmup
from ..system.files import free_bytes
from ..system.fork import imported_memory
from ..system.process import allocated_memory, available_memory, limit_memory, machine_memory, resident_memory
from .data.chat import check_chat_template
from .data.lengths import histogram, lengths_before_packing, row_lengths
from .data.mixed import prepared_data
from .data.mixture import Mixture
from .data.padding import problem_of_padding
from .data.prepare import DataReport
from .data.prompts import encode_prompts
from .data.sampling import BatchPlan
from .distributed import ranks
from .fast.kept_attention import chooses_to_keep
from .fast.smaller_batches import in_parts
from .fast.support import with_batches
from .memory.estimate import disk_bytes, estimate
from .memory.messages import gib, misfit
from .memory.nearest import Capacity, batch_fields, nearest
from .memory.trace import Batch
from .memory.trace_cache import trace
from .micro_steps import (
    GIVEN_UP,
    MicroBatches,
    RowsOnDevice,
    StepPlan,
    fix_order,
    merge_micro_steps,
    plan_steps,
    with_groups,
)
from .model.checked import check_models
from .model.fsdp import accumulates_shards, frees_blocks, keeps_whole_gradients, ranks_per_machine
from .model.loading import load_job_tokenizer, load_teacher_tokenizer, vocabulary_size
from .model.positions import positions_of, within_positions
from .model.saving import try_exports
from .preview import preview
from .reward_templates import lost_by_reward_models
from .vision import with_images


def device_limit(device: torch.device, ranks: int) -> int:
    """Bytes that a rank may take. On a GPU, which is locked for the job: what is free. On a CPU: an equal part of all
    memory of the machine or container, including what other programs use at the moment.

    Args:
        ranks: of the job on this machine.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return machine_memory() // ranks


def memory_of(spec: JobSpec, device: torch.device) -> tuple[Capacity, int]:
    """What this machine has for a job, and all bytes of a rank's device, those in use included."""
    limit = device_limit(device, spec.ranks * ranks.local_world_size() // ranks.world_size())
    total = int(torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else limit
    return Capacity(limit, machine_memory(), baseline=_baseline(device.type)), total


def check(
    spec: JobSpec, batch: Batch, device: str, capacity: Capacity, requested: JobSpec | None = None
) -> dict[str, Any]:
    """Compare the estimated memory with the capacity. The verdict has the nearest job that fits, if it does not.

    `gradient_sync` auto is decided here: whole gradients where the job fits with them. So are `keep_attention` auto,
    and whether blocks stay gathered while the model answers prompts.

    Args:
        requested: the job before its batches were divided (`fast.parts`); None: they were not.
    """
    memory = estimate(spec, batch, device, capacity.baseline)
    if spec.train.gradient_sync == "auto" and accumulates_shards(spec):
        whole = spec.changed(gradient_sync="step")
        with_whole = estimate(whole, batch, device, capacity.baseline)
        if capacity.holds(with_whole):
            spec, memory = whole, with_whole
    chooses_attention, keeps_attention = chooses_to_keep(spec, device.partition(":")[0]), False
    if chooses_attention:
        kept = spec.changed(keep_attention="always")
        with_kept = estimate(kept, batch, device, capacity.baseline)
        if keeps_attention := capacity.holds(with_kept):
            spec, memory = kept, with_kept
    verdict: dict[str, Any] = {
        "fits": capacity.holds(memory),
        "device": device.partition(":")[0],
        "devices": spec.ranks,
        "estimate_bytes": memory.total,
        "limit_bytes": capacity.device,
        "largest_batch": batch.shown,
        **memory.shown(),
        "ranks_per_machine": ranks_per_machine(spec),
        "machine_limit_bytes": capacity.machine,
    }
    if accumulates_shards(spec):
        verdict["gradient_sync"] = "step" if keeps_whole_gradients(spec) else "micro_step"
    if chooses_attention:
        verdict["kept_attention"] = keeps_attention
    if answers_by_freed_blocks(spec):
        verdict["answer_weights"] = "kept" if _holds_gathered(spec, batch, device, capacity) else "per_token"
    if not verdict["fits"]:
        found = nearest(spec, batch, device, capacity)
        if found and requested and requested.data.batch_size != spec.data.batch_size:
            # The changes are made to the request, and some jobs that they lead to are not divided.
            found = replace(found, changes={**batch_fields(spec), **found.changes})
        verdict["nearest"] = found and {"changes": found.changes, "estimate_bytes": found.memory.total}
        model = trace(spec, batch, device)  # of the estimate
        verdict["message"] = misfit(spec, model, memory, device, capacity, found)
    return verdict


def before_training(
    spec: JobSpec,
    batch_plan: BatchPlan,
    dataset: Dataset,
    device: torch.device,
    writer: EventWriter | None,
    requested: JobSpec | None = None,
    mixture: Mixture | None = None,
    unmerged: MicroBatches | None = None,
) -> dict[str, Any] | None:
    """Check the memory of a job before it loads its model; returns the result for its record.

    Nobody asked for merged micro steps: where they do not fit in what is free, the job is refused only if it does not
    fit without them. They stay merged: what is free at the moment decides no number. Nor did anyone ask for what
    attention takes to add in a fixed order, which is given up (`micro_steps.keep_order`) where it does not fit: the job
    repeats up to rounding then. Raises JobFailure: does_not_fit, unless the job's option `preflight` is warn or off.

    Args:
        spec: as this attempt's ranks train it.
        batch_plan: the batches of each optimizer step.
        dataset: prepared rows, packed where the job packs them, without a filler.
        unmerged: the job before its micro steps were merged; None: they were not.
    """
    if spec.preflight == "off" or ranks.rank() != 0:  # the other ranks end with rank 0
        return None
    lengths = row_lengths(dataset)

    def checked(job: JobSpec, plan: BatchPlan, capacity: Capacity) -> dict[str, Any]:
        batch = with_groups(plan_steps(job, lengths, plan, mixture).batch, job, dataset, mixture)
        return check(job, batch, device.type, capacity, requested)

    try:
        capacity, _ = memory_of(spec, device)
        verdict, alone, given_up = checked(spec, batch_plan, capacity), None, ""
        if not verdict["fits"] and spec.compute.accumulator_bytes is not None:
            given_up = _order_given_up(spec.compute.accumulator_bytes, capacity)
            spec = spec.changed(accumulator_bytes=None)
            verdict = checked(spec, batch_plan, capacity) | {"fixed_order": GIVEN_UP}
        if not verdict["fits"] and unmerged is not None:
            alone = checked(unmerged.spec, unmerged.batch_plan, capacity)
    except JobFailure:
        raise
    except Exception as error:  # an architecture that cannot be traced may still be trained
        _warn_not_estimated(error, writer)
        return None
    if given_up and writer and (verdict["fits"] or spec.preflight != "refuse" or (alone and alone["fits"])):
        writer.write(Warned(message=given_up))
    if not verdict["fits"]:
        if alone is not None:
            message = _held_by_others(verdict) if alone["fits"] else alone["message"]
            verdict |= {"message": message, "nearest": alone.get("nearest")}
        if spec.preflight == "refuse" and not (alone and alone["fits"]):
            raise JobFailure(Reason.does_not_fit, verdict["message"])
        if writer:
            writer.write(Warned(message=verdict["message"]))
    elif device.type == "cpu" and writer and verdict["estimate_bytes"] * spec.ranks > available_memory():
        writer.write(
            Warned(
                message=f"the job takes about {gib(verdict['estimate_bytes'] * spec.ranks)} and other programs leave "
                f"{gib(available_memory())} of this machine's memory: it may be killed while they run"
            )
        )
    return verdict


def choose_gradient_sync(spec: JobSpec, verdict: dict[str, Any] | None) -> JobSpec:
    """The job with `gradient_sync` auto replaced by rank 0's choice: that of its memory check, and micro_step without
    one. A collective."""
    if spec.train.gradient_sync != "auto":
        return spec
    whole = verdict is not None and verdict.get("gradient_sync") == "step"
    if accumulates_shards(spec):
        whole = bool(ranks.broadcast_number(whole))
    return spec.changed(gradient_sync="step" if whole else "micro_step")


def choose_kept_attention(spec: JobSpec, device: str, verdict: dict[str, Any] | None) -> JobSpec:
    """The job with `keep_attention` auto replaced by rank 0's choice: that of its memory check, and never without one.
    A collective.

    Args:
        device: its type.
    """
    if not chooses_to_keep(spec, device):
        return spec
    keeps = ranks.broadcast_number(verdict is not None and verdict.get("kept_attention", False))
    return spec.changed(keep_attention="always" if keeps else "never")


def answers_by_freed_blocks(spec: JobSpec) -> bool:
    """Whether a model that frees its blocks after each forward answers prompts while it trains, in place of vLLM."""
    answers = spec.method.answer_tokens is not None and spec.method.answered_by_vllm is None
    return frees_blocks(spec) and (answers or spec.train.samples is not None)


def _holds_gathered(spec: JobSpec, batch: Batch, device: str, capacity: Capacity) -> bool:
    """Whether the whole model, gathered, fits beside what ranks hold while it answers. They hold no gradients then;
    activations of the training step take more than keys and values do."""
    sharding = (spec.sharding or ShardingSpec()).model_copy(update={"strategy": "SHARD_GRAD_OP"})
    whole = spec.changed(sharding=sharding)
    return capacity.device_holds(replace(estimate(whole, batch, device, capacity.baseline), gradients=0))


def choose_answer_weights(spec: JobSpec, verdict: dict[str, Any] | None) -> bool:
    """Whether blocks stay gathered while the model answers prompts: rank 0's choice, by its memory check, and no
    without one. A collective."""
    return answers_by_freed_blocks(spec) and bool(
        ranks.broadcast_number(verdict is not None and verdict.get("answer_weights") == "kept")
    )


def preflight_attempt(attempt: AttemptSpec, writer: EventWriter) -> None:
    """Run a preflight: tokenize the rows as the job would, and report instead of training. Raises JobFailure: what
    would prevent the job from starting, such as a missing model; or the preflight itself exceeds its memory limit,
    since a chat template may allocate any amount."""
    request = attempt.preflight
    if request is None:
        raise AssertionError("the attempt has no PreflightSpec")
    if request.own_memory_bytes is None:
        return _preflight(attempt.job, request, writer)
    limit_memory(allocated_memory() + request.own_memory_bytes)
    try:
        _preflight(attempt.job, request, writer)
    except MemoryError as error:
        raise JobFailure(Reason.invalid_request, request.too_much_memory) from error


def _preflight(spec: JobSpec, request: PreflightSpec, writer: EventWriter) -> None:
    if request.preview:
        return preview(spec, request.preview, writer)
    spec, notes = within_positions(spec)
    tokenizer = load_job_tokenizer(spec, notes.append)
    check_chat_template(spec, tokenizer)
    check_models(spec, notes.append)
    spec, _ = with_batches(with_images(spec))
    embeddings = vocabulary_size(spec.source)
    prompts = encode_prompts(
        spec.train.samples, tokenizer, positions_of(spec.source), spec.data.dropped_turns, embeddings
    )
    data = prepared_data(spec, tokenizer, writer, spec.rows_per_step, load_teacher_tokenizer(spec), embeddings)
    prepared = data.mixed
    try_exports(spec, tokenizer, notes.append)
    lost = lost_by_reward_models(spec, writer.heartbeat)
    requested = spec
    spec, batch_plan = in_parts(spec, BatchPlan.of_job(spec), prepared.dataset, request.device)
    capacity = Capacity(
        device=request.memory_bytes or _device_memory(request.device) or machine_memory() // spec.ranks,
        machine=request.machine_memory_bytes or (None if request.device == "cuda" else machine_memory()),
        max_ranks=request.max_ranks,
        baseline=_baseline(request.device),
    )
    rows_on_device = RowsOnDevice(
        prepared.dataset, request.device, lambda: (capacity, capacity.device), prepared.mixture
    )
    merged = merge_micro_steps(spec, batch_plan, rows_on_device)
    spec, batch_plan = merged.spec, merged.batch_plan
    gpu = torch.device("cuda", 0) if _device_memory(request.device) else None
    spec, repeats = fix_order(spec, batch_plan, rows_on_device, gpu=gpu)
    planned = plan_steps(spec, row_lengths(prepared.dataset), batch_plan, prepared.mixture)
    warmup = problem_of_warmup(spec.train.optimizer, planned.total_steps)
    padded = problem_of_padding(requested, row_lengths(prepared.dataset))
    planned = replace(planned, batch=with_groups(planned.batch, spec, prepared.dataset, prepared.mixture))
    memory = check(spec, planned.batch, request.device, capacity, requested) | {"repeats": repeats}
    if spec.data.has_images:
        notes.append("the estimate of memory leaves out what the vision part of the model takes for images")
    disk = _disk(spec, planned, request)
    writer.write(
        Preflighted(
            fits=memory["fits"] and disk["fits"],
            message=" ".join(filter(None, [memory.get("message"), disk.pop("message")])) or "The job fits.",
            data=_data(prepared.report, lengths_before_packing(prepared.dataset), prepared.described()),
            steps={
                "epochs": planned.epochs,
                "steps_per_epoch": planned.steps_per_epoch,
                "total_steps": planned.total_steps,
                "global_batch": planned.global_batch,
            },
            memory=memory,
            disk=disk,
            warnings=[*notes, *prompts.lost_turns, *data.warnings, *lost, *filter(None, [warmup, padded])],
        ),
        durable=True,
    )
    writer.write(Finished(step=0), durable=True)


def _data(report: DataReport, lengths: torch.Tensor, mixture: list[dict[str, Any]]) -> dict[str, Any]:
    ordered = lengths.sort().values
    return {
        "num_rows": report.num_rows,
        "examples": report.examples,
        "trained": report.kept,
        "truncated": report.truncated,
        "dropped": report.dropped,
        "total_tokens": report.total_tokens,
        "trained_tokens": report.trained_tokens,
        "longest_before_cut": report.max_tokens,
        "median_tokens": int(ordered[len(ordered) // 2]),
        "max_tokens": int(ordered[-1]),
        "histogram": histogram(lengths),
        **({"images": report.images} if report.images else {}),
        **({"mixture": mixture} if mixture else {}),
    }


def _disk(spec: JobSpec, planned: StepPlan, request: PreflightSpec) -> dict[str, Any]:
    """The most that the job writes: the step checkpoints that are kept, one being written, final and merged."""
    sizes = disk_bytes(spec, trace(spec, planned.batch, request.device))
    saves = planned.total_steps // spec.train.save_steps if spec.train.save_steps else planned.epochs
    steps = min(saves, spec.train.keep_last + 1) if spec.train.keep_last else saves
    needed = steps * sizes["step_checkpoint"] + sizes["final"] + sizes["merged"]
    free = free_bytes(spec.checkpoint_dir) if request.free_bytes is None else request.free_bytes
    enough = needed + spec.lifecycle.min_free_bytes <= free
    message = (
        f"The job writes about {gib(needed)} below {spec.checkpoint_dir}, where {gib(free)} are free and "
        f"{gib(spec.lifecycle.min_free_bytes)} must stay free: free some, or keep fewer checkpoints (provider option "
        "keep_last)."
    )
    return {
        "fits": enough,
        "needed_bytes": needed,
        "free_bytes": free,
        "step_checkpoints": steps,
        **{f"{name}_bytes": size for name, size in sizes.items()},
        "message": "" if enough else message,
    }


def _held_by_others(verdict: dict[str, Any]) -> str:
    """Of a job whose merged micro steps do not fit in what other processes leave of its device."""
    return (
        f"the merged micro steps of this job take about {gib(verdict['estimate_bytes'])}, and its device has "
        f"{gib(verdict['limit_bytes'])} free at the moment: other processes hold memory of it. The steps stay merged, "
        "since others would round differently. If the memory ends, oom_retry separates them. End the other processes, "
        "or set merge_micro_batches to never."
    )


def _order_given_up(needed: int, capacity: Capacity) -> str:
    return (
        f"attention would take {gib(needed)} to add in a fixed order, and with it the job does not fit in the "
        f"{gib(capacity.device)} that other processes leave of its device: it adds in no fixed order, and repeats up "
        "to rounding. End the other processes for a job that repeats bit for bit."
    )


def _warn_not_estimated(error: Exception, writer: EventWriter | None) -> None:
    if writer:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        writer.write(Warned(message=f"the memory of this job could not be estimated ({what}); it is trained unchecked"))


def _device_memory(device: str) -> int:
    """All memory of a GPU of this machine, in bytes, since a preflight uses none of it. 0: no GPU."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(0).total_memory)


def _baseline(device: str) -> int:
    return max(resident_memory(), imported_memory()) if device == "cpu" else 0
