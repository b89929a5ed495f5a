"""Merges an adapter into its base model: `python -m llama_stack_provider_trl.recipes.merge_adapter SPEC RESULT`.

Reads an AdapterMergeSpec and writes one JSON object to RESULT: what was written, or `reason` and `message` of the
failure. The result is written as the checkpoint `merged` of a job is: layer by layer, in fp32 before it is rounded.
"""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

from ..errors import JobFailure
from ..specs.events import Reason
from ..specs.merge import AdapterMergeSpec
from ..specs.model_source import ModelSource
from ..system.files import fsync_tree, put_in_place
from .imports import quick_imports
from .results import write_result

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def main(argv: list[str]) -> int:
    return write_result(argv, lambda text: merge_adapter(AdapterMergeSpec.model_validate_json(text)))


def merge_adapter(spec: AdapterMergeSpec) -> dict[str, Any]:
    """Write the base model with the adapter merged in to `spec.output`, which appears when it is complete. Returns
    `kind` (model), `parameters` and `bytes` of the result.

    Raises:
        JobFailure: invalid_request, the output exists; invalid_model, the adapter does not fit its base; export_failed,
            the files are not what was merged.
        OSError: the disk is full.
    """
    if spec.output.exists():
        raise JobFailure(Reason.invalid_request, f"{spec.output} exists: name a new directory")
    with quick_imports():
        import torch
        from peft import PeftModel
        from transformers.utils import SAFE_WEIGHTS_NAME

        from .checkpoint.weights import differences, export_bytes, write_weights
        from .model.adapters import check_adapter, fitting_adapter
        from .model.files import copy_processor
        from .model.loading import DTYPES, load_config, load_whole, parameter_counts
        from .model.saving import write_configuration

    check_adapter(spec.adapter, spec.base, is_reward=spec.is_reward)
    own = load_config(spec.base).dtype
    dtype = DTYPES[spec.dtype] if spec.dtype else own if isinstance(own, torch.dtype) else torch.float32
    base = load_whole(spec.base, dtype, is_reward=spec.is_reward)
    parameters, size = parameter_counts(base)[1], export_bytes(base, dtype)
    with fitting_adapter(spec.adapter, spec.base):
        model = PeftModel.from_pretrained(base, spec.adapter)
    staging = spec.output.with_name(f".{spec.output.name}.merging")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        write_configuration(model.get_base_model(), staging, dtype)
        expected = write_weights(model, staging, dtype)
        _tokenizer(spec).save_pretrained(staging)
        copy_processor(spec.base, staging)
        if wrong := differences(expected, staging, SAFE_WEIGHTS_NAME):
            found = f"{len(wrong)} of {len(expected)} weights are not what was merged: {'; '.join(wrong[:3])}"
            raise JobFailure(Reason.export_failed, f"{found}. Nothing was kept; check the disk, and try again.")
        fsync_tree(staging)
        put_in_place(staging, spec.output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return {"kind": "model", "parameters": parameters, "bytes": size}


def _tokenizer(spec: AdapterMergeSpec) -> PreTrainedTokenizerBase:
    """That of the adapter, where one lies beside it, as the model was trained with."""
    from .model.files import has_tokenizer_files
    from .model.loading import load_tokenizer

    if has_tokenizer_files(spec.adapter):
        return load_tokenizer(ModelSource(model=str(spec.adapter)), model=spec.base)
    return load_tokenizer(spec.base)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
