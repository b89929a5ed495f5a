"""Trained adapters that a job continues (those that it merges: `recipes.checkpoint.merged_base`).

A continued adapter is `default` in the model, as every trained one. Where DPO compares the policy with what it was in
the beginning, a frozen copy is there too, as `reference`: switched off, the adapter would leave the bare base model.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from ...errors import JobFailure
from ...specs.events import Reason
from ...specs.job import JobSpec, LoraSpec
from ...specs.model_source import ModelSource
from ...system.model_damage import ADAPTER_PICKLE, ADAPTER_WEIGHTS
from .files import check_adapter_files
from .loading import DTYPES, WeightStorage, adapter_config, load_config, load_model, outline, quantize
from .shapes import shapes_in

log = logging.getLogger(__name__)
DEFAULT, REFERENCE = "default", "reference"
_UNFIT = (ValueError, TypeError, AttributeError, LookupError, ImportError, re.error)
"""What PEFT raises for a module that is not there, and for values of other types than it expects."""


def continues(spec: JobSpec) -> bool:
    """Whether the job trains an adapter that was trained before."""
    return spec.adapter is not None and spec.adapter.use == "continue"


def has_reference_adapter(spec: JobSpec) -> bool:
    """Whether the reference is the adapter as it was in the beginning."""
    own = spec.reference is not None and spec.reference.source is None
    return continues(spec) and (own or spec.method.kl_weight > 0)


def continued(spec: JobSpec, model: PreTrainedModel, config: PeftConfig, *, reference: bool) -> PeftModel:
    """The model with the adapter that the job continues, its weights read. Raises JobFailure: invalid_model, where the
    adapter's file is missing, damaged, or of other modules or another rank."""
    assert spec.adapter is not None
    try:
        with torch.random.fork_rng():  # what it begins with is read from the file
            adapted: PeftModel = get_peft_model(model, config)
            if reference:
                adapted.add_adapter(REFERENCE, copy.deepcopy(config))
    except (*_UNFIT, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise unusable(spec.adapter.directory, f"it does not fit {spec.source.model!r}: {str(error)[:300]}") from error
    for name, weight in adapted.named_parameters():
        if f".{REFERENCE}" in name:
            weight.requires_grad_(False)
    read_weights(spec, adapted)
    return adapted


def load_to_infer(spec: JobSpec, device: torch.device, *, in_4_bits: bool = False) -> PreTrainedModel:
    """The job's model in its dtype, with the adapter that the job names, for inference. Raises JobFailure:
    invalid_model.

    Args:
        in_4_bits: quantize it below the adapter.
    """
    storage = WeightStorage(
        dtype=DTYPES[spec.compute.dtype],
        compute_dtype=spec.compute.dtype,
        in_4_bits=in_4_bits,
        is_quantized=in_4_bits,
        is_sharded=False,
    )
    if spec.adapter is not None:
        check_adapter(spec.adapter.directory, spec.source)
    model: Any = load_model(spec.source, storage, device)
    if in_4_bits:
        quantize(spec, model)
    if spec.adapter is not None:
        model = continued(spec, model, PeftConfig.from_pretrained(spec.adapter.directory), reference=False)
    return model.eval()


def added(spec: JobSpec, model: PeftModel, name: str) -> None:
    """Add the adapter that a job continues to a model that has others, of which the active one stays so. Raises
    JobFailure: as `continued`."""
    assert spec.lora is not None
    bare = outline(spec.source, load_config(spec.source), torch.float32)  # in `model` layers are inside of adapters
    with torch.random.fork_rng():
        model.add_adapter(name, adapter_config(bare, spec.lora))
    read_weights(spec, model, (name,))


def read_weights(spec: JobSpec, model: PeftModel, names: Sequence[str] = ()) -> None:
    """Read the weights of the adapter that the job continues.

    Args:
        names: of adapters in the model, which are alike; none: all, which are the trained one and the frozen copy.
    """
    assert spec.adapter is not None
    names = names or tuple(model.peft_config)
    check_adapter_files(spec.adapter.directory)
    try:
        found = load_file(spec.adapter.directory / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise unusable(spec.adapter.directory, f"its weights cannot be read: {error}") from error
    expected = get_peft_model_state_dict(model, adapter_name=names[0], save_embedding_layers=False)
    _compare(spec.adapter.directory, _shapes(found), _shapes(expected))
    for adapter in names:
        set_peft_model_state_dict(model, found, adapter_name=adapter)


def adapter_weights(directory: Path) -> list[Path]:
    """The file that an adapter's weights are read from; empty: there is none."""
    return [path for name in (ADAPTER_WEIGHTS, ADAPTER_PICKLE) if (path := directory / name).is_file()][:1]


def check_adapter(
    directory: Path, source: ModelSource, *, is_reward: bool = False, lora: LoraSpec | None = None
) -> None:
    """Return if the files of an adapter are whole, and its weights are those of its configuration on this base model.

    Reads headers only. Of a model with code of its own, or that cannot be built without weights, they are not compared.
    Raises JobFailure: invalid_model.

    Args:
        lora: settings that the adapter is continued with; None: those in its own files.
    """
    check_adapter_files(directory)
    try:
        config = PeftConfig.from_pretrained(str(directory))
    except Exception as error:  # of peft, for values of any type
        raise unusable(directory, f"its adapter_config.json cannot be read: {str(error)[:300]}") from error
    if not (files := adapter_weights(directory)):
        raise unusable(directory, f"it has no {ADAPTER_WEIGHTS}")
    (file,) = files
    try:
        found = shapes_in(file)
    except MemoryError:
        raise
    except Exception as error:  # of torch.load, for content of any kind
        raise unusable(directory, f"its weights in {file.name} cannot be read: {str(error)[:300]}") from error
    if source.trust_remote_code:
        return
    bare = outline(source, load_config(source), torch.float32, is_reward=is_reward)
    if lora is not None:
        config = adapter_config(bare, lora, is_reward=is_reward)
    config.base_model_name_or_path = None  # PEFT warns where the model has another name
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            adapted = get_peft_model(bare, config)
        expected = _shapes(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    except _UNFIT as error:
        raise unusable(directory, f"it does not fit {source.model!r}: {str(error)[:300]}") from error
    except RuntimeError as error:
        # PEFT 0.21.2 needs the values of weights for BOFT, CPT, FRoD, SHiRA, UniLoRA, prompts and prefixes. LoRA, DoRA,
        # IA3 and VeRA, which jobs train, need none in any of the 22 architectures of test_model_agreement.py.
        kind = getattr(config.peft_type, "value", config.peft_type)
        log.info("adapter %s is compared with %s when it is loaded: %s: %s", directory, source.model, kind, error)
        return
    if lora is None:  # PEFT loads further weights of the base, such as embeddings
        prefix = getattr(adapted.base_model, "prefix", "")
        found = {name: shape for name, shape in found.items() if name in expected or prefix in name}
    _compare(directory, found, expected)


def _shapes(weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _compare(directory: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    if strange := sorted(found.keys() ^ expected.keys()):
        raise unusable(directory, f"{len(strange)} weights are in only one of it and this model, such as {strange[0]}")
    if wrong := [name for name in sorted(found) if found[name] != expected[name]]:
        raise unusable(directory, f"{wrong[0]} is {[*found[wrong[0]]]}, and {[*expected[wrong[0]]]} in this model")


def frozen(spec: JobSpec, model: PreTrainedModel) -> PeftModel:
    assert spec.lora is not None
    return continued(spec, model, adapter_config(model, spec.lora), reference=False).requires_grad_(False)


@contextmanager
def fitting_adapter(directory: Path, base: ModelSource) -> Iterator[None]:
    """Loads an adapter on a base model while this is open. Raises JobFailure: invalid_model, where it does not fit."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise unusable(directory, f"it cannot be loaded on {base.model}: {str(error)[:300]}") from error


def unusable(path: Path, problem: str) -> JobFailure:
    """The failure of a job whose adapter cannot be used, with the problem as a sentence's end."""
    return JobFailure(
        Reason.invalid_model,
        f"adapter {str(path)!r}: {problem}. Name an adapter that was trained on this base model, with the same LoRA "
        "settings.",
    )
