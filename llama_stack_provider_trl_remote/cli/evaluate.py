"""`trl-remote evaluate`: a model on held-out rows, in a process of this machine. It calls no service."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from llama_stack_provider_trl.errors import InvalidRequest
from llama_stack_provider_trl.launch.devices import usable_devices
from llama_stack_provider_trl.launch.interpreter import check_interpreter
from llama_stack_provider_trl.requests.bodies import PreferenceOptimizeRequest, SupervisedFineTuneRequest
from llama_stack_provider_trl.requests.options import ProviderOptions
from llama_stack_provider_trl.requests.resolve import resolve
from llama_stack_provider_trl.requests.settings import Settings
from llama_stack_provider_trl.specs.job import DatasetRef, JobSpec
from llama_stack_provider_trl.system.files import Blob

from ..row_files import has_preferences, stored_rows
from .adapter import is_adapter
from .recipe_process import run_recipe
from .terminal import emit, evaluation_lines

_MODULE = "llama_stack_provider_trl.recipes.evaluation.evaluate"


def evaluate(options: Namespace) -> int:
    """Evaluate a model and print its measures."""
    check_interpreter(None)
    with stored_rows(Path(options.data)) as blob, tempfile.TemporaryDirectory(prefix="trl-evaluate-") as directory:
        if not blob.num_rows:
            raise InvalidRequest("DATA", options.data, "it has no rows.")
        method = options.method or ("dpo" if has_preferences(blob.path) else "sft")
        spec = _spec(options, method, blob, Path(directory))
        found = {
            "model": spec.source.model,
            "method": method,
            **run_recipe(_MODULE, spec.model_dump_json(), "evaluation"),
        }
    emit(options, found, *evaluation_lines(found))
    return 0


def _spec(options: Namespace, method: str, blob: Blob, directory: Path) -> JobSpec:
    """A job with these rows as its validation dataset."""
    if method == "dpo" and options.reference is None:
        raise InvalidRequest(
            "--reference", None, "pairs are compared with another model: name the one before training."
        )
    if method == "sft" and options.reference is not None:
        hint = "only pairs with chosen and rejected are compared with a reference: leave it out."
        raise InvalidRequest("--reference", options.reference, hint)
    adapted = is_adapter(options.model)
    if adapted and method == "dpo":
        hint = "it is an adapter, whose pairs need a whole model: trl-remote adapter merge DIR -o MODEL makes one."
        raise InvalidRequest("MODEL", options.model, hint)
    device = usable_devices(options.device)[0]
    given: dict[str, Any] = {
        "job_uuid": "evaluation",
        "model": options.model,
        "training_config": {
            "n_epochs": 1,
            "dtype": options.dtype,
            "data_config": {"dataset_id": "rows", "batch_size": options.batch_size, "validation_dataset_id": "rows"},
        },
    }
    parameters = {"reference_model": options.reference, "max_seq_length": options.max_seq_length}
    # Memory is estimated for training, which takes more.
    set_parameters = {name: value for name, value in parameters.items() if value is not None}
    set_parameters |= {"adapter": "continue"} if adapted else {}
    provider_options = ProviderOptions.parse({"device": device, "preflight": "off", **set_parameters})
    request_type = PreferenceOptimizeRequest if method == "dpo" else SupervisedFineTuneRequest
    request = request_type.model_validate(given)
    try:
        resolved = resolve(request, provider_options, Settings(data_dir=directory, devices=(device,)))
    except InvalidRequest as error:
        if not adapted or error.field != "model":
            raise
        hint = f"{error.hint}. trl-remote adapter merge DIR --base M -o MODEL makes a whole model of an adapter"
        raise InvalidRequest("MODEL", options.model, hint) from error
    rows = DatasetRef(dataset_id="rows", path=blob.path, sha256=blob.sha256, num_rows=blob.num_rows)
    spec = resolved.spec(rows, rows)
    if spec.reference is not None and spec.reference.source is None:
        raise InvalidRequest("--reference", options.reference, "it is the model itself: name the one before training.")
    return spec
