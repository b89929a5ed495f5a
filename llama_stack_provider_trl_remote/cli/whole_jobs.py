"""Commands that run a job from its data or its file to its result: `train`, `generate`, `export`, `run`, `resume`."""

from __future__ import annotations

import asyncio
import re
import secrets
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llama_stack_provider_trl.errors import InvalidRequest, JobConflict
from llama_stack_provider_trl.specs.row_files import stem_of
from llama_stack_provider_trl.specs.state_words import state_word
from llama_stack_provider_trl.system.console import complain, show_lines
from llama_stack_provider_trl.system.texts import counted

from ..client import ServiceClient, job_path
from ..follow import ENDED
from ..pull import pull
from ..request_files import read_request
from ..row_files import has_preferences, name_by_content, register_rows, stored_rows
from ..submitting import submit_request
from .chat import model_name
from .promotion import (
    OPTION,
    check_promotion,
    evaluations_of,
    of_job,
    own_evaluation,
    refuse_unusable_with_training,
    refuse_without_evaluation,
)
from .register import show_registered, stack_at
from .shared_options import trained_as, without_none
from .terminal import emit, table
from .watch import exit_status, show_change, watch

LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
"""With the MLP these are all linear layers of a Llama-like block, as in the quickstart."""
LORA_RANK = 8
_LIKE_A_PATH = ("/", "./", "../", "~")


async def train(client: ServiceClient, options: Namespace) -> int:
    """Upload rows, submit a job for them, follow it, and pull its result."""
    refuse_unusable_with_training(options)
    await _check_end(client, options)
    model = model_at(options.model, client.url)
    with ExitStack() as files:
        trained_on = [options.data, *(options.mix or [])]
        _check_weights(options, trained_on)
        files_given = [Path(file) for file in (*trained_on, options.eval_data) if file is not None]
        blobs = [await asyncio.to_thread(files.enter_context, stored_rows(file)) for file in files_given]
        for file, blob in zip(files_given, blobs, strict=True):
            if not blob.num_rows:
                raise InvalidRequest("DATA", str(file), "it has no rows.")
        method = options.method or ("dpo" if has_preferences(blobs[0].path) else "sft")
        if options.promote_if:
            refuse_without_evaluation(method)
        if options.register is not None and method == "reward":
            raise InvalidRequest("--register", options.register, "a reward model writes no text: leave it out.")
        datasets = [
            await register_rows(client, blob, name_by_content(stem_of(file.name), blob))
            for file, blob in zip(files_given, blobs, strict=True)
        ]
    job_uuid = options.job or _new_name(f"{method}-{stem_of(files_given[0].name)}")
    ids = [dataset.dataset_id for dataset in datasets]
    validation_id = ids.pop() if options.eval_data is not None else None
    body = training_request(options, method, model, job_uuid, ids, validation_id)
    if options.promote_if:
        body.setdefault("provider_options", {})["evaluate"] = own_evaluation(method, model, str(validation_id))
        options.promote_if = of_job(options.promote_if, job_uuid)
    if not (options.json or options.detach):
        show_lines(*(f"{dataset.dataset_id}: {counted(dataset.num_rows, 'row')}" for dataset in datasets))
    return await _submit_and_follow(client, body, options, "sft" if method == "sft" else "dpo")


async def generate(client: ServiceClient, options: Namespace) -> int:
    """Submit a job that answers prompts, and follow it."""
    if (options.data is None) is (options.dataset is None):
        raise InvalidRequest("DATA", options.data, "name a file with prompts, or a registered dataset with --dataset.")
    dataset_id = options.dataset
    if options.data is not None:
        file = Path(options.data)
        with ExitStack() as files:
            blob = await asyncio.to_thread(files.enter_context, stored_rows(file))
            dataset_id = (await register_rows(client, blob, name_by_content(stem_of(file.name), blob))).dataset_id
    sampling = {
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": options.seed,
        "samples_per_prompt": options.samples,
        "batch_size": options.batch_size,
    }
    body = {
        "kind": "generate",
        "job_uuid": options.job or _new_name(f"generate-{options.output}"),
        "model": options.model if options.model.startswith("job:") else model_at(options.model, client.url),
        "dataset_id": dataset_id,
        "output": {"dataset_id": options.output},
        **without_none(sampling),
    }
    return await _submit_and_follow(client, body, options, None)


async def export(client: ServiceClient, options: Namespace) -> int:
    """Submit a job that exports a model, follow it, and pull the export."""
    await _check_end(client, options)
    model = exported_model(options.model, client.url)
    stem = model.removeprefix("job:") if model.startswith("job:") else model.rstrip("/").rpartition("/")[2]
    body = {
        "kind": "export",
        "job_uuid": options.job or _new_name(f"{options.to}-{stem}"),
        "model": model,
        "to": options.to,
        **without_none({"gguf_type": options.type, "promote_if": options.promote_if, "upload_to": options.upload_to}),
    }
    return await _submit_and_follow(client, body, options, None)


async def run(client: ServiceClient, options: Namespace) -> int:
    """Submit the job of a file, follow it, and pull its result; or the jobs of a pipeline."""
    from ..submitting import is_pipeline

    await _check_end(client, options)
    body = read_request(options.file)
    if is_pipeline(body):
        return await _run_pipeline(client, body, options)
    if options.promote_if and options.register is None:
        hint = "it decides on --register: name the Llama Stack there; a file with an export has a field promote_if."
        raise InvalidRequest(OPTION, evaluations_of(options.promote_if), hint)
    if options.register is not None and body.get("kind") not in (None, "merge"):
        hint = f"a job of the kind {body['kind']!r} makes no model that answers: leave it out."
        raise InvalidRequest("--register", options.register, hint)
    given = body.get("job_uuid")
    # A job that resumes from another one is another job.
    stem = str(given or ("job" if options.file == "-" else Path(options.file).stem))
    if options.job or given is None or options.resume_from:
        body["job_uuid"] = options.job or _new_name(stem)
    if changed := _placement(options):
        try:
            body["provider_options"] = _merged(body.get("provider_options") or {}, changed)
        except (TypeError, AttributeError) as error:
            raise InvalidRequest("provider_options", body["provider_options"], "expected an object.") from error
    return await _submit_and_follow(client, body, options, options.algorithm)


async def _run_pipeline(client: ServiceClient, body: dict[str, Any], options: Namespace) -> int:
    """Submit the jobs that the service does not have yet, and follow all of them."""
    from ..submitting import place

    result = ("pull", "checkpoint", "register", "promote_if")
    for name in ("job", "nodes", "nproc_per_node", "resume_from", "algorithm", *result):
        if (value := getattr(options, name)) is not None:
            hint = (
                "it is for the file of one job: set it in the requests, or use trl-remote jobs pull and trl-remote "
                "register for a result."
            )
            raise InvalidRequest(f"--{name.replace('_', '-')}", value, hint)
    placed = await place(client, body)
    if options.json:
        for one in placed:
            event = dict(one)
            show_change(event.pop("job_uuid"), {"type": "placed", **event})
    else:
        rows = [
            (
                one["name"],
                one["job_uuid"],
                "submitted" if one["is_new"] else f"there already, {state_word(one['state'])}",
            )
            for one in placed
        ]
        show_lines(*table(("job", "job_uuid", "state"), rows, cut=("state",)), flush=True)
    if options.detach:
        return 0
    followed = [name for one in placed for name in (one["job_uuid"], one["evaluation"]) if name is not None]
    ended = await watch(client, followed, options.interval, as_json=options.json)
    for status in ended:
        if status["status"] != "completed":
            complain(_ending(status))
    return exit_status(ended)


async def resume(client: ServiceClient, options: Namespace) -> int:
    """Queue a paused job again, follow it, and pull its result."""
    await _check_end(client, options)
    status = await client.status(options.job_uuid)
    if status["status"] in ENDED:
        raise JobConflict(
            f"job {options.job_uuid!r} is {status['status']}, and only a paused one can be resumed: a new job "
            f"continues from its last checkpoint with trl-remote run FILE --resume-from {options.job_uuid}"
        )
    await client.post(job_path(options.job_uuid, "/resume"))
    return await _follow(client, options.job_uuid, options)


def training_request(
    options: Namespace,
    method: str,
    model: str,
    job_uuid: str,
    dataset_ids: Sequence[str],
    validation_dataset_id: str | None = None,
) -> dict[str, Any]:
    """The body of the call that `train`'s options describe. What they leave out, the service decides."""
    data = {"dataset_id": dataset_ids[0], "batch_size": options.batch_size, "shuffle": True}
    training = {
        "n_epochs": options.epochs,
        "max_steps_per_epoch": options.max_steps,
        "gradient_accumulation_steps": options.gradient_accumulation,
        "learning_rate": options.learning_rate,
        "data_config": data | without_none({"validation_dataset_id": validation_dataset_id}),
    }
    lora = _lora(options)
    given: dict[str, Any] = _placement(options) | without_none({"adapter": options.adapter})
    if options.merge:
        given["merge_adapter"] = True
    if len(dataset_ids) > 1:
        weights = options.weights or [None] * len(dataset_ids)
        given["mixture"] = [
            {"dataset_id": name, **without_none({"weight": weight})}
            for name, weight in zip(dataset_ids, weights, strict=True)
        ]
    own, of_rows = trained_as(options)
    training["data_config"] |= own
    given |= of_rows
    if method != "sft" and lora:
        given["lora"] = lora
    algorithm = lora if method == "sft" else {"type": method}
    body = {"job_uuid": job_uuid, "model": model, "training_config": without_none(training)}
    return body | without_none({"algorithm_config": algorithm, "provider_options": given or None})


async def _submit_and_follow(
    client: ServiceClient, body: dict[str, Any], options: Namespace, algorithm: str | None
) -> int:
    job_uuid = (await submit_request(client, body, algorithm))["job_uuid"]
    if options.detach:
        emit(options, {"job_uuid": job_uuid}, job_uuid)
        return 0
    if not options.json:
        show_lines(f"job {job_uuid}", flush=True)
    if options.register is not None:
        for name in evaluations_of(getattr(options, "promote_if", None) or []):
            await client.status(name)  # one that is not there is known now, and not when the job has ended
    return await _follow(client, job_uuid, options)


async def _follow(client: ServiceClient, job_uuid: str, options: Namespace) -> int:
    """Show a job until it has ended; of one that completed, pull the result where that is wanted."""
    (status,) = ended = await watch(client, [job_uuid], options.interval, as_json=options.json)
    if status["status"] != "completed":
        # In one sentence, for a shell that keeps standard error only.
        complain(_ending(status))
        return exit_status(ended)
    if options.pull is not None:
        checkpoint = options.checkpoint or ("merged" if getattr(options, "merge", False) else "final")
        line = (lambda text: None) if options.json else (lambda text: show_lines(text, flush=True))
        identifier = await pull(client, job_uuid, checkpoint, Path(options.pull), line)
        if options.json:
            show_change(job_uuid, {"type": "pulled", "identifier": identifier, "directory": options.pull})
        else:
            show_lines(f"{identifier} is in {options.pull}")
    if options.register is not None:
        stack, model = stack_at(options.register), model_name(job_uuid)
        if given := getattr(options, "promote_if", None):
            await watch(client, evaluations_of(given), options.interval, as_json=options.json)
            await check_promotion(client, model, given)
        as_change = partial(_show_registration, job_uuid) if options.json else None
        await show_registered(client, stack, model, None, as_change)
    return exit_status(ended)


def _show_registration(job_uuid: str, registration: dict[str, Any]) -> None:
    show_change(job_uuid, {"type": "registered", **registration})


def _ending(status: dict[str, Any]) -> str:
    error = (status.get("resources_allocated") or {}).get("error")
    why = f" ({error['reason']}): {' '.join(error['message'].split())}" if error else ""
    return f"job {status['job_uuid']} {status['status']}{why}"


async def _check_end(client: ServiceClient, options: Namespace) -> None:
    """Find out before hours of training what would prevent the download and the registration after them."""
    if options.register is not None:
        if options.detach:
            hint = "with --detach nothing waits for the result: use `register` later."
            raise InvalidRequest("--register", options.register, hint)
        await stack_at(options.register).provider_of(client.url)
    if options.pull is None:
        return
    if options.detach:
        raise InvalidRequest(
            "--pull", options.pull, "with --detach nothing waits for the result: use `jobs pull` later."
        )
    if Path(options.pull).exists():
        raise InvalidRequest("--pull", options.pull, "it exists already: name a new directory.")


def model_at(name: str, url: str) -> str:
    """The model as the service finds it: a path of this machine is absolute, where the service is on it."""
    if urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1"):
        return name
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path.resolve())
    if name.startswith(_LIKE_A_PATH):
        raise InvalidRequest(
            "--model", name, "there is no such directory: name a model's directory, or an id (org/name)."
        )
    return name


def exported_model(name: str, url: str) -> str:
    """The model that a word of the command line means: NAME and NAME/CHECKPOINT are those of a job."""
    if re.fullmatch(r"[^/:]+(/(final|merged|checkpoint-\d+))?", name) and not Path(name).expanduser().is_dir():
        return f"job:{name}"
    return name if name.startswith("job:") else model_at(name, url)


def _check_weights(options: Namespace, files: list[str]) -> None:
    if options.weights is not None and (len(options.weights) != len(files) or len(files) == 1):
        hint = f"expected one for each of {', '.join(files)}, or --mix with further rows."
        raise InvalidRequest("--weights", ",".join(f"{weight:g}" for weight in options.weights), hint)


def _lora(options: Namespace) -> dict[str, Any] | None:
    if options.lora_r is None and options.lora_alpha is None and options.lora_modules is None:
        return None
    rank = options.lora_r or LORA_RANK
    return {
        "type": "LoRA",
        "lora_attn_modules": list(options.lora_modules or LORA_MODULES),
        "apply_lora_to_mlp": options.lora_modules is None,
        "rank": rank,
        "alpha": options.lora_alpha or 2 * rank,
    }


def _placement(options: Namespace) -> dict[str, Any]:
    """Provider options that `train` and `run` have in common."""
    nodes = {"nodes": options.nodes} if options.nodes else None
    return without_none(
        {
            "resources": nodes,
            "nproc_per_node": options.nproc_per_node,
            "resume_from": options.resume_from,
            "priority": options.priority,
        }
    )


def _merged(given: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    resources = {**(given.get("resources") or {}), **changed.get("resources", {})}
    return {**given, **changed, **({"resources": resources} if resources else {})}


def _new_name(stem: str) -> str:
    """A job_uuid that no job has yet."""
    return f"{re.sub('[^A-Za-z0-9._-]+', '-', stem).strip('-._')[:100] or 'job'}-{secrets.token_hex(3)}"
