"""`trl-remote datasets check`: whether every row of a file trains, and is trained as inference renders it.

It calls no service and reads no weights: the rows are tokenized in a process of this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest, InvalidRows, JobFailure, TrlError, sentence_of
from llama_stack_provider_trl.launch.interpreter import check_interpreter
from llama_stack_provider_trl.requests.bodies import PreferenceOptimizeRequest, SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.events import Reason
from llama_stack_provider_trl.specs.job import DatasetRef, JobSpec
from llama_stack_provider_trl.specs.previewed import inference_sentence
from llama_stack_provider_trl.specs.row_files import ENDINGS, ROW_READERS, ending_of
from llama_stack_provider_trl.specs.row_verdicts import check_file
from llama_stack_provider_trl.system.console import complain
from llama_stack_provider_trl.system.files import put_rows
from llama_stack_provider_trl.system.process import child_environment
from llama_stack_provider_trl.system.texts import counted

from ..row_files import has_preferences, read_row_file
from .preview import job_body
from .recipe_process import run_recipe
from .refusals import in_a_shell
from .terminal import emit

_MODULE = "llama_stack_provider_trl.recipes.check"
_READER = "llama_stack_provider_trl_remote.service.datasets.reader"
"""The program that reads Parquet, within a limit of memory."""
_READER_LIMITS = ("1000000000", "1048576", "0", "", "4096")
"""Rows, MiB on the disk, MiB that stay free there, the rows that are here already (none), MiB of memory."""
_OF_ROWS = (Reason.invalid_dataset, Reason.invalid_model)
"""Reasons of failures that may be about a row. The message of these begins with it."""


def check(options: Namespace) -> int:
    """Check the rows of a file. Returns 0: every row trains, and every trained turn is as at inference. 1: not so, with
    a sentence on standard error. 2: that is not known, since the file, the model or an option cannot be used."""
    try:
        check_interpreter(None)
        with tempfile.TemporaryDirectory(prefix="trl-check-") as directory:
            found = _checked(options, Path(directory))
    except (TrlError, OSError) as error:
        complain(sentence_of(error, "run the command again"))
        return 2
    problems = list(_problems(found, options.strict))
    emit(options, {**found, "ok": not problems, "problems": problems}, *_lines(found, not problems))
    for problem in problems:
        complain(problem)
    return int(bool(problems))


def _checked(options: Namespace, directory: Path) -> dict[str, Any]:
    """What is known of the rows: `refused`, a sentence, or the counts of all of them. Raises TrlError, OSError: they
    cannot be checked."""
    found: dict[str, Any] = {"model": options.model, "method": options.method, "refused": None}
    found |= {"max_seq_length": None, "data": None, "inference": None, "warnings": []}
    try:
        rows = _stored(Path(options.data), directory)
        if not rows.num_rows:
            raise InvalidRows("the dataset is empty: expected at least one row")
        found["method"] = options.method or ("dpo" if has_preferences(rows.path) else "sft")
        spec = _spec(options, found["method"], rows, directory)
        verdict = check_file(rows.path, spec.algorithm, spec.data.data_format, spec.data.dataset.names)
        if verdict["error"] is not None:
            raise InvalidRows(verdict["error"])
        found |= run_recipe(_MODULE, spec.model_dump_json(), "check")
    except InvalidRows as error:
        return {**found, "refused": in_a_shell(str(error))}
    except JobFailure as error:
        message = error.message.removeprefix(f"{error.reason}: ")
        if error.reason not in _OF_ROWS or (error.reason == Reason.invalid_model and not message.startswith("row ")):
            raise
        return {**found, "refused": message}
    found["warnings"] = [*verdict["warnings"], *found["warnings"]]
    return found


def _stored(file: Path, directory: Path) -> DatasetRef:
    """The rows of a file as jobs read them. Raises InvalidRequest: the file is of a kind that is not read; InvalidRows:
    its content is none of that kind; OSError: it cannot be read."""
    if file.suffix.lower() == ".parquet":
        with open(file, "rb") as source:
            words = ["convert", str(file), str(directory), *_READER_LIMITS, str(source.fileno())]
            done = subprocess.run(
                [sys.executable, "-m", _READER, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=child_environment(os.environ, {}),
                pass_fds=[source.fileno()],
            )
        answer: dict[str, Any] = json.loads(done.stdout or b"{}")
        if "sha256" not in answer:
            raise InvalidRows(f"{file}: {answer.get('error') or f'its reader ended with {done.returncode}'}")
        digest, count = answer["sha256"], answer["num_rows"]
        return DatasetRef(dataset_id=file.name, path=directory / f"{digest}.jsonl", sha256=digest, num_rows=count)
    if ending_of(file.name) not in ROW_READERS:
        raise InvalidRequest("DATA", str(file), f"expected a file name that ends in {ENDINGS}.")
    blob = put_rows(directory, read_row_file(file))
    return DatasetRef(dataset_id=file.name, path=blob.path, sha256=blob.sha256, num_rows=blob.num_rows)


def _spec(options: Namespace, method: str, rows: DatasetRef, directory: Path) -> JobSpec:
    """A job that would train on these rows. Raises InvalidRequest: an option or the model cannot be used."""
    path = Path(options.model).expanduser()
    body = job_body(options, method, "rows", str(path.resolve()) if path.is_dir() else options.model)
    given = {**body.pop("provider_options"), "device": "cpu", "preflight": "off"}
    kind = SupervisedFineTuneRequest if method == "sft" else PreferenceOptimizeRequest
    settings = Settings(data_dir=directory, devices=("cpu",))
    resolution = resolve(kind.model_validate({"job_uuid": "check", **body}), ProviderOptions.parse(given), settings)
    return resolution.spec(rows, None)


def _problems(found: dict[str, Any], strict: bool) -> Iterator[str]:
    if found["refused"]:
        yield f"a row does not train: {found['refused']}"
        return
    if found["inference"]["different"]:
        counts = found["inference"]
        yield (
            f"{counts['different']} of {counts['turns']} trained turns are not as at inference, first "
            f"{counts['first_different']}"
        )
    if strict and found["warnings"]:
        yield f"with --strict warnings are failures, and there are {len(found['warnings'])}: {found['warnings'][0]}"


def _lines(found: dict[str, Any], ok: bool) -> Iterator[str]:
    if found["refused"]:
        return
    data = found["data"]
    made = f", which make {counted(data['examples'], 'example')}" if data["examples"] != data["read"] else ""
    cut = f"{data['truncated']} of them cut to {found['max_seq_length']} tokens"
    yield f"rows    {data['read']}{made}: {data['trained']} trained, {cut}, {data['dropped']} dropped"
    yield (
        f"tokens  {data['trained_tokens']} of {data['total_tokens']} in the loss; longest "
        f"{data['longest_before_cut']}, median {data['median_tokens']}"
    )
    if data.get("images"):
        yield f"images  {data['images']}, whose tokens carry no loss"
    yield f"turns   {inference_sentence(found['inference'])}"
    yield from (f"note    {warning}" for warning in found["warnings"])
    if ok:
        yield "verdict no row is refused, and every trained turn is as at inference"
