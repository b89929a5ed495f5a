"""The recipe of `export` jobs: the trained model's answers, the files, and the comparison of both.

Everything is written to a directory of another name, which becomes `final` when the comparison has passed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from transformers import PreTrainedModel

from ... import faults
from ...errors import JobFailure
from ...specs.events import CheckpointSaved, EventWriter, Finished, Prepared, Reason, Started
from ...specs.exports import ADAPTER_GGUF, EXPORT_RECORD, EXPORTING, GGUF_FILE, GgufType, destination_of
from ...specs.job import AttemptSpec, JobSpec
from ...specs.rows import Message
from ...specs.work import ExportWork
from ...system.files import atomic_write_json, fsync_tree, put_in_place, write_manifest
from ..answers.generate import report_steps
from ..checkpoint.step import need_space
from ..checkpoint.weights import WeightGroups, differences, export_bytes, write_weights
from ..data.templates import rendered
from ..distributed.heartbeat import heartbeat
from ..model.loading import load_config, load_model, parameter_counts
from ..model.saving import write_configuration
from .adapter import Lora, WrittenLora, check_vllm, command_of, lora_of, write_gguf, write_peft
from .architectures import names_in_gguf
from .card import CARD, LINEAGE, card, lineage
from .gguf_file import GgufPlan
from .llamacpp import LlamaCppReader, is_installed
from .ollama import MODELFILE, TurnTexts, modelfile, turn_texts
from .proof import BOUNDS, Reader, compared, failed
from .readers import AdapterReader, TransformersReader
from .reference import Expected, Trained
from .upload import uploaded
from .vocabulary import adds_bos

_WEIGHTS = f"{EXPORTING}-weights"
"""Directory beside `EXPORTING`: the merged weights of which a GGUF file is made."""
_BASE = "base"
"""Directory in `_WEIGHTS`: the base model's GGUF file, by which an adapter alone is proven."""
_PERCENT = 100
_TYPES: dict[torch.dtype, GgufType] = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def export_attempt(attempt: AttemptSpec, writer: EventWriter) -> None:
    """Export a model as a job, into its checkpoint `final`. An attempt begins at the first weight. Raises JobFailure:
    the model is not mapped, or the export is not what was trained; OSError: the disk is, or would be, full."""
    job, work = attempt.job, attempt.job.work
    assert isinstance(work, ExportWork)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    writer.write(Started(pid=os.getpid(), device="cpu", versions=versions))
    if job.compute.num_threads:
        torch.set_num_threads(job.compute.num_threads)
    faults.reach("started")
    job.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    final, output, weights = (job.checkpoint_dir / name for name in ("final", EXPORTING, _WEIGHTS))
    for left in (output, weights, final):  # of an attempt that was interrupted
        shutil.rmtree(left, ignore_errors=True)
    with heartbeat(writer):
        try:
            record = _exported(job, work, output, weights, writer)
            shutil.rmtree(weights, ignore_errors=True)
            faults.reach("exporting-final")
            if (place := work.export.upload_to) is not None:
                record |= {"upload": uploaded(output, destination_of(place), job.job_uuid)}
                faults.reach("uploaded")
            write_manifest(output)
            fsync_tree(output)
            put_in_place(output, final)
        except BaseException:  # a signal, too
            for left in (output, weights):
                shutil.rmtree(left, ignore_errors=True)
            raise
    faults.reach("exported-final")
    writer.write(
        CheckpointSaved(kind="final", step=_PERCENT, epoch=1, path=final, train_loss=None, verified="logits"),
        durable=True,
    )
    writer.write(Finished(step=_PERCENT, result=record), durable=True)


def _exported(job: JobSpec, work: ExportWork, output: Path, weights: Path, writer: EventWriter) -> dict[str, Any]:
    if work.export.upload_to is not None and job.source.trust_remote_code:
        raise JobFailure(
            Reason.invalid_request,
            f"the model {job.source.model!r} has code of its own, which would see the account that uploads: leave "
            "upload_to out, and upload the export yourself.",
        )
    _refuse_vision(job)
    trained, target = Trained(job), work.export.target
    stored = _TYPES[trained.storage.dtype]
    is_adapter = target == "lora-gguf" or (target == "vllm" and trained.spec.adapter is not None)
    lora = lora_of(trained, target) if is_adapter else None
    most_rank = check_vllm(trained, lora) if target == "vllm" else None
    kind: GgufType = work.export.gguf_type or ("f32" if lora is not None else stored)
    plan = None
    if target in ("gguf", "ollama", "lora-gguf"):
        rows = trained.plain.get_input_embeddings().weight.shape[0]
        plan = GgufPlan(
            trained.plain.config, trained.tokenizer, trained.ends, rows, job.source.model.rpartition("/")[2]
        )
        groups = WeightGroups(trained.model, trained.storage.dtype).planned
        names_in_gguf(trained.plain.config, [name for group in groups for name in group])
    texts = _texts_of(trained) if target == "ollama" else None
    size = export_bytes(trained.model, trained.storage.dtype)
    need_space(job, size * 3 if plan is not None else size if lora is None else lora.num_bytes())
    _, count = parameter_counts(trained.plain)
    writer.write(Prepared(total_steps=_PERCENT, num_rows=0, trainable_parameters=0, total_parameters=count))
    expected, change = trained.answers(_part(writer, 0, 35))
    files, model = _part(writer, 35, 55), _part(writer, 55, 65)
    record: dict[str, Any] = {"target": target, "type": kind, "parameters": count}
    bound = kind
    if lora is None:
        _write_model(trained.model, trained, output if plan is None else weights, files)
        if plan is not None:
            output.mkdir()
            plan.write(weights, kind, output / GGUF_FILE, model)
    else:
        record |= {"rank": lora.rank, "alpha": lora.alpha, "modules": len(lora.modules)}
        output.mkdir()
        if plan is None:
            write_peft(trained, output)
        else:
            record["change_difference"] = write_gguf(trained, lora, kind, output)
            base = load_model(job.source, trained.storage, torch.device("cpu"))
            _write_model(base, trained, weights, files)
            # llama.cpp adds the adapter itself; for transformers, which cannot, it is in the weights.
            added = WrittenLora(output / ADAPTER_GGUF).change
            (below := weights / _BASE).mkdir()
            plan.write(weights, stored, below / GGUF_FILE, model, change=_none if is_installed() else added)
            bound = max(kind, stored, key=BOUNDS.__getitem__)
    if texts is not None:
        ends = [trained.tokenizer.decode([end]) for end in trained.ends]
        (output / MODELFILE).write_text(modelfile(GGUF_FILE, texts, ends))
    if target in ("lora-gguf", "vllm"):
        record["command"] = command_of(trained, lora, most_rank)
    faults.reach("written-final")
    with closing(_reader(output, weights, expected, trained, lora, is_gguf=plan is not None)) as reader:
        report = compared(expected, trained.ends, reader, bound, trained.tokenizer.decode, _part(writer, 65, _PERCENT))
    record |= {
        "bytes": sum(path.stat().st_size for path in output.iterdir()),
        "adapter_difference": change,
        **report,
    }
    if work.gates:
        record["gates"] = [gate.model_dump(mode="json", exclude_none=True) for gate in work.gates]
    atomic_write_json(output / EXPORT_RECORD, record, mode=0o644)
    origin = lineage(trained, record)
    atomic_write_json(output / LINEAGE, origin, mode=0o644)
    (output / CARD).write_text(card(origin), encoding="utf-8")
    return record


def _none(name: str) -> None:
    """No change of a weight."""


def _refuse_vision(job: JobSpec) -> None:
    config = load_config(job.source)
    if getattr(config, "vision_config", None) is not None:
        raise JobFailure(
            Reason.invalid_model,
            f"the model {job.source.model!r} is a vision-language model (its model_type is {config.model_type!r}, with "
            "a vision_config), and an export has no image processor and is compared by texts alone. Nothing was "
            "written; export a model that reads text alone, or use the files that training has written.",
        )


def _texts_of(trained: Trained) -> TurnTexts:
    """The parts of the chat template. Raises JobFailure: they are not all of it."""
    tokenizer = trained.tokenizer

    def render(messages: list[Message], add_generation_prompt: bool) -> str:
        return rendered(tokenizer, messages, add_generation_prompt=add_generation_prompt)

    bos = tokenizer.bos_token if adds_bos(tokenizer) else None
    return turn_texts(render, trained.prompts(), str(bos) if bos else None)


def _reader(
    directory: Path, weights: Path, expected: list[Expected], trained: Trained, lora: Lora | None, *, is_gguf: bool
) -> Reader:
    """What reads an export: another program than the one that wrote it, where it is installed."""
    if lora is not None and not is_gguf:
        storage = trained.storage.with_dtype(trained.compared_in)
        return AdapterReader(directory, load_model(trained.spec.source, storage, torch.device("cpu")))
    adapters = [directory / ADAPTER_GGUF] if lora is not None else []
    model = directory if lora is None else weights / _BASE
    if is_gguf and is_installed():
        context = max(len(one.prompt.ids) + len(one.tokens) for one in expected)
        return LlamaCppReader(model, context, torch.get_num_threads(), adapters)
    config = trained.plain.config if is_gguf else None
    trusts = trained.spec.source.trust_remote_code
    return TransformersReader(model, trained=config, trust_remote_code=trusts, dtype=trained.compared_in)


def _write_model(
    model: PreTrainedModel | PeftModel, trained: Trained, directory: Path, progress: Callable[[int, int], None]
) -> None:
    """Write a model, with its adapter merged in, as transformers loads it, and read every weight back."""
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    directory.mkdir()
    dtype = trained.storage.dtype
    plain.config.use_cache = True
    write_configuration(plain, directory, dtype)
    total = len(list(plain.parameters()))
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        progress(min(done, 3 * total), 3 * total)

    written = write_weights(model, directory, dtype, count)
    trained.tokenizer.save_pretrained(directory)
    if wrong := differences(written, directory, "model.safetensors", count):
        raise failed(f"{len(wrong)} of {len(written)} weights are not what was written: {'; '.join(wrong[:3])}")


def _part(writer: EventWriter, begin: int, end: int) -> Callable[[int, int], None]:
    """Reports a part of the work, from `begin` to `end` percent, once a second at most."""
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 1 or done == total:
            last = now
            report_steps(begin + (end - begin) * done // max(total, 1), _PERCENT, {}, writer)

    return report
